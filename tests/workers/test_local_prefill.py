"""A decode worker that computes prompts itself: all of them, or the short ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from router_stand_in import wait_until
from staged_scenes import Gate

from antiphon.configs.schema import DeploymentConfig
from antiphon.kv_transfer.in_process import InProcessNetwork

Start = Callable[..., tuple[Any, Any]]
MakeConfig = Callable[..., DeploymentConfig]


def local(config: DeploymentConfig, mode: str, limit: int = 32) -> DeploymentConfig:
    """The same deployment with another ``local_prefill``."""
    document = config.model_dump()
    document["decode"] |= {"local_prefill": mode, "local_prefill_max_tokens": limit}
    document["prefill"]["replicas"] = 0 if mode == "always" else 1
    return DeploymentConfig.model_validate(document)


@pytest.mark.parametrize("length", [1, 2, 16, 33, 100, 200])
def test_tokens_equal_those_of_an_engine_of_its_own(
    started: Start, make_config: MakeConfig, length: int
) -> None:
    pair, router = started(InProcessNetwork().transport, deployment=local(make_config(), "always"))
    name = router.generate(router.random_prompt(length))
    router.wait(name)
    outcome = router.requests[name]
    assert outcome.tokens == outcome.expected()
    assert outcome.finish.reason == "length"
    assert outcome.attempts == [1]
    assert outcome.prefilled == 0
    pair.wait_idle()
    assert pair.decode.status().counters["prompts_computed_here"] == 1


def test_it_preempts_and_goes_on_without_a_gap(started: Start, make_config: MakeConfig) -> None:
    pair, router = started(
        InProcessNetwork().transport,
        deployment=local(make_config(), "always"),
        decode_settings={"full_pages": 24},
    )
    gate = Gate(pair.models[1])  # no step ends before all are there, who run out of pages together
    names = [router.generate(router.random_prompt(20 + 13 * i), max_tokens=60) for i in range(8)]
    wait_until(lambda: pair.decode.status().requests == len(names), what="all requests")
    gate.opened.set()
    router.wait(*names)
    outcomes = [router.requests[name] for name in names]
    for outcome in outcomes:
        assert outcome.tokens == outcome.expected()
        assert outcome.prefilled == 0
    assert max(len(outcome.attempts) for outcome in outcomes) > 1, "nothing was preempted"
    assert all(outcome.attempts == sorted(set(outcome.attempts)) for outcome in outcomes)
    pair.wait_idle()


def test_an_abort_frees_its_pages(started: Start, make_config: MakeConfig) -> None:
    pair, router = started(InProcessNetwork().transport, deployment=local(make_config(), "always"))
    names = [router.generate(router.random_prompt(150), max_tokens=400) for _ in range(3)]
    router.abort(names[0])
    router.wait(*names)
    assert router.requests[names[0]].finish.reason == "abort"
    assert router.requests[names[1]].tokens == router.requests[names[1]].expected()
    pair.wait_idle()


def test_only_short_prompts_stay_when_so_configured(started: Start, make_config: MakeConfig) -> None:
    pair, router = started(InProcessNetwork().transport, deployment=local(make_config(), "short"))
    short, edge, long = (router.generate(router.random_prompt(length)) for length in (20, 32, 33))
    router.wait(short, edge, long)
    router.wait_prefilled(long)
    assert [router.requests[name].prefilled for name in (short, edge, long)] == [0, 0, 1]
    for name in (short, edge, long):
        assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


def test_who_computes_every_prompt_says_so_and_waits_for_no_peer(
    started: Start, make_config: MakeConfig
) -> None:
    _, router = started(InProcessNetwork().transport, deployment=local(make_config(), "always"))
    name = router.generate(router.random_prompt(5))
    router.wait(name)
    wait_until(lambda: len(router.loads) == 2, what="a report of each")
    reports = {peer.worker_id: report.computes_prompts for peer, report in router.loads.items()}
    assert reports == {"prefill-0": False, "decode-0": True}
