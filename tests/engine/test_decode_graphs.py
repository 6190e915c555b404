"""What a replayed decode step reads: block tables kept up to date, and padding that touches nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.engine.decode_graphs import padded_sizes
from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.device_runtime import Captured, HostRuntime
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import RequestKind
from antiphon.kernels.attention.decode import DecodeAttention
from antiphon.kernels.reference import PagedSequences, paged_attention


class CountingRuntime(HostRuntime):
    """Counts what is replayed, by the width of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def capture(self, compute: Callable[[], Tensor]) -> Captured:
        """A graph that is counted."""
        inner = super().capture(compute)
        size = len(inner.output)
        self.captured.append(size)
        replay = inner.replay

        def counted() -> None:
            self.replayed.append(size)
            replay()

        inner.replay = counted  # type: ignore[method-assign]
        return inner


def _loop(kit: Any, model: Any, runtime: HostRuntime, **changes: Any) -> EngineLoop:
    return EngineLoop(
        model,
        kit.settings(overlap=True, decode_graphs=True, **changes),
        executor=lambda *built: DeviceExecutor(*built, runtime),
    )


def test_padded_sizes_end_with_the_largest() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(10) == (*range(1, 9), 10)
    assert padded_sizes(128) == (*range(1, 9), 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
    assert padded_sizes(130)[-2:] == (128, 130)


def test_every_size_is_captured_at_the_start_and_none_later(kit: Any) -> None:
    runtime = CountingRuntime()
    loop = _loop(kit, kit.FakeModel(), runtime, max_batch_size=10)
    at_start = sorted(runtime.captured)
    assert at_start == sorted([*padded_sizes(10)] * 3), "forward, and the end of a step in two ways"
    requests = [
        kit.request(f"r{i}", (i + 1,), kind=RequestKind.REMOTE_KV, max_tokens=4, temperature=t, top_k=k)
        for i, (t, k) in enumerate([(0.0, 0)] * 9 + [(1.0, 3)])
    ]
    for request in requests[:9]:
        loop.submit(request)
    said = kit.run(loop)
    assert runtime.replayed == [10, 10] * 4, "nine rows are padded to ten; all greedy, so sampled in a graph"
    runtime.replayed.clear()
    loop.submit(requests[9])
    kit.run(loop, said)
    assert runtime.replayed == [1] * 4, "a row that is cut is sampled step by step"
    assert sorted(runtime.captured) == at_start
    for request in requests:
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)


def test_the_model_keeps_the_buffers_that_graphs_hold(kit: Any) -> None:
    """A longer eager chunk would otherwise free what the captured steps compute in."""
    runtime, reserved = CountingRuntime(), []
    model = kit.FakeModel()
    model.reserve = lambda tokens: reserved.append((tokens, len(runtime.captured)))
    _loop(kit, model, runtime, max_batch_size=6)
    assert reserved == [(6, 0)], "for the largest size, before anything is captured"


def test_padding_rows_see_no_key_and_write_none(kit: Any) -> None:
    model = kit.FakeModel()
    seen: list[tuple[list[int], list[int], list[int]]] = []
    forward = model.forward

    def spied(batch: Any, kv: Any, after_layer: Any = None) -> Tensor:
        seen.append((batch.full.kv_len.tolist(), batch.full.slot.tolist(), batch.sliding.slot.tolist()))
        out: Tensor = forward(batch, kv, after_layer)
        return out

    model.forward = spied
    loop = _loop(kit, model, HostRuntime(), max_batch_size=12)
    for i in range(12):
        loop.submit(kit.request(f"r{i}", (i + 1,), kind=RequestKind.REMOTE_KV, max_tokens=2 + (i < 10)))
    kit.run(loop)
    lengths, full, sliding = seen[-1]
    assert len(lengths) == 12
    assert sorted(lengths) == [0, 0] + [3] * 10
    assert full[10:] == sliding[10:] == [-1, -1]
    assert min(full[:10] + sliding[:10]) >= 0


def test_the_same_id_and_attempt_again_has_other_pages(kit: Any) -> None:
    """A row must not be taken for up to date because somebody of the same name and size was there before."""
    loop = _loop(kit, kit.FakeModel(), HostRuntime(), prefix_cache=False)
    texts = [kit.prompt_of(40, salt) for salt in range(3)]
    loop.submit(kit.request("x", texts[0], max_tokens=20))
    said = kit.run(loop)
    loop.submit(kit.request("other", texts[1], max_tokens=40))
    for _ in range(4):
        loop.step()
    said = kit.Transcript()
    request = kit.request("x", texts[2], max_tokens=20)
    loop.submit(request)
    kit.run(loop, said)
    assert said.tokens["x"] == kit.FakeModel().expected(request)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter only; tests/gpu runs the real ones")
@pytest.mark.parametrize("splits", [1, 3])
def test_the_decode_kernels_take_padding(splits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(6, 3, 2, 2, 64, 64, generator=generator)[:, 1]
    query = torch.randn(3, 16, 64, generator=generator)
    sinks = torch.randn(16, generator=generator)
    sequences = PagedSequences(
        torch.tensor(
            [[5, 2], [99, 99], [0, 1]], dtype=torch.int32
        ),  # a padding row's pages are not looked at
        torch.arange(4, dtype=torch.int32),
        torch.tensor([70, 0, 3], dtype=torch.int32),
        torch.zeros(3, dtype=torch.int64),
    )
    kernel = DecodeAttention(3, 16, 2, 64, query.device, splits=splits)
    for window in (None, 128):
        out = torch.full_like(query, float("nan"))
        if window is None:
            kernel.full(query, cache, sequences, sinks, 0.125, out)
        else:
            kernel.sliding(query, cache, sequences, sinks, window, 0.125, out)
        expected = paged_attention(query, cache, sequences, sinks, window, 0.125)
        assert bool((expected[1] == 0).all())
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
