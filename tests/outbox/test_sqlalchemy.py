"""The outbox with SQLAlchemy: the page's program, and the ORM, sync and async."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hadelay.outbox import Relay, connect
from hadelay.testing import LocalNode
from tests.outbox.conftest import empty
from tests.system.cluster import environment

sqlalchemy = pytest.importorskip("sqlalchemy")
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "outbox.md"


def test_the_page(tmp_path: Path, node: LocalNode) -> None:
    """Its program runs; its last block cancels what the blocks before published."""
    blocks = re.findall(r"^```py\n# shop.py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 2
    url = f"sqlite:///{tmp_path}/shop.db"
    states = []
    for program in (blocks[0], blocks[0].split("with engine")[0] + blocks[1]):
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), check=True, timeout=60)
        relay = Relay(lambda: connect(url), node.client)
        assert relay.drain().done == 1
        relay.close()
        states.append(node.client.get(topic="orders", key="order-4711").state)
    assert states == ["scheduled", "cancelled"]


async def test_sessions_sync_and_async(request: pytest.FixtureRequest, tmp_path: Path, node: LocalNode) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
    from sqlalchemy.orm import Session

    from hadelay.outbox import sqlalchemy as outbox

    url = empty("postgresql", request, tmp_path)
    driver = url.replace("postgresql:", "postgresql+psycopg:")
    engine, later = sqlalchemy.create_engine(driver), create_async_engine(driver)
    with engine.begin() as connection:
        outbox.create(connection)
    with Session(engine) as session, session.begin():
        session.execute(outbox.put("orm", b"\x00one", delay="1h", key="one", meta={"a": "ü"}))
    with Session(engine) as session:
        session.execute(outbox.put("orm", "never", key="never"))
        session.rollback()
    async with AsyncSession(later) as aside, aside.begin():
        await aside.execute(outbox.put("orm", ["two"], delay="1h", key="two"))
        await aside.execute(outbox.reschedule("orm", "one", delay="2d"))
    engine.dispose()
    await later.dispose()
    relay = Relay(lambda: connect(driver), node.client)
    assert relay.drain().done == 3
    relay.close()
    found = {message.key: message for message in node.client.messages("orm")}
    assert set(found) == {"one", "two"}
    one = node.client.get(found["one"].id, body=True)
    assert (one.body, one.meta) == (b"\x00one", {"a": "ü"})
    assert (one.deliver_at - one.published_at).days >= 1
    assert os.environ.get("HADELAY_OUTBOX") is None
