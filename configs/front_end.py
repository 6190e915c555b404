"""Sections of the routers: the HTTP front end, what one key may use, and where responses are kept."""

from __future__ import annotations

import datetime
from urllib.parse import urlsplit

import pydantic

from antiphon.configs.section import Section


class ResponseStoreConfig(Section):
    """Responses that later requests can refer to by id."""

    path: str | None = None
    """SQLite file; absent keeps them in the router's memory, so they end with it."""
    redis_url: str | None = None
    """Redis server that the routers of several machines share, as ``redis://host:6379/0``; ``rediss`` is TLS.
    The user may stand in it, the password comes from ANTIPHON_REDIS_PASSWORD."""
    max_bytes: int = pydantic.Field(256 * 1024 * 1024, ge=1024 * 1024)
    """Size of all stored responses; beyond it the oldest go."""
    max_age_s: float = pydantic.Field(30 * 24 * 3600.0, gt=0)
    """A response older than this is gone."""

    @pydantic.model_validator(mode="after")
    def _one_store(self) -> ResponseStoreConfig:
        if self.path is not None and self.redis_url is not None:
            raise ValueError("path and redis_url are two stores: name one")
        return self

    @pydantic.field_validator("redis_url")
    @classmethod
    def _no_password(cls, url: str | None) -> str | None:
        if url is not None:
            parts = urlsplit(url)
            if parts.scheme not in ("redis", "rediss", "unix"):
                raise ValueError("the scheme must be redis, rediss or unix")
            if parts.password is not None:
                raise ValueError("a password does not belong here: it comes from ANTIPHON_REDIS_PASSWORD")
        return url


class KeyLimitsConfig(Section):
    """What one API key may use at one router; without keys all clients together count as one."""

    max_concurrent_requests: int | None = pydantic.Field(None, ge=1)
    """Requests at one time; absent is no limit."""
    requests_per_minute: int | None = pydantic.Field(None, ge=1)
    """Absent is no limit."""
    tokens_per_minute: int | None = pydantic.Field(None, ge=1)
    """Prompt and output together; absent is no limit."""


class RouterConfig(Section):
    """The HTTP front end."""

    replicas: int = pydantic.Field(1, ge=1)
    """Router processes."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = pydantic.Field(8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    max_in_flight_requests: int = pydantic.Field(256, ge=1)
    """Requests admitted at one time."""
    max_queued_requests: int = pydantic.Field(256, ge=0)
    """Requests waiting for admission; beyond it 429."""
    max_body_bytes: int = pydantic.Field(16 * 1024 * 1024, ge=1024)
    """Largest request body; beyond it 413."""
    head_timeout_s: float = pydantic.Field(30.0, gt=0)
    """The URL and the headers of a request must have come after this long, from their first byte or the
    connection's start; beyond it 408 and the connection is closed."""
    body_timeout_s: float = pydantic.Field(60.0, gt=0)
    """A request body must have come after this long and what its bytes take at ``body_min_bytes_per_s``, and
    never stop for this long; beyond it 408 and the connection is closed. A client that reads nothing of a
    whole answer for this long is dropped."""
    body_min_bytes_per_s: int = pydantic.Field(16 * 1024, ge=1)
    """The slowest that a request body may come."""
    encoding_processes: int = pydantic.Field(2, ge=0)
    """Processes of a router that parse, render and encode long requests beside its event loop; the first
    starts with the router, others when they are needed, and each takes about 150 MB. With 0 the loop does it,
    and holds up streams."""
    encoding_max_waiting_bytes: int = pydantic.Field(64 * 1024 * 1024, ge=1024)
    """What long requests may hold together that wait for one of these processes; beyond it 429. One that is
    larger may wait alone."""
    request_timeout_s: float = pydantic.Field(600.0, gt=0)
    """Deadline of a request that names none."""
    max_attempts: int = pydantic.Field(3, ge=1)
    """Prefill attempts per request before it ends with an error."""
    slow_client_buffer_tokens: int = pydantic.Field(8192, ge=64)
    """Tokens held for a client that reads too slowly before it is cut off."""
    sse_keep_alive_s: float = pydantic.Field(15.0, gt=0)
    """A stream without an event for this long sends a comment line, so that no proxy closes it."""
    worker_replacement_wait_s: float = pydantic.Field(120.0, ge=0)
    """A request whose worker died waits this long for another one; a new request does not wait."""
    drain_notice_s: float = pydantic.Field(0.0, ge=0)
    """A router that stops first takes requests for so long while /ready says no: more than a load balancer's
    interval of health checks, where one stands in front."""
    drain_timeout_s: float = pydantic.Field(60.0, ge=0)
    """A router that stops lets its open requests finish for this long, the notice before included."""
    api_key_file: str | None = None
    """File of accepted API keys, one per line, read again when it changes; ANTIPHON_API_KEYS adds more."""
    key_limits: KeyLimitsConfig = KeyLimitsConfig()
    """Limits of every API key; beyond one of them 429."""
    response_store: ResponseStoreConfig = ResponseStoreConfig()
    """Where stored responses are kept."""
    tls_certificate_file: str | None = None
    """PEM file of the certificate chain; with it and its key the API is HTTPS."""
    tls_key_file: str | None = None
    """PEM file of the certificate's private key."""
    current_date: datetime.date | None = None
    """The date that prompts name; today's (UTC) when absent. A fixed one keeps caches past midnight."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API from a browser; none unless named, ``*`` is all."""

    @pydantic.model_validator(mode="after")
    def _certificate_has_its_key(self) -> RouterConfig:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file go together: one is missing")
        return self
