"""Limits of one API key."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.configs.front_end import KeyLimitsConfig
from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.key_limits import KeyLimits, LimitReached


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limits_of(clock: Clock, **limits: int) -> KeyLimits:
    return KeyLimits(KeyLimitsConfig(**limits), clock)


def test_without_limits_nothing_is_refused_or_told():
    limits = limits_of(Clock())
    for _ in range(1000):
        with limits.request("a") as headers:
            assert headers == {}


def test_requests_per_minute_refill_evenly():
    clock = Clock()
    limits = limits_of(clock, requests_per_minute=6)
    for left in range(5, -1, -1):
        with limits.request("a") as headers:
            assert headers["x-ratelimit-limit-requests"] == "6"
            assert headers["x-ratelimit-remaining-requests"] == str(left)
    with pytest.raises(LimitReached, match="requests per minute") as caught, limits.request("a"):
        pass
    assert caught.value.retry_after_s == pytest.approx(10)
    with limits.request("b"):
        pass
    clock.now += 9.9
    with pytest.raises(LimitReached), limits.request("a"):
        pass
    clock.now += 0.2
    with limits.request("a"):
        pass
    clock.now += 10_000
    with limits.request("a") as headers:
        assert headers["x-ratelimit-remaining-requests"] == "5", "no more than a minute's worth is saved up"


def test_overdrawn_tokens_are_waited_for():
    clock = Clock()
    limits = limits_of(clock, tokens_per_minute=60)
    with limits.request("a"):
        limits.spend_tokens("a", 90)
    with pytest.raises(LimitReached, match="tokens per minute") as caught, limits.request("a"):
        pass
    assert caught.value.retry_after_s == pytest.approx(31)
    clock.now += 31
    with limits.request("a") as headers:
        assert headers["x-ratelimit-remaining-tokens"] == "1"


def test_concurrent_requests_are_counted_until_they_end():
    limits = limits_of(Clock(), max_concurrent_requests=1)
    with limits.request("a"):
        with pytest.raises(LimitReached, match="concurrent"), limits.request("a"):
            pass
        with limits.request("b"):
            pass
    with pytest.raises(ZeroDivisionError), limits.request("a"):
        raise ZeroDivisionError
    with limits.request("a"):
        pass


async def test_limits_over_http(deploy, until):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "hello")))
    deployment = await deploy(
        workers, key_limits={"max_concurrent_requests": 1, "requests_per_minute": 3, "tokens_per_minute": 100}
    )
    workers.workers["d0"].hold = True
    first = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].held)
    second = await deployment.chat()
    assert second.status_code == 429
    assert second.json()["error"]["code"] == "rate_limit_exceeded"
    assert second.json()["error"]["message"] == "The limit of concurrent requests of this API key is reached."
    assert int(second.headers["retry-after"]) >= 1
    workers.go_on("d0")
    answer = await first
    assert answer.headers["x-ratelimit-remaining-requests"] == "2"
    assert answer.headers["x-ratelimit-remaining-tokens"] == "100"
    used = answer.json()["usage"]["total_tokens"]
    following = await deployment.chat(stream=True)
    assert 100 - used <= int(following.headers["x-ratelimit-remaining-tokens"]) <= 100 - used + 10
    assert (await deployment.chat()).status_code == 200
    last = await deployment.chat()
    assert last.status_code == 429
    assert await deployment.metric("rejections_total", reason="key_limit") == 2
    assert not deployment.server.open_requests
