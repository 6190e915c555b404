"""One log form for every process of a deployment: a JSON object per line on standard error.

Routers and the supervisor log through structlog, workers through the standard library; both end here, with
the name of the process they come from. Prompts and answers are never logged.
"""

from __future__ import annotations

import logging
import sys

import orjson
import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger


def configure_logs(process: str, level: str) -> None:
    """Set up logging of this process; ``level`` is debug, info, warning or error."""
    number = logging.getLevelNamesMapping()[level.upper()]

    def name_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.ExtraAdder(),
        drop_private,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_process,
    ]
    rendered: list[Processor] = [
        # Local variables hold prompts: they stay out of tracebacks.
        structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
        structlog.processors.JSONRenderer(serializer=_dumps),
    ]
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
        )
    )
    antiphon = logging.getLogger("antiphon")
    antiphon.handlers = [handler]
    antiphon.setLevel(number)
    antiphon.propagate = False


def drop_private(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Leave out what libraries hang onto log records for themselves."""
    return {
        key: value
        for key, value in event.items()
        if not key.startswith("_") or key in ("_record", "_from_structlog")
    }


def _dumps(event: object, **_: object) -> str:
    return orjson.dumps(event, default=str).decode()
