"""Two steps at a time: who may run ahead, whose pages wait, and what is thrown away."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from antiphon.engine import device_choice
from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.events import (
    KvWritten,
    PagesReserved,
    PrefillComputed,
    SequencePreempted,
    TokensSampled,
)
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import RequestKind
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.messages import FinishReason

OVERLAPPED = ("overlapped", "overlapped late", "graphs late")


def _decoding(kit: Any, mode: str, **more: Any) -> tuple[EngineLoop, Any, list[int]]:
    """An engine whose only request decodes with a step in flight, its request, and what it said so far."""
    loop = kit.loop(mode)
    request = kit.request("x", kit.prompt_of(20), **{"max_tokens": 50, **more})
    loop.submit(request)
    said = [token for _ in range(3) for token in _tokens(loop.step())]
    assert loop._ledger.pages.step_in_flight
    return loop, request, said


def _tokens(events: list[Any]) -> list[int]:
    return [token for event in events if isinstance(event, TokensSampled) for token in event.token_ids]


@pytest.mark.parametrize("mode", OVERLAPPED)
def test_a_step_is_committed_one_step_later(kit: Any, mode: str) -> None:
    loop = kit.loop(mode)
    request = kit.request("x", kit.prompt_of(20), max_tokens=5)
    loop.submit(request)
    said = [_tokens(loop.step()) for _ in range(7)]
    assert [len(tokens) for tokens in said] == [0, 1, 1, 1, 1, 1, 0]
    assert [token for tokens in said for token in tokens] == kit.FakeModel().expected(request)


@pytest.mark.parametrize("mode", OVERLAPPED)
def test_nothing_runs_ahead_of_an_end_that_is_certain(kit: Any, mode: str) -> None:
    computed = []
    for way in ("plain", mode):
        model = kit.FakeModel()
        loop = kit.engine(way, model, kit.settings(full_pages=6))
        loop.submit(kit.request("a", kit.prompt_of(20), max_tokens=7))
        loop.submit(kit.request("whole cache", kit.prompt_of(80, 1), max_tokens=100))
        before = model.tokens_computed  # captures compute too
        kit.run(loop)
        computed.append(model.tokens_computed - before)
    # Graphs of padded sizes compute padding, so only steps without any can be compared.
    assert computed[0] == computed[1] or mode == "graphs late"


@pytest.mark.parametrize("mode", OVERLAPPED)
def test_pages_wait_for_the_younger_step(kit: Any, mode: str) -> None:
    expected = kit.FakeModel().expected(kit.request("x", kit.prompt_of(20), max_tokens=50))
    loop, _, said = _decoding(kit, mode, stop_token_ids=(expected[4],))
    end = None
    while end is None:
        events = loop.step()
        said += _tokens(events)
        end = next((event for event in events if hasattr(event, "reason")), None)
    assert said == expected[:5]
    assert end.reason is FinishReason.STOP
    # The step after the stop token was launched before the stop token was known.
    assert kit.held_pages(loop) == {"full/used": 2, "sliding/used": 2}
    loop.check_pages()
    assert loop.step() == []
    assert not kit.held_pages(loop)
    assert loop.snapshot().generated_tokens == 5


@pytest.mark.parametrize("mode", OVERLAPPED)
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_an_end_from_outside_wins_over_both_steps(kit: Any, mode: str, how: str) -> None:
    now = [0.0]
    loop = kit.engine(mode, kit.FakeModel(), kit.settings(), clock=lambda: now[0])
    loop.submit(kit.request("x", kit.prompt_of(20), max_tokens=50, deadline_s=9.0))
    for _ in range(3):
        loop.step()
    if how == "abort":
        loop.abort("x", 1)
    else:
        now[0] = 9.0
    events = loop.step()
    assert [event.reason.value for event in events] == [how]
    said = kit.run(loop)
    assert not said.events
    assert not kit.held_pages(loop)


@pytest.mark.parametrize("mode", ["overlapped late", "graphs late"])
def test_a_peer_that_writes_at_once_meets_no_running_step(kit: Any, mode: str) -> None:
    """Pages of an ended sequence go to a reservation whose peer is fast, while a step is in flight."""
    first = kit.request("first", kit.prompt_of(20), max_tokens=50)
    stop = kit.FakeModel().expected(first)[4]
    written: list[PagesReserved] = []

    def peer(event: Any) -> None:
        if isinstance(event, PagesReserved):
            written.append(event)
            for group, pages in (("full", event.full_pages), ("sliding", event.sliding_pages)):
                loop.kv_cache.memory(group)[list(pages)] = 77.0

    loop = kit.engine(mode, kit.FakeModel(), kit.settings(full_pages=4, sliding_pages=5), on_scheduled=peer)
    loop.submit(kit.request("first", kit.prompt_of(20), max_tokens=50, stop_token_ids=(stop,)))
    said = kit.Transcript()
    while "first" not in said.finished:
        said.take(loop.step())
        if len(said.tokens.get("first", ())) == 4:
            loop.submit(kit.request("second", kit.prompt_of(50, 1), kind=RequestKind.REMOTE_KV))
    for _ in range(4):
        said.take(loop.step())
    assert written
    for group, pages in (("full", written[0].full_pages), ("sliding", written[0].sliding_pages)):
        assert bool((loop.kv_cache.memory(group)[list(pages)] == 77.0).all())


@pytest.mark.parametrize("mode", OVERLAPPED)
def test_who_lacks_a_page_does_not_wait_for_its_betters_to_end(kit: Any, mode: str) -> None:
    """The first one could run on for ever; the second gets the page of the third all the same."""
    loop = kit.loop(mode, full_pages=8, prefix_cache=False)
    requests = [
        kit.request("first", kit.prompt_of(34), max_tokens=70),
        kit.request("second", kit.prompt_of(10, 1), max_tokens=60),
        kit.request("third", kit.prompt_of(10, 2), max_tokens=60),
    ]
    for request in requests:
        loop.submit(request)
    said = kit.Transcript()
    while not (preempted := said.of_type(SequencePreempted)):
        said.take(loop.step())
    assert preempted[0].request_id == "third"
    assert len(said.tokens["first"]) <= 26, "its next page is due at 30 only"
    kit.run(loop, said)
    for request in requests:
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)


@pytest.mark.parametrize("mode", OVERLAPPED)
def test_penalties_wait_for_the_token_before_and_hold_up_nobody(kit: Any, mode: str) -> None:
    loop = kit.loop(mode)
    penalised = kit.request("p", kit.prompt_of(20), max_tokens=8, frequency_penalty=0.9)
    free = kit.request("f", kit.prompt_of(30, 1), max_tokens=16)
    for request in (penalised, free):
        loop.submit(request)
    said = kit.run(loop)
    for request in (penalised, free):
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)
    order = [e.request_id for e in said.events if isinstance(e, TokensSampled)]
    assert order.index("p", order.index("p") + 1) - order.index("p") >= 2, "every other step is its own"
    assert loop.snapshot().steps <= 20


@pytest.mark.parametrize("mode", OVERLAPPED)
def test_an_undecided_draw_is_made_again_and_said_once(
    kit: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_choice, "CANDIDATES", 2)
    loop = kit.loop(mode)
    wide = kit.request("w", kit.prompt_of(20), max_tokens=12, temperature=2.0, top_p=0.99)
    other = kit.request("o", kit.prompt_of(30, 1), max_tokens=12, temperature=1.0)
    for request in (wide, other):
        loop.submit(request)
    said = kit.run(loop)
    for request in (wide, other):
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)
    # Once a draw was open, the step behind it was void; after that whole rows are sorted, and none is.
    assert 14 <= loop.snapshot().steps <= 16
    assert loop.snapshot().generated_tokens == 24


@pytest.mark.parametrize("mode", OVERLAPPED)
def test_logits_that_are_not_finite_end_only_their_request(kit: Any, mode: str) -> None:
    model = kit.FakeModel()
    logits = model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        out = logits(hidden)
        if len(out) == 2:
            out[1] = float("nan")
        return out

    model.logits = broken
    loop = kit.engine(mode, model, kit.settings())
    fine = kit.request("a", kit.prompt_of(10), max_tokens=20)
    loop.submit(fine)
    loop.step()
    loop.submit(kit.request("b", kit.prompt_of(12, 1), max_tokens=20, temperature=1.0, top_p=0.5))
    said = kit.run(loop)
    assert said.finished["b"].reason is FinishReason.ERROR
    assert "not finite" in str(said.finished["b"].error)
    assert said.tokens["a"] == kit.FakeModel().expected(fine)
    assert not kit.held_pages(loop)


@pytest.mark.parametrize("mode", ["overlapped", "overlapped late"])
def test_chunks_of_a_prefill_follow_each_other_without_a_gap(kit: Any, mode: str) -> None:
    loop = kit.loop(mode)
    loop.submit(kit.request("a", kit.prompt_of(101), kind=RequestKind.PREFILL_ONLY))
    said = kit.run(loop)
    assert [(e.chunk, e.layer_group) for e in said.events if isinstance(e, KvWritten)] == [
        (chunk, group) for chunk in range(4) for group in range(2)
    ]
    assert isinstance(said.events[-1], PrefillComputed)
    assert kit.held_pages(loop) == {"full/pinned_for_transfer": 7, "sliding/pinned_for_transfer": 3}
    loop.release("a", 1)
    kit.run(loop, said)
    assert not kit.held_pages(loop)


@pytest.mark.parametrize("mode", OVERLAPPED)
@pytest.mark.parametrize("length", [1, 17, 100])
def test_split_equals_the_definition(kit: Any, mode: str, length: int) -> None:
    pair = kit.SplitPair(kit.settings(), kit.settings(full_pages=16), mode=mode)
    requests = [
        kit.request(
            f"r{i}", kit.prompt_of(length + i, i), kind=RequestKind.REMOTE_KV, max_tokens=30, temperature=0.7
        )
        for i in range(3)
    ]
    for request in requests:
        pair.submit(request)
    said = pair.run()
    for request in requests:
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)
    assert not kit.held_pages(pair.decode)
    assert not kit.held_pages(pair.prefill)


def test_a_third_step_in_flight_is_refused(kit: Any) -> None:
    loop = kit.loop()
    executor = DeviceExecutor(kit.FakeModel(), loop.kv_cache, kit.settings(overlap=True), kit.LazyRuntime())
    loop.submit(kit.request("x", kit.prompt_of(200), kind=RequestKind.PREFILL_ONLY))
    loop._intake()
    for _ in range(2):
        executor.launch(loop._ledger.scheduler.schedule().work)
    with pytest.raises(RuntimeError, match="third step"):
        executor.launch(loop._ledger.scheduler.schedule().work)


def test_the_road_is_chosen_once_and_can_be_read(kit: Any) -> None:
    assert "host" in kit.loop().executor.road
    assert "eager" in kit.loop("overlapped").executor.road
    assert "graphs" in kit.loop("graphs late").executor.road
    with pytest.raises(ConfigError, match="decode_graphs"):
        kit.settings(decode_graphs=True)
