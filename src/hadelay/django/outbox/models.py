"""Django model of the outbox table. The migration creates the table with the SQL statements in
hadelay/outbox/tables.py."""

import uuid

from django.db import models

from hadelay.outbox.tables import TABLE


def _request() -> str:
    return str(uuid.uuid4())


class OutboxRow(models.Model):
    id = models.BigAutoField(primary_key=True)
    request = models.CharField(max_length=64, default=_request)
    action = models.CharField(max_length=10, default="put")
    topic = models.CharField(max_length=128)
    message_key = models.CharField(max_length=256, null=True)
    body = models.TextField(null=True)
    body_bytes = models.BinaryField(null=True)
    due_ms = models.BigIntegerField(null=True)
    options = models.TextField(null=True)
    created_ms = models.BigIntegerField()
    tries = models.IntegerField(default=0)
    retry_ms = models.BigIntegerField(default=0)
    refusal = models.TextField(null=True)

    class Meta:
        db_table = TABLE
        verbose_name = "row of the outbox"
        verbose_name_plural = "rows of the outbox"

    def __str__(self) -> str:
        return f"{self.action} {self.topic}" + (f"/{self.message_key}" if self.message_key else "")
