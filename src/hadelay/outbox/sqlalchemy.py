"""The outbox for SQLAlchemy, Core and ORM, sync and async: statements to execute in a transaction.

session.execute(outbox.put("orders", {"id": 4711}, delay="1h", key="order-4711"))
await connection.execute(outbox.cancel("orders", "order-4711"))
"""

from typing import Any, Unpack, cast

from sqlalchemy import Connection, Insert, column, insert, table

from hadelay.client.putoptions import Put, PutOptions
from hadelay.client.types import Body, Delay, When
from hadelay.outbox.rows import cancel_columns, put_columns, reschedule_columns
from hadelay.outbox.tables import TABLE, Dialect
from hadelay.outbox.tables import create as _create


def create(connection: Connection) -> None:
    """Create the outbox's table. In a migration of Alembic: `create(op.get_bind())`."""
    name = {"mariadb": "mysql"}.get(connection.dialect.name, connection.dialect.name)
    for statement in _create(cast(Dialect, name)):
        connection.exec_driver_sql(statement)


def put(message: str | Put, body: Body = b"", **options: Unpack[PutOptions]) -> Insert:
    """Statement that publishes a message; the arguments are those of `Client.put`, or a Put, such as `task.message(…)`
    makes. `delay` counts from now."""
    return _insert(put_columns(message, body, **options))


def cancel(topic: str, key: str) -> Insert:
    """Statement that cancels the message published last with a key, if the message is still pending when the relay gets
    the row."""
    return _insert(cancel_columns(topic, key))


def reschedule(topic: str, key: str, *, delay: Delay | None = None, at: When | None = None) -> Insert:
    """Statement that makes the message published last with a key due at another time, if the message is still pending
    when the relay gets the row."""
    return _insert(reschedule_columns(topic, key, delay=delay, at=at))


def _insert(columns: dict[str, Any]) -> Insert:
    return insert(table(TABLE, *map(column, columns))).values(**columns)
