"""The outbox for Django: publishes that take effect if, and only if, the transaction around them commits.

Unlike `transaction.on_commit`, nothing is lost by a crash after the commit. Add "hadelay.django.outbox" to
INSTALLED_APPS, run `manage.py migrate`, and a relay: `manage.py hadelay_outbox` (docs/howto/outbox.md).
"""

from typing import Any, Unpack

from hadelay.client.putoptions import Put, PutOptions
from hadelay.client.types import Body, Delay, When
from hadelay.outbox.rows import cancel_columns, put_columns, reschedule_columns


def publish(message: str | Put, body: Body = b"", *, using: str | None = None, **options: Unpack[PutOptions]) -> None:
    """Publish a message with the current transaction; the arguments are those of `Client.put`, or a Put, such as
    `task.message(…)` makes. `delay` counts from now. using: alias of the database; default: by the routers."""
    write(put_columns(message, body, **options), using)


def cancel(topic: str, key: str, *, using: str | None = None) -> None:
    """Cancel the message published last with a key, if it is pending when the transaction has committed."""
    write(cancel_columns(topic, key), using)


def reschedule(
    topic: str, key: str, *, delay: Delay | None = None, at: When | None = None, using: str | None = None
) -> None:
    """Make the message published last with a key due at another time, if it is pending when the transaction has
    committed."""
    write(reschedule_columns(topic, key, delay=delay, at=at), using)


def write(columns: dict[str, Any], using: str | None = None) -> None:
    """Write a row: the function for options that take one (`outbox` of Celery's broker_transport_options)."""
    from hadelay.django.outbox.models import OutboxRow  # models are importable once Django is set up

    OutboxRow.objects.using(using).create(**columns)
