"""A small HTTP server on a thread: /metrics of a process that serves no HTTP otherwise."""

from __future__ import annotations

import errno
import http.server
import json
import logging
import socket
import threading
from collections.abc import Callable, Sequence

from antiphon.protocol.errors import ConfigError
from antiphon.telemetry.registry import ProcessRegistry

_log = logging.getLogger(__name__)
PORTS_TRIED = 64
"""Processes of one node that may share a first port."""

Targets = Callable[[], Sequence[tuple[str, dict[str, str]]]]
"""Gives (host:port, labels) of every process to scrape."""


class MetricsServer:
    """Serves ``/metrics``, ``/health`` and, where there are ``targets``, ``/targets`` for HTTP discovery.

    Args:
        host, port: where to listen. 0 picks a free port; with ``several``, ports in use are passed over, up
            to ``PORTS_TRIED`` beyond ``port``, so that the workers of one node can share a setting.
        targets: what ``/targets`` lists, in the form of Prometheus' ``http_sd_configs``.

    Raises:
        ConfigError: nothing can listen there.
    """

    def __init__(
        self,
        registry: ProcessRegistry,
        host: str,
        port: int,
        *,
        several: bool = False,
        targets: Targets | None = None,
    ) -> None:
        self._registry = registry
        self._targets = targets
        self._server = self._bind(host, port, PORTS_TRIED if several and port else 1)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _bind(self, host: str, port: int, tries: int) -> http.server.ThreadingHTTPServer:
        for candidate in range(port, port + tries):
            try:
                return _Server((host, candidate), self._handler(), family_of(host))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or candidate == port + tries - 1:
                    raise ConfigError(
                        f"metrics: cannot listen on {host}:{candidate}: {error.strerror}"
                    ) from error
        raise AssertionError("unreachable")

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        pages = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30.0

            def do_GET(self) -> None:
                status, body, kind = pages.page(self.path, self.headers.get("accept", ""))
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                _log.debug(format, *args)

        return Handler

    def page(self, path: str, accept: str) -> tuple[int, bytes, str]:
        """(status, body, content type) of a path."""
        path = path.partition("?")[0]
        if path == "/metrics":
            try:
                return 200, *self._registry.exposition(accept)
            except Exception:  # Prometheus shows the target as down; why is in the log
                _log.exception("the metrics could not be collected")
                return 500, b"the metrics could not be collected\n", "text/plain"
        if path == "/health":
            return 200, b'{"status": "ok"}', "application/json"
        if path == "/targets" and self._targets is not None:
            groups = [{"targets": [where], "labels": labels} for where, labels in self._targets()]
            return 200, json.dumps(groups).encode(), "application/json"
        return 404, b"not found\n", "text/plain"


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    # A process that was restarted need not wait for the connections of its earlier life.
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[http.server.BaseHTTPRequestHandler],
        family: socket.AddressFamily,
    ) -> None:
        self.address_family = family
        super().__init__(address, handler)


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address that is one."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
