"""Structured logs: one JSON object per line on standard error. Prompts and answers are never logged."""

from __future__ import annotations

import logging
import sys

import orjson
import structlog
from structlog.tracebacks import ExceptionDictTransformer


def configure_logs(level: str = "info") -> None:
    """Set up logging of this process. ``level`` is debug, info, warning or error."""
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # Local variables hold prompts: they stay out of tracebacks.
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(serializer=_dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _dumps(event: object, **_: object) -> str:
    return orjson.dumps(event, default=str).decode()
