"""The engine as a whole on the fake model: what comes out must not depend on how it was scheduled."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.engine.events import (
    KvWritten,
    PagesReserved,
    PrefillComputed,
    PrefillStarted,
    SequencePreempted,
)
from antiphon.engine.loop import EngineLoop
from antiphon.engine.rejection import RequestRejected
from antiphon.engine.requests import RequestKind
from antiphon.protocol.messages import FinishReason


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 70, 200])
def test_colocated_equals_the_definition(kit: Any, length: int) -> None:
    loop = kit.loop()
    request = kit.request("a", kit.prompt_of(length), max_tokens=20)
    loop.submit(request)
    said = kit.run(loop)
    assert said.tokens["a"] == kit.FakeModel().expected(request)
    assert said.finished["a"].reason is FinishReason.LENGTH
    assert not kit.held_pages(loop)


@pytest.mark.parametrize("chunk", [16, 48, 256])
def test_chunk_size_changes_nothing(kit: Any, chunk: int) -> None:
    request = kit.request("a", kit.prompt_of(200), max_tokens=8, temperature=0.9, top_p=0.9)
    loop = kit.loop(chunk_tokens=chunk)
    loop.submit(request)
    assert kit.run(loop).tokens["a"] == kit.FakeModel().expected(request)


def test_a_batch_equals_its_members_alone(kit: Any) -> None:
    requests = [
        kit.request(f"r{i}", kit.prompt_of(10 + 23 * i, salt=i), max_tokens=20 + i, seed=i, temperature=i / 4)
        for i in range(8)
    ]
    model = kit.FakeModel()
    loop = EngineLoop(model, kit.settings())
    for request in requests:
        loop.submit(request)
    said = kit.run(loop)
    for request in requests:
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)
    assert max(model.batches) == 8


def test_preempted_equals_undisturbed(kit: Any) -> None:
    loop = kit.loop(full_pages=8, sliding_pages=8)
    requests = [kit.request(f"r{i}", kit.prompt_of(30, salt=i), max_tokens=60) for i in range(4)]
    for request in requests:
        loop.submit(request)
    said = kit.run(loop)
    assert said.of_type(SequencePreempted)
    assert sum(end.preemptions for end in said.finished.values()) == loop.snapshot().preemptions > 0
    for request in requests:
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)
    assert said.finished["r0"].preemptions == 0, "the first in order is never the victim"
    assert not kit.held_pages(loop)


def test_a_prefix_hit_equals_no_hit(kit: Any) -> None:
    loop = kit.loop()
    request = kit.request("a", kit.prompt_of(100))
    loop.submit(request)
    first = kit.run(loop)
    computed = loop.snapshot().computed_prompt_tokens
    again = kit.request("b", (*kit.prompt_of(100), 3, 5, 8))
    loop.submit(again)
    second = kit.run(loop)
    assert first.tokens["a"] == kit.FakeModel().expected(request)
    assert second.tokens["b"] == kit.FakeModel().expected(again)
    assert loop.snapshot().prefix_hit_tokens == 96
    assert loop.snapshot().computed_prompt_tokens == computed + 103 - 96


def test_a_salt_keeps_prefixes_apart(kit: Any) -> None:
    loop = kit.loop()
    for name, salt in (("a", "x"), ("b", "y")):
        loop.submit(kit.request(name, kit.prompt_of(100), cache_salt=salt))
        kit.run(loop)
    assert loop.snapshot().prefix_hit_tokens == 0


def test_prefill_only_announces_every_page_once_per_layer_group(kit: Any) -> None:
    loop = kit.loop()
    loop.submit(kit.request("a", kit.prompt_of(101), kind=RequestKind.PREFILL_ONLY))
    said = kit.run(loop)
    started = said.of_type(PrefillStarted)[0]
    assert isinstance(started, PrefillStarted)
    assert (started.chunks, started.cached_tokens) == (4, 0)  # 100 positions in chunks of 32
    for layer_group in range(2):
        written = [e for e in said.of_type(KvWritten) if e.layer_group == layer_group]  # type: ignore[attr-defined]
        assert [e.chunk for e in written] == [0, 1, 2, 3]  # type: ignore[attr-defined]
        assert [e.last_chunk for e in written] == [False, False, False, True]  # type: ignore[attr-defined]
        logical = [page for e in written for page, _ in e.full_pages]  # type: ignore[attr-defined]
        assert logical == list(range(7))
        # 24 positions before 100 begin at 76, in logical page 4.
        assert [[page for page, _ in e.sliding_pages] for e in written] == [[], [], [], [4, 5, 6]]  # type: ignore[attr-defined]
    assert isinstance(said.events[-1], PrefillComputed)
    assert kit.held_pages(loop) == {"full/pinned_for_transfer": 7, "sliding/pinned_for_transfer": 3}
    assert not loop.has_work()
    loop.release("a", 1)
    said = kit.run(loop, said)
    assert said.finished["a"].reason is FinishReason.STOP
    assert not kit.held_pages(loop)


def test_a_fully_cached_prefill_computes_nothing_and_announces_one_chunk(kit: Any) -> None:
    loop = kit.loop()
    for name in ("a", "b"):
        loop.submit(kit.request(name, kit.prompt_of(97), kind=RequestKind.PREFILL_ONLY))
        said = kit.run(loop)
        loop.release(name, 1)
        kit.run(loop, said)
    started = said.of_type(PrefillStarted)[0]
    assert isinstance(started, PrefillStarted)
    assert (started.cached_tokens, started.chunks) == (96, 1)
    assert loop.snapshot().computed_prompt_tokens == 96
    written = said.of_type(KvWritten)
    assert len(written) == 2
    for event in written:
        assert isinstance(event, KvWritten)
        assert event.last_chunk
        assert [page for page, _ in event.full_pages] == [0, 1, 2, 3, 4, 5]
        assert [page for page, _ in event.sliding_pages] == [4, 5]


def test_kv_written_is_delivered_while_the_step_computes(kit: Any) -> None:
    heard: list[tuple[str, int]] = []
    model = kit.FakeModel()
    forward = model.forward

    def spied(batch: Any, kv: Any, after_layer: Any = None) -> Any:
        def both(layer: int) -> None:
            heard.append(("layer", layer))
            after_layer(layer)

        return forward(batch, kv, both)

    model.forward = spied
    loop = EngineLoop(
        model,
        kit.settings(),
        on_scheduled=lambda event: heard.append((type(event).__name__, 0)),
        on_kv_written=lambda event: heard.append(("written", event.layer_group)),
    )
    loop.submit(kit.request("a", kit.prompt_of(20), kind=RequestKind.PREFILL_ONLY))
    loop.step()
    assert heard == [
        ("PrefillStarted", 0),
        ("layer", 0),
        ("layer", 1),
        ("written", 0),
        ("layer", 2),
        ("layer", 3),
        ("written", 1),
    ]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 100, 200])
def test_split_equals_the_definition(kit: Any, length: int) -> None:
    pair = kit.SplitPair(kit.settings(), kit.settings())
    request = kit.request("a", kit.prompt_of(length), kind=RequestKind.REMOTE_KV, max_tokens=30)
    pair.submit(request)
    said = pair.run()
    assert said.tokens["a"] == kit.FakeModel().expected(request)
    reserved = said.of_type(PagesReserved)
    assert len(reserved) == 1
    assert reserved[0].kv_tokens == length - 1  # type: ignore[attr-defined]
    assert pair.decode.snapshot().computed_prompt_tokens == 0
    assert not kit.held_pages(pair.decode)
    assert not kit.held_pages(pair.prefill)


def test_split_with_a_cached_prefix_on_the_decode_side(kit: Any) -> None:
    pair = kit.SplitPair(kit.settings(), kit.settings())
    requests = [
        kit.request("a", kit.prompt_of(100), kind=RequestKind.REMOTE_KV),
        kit.request("b", (*kit.prompt_of(100), *kit.prompt_of(60, 3)), kind=RequestKind.REMOTE_KV),
        kit.request("c", kit.prompt_of(97), kind=RequestKind.REMOTE_KV),
    ]
    for request in requests:
        pair.submit(request)
        said = pair.run()
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)
    reserved = said.of_type(PagesReserved)
    assert [e.cached_tokens for e in reserved] == [0, 96, 96]  # type: ignore[attr-defined]
    assert reserved[2].full_pages == reserved[2].sliding_pages == ()  # type: ignore[attr-defined]


def test_split_under_pressure_preempts_and_continues(kit: Any) -> None:
    pair = kit.SplitPair(kit.settings(), kit.settings(full_pages=10, sliding_pages=12))
    requests = [
        kit.request(f"r{i}", kit.prompt_of(40, salt=i), kind=RequestKind.REMOTE_KV, max_tokens=70)
        for i in range(4)
    ]
    for request in requests:
        pair.submit(request)
    said = pair.run()
    preempted = said.of_type(SequencePreempted)
    assert preempted
    for request in requests:
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)
    attempts = [
        e.attempt  # type: ignore[attr-defined]
        for e in said.of_type(PagesReserved)
        if e.request_id == preempted[0].request_id  # type: ignore[attr-defined]
    ]
    assert attempts == sorted(set(attempts))
    assert len(attempts) > 1
    assert not kit.held_pages(pair.decode)


def test_rejections_name_what_is_wrong(kit: Any) -> None:
    loop = kit.loop(full_pages=4, max_queued_requests=1)
    for request, words in (
        (kit.request("a", ()), "empty"),
        (kit.request("a", (1, 61)), "token id 61"),
        (kit.request("a", (1, -1, 2)), "token id -1"),
        (kit.request("a", (1,), output=(2, 61)), "token id 61"),
        (kit.request("a", (1, 2**63)), "64 bits"),
        (kit.request("a", (1, 0.5)), "64 bits"),
        (kit.request("a", kit.prompt_of(64)), "whole cache of 4 pages"),
        (kit.request("a", (1,), max_tokens=0), "max_tokens"),
        (kit.request("a", (1,), temperature=-1.0), "temperature"),
        (kit.request("a", (1,), top_p=0.0), "top_p"),
        (kit.request("a", (1,), stop_token_ids=(99,)), "99|stop id"),
    ):
        with pytest.raises(RequestRejected, match=words) as caught:
            loop.submit(request)
        assert not caught.value.retryable
    loop.submit(kit.request("a", (1,)))
    with pytest.raises(RequestRejected, match="full") as caught:
        loop.submit(kit.request("b", (1,)))
    assert caught.value.retryable
    with pytest.raises(RequestRejected, match="still running"):
        loop.submit(kit.request("a", (1,)))


def test_the_whole_cache_can_be_used_by_one_sequence(kit: Any) -> None:
    loop = kit.loop(full_pages=4)
    request = kit.request("a", kit.prompt_of(60), max_tokens=100)
    loop.submit(request)
    said = kit.run(loop)
    assert said.finished["a"].reason is FinishReason.LENGTH
    assert said.tokens["a"] == kit.FakeModel().expected(request, 64)
    assert len(said.tokens["a"]) == 4
