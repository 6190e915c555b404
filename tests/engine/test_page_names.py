"""The pages of a long prompt get their keys over several steps, and are all found in the end."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import pytest

from antiphon.engine import allocation, sequence
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.sequence import Sequence

A_STEP = 4
PAGES = 30


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every key that was computed, in an engine that computes few a step."""
    keys: list[bytes] = []
    compute = sequence.page_key

    def page_key(previous: bytes, token_ids: Many[int]) -> bytes:
        keys.append(compute(previous, token_ids))
        return keys[-1]

    monkeypatch.setattr(sequence, "page_key", page_key)
    monkeypatch.setattr(allocation, "PAGES_NAMED_A_STEP", A_STEP)
    return keys


def _long(kit: Any, kind: RequestKind, **more: Any) -> EngineRequest:
    request: EngineRequest = kit.request("long", kit.prompt_of(PAGES * kit.PAGE + 5), kind=kind, **more)
    return request


def _steps(loop: EngineLoop, named: list[bytes]) -> list[int]:
    """Run until there is nothing to do; how many pages each step named."""
    counts = []
    while loop.has_work():
        before = len(named)
        loop.step()
        counts.append(len(named) - before)
    return counts


def _all_published(kit: Any, loop: EngineLoop, request: EngineRequest) -> bool:
    keys = Sequence(request, 1, 0.0).page_keys(PAGES, kit.PAGE)
    return all(loop._ledger.pages.full.lookup(key) is not None for key in keys)


def _hit_tokens(kit: Any, loop: EngineLoop) -> int:
    """What another request of the same prompt finds."""
    before = loop.snapshot().prefix_hit_tokens
    loop.submit(kit.request("same", kit.prompt_of(PAGES * kit.PAGE + 5), max_tokens=1))
    kit.run(loop)
    return loop.snapshot().prefix_hit_tokens - before


@pytest.mark.parametrize("mode", ["plain", "overlapped", "graphs late"])
@pytest.mark.parametrize("kind", [RequestKind.COLOCATED, RequestKind.PREFILL_ONLY])
def test_no_step_names_more_than_it_may(kit: Any, named: list[bytes], kind: RequestKind, mode: str) -> None:
    loop, request = kit.loop(mode), _long(kit, kind)
    loop.submit(request)
    first, *others = _steps(loop, named)
    assert first == 1 + A_STEP, "one is looked up before the launch"
    assert max(others) == A_STEP
    assert len(named) == PAGES
    if kind is RequestKind.PREFILL_ONLY:
        loop.release("long", 1)
        loop.step()
    assert _all_published(kit, loop, request)
    assert _hit_tokens(kit, loop) == PAGES * kit.PAGE


@pytest.mark.parametrize("mode", ["plain", "overlapped", "graphs late"])
def test_the_pages_of_a_reservation_are_named_by_an_engine_that_rests(
    kit: Any, named: list[bytes], mode: str
) -> None:
    loop, request = kit.loop(mode), _long(kit, RequestKind.REMOTE_KV)
    loop.submit(request)
    first, *others = _steps(loop, named)
    assert (first, max(others), len(named)) == (1 + A_STEP, A_STEP, PAGES)
    loop.kv_ready("long", 1)
    assert not any(_steps(loop, named))
    assert _all_published(kit, loop, request)
    assert _hit_tokens(kit, loop) == PAGES * kit.PAGE


@pytest.mark.parametrize("mode", ["plain", "overlapped", "graphs late"])
@pytest.mark.parametrize("behind", [0, 3, 7])
def test_pages_whose_kv_comes_before_their_names_are_published_later(
    kit: Any, named: list[bytes], behind: int, mode: str
) -> None:
    """Those of the window too, which the sequence would leave behind by then."""
    prompt = kit.prompt_of(PAGES * kit.PAGE + 1 + behind)
    loop, request = kit.loop(mode), kit.request("long", prompt, kind=RequestKind.REMOTE_KV, max_tokens=40)
    loop.submit(request)
    loop.step()
    loop.kv_ready("long", 1)
    counts = _steps(loop, named)
    assert max(counts) <= A_STEP + 1, "and the page that a decode step completes"
    assert _all_published(kit, loop, request)
    assert _hit_tokens(kit, loop) == PAGES * kit.PAGE


def test_a_long_prompt_delays_no_name_that_a_page_beside_it_needs(kit: Any, named: list[bytes]) -> None:
    loop = kit.loop(full_pages=128)
    loop.submit(_long(kit, RequestKind.REMOTE_KV))
    short = kit.request("short", kit.prompt_of(2 * kit.PAGE + 1, 1), max_tokens=1)
    loop.submit(short)
    kit.run(loop)
    keys = Sequence(short, 1, 0.0).page_keys(2, kit.PAGE)
    assert all(loop._ledger.pages.full.lookup(key) is not None for key in keys)


def test_a_prompt_that_has_ended_is_named_no_further(kit: Any, named: list[bytes]) -> None:
    loop = kit.loop()
    loop.submit(_long(kit, RequestKind.REMOTE_KV))
    loop.step()
    loop.abort("long", 1)
    assert not any(_steps(loop, named))
    assert not loop._ledger.pages._unnamed
