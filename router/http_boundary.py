"""The outermost layer of the API: request ids, counts, and no error without OpenAI's body."""

from __future__ import annotations

import time
import traceback
import uuid

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.router.api_keys import CALLER, ApiKeys
from antiphon.router.http_connection import abort_connection
from antiphon.router.metrics import RouterMetrics
from antiphon.router.openai.errors import (
    ApiError,
    client_left,
    invalid_api_key,
    method_not_allowed,
    not_found,
    server_error,
)
from antiphon.router.pages import PAGE_PATHS
from antiphon.router.request_trace import REQUEST_ID, TRACE
from antiphon.telemetry.trace_context import TraceContext
from antiphon.telemetry.tracing import Span, Tracer, UnrecordedTracer

log = structlog.get_logger("antiphon.router.http")

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json", *PAGE_PATHS})
"""What probes, scrapers and browsers read without a key."""
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Paths that name a span; others may hold ids, and their route is an attribute."""
_ERROR_TYPE = "antiphon.error_type"
_CRASHED = server_error("Internal error.")


class HttpBoundary:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, keys: ApiKeys, tracer: Tracer) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = keys
        # What probes and scrapers ask is no part of anybody's request.
        self._tracers = dict.fromkeys(OPEN_PATHS, UnrecordedTracer()), tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # Answered like GET; the server leaves the body out, by its own copy of the method.
            scope = {**scope, "method": "GET"}
        request_id = scope[REQUEST_ID] = f"req_{uuid.uuid4().hex}"
        span = self._begin_span(scope)
        trace = scope[TRACE] = span.context
        more_headers = [
            (b"x-request-id", request_id.encode()),
            (b"traceresponse", trace.header().encode()),
        ]
        started = time.perf_counter()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *more_headers]}
            await send(message)

        with structlog.contextvars.bound_contextvars(http_request_id=request_id, trace_id=trace.trace_id):
            try:
                scope[CALLER] = self._keys.identify(Headers(scope=scope).get("authorization"))
                if scope["path"] in OPEN_PATHS or scope[CALLER] is not None:
                    await self._app(scope, receive, send_with_id)
                else:
                    await error_response(scope, invalid_api_key())(scope, receive, send_with_id)
            except Exception as error:
                _log_crash(scope, error)
                if status is None:
                    await error_response(scope, _CRASHED)(scope, receive, send_with_id)
                elif scope.get(_ERROR_TYPE) != _CRASHED.metric_type:
                    # Too late for a body: dropping the connection is the only way to say it.
                    await abort_connection(scope)
            status = 499 if status is None else status
            self._account(scope, status, time.perf_counter() - started)
            span.end(
                error=scope.get(_ERROR_TYPE) if status >= 500 else None,
                attributes={"http.route": _endpoint(scope), "http.response.status_code": status},
            )

    def _begin_span(self, scope: Scope) -> Span:
        parent = TraceContext.parse(Headers(scope=scope).get("traceparent"))
        unrecorded, tracer = self._tracers
        about = {"http.request.method": scope["method"], "antiphon.http_request_id": scope[REQUEST_ID]}
        return unrecorded.get(scope["path"], tracer).start(
            f"{scope['method']} {scope['path'] if scope['path'] in GENERATION_PATHS else 'other'}",
            parent,
            server=True,
            attributes=about,
        )

    def _account(self, scope: Scope, status: int, seconds: float) -> None:
        endpoint = _endpoint(scope)
        self._metrics.requests.labels(endpoint, str(status)).inc()
        if (error_type := scope.get(_ERROR_TYPE)) is not None:
            self._metrics.request_errors.labels(error_type).inc()
        level = log.debug if endpoint in ("/health", "/ready", "/metrics") else log.info
        level("request", endpoint=endpoint, status=status, seconds=round(seconds, 6), error=error_type)


def _log_crash(scope: Scope, error: Exception) -> None:
    """Where it crashed and with which class. Messages and local variables may hold a client's text."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("request_crashed", endpoint=_endpoint(scope), error=type(error).__name__, frames=frames)


def _endpoint(scope: Scope) -> str:
    """Path template of the route; unknown URLs share one label, so that nobody can flood the metric."""
    return getattr(scope.get("route"), "path", "unknown")


def error_response(scope: Scope, error: ApiError) -> Response:
    """The response to an error, noted for the counts."""
    scope[_ERROR_TYPE] = error.metric_type
    return error.response()


async def handle_api_error(request: Request, error: Exception) -> Response:
    """Exception handler for ApiError."""
    if not isinstance(error, ApiError):
        raise error
    return error_response(request.scope, error)


async def handle_disconnect(request: Request, error: Exception) -> Response:
    """Exception handler for a client that left while it sent its body; nobody reads the answer."""
    return error_response(request.scope, client_left())


async def handle_crash(request: Request, error: Exception) -> Response:
    """Exception handler for everything unforeseen; the boundary logs it."""
    return error_response(request.scope, _CRASHED)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for what the routing layer raises: unknown URLs and methods."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        return error_response(request.scope, not_found(request.scope["path"]))
    if error.status_code == 405:
        allow = _allowed_methods(request)
        return error_response(request.scope, method_not_allowed(request.method, allow))
    return error_response(request.scope, ApiError(error.status_code, str(error.detail)))


def _allowed_methods(request: Request) -> str:
    """All methods of a path; the routing layer names those of its first route only."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.path_regex.match(request.scope["path"])]
    methods = {method for route in matching for method in route.methods or ()}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
