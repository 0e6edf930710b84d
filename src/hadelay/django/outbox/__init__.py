"""The outbox for Django: publishes that take effect if, and only if, the transaction around them commits.

Unlike `transaction.on_commit`, nothing is lost by a crash after the commit. Add "hadelay.django.outbox" to
INSTALLED_APPS, run `manage.py migrate`, and a relay: `manage.py hadelay_outbox` (docs/howto/outbox.md).
"""

from typing import Any, Unpack

from hadelay.client.putoptions import Put, PutOptions
from hadelay.client.types import Body, Delay, When
from hadelay.outbox.rows import cancel_columns, put_columns, reschedule_columns


def publish(message: str | Put, body: Body = b"", *, using: str | None = None, **options: Unpack[PutOptions]) -> None:
    """Publish a message if the current transaction commits. Arguments: those of `Client.put`, or a Put, such as
    `task.message(…)` returns. `delay` counts from now. using: alias of the database; None: as Django's database routers
    choose."""
    write(put_columns(message, body, **options), using)


def cancel(topic: str, key: str, *, using: str | None = None) -> None:
    """Cancel the last published message with this key, if it is still pending when the transaction has committed."""
    write(cancel_columns(topic, key), using)


def reschedule(
    topic: str, key: str, *, delay: Delay | None = None, at: When | None = None, using: str | None = None
) -> None:
    """Change the due time of the last published message with this key, if it is still pending when the transaction has
    committed."""
    write(reschedule_columns(topic, key, delay=delay, at=at), using)


def write(columns: dict[str, Any], using: str | None = None) -> None:
    """Write a row into the outbox table. Options such as `outbox` in Celery's broker_transport_options take this
    function."""
    from hadelay.django.outbox.models import OutboxRow  # import late: Django must be set up before models are imported

    OutboxRow.objects.using(using).create(**columns)
