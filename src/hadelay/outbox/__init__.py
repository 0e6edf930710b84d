"""Transactional outbox: a program writes publishes to its own database, in the transaction of its data
(docs/howto/outbox.md).

A program inserts a row into the table `hadelay_outbox` of its database, in the transaction that it depends on. A relay
(`hadelay outbox run`) takes the rows of committed transactions, publishes them, and deletes each row after the answer.
A row's own Idempotency-Key makes its repetition harmless, so a relay that is killed loses and doubles nothing.
"""

from hadelay.outbox.database import Database, Refused, Status, connect
from hadelay.outbox.relay import Relay, Step
from hadelay.outbox.tables import TABLE, create

__all__ = ["TABLE", "Database", "Refused", "Relay", "Status", "Step", "connect", "create"]
