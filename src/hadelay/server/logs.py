"""Log lines on stderr: an event and its fields, for changes of state, never per message. JSON unless on a terminal.

Parts that also run in the simulator log through `logging`, with fields in `extra`; others log through structlog. Both
kinds of lines look alike and carry the node's name.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from hadelay.errors import shortened
from hadelay.settings.node import LogConfig

#: Fields that are never shortened, because clients have no influence on them.
_WHOLE = frozenset(("event", "exception", "stack"))


def set_up_logs(config: LogConfig, node: str = "") -> None:
    """Call once per process, before anything logs."""

    def named(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event.setdefault("node", node)
        return event

    def short(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        for name, value in event.items():
            if isinstance(value, str) and name not in _WHOLE:
                event[name] = shortened(value)
        return event

    pretty = config.format == "text" or (config.format == "auto" and sys.stderr.isatty())
    level = getattr(logging, config.level.upper())
    now = structlog.processors.TimeStamper(fmt="iso", utc=True)
    common: list[Processor] = [short, structlog.processors.add_log_level, now, *([named] if node else [])]
    written: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if pretty
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*common, *written],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *written],
        )
    )
    # Libraries such as aiohttp log warnings only.
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("hadelay").setLevel(level)
