"""Log lines: structlog to stderr, an event and its fields; JSON unless a person is watching. None per message."""

from __future__ import annotations

import logging
import sys

import structlog

from hadelay.config import LogConfig


def set_up_logs(config: LogConfig) -> None:
    """Once per process, before anything logs."""
    pretty = config.format == "text" or (config.format == "auto" and sys.stderr.isatty())
    level = getattr(logging, config.level.upper())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(
                [structlog.dev.ConsoleRenderer()]
                if pretty
                else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # aiohttp and pysyncobj speak through logging: what they warn about is worth a line, in the same form.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
