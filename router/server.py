"""One router process: links to the workers, the HTTP server, and an orderly end.

The server lives on the running event loop and installs no signal handlers: whoever runs it decides when it
stops. Inside a Ray actor that is the actor's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sqlite3
import ssl
from collections.abc import Iterator

import structlog
import uvicorn

from antiphon.configs.front_end import ResponseStoreConfig, RouterConfig
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import Topology
from antiphon.router.admission import Admission
from antiphon.router.api_keys import ApiKeys
from antiphon.router.app import create_app, wrap_app
from antiphon.router.dispatch.dispatcher import Dispatcher
from antiphon.router.dispatch.gateway import WorkerGateway
from antiphon.router.encoding_pool import EncodingPool
from antiphon.router.formatter import ChatFormatter
from antiphon.router.http_connection import protocol_class
from antiphon.router.key_limits import KeyLimits
from antiphon.router.lifecycle import EndKind
from antiphon.router.metrics import RouterMetrics
from antiphon.router.openai.context import ApiContext
from antiphon.router.openai.response_store import ResponseStore
from antiphon.router.openai.sqlite_response_store import SqliteResponseStore
from antiphon.router.served_model import ServedModel
from antiphon.telemetry.tracing import Tracer, UnrecordedTracer

log = structlog.get_logger("antiphon.router")

KEEP_ALIVE_TIMEOUT_S = 75
"""Idle connections stay open longer than common clients keep them in their pools."""
CLOSE_TIMEOUT_S = 5
"""Connections get so long to end after their requests have."""


class RouterServer:
    """A router. ``start``, ``set_topology`` as often as workers come and go, ``stop`` once."""

    def __init__(
        self,
        config: DeploymentConfig,
        model: ServedModel,
        formatter: ChatFormatter,
        gateway: WorkerGateway,
        tracer: Tracer | None = None,
    ) -> None:
        """``tracer`` records the spans of requests; absent records none."""
        self._config = config
        self._tracer = tracer or UnrecordedTracer()
        self._gateway = gateway
        self._model = model
        self._formatter = formatter
        self._draining = False
        self._context: ApiContext | None = None
        self._server: _EmbeddedServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Where the API is, e.g. ``http://127.0.0.1:8000``; known after ``start``."""
        if self._url is None:
            raise RuntimeError("the router has not been started")
        return self._url

    @property
    def ready(self) -> bool:
        """Requests can be served."""
        return self._context is not None and not self._draining and self._context.dispatcher.ready

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(prefill, decode) ids of workers that requests are sent to."""
        return tuple(self._context.dispatcher.fleet.pairs()) if self._context is not None else ()

    @property
    def open_requests(self) -> int:
        """Choices that hold or wait for an admission slot."""
        if self._context is None:
            return 0
        return self._context.admission.in_flight + self._context.admission.queued

    async def start(self) -> None:
        """Listen and link.

        Raises:
            ConfigError: the port is in use or may not be used; a file of keys or certificates cannot be read;
                the store of responses cannot be opened.
        """
        router = self._config.router
        keys = ApiKeys(router.api_key_file)
        check_certificate(router)
        listener = bind_socket(router.host, router.port)
        host, port = listener.getsockname()[:2]
        metrics = RouterMetrics(self._model.name, vllm_names=self._config.metrics.compat == "vllm")
        page_size_tokens = self._config.decode.kv_cache.page_size_tokens
        dispatcher = Dispatcher(self._gateway, router, page_size_tokens, metrics)
        admission = Admission(router.max_in_flight_requests, router.max_queued_requests, metrics)
        try:
            store = await open_store(router.response_store)
        except ConfigError:
            listener.close()
            raise
        self._context = ApiContext(
            config=router,
            model=self._model,
            formatter=self._formatter,
            dispatcher=dispatcher,
            admission=admission,
            metrics=metrics,
            store=store,
            key_limits=KeyLimits(router.key_limits),
            tracer=self._tracer,
            encoding=EncodingPool(
                self._formatter, router.encoding_processes, router.encoding_max_waiting_bytes
            ),
        )
        app = create_app(self._context, lambda: self._draining)
        self._server = _EmbeddedServer(
            uvicorn.Config(
                wrap_app(app, self._context, keys),
                http=protocol_class(router.head_timeout_s, router.body_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
                ssl_certfile=router.tls_certificate_file,
                ssl_keyfile=router.tls_key_file,
            )
        )
        await self._gateway.start(dispatcher)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)
        scheme = "https" if router.tls_certificate_file is not None else "http"
        self._url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("router_started", url=self._url, model=self._model.name)

    def warm_encoding(self) -> None:
        """Start the process that the first long request would wait for."""
        if self._context is not None:
            self._context.encoding.warm()

    def set_topology(self, topology: Topology) -> None:
        """The workers that are alive now."""
        self._gateway.set_topology(topology)

    async def stop(self, drain: bool = True) -> None:
        """Take nothing new, let what runs finish within ``router.drain_timeout_s``, end the rest, close.

        The notice on ``/ready`` is part of that time: whoever stops this router waits no longer.
        """
        if self._context is None or self._server is None or self._serving is None:
            return
        self._draining = True
        deadline = asyncio.get_running_loop().time() + self._config.router.drain_timeout_s
        if drain:  # whoever asks /ready stops sending; what comes meanwhile is served
            await asyncio.sleep(self._config.router.drain_notice_s)
        self._context.admission.close()
        if drain:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._context.admission.wait_idle()
        cut = self._context.dispatcher.open_generations
        self._context.dispatcher.abandon_all(EndKind.SHUTDOWN, "the router stopped")
        self._server.should_exit = True
        await self._serving
        await self._gateway.close()
        await self._context.store.close()
        await asyncio.to_thread(self._context.encoding.close)
        await asyncio.to_thread(self._tracer.close)
        log.info("router_stopped", cut=cut)


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handlers, which belong to the process that embeds it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


async def open_store(config: ResponseStoreConfig) -> ResponseStore:
    """The store of responses.

    Raises:
        ConfigError: the file cannot be used as one, or the Redis server cannot be reached.
    """
    if config.redis_url is not None:
        # Only who uses it waits for its import.
        from antiphon.router.openai.redis_response_store import RedisResponseStore

        return await RedisResponseStore.connect(
            config.redis_url, max_bytes=config.max_bytes, max_age_s=config.max_age_s
        )
    try:
        return SqliteResponseStore(config.path, max_bytes=config.max_bytes, max_age_s=config.max_age_s)
    except sqlite3.Error as error:
        raise ConfigError(f"router.response_store.path {config.path}: {error}") from error


def check_certificate(config: RouterConfig) -> None:
    """See that the files of HTTPS can be used, where they are configured.

    Raises:
        ConfigError: names the files and what is wrong.
    """
    if config.tls_certificate_file is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.tls_certificate_file, config.tls_key_file
        )
    except OSError as error:  # ssl.SSLError is one
        files = (
            f"router.tls_certificate_file {config.tls_certificate_file}, tls_key_file {config.tls_key_file}"
        )
        raise ConfigError(f"{files}: {error.strerror or error}") from error


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening-ready TCP socket; port 0 picks a free one.

    Raises:
        ConfigError: names the address and what is wrong with it.
    """
    where = f"router.host {host}, router.port {port}"
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"{where}: no such host: {error.strerror}") from error
    listener = socket.socket(family, kind, number)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        # Listening at once makes a second router on the port fail here, and not after it linked to workers.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where}: the port is in use by another process") from error
        raise ConfigError(f"{where}: cannot listen: {error.strerror}") from error
    listener.setblocking(False)
    return listener
