"""What one API key may use: requests at one time, requests per minute, tokens per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from antiphon.configs.front_end import KeyLimitsConfig
from antiphon.protocol.errors import AntiphonError


class LimitReached(AntiphonError):
    """A key has used up one of its limits; ``retry_after_s`` is when it has something again."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(f"The limit of {what} of this API key is reached")
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Allowance:
    """An amount that refills evenly over a minute up to ``per_minute``; it may go below zero."""

    per_minute: int
    left: float
    filled_at: float

    def refill(self, now: float) -> None:
        """Add what has come since the last time."""
        gained = (now - self.filled_at) * self.per_minute / 60
        self.left = min(self.left + gained, float(self.per_minute))
        self.filled_at = now

    def wait_s(self, amount: float) -> float:
        """Seconds until so much is there; 0 when it is."""
        return max(amount - self.left, 0.0) * 60 / self.per_minute

    def headers(self, name: str) -> dict[str, str]:
        """OpenAI's headers of this limit."""
        return {
            f"x-ratelimit-limit-{name}": str(self.per_minute),
            f"x-ratelimit-remaining-{name}": str(max(int(self.left), 0)),
            f"x-ratelimit-reset-{name}": f"{math.ceil(self.wait_s(self.per_minute))}s",
        }


@dataclass(slots=True)
class _KeyUse:
    running: int = 0
    allowances: dict[str, Allowance] = field(default_factory=dict)


class KeyLimits:
    """Keeps account per key. Tokens are known only afterwards: a key may overdraw them, then it waits."""

    def __init__(self, config: KeyLimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._keys: dict[str, _KeyUse] = {}

    @contextmanager
    def request(self, key: str) -> Iterator[dict[str, str]]:
        """One request of a key, for as long as it runs; gives the headers that tell what is left.

        Raises:
            LimitReached: 0 tokens are left, or no request.
        """
        use = self._use(key)
        limit = self._config.max_concurrent_requests
        if limit is not None and use.running >= limit:
            raise LimitReached("concurrent requests", 1.0)
        for name, amount in (("tokens", 1.0), ("requests", 1.0)):
            allowance = use.allowances.get(name)
            if allowance is not None and (wait_s := allowance.wait_s(amount)) > 0:
                raise LimitReached(f"{name} per minute", wait_s)
        if (requests := use.allowances.get("requests")) is not None:
            requests.left -= 1
        use.running += 1
        try:
            yield {k: v for name, a in use.allowances.items() for k, v in a.headers(name).items()}
        finally:
            use.running -= 1

    def spend_tokens(self, key: str, tokens: int) -> None:
        """Tokens that a request of the key took, prompt and output together."""
        if (allowance := self._use(key).allowances.get("tokens")) is not None:
            allowance.left -= tokens

    def _use(self, key: str) -> _KeyUse:
        now = self._clock()
        use = self._keys.get(key)
        if use is None:
            limits = {
                "requests": self._config.requests_per_minute,
                "tokens": self._config.tokens_per_minute,
            }
            use = _KeyUse(
                allowances={name: Allowance(n, float(n), now) for name, n in limits.items() if n is not None}
            )
            self._keys[key] = use
        for allowance in use.allowances.values():
            allowance.refill(now)
        return use
