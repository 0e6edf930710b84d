"""Health and metrics of a relay."""

import time
from collections.abc import Mapping
from threading import Lock

from hadelay.outbox.database import Status

#: Time in seconds since the last read of the table after which a relay counts as stuck.
STUCK_S = 120.0


class Health:
    """State of a relay for /healthz and /metrics. The relay's thread writes it, and threads of the HTTP server read
    it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._seen = time.monotonic()
        self._status = Status(0, 0, 0, 0)
        self._counts: Mapping[str, int] = {}

    def say(self, status: Status | None, counts: Mapping[str, int]) -> None:
        """Update the state. status: None if the table could not be read."""
        with self._lock:
            self._counts = dict(counts)
            if status is not None:
                self._seen, self._status = time.monotonic(), status

    def page(self, path: str) -> tuple[int, str]:
        """HTTP status and text of the answer to a request for this path."""
        with self._lock:
            seen, status, counts = self._seen, self._status, self._counts
        if path == "/healthz":
            well = time.monotonic() - seen < STUCK_S
            return (200, "ok\n") if well else (503, "the table was not read for two minutes: see the relay's log\n")
        if path != "/metrics":
            return 404, "look at /healthz or /metrics\n"
        lines = ["# TYPE hadelay_outbox_rows_total counter"]
        lines += [
            f'hadelay_outbox_rows_total{{outcome="{outcome}"}} {counts.get(outcome, 0)}'
            for outcome in ("done", "missed", "later", "refused")
        ]
        lines += [
            "# TYPE hadelay_outbox_failed_steps_total counter",
            f"hadelay_outbox_failed_steps_total {counts.get('failed', 0)}",
            "# TYPE hadelay_outbox_rows gauge",
            f'hadelay_outbox_rows{{state="waiting"}} {status.waiting}',
            f'hadelay_outbox_rows{{state="retrying"}} {status.retrying}',
            f'hadelay_outbox_rows{{state="refused"}} {status.refused}',
            "# TYPE hadelay_outbox_oldest_seconds gauge",
            f"hadelay_outbox_oldest_seconds {status.oldest_ms / 1000:.3f}",
        ]
        return 200, "\n".join(lines) + "\n"
