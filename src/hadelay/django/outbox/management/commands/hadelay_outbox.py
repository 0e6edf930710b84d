"""`manage.py hadelay_outbox` relays messages from the outbox table of a Django database to the cluster."""

from argparse import ArgumentParser
from typing import Any, cast

from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from hadelay.client import Client
from hadelay.client.wire import ADAPTER_TIMEOUT_S, servers
from hadelay.errors import HadelayError
from hadelay.outbox.database import Database, lock_file
from hadelay.outbox.relay import Relay, run_until_signal
from hadelay.outbox.tables import Dialect


class Command(BaseCommand):
    help = "Publish what transactions wrote into the outbox, until SIGTERM or Ctrl-C. Several may run at once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", default="default", help="Alias in DATABASES.")
        parser.add_argument("--servers", help="Addresses of nodes. Default: HADELAY_SERVERS.")
        parser.add_argument("--once", action="store_true", help="Relay what there is, and end.")
        parser.add_argument("--health", help="Serve /healthz and /metrics at HOST:PORT.")

    def handle(self, *, database: str, servers: str | None, once: bool, health: str | None, **_: Any) -> None:
        try:
            with _client(servers) as client:
                relay = Relay(lambda: _opened(database), client)
                if once:
                    step = relay.drain()
                    relay.close()
                    self.stdout.write(f"{step.done} relayed, {step.later} to try again, {step.refused} refused")
                else:
                    run_until_signal(relay, health)
        except HadelayError as error:
            raise CommandError(str(error)) from error


def _client(urls: str | None) -> Client:
    return Client(servers(urls), timeout=ADAPTER_TIMEOUT_S)


def _opened(alias: str) -> Database:
    """Open a database connection for the relay alone, with Django's driver and settings for this alias."""
    wrapper = connections.create_connection(alias)
    lock = lock_file(str(wrapper.settings_dict["NAME"])) if wrapper.vendor == "sqlite" else None
    wrapper.connect()
    return Database(cast(Dialect, wrapper.vendor), wrapper.connection, lock)
