"""Random schedules of requests, aborts, deadlines and faults: right tokens, and nothing held at the end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.configs.schema import DeploymentConfig
from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.prefill_worker import peers

Start = Callable[..., tuple[Any, Any]]
MakeConfig = Callable[..., DeploymentConfig]

RATES = {
    Fault.LOSE_NOTIFICATION: 0.05,
    Fault.REPEAT_NOTIFICATION: 0.1,
    Fault.FAIL_POST: 0.05,
    Fault.FAIL_WRITE: 0.03,
}


STEPS: dict[str, dict[str, object]] = {
    "one at a time": {},
    "two at a time": {"overlap": True, "decode_graphs": True, "chunk_graph_tokens": (19, 32)},
}
"""The second are those of a GPU, where a prompt may be on its way before its writes are announced."""


@pytest.fixture(autouse=True)
def handshakes_follow_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults strike probes as well, and the pause after each that fails would grow to a minute."""
    monkeypatch.setattr(peers, "_LAST_RETRY_S", 0.1)


def settings_of(seed: int, make_config: MakeConfig, steps: str) -> dict[str, Any]:
    """Small caches, with and without prefix caching, and little patience."""
    cached = {"prefix_cache": seed % 2 == 0} | STEPS[steps]
    return {
        "deployment": make_config(completion_timeout_s=0.4),
        "prefill_settings": {"full_pages": 48} | cached,
        "decode_settings": {"full_pages": 40, "max_batch_size": 6} | cached,
    }


def play(router: Any, chance: random.Random) -> None:
    """Requests, aborts and deadlines at random times; each must end once, with the right tokens."""
    shared = router.random_prompt(48)
    names, aborted, hurried = [], set(), set()
    for _ in range(24):
        prompt = (shared if chance.random() < 0.4 else []) + router.random_prompt(chance.randint(1, 150))
        deadline_s = 0.05 if chance.random() < 0.15 else None
        name = router.generate(prompt, max_tokens=chance.randint(1, 30), deadline_s=deadline_s)
        names.append(name)
        if deadline_s is not None:
            hurried.add(name)
        time.sleep(chance.random() * 0.02)
        if chance.random() < 0.3:
            victim = chance.choice(names)
            aborted.add(victim)
            router.abort(victim)
    router.wait(*names, seconds=120)
    for name in names:
        outcome = router.requests[name]
        expected = outcome.expected()
        assert outcome.finish is not None, outcome.refused
        allowed = {"length"} | ({"abort"} if name in aborted else set())
        allowed |= {"deadline"} if name in hurried else set()
        assert outcome.finish.reason in allowed
        complete = outcome.finish.reason == "length"
        assert outcome.tokens == (expected if complete else expected[: len(outcome.tokens)])


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("seed", range(4))
def test_everything_ends_once_and_nothing_stays_held(
    started: Start, make_config: MakeConfig, seed: int, steps: str
) -> None:
    network = InProcessNetwork(seed, RATES, max_delay_polls=30)
    pair, router = started(network.transport, **settings_of(seed, make_config, steps))
    play(router, random.Random(seed))
    pair.wait_idle()
    # How many it is depends on how many writes come before an abort or a deadline; there are always some.
    assert sum(network.happened.values()) > 0, "the schedule met no faults"


@pytest.mark.parametrize("steps", STEPS)
def test_the_same_over_nixl(started: Start, make_config: MakeConfig, steps: str) -> None:
    pair, router = started(None, **settings_of(0, make_config, steps))
    play(router, random.Random(11))
    pair.wait_idle()
