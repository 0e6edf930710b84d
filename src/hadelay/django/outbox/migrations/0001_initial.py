"""Create the table of the outbox."""

from typing import Any, ClassVar

from django.db import migrations, models

import hadelay.django.outbox.models
from hadelay.outbox.tables import TABLE, create


def _create(_: Any, editor: Any) -> None:
    for statement in create(editor.connection.vendor):
        editor.execute(statement, None)


def _drop(_: Any, editor: Any) -> None:
    editor.execute(f"drop table {TABLE}", None)


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunPython(_create, _drop)],
            state_operations=[
                migrations.CreateModel(
                    name="OutboxRow",
                    fields=[
                        ("id", models.BigAutoField(primary_key=True, serialize=False)),
                        ("request", models.CharField(default=hadelay.django.outbox.models._request, max_length=64)),
                        ("action", models.CharField(default="put", max_length=10)),
                        ("topic", models.CharField(max_length=128)),
                        ("message_key", models.CharField(max_length=256, null=True)),
                        ("body", models.TextField(null=True)),
                        ("body_bytes", models.BinaryField(null=True)),
                        ("due_ms", models.BigIntegerField(null=True)),
                        ("options", models.TextField(null=True)),
                        ("created_ms", models.BigIntegerField()),
                        ("tries", models.IntegerField(default=0)),
                        ("retry_ms", models.BigIntegerField(default=0)),
                        ("refusal", models.TextField(null=True)),
                    ],
                    options={
                        "db_table": TABLE,
                        "verbose_name": "row of the outbox",
                        "verbose_name_plural": "rows of the outbox",
                    },
                ),
            ],
        ),
    ]
