"""The Django app of the outbox: its table, and the command `hadelay_outbox`."""

from django.apps import AppConfig


class OutboxConfig(AppConfig):
    name = "hadelay.django.outbox"
    label = "hadelay_outbox"
    verbose_name = "hadelay outbox"
    default_auto_field = "django.db.models.BigAutoField"
