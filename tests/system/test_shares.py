"""A tenant's token cannot use up the topics of the others, through the HTTP API of real nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.console.conftest import BOOTSTRAP, TOKENS, make_token
from tests.system.cluster import Answer, Cluster, ask


def test_a_token_that_may_publish_cannot_take_all_topics(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=1, settings=TOKENS) as cluster:
        admin = make_token(cluster, BOOTSTRAP, "admin")
        low, other = (make_token(cluster, admin, f"publish:{name}-*", name=name) for name in "ab")

        def call(token: str, method: str, path: str, body: Any = None, **more: str) -> Answer:
            return ask(cluster.urls["n1"], method, path, body, {"Authorization": f"Bearer {token}", **more})

        statuses: list[int] = []
        for first in range(0, 30_000, 1_000):
            items = [{"topic": f"a-{n}", "body": ""} for n in range(first, first + 1_000)]
            results = call(low, "POST", "/v1/messages:batch", items).json["results"]
            statuses += [result["error"]["status"] if "error" in result else 201 for result in results]
        assert statuses == [201] * 25_000 + [429] * 5_000, (statuses[:3], statuses[-3:])
        refused = call(low, "POST", "/v1/topics/a-new/messages")
        assert refused.status == 429, refused
        assert "Your token has created its share" in refused.json["detail"]
        assert call(low, "POST", "/v1/topics/a-1/messages").status == 201, "an existing topic"
        assert call(low, "POST", "/v1/topics/a-new/messages", None, **{"Idempotency-Key": "k"}).status == 429
        assert call(other, "POST", "/v1/topics/b-1/messages").status == 201
        assert call(admin, "POST", "/v1/topics/a-new/messages").status == 201, "an admin creates the topic"
        assert call(low, "POST", "/v1/topics/a-new/messages").status == 201
