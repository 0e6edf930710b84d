"""The Django app, which brings the command `hadelay_worker`."""

from django.apps import AppConfig


class HadelayConfig(AppConfig):
    name = "hadelay.django"
    label = "hadelay"
    verbose_name = "hadelay"
