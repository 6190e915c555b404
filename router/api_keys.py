"""API keys: who may use the service. Keys come from a file or the environment; reload revokes them."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from pathlib import Path

import structlog

from antiphon.protocol.errors import ConfigError

log = structlog.get_logger("antiphon.router.api_keys")

ENVIRONMENT = "ANTIPHON_API_KEYS"
"""Keys separated by commas or white space, besides those of the file."""
CALLER = "antiphon.caller"
"""Where a request's scope says whose key it came with."""
ANYONE = "anyone"
RELOAD_CHECK_S = 1.0
MIN_KEY_CHARS = 16


class ApiKeys:
    """The set of valid keys. Without a file and without the variable everyone may enter.

    The file has one key per line; empty lines and lines that begin with ``#`` do not count. It is read again
    when it changes. When it cannot be read any more its last keys stay: an operator's slip must neither open
    the service nor close it.
    """

    def __init__(self, path: str | None) -> None:
        """Raises ConfigError when the file cannot be read or a key is too short."""
        self._path = Path(path) if path is not None else None
        self._fixed = _digests(os.environ.get(ENVIRONMENT, "").replace(",", " ").split(), ENVIRONMENT)
        self._from_file: list[bytes] = []
        self._signature: tuple[int, int] | None = None
        self._checked_at = 0.0
        if self._path is not None:
            self._load(self._path)

    @property
    def required(self) -> bool:
        """Whether a key is needed at all."""
        return self._path is not None or bool(self._fixed)

    def identify(self, authorization: str | None) -> str | None:
        """Who an ``Authorization`` header is from: a name of its key, or None when it holds no valid one.

        The name is part of the key's digest, good for accounts and logs; without keys all are ``ANYONE``.
        """
        if not self.required:
            return ANYONE
        self._reload()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = _digest(key.strip())
        # Every key is compared, in constant time, so that the time tells nothing about any of them.
        matches = [hmac.compare_digest(digest, known) for known in (*self._fixed, *self._from_file)]
        return digest.hex()[:16] if any(matches) else None

    def _reload(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._checked_at < RELOAD_CHECK_S:
            return
        self._checked_at = now
        try:
            status = self._path.stat()
            if (status.st_mtime_ns, status.st_size) != self._signature:
                self._load(self._path)
                log.info("api_keys_reloaded", keys=len(self._from_file))
        except (OSError, ConfigError) as error:
            log.error("api_keys_not_reloaded", error=str(error))

    def _load(self, path: Path) -> None:
        try:
            status = path.stat()
            lines = path.read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"router.api_key_file {path}: cannot be read: {error.strerror}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        self._from_file = _digests(keys, f"router.api_key_file {path}")
        self._signature = status.st_mtime_ns, status.st_size


def _digests(keys: list[str], source: str) -> list[bytes]:
    if any(len(key) < MIN_KEY_CHARS for key in keys):
        raise ConfigError(f"{source}: a key has fewer than {MIN_KEY_CHARS} characters")
    return [_digest(key) for key in keys]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
