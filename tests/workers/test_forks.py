"""Further choices of a prompt share the pages of the first: one prefill, one transfer, the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from router_stand_in import wait_until
from staged_scenes import Gate

from antiphon.kv_transfer.in_process import InProcessNetwork

Start = Callable[..., tuple[Any, Any]]


@pytest.mark.parametrize("length", [1, 2, 17, 33, 100, 200])
def test_choices_of_a_prompt_cost_one_prefill(started: Start, length: int) -> None:
    pair, router = started(InProcessNetwork().transport)
    prompt = router.random_prompt(length)
    gate = Gate(pair.models[1])  # the first one must not have ended when the last of the others comes
    first = router.generate(prompt, seed=1, temperature=1.0, max_tokens=20)
    forks = [
        router.generate(prompt, fork_of=first, seed=i, temperature=1.0, max_tokens=20) for i in (2, 3, 4)
    ]
    wait_until(lambda: pair.decode.status().requests == 4, what="all choices")
    gate.opened.set()
    router.wait(first, *forks)
    if length > 1:
        router.wait_prefilled(first)
    for name in (first, *forks):
        outcome = router.requests[name]
        assert outcome.tokens == outcome.expected()
        assert outcome.attempts == [1]
    assert [router.requests[name].prefilled for name in (first, *forks)] == [int(length > 1), 0, 0, 0]
    pair.wait_idle()
    assert pair.decode.status().counters["prompts_shared"] == 3
    page = pair.decode._engine.settings.page_size_tokens
    assert pair.decode._engine.snapshot().computed_prompt_tokens <= 3 * page


def test_a_fork_of_one_that_speaks_already(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    prompt = router.random_prompt(50)
    gate = Gate(pair.models[1], layers=pair.models[1].config.num_hidden_layers + 1)  # in its second step
    first = router.generate(prompt, max_tokens=20)
    router.wait_tokens(first)
    late = router.generate(prompt, fork_of=first)
    wait_until(lambda: pair.decode.status().requests == 2, what="the other choice")
    gate.opened.set()
    router.wait(first, late)
    assert router.requests[late].tokens == router.requests[late].expected()
    assert router.requests[late].prefilled == 0
    pair.wait_idle()


def test_a_fork_whose_pages_are_gone_is_prefilled_as_any_other(started: Start) -> None:
    small = {"full_pages": 16, "max_batch_size": 1}
    pair, router = started(InProcessNetwork().transport, decode_settings=small)
    prompt = router.random_prompt(150)
    gate = Gate(pair.models[1])
    first = router.generate(prompt)
    other = router.generate(router.random_prompt(200))  # is served next, with the pages of the first
    fork = router.generate(prompt, fork_of=first)
    wait_until(lambda: pair.decode.status().requests == 3, what="all three")
    gate.opened.set()
    router.wait(first, other, fork)
    assert pair.decode._engine.snapshot().computed_prompt_tokens == 0
    router.wait_prefilled(first, other, fork)
    assert router.requests[fork].tokens == router.requests[fork].expected()
    pair.wait_idle()
    assert pair.decode.status().counters["prompts_shared"] == 1


def test_forks_go_on_without_the_first(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    prompt = router.random_prompt(120)
    first = router.generate(prompt)
    forks = [router.generate(prompt, fork_of=first) for _ in range(2)]
    gone = router.generate(prompt, fork_of="never-heard-of")
    router.abort(first)
    router.wait(*forks, gone)
    for name in (*forks, gone):
        assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_a_full_queue_lets_choices_that_were_taken_pass(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    prompt = router.random_prompt(50)
    gate = Gate(pair.models[1])
    first = router.generate(prompt, max_tokens=20)
    forks = [router.generate(prompt, fork_of=first) for _ in range(2)]
    wait_until(lambda: pair.decode.status().requests == 3, what="all choices")
    pair.decode._engine._inbox._max_queued = 0
    gate.opened.set()
    router.wait(first, *forks)
    for name in forks:
        assert router.requests[name].refused is None
        assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_an_abort_of_those_that_wait(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport)
    prompt = router.random_prompt(150)
    first = router.generate(prompt, max_tokens=40)
    forks = [router.generate(prompt, fork_of=first) for _ in range(3)]
    router.abort(forks[1])
    router.wait(first, forks[0], forks[2])
    for name in (first, forks[0], forks[2]):
        assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_without_a_prefix_cache_every_choice_has_its_own_prefill(started: Start) -> None:
    pair, router = started(InProcessNetwork().transport, decode_settings={"prefix_cache": False})
    prompt = router.random_prompt(40)
    first = router.generate(prompt)
    fork = router.generate(prompt, fork_of=first)
    router.wait(first, fork)
    router.wait_prefilled(first, fork)
    assert [router.requests[name].prefilled for name in (first, fork)] == [1, 1]
    assert router.requests[fork].tokens == router.requests[fork].expected()
    pair.wait_idle()
