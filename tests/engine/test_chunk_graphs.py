"""What a replayed chunk reads and writes, and when its layer groups are announced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.device_runtime import CapturedParts, CudaRuntime, HostRuntime
from antiphon.engine.events import KvWritten, PrefillComputed
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import RequestKind
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import preset
from antiphon.model.transformer import Transformer
from antiphon.protocol.errors import ConfigError


class CountingRuntime(HostRuntime):
    """Remembers which padded sizes were captured, and which replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def capture_parts(self, compute: Any) -> CapturedParts:
        """A chunk that is counted; ``compute`` is bound to its padded size."""
        inner = super().capture_parts(compute)
        (size,) = compute.args
        self.captured.append(size)
        replay = inner.replay

        def counted(after_part: Any) -> None:
            self.replayed.append(size)
            replay(after_part)

        inner.replay = counted  # type: ignore[method-assign]
        return inner


def _loop(kit: Any, model: Any, runtime: HostRuntime, sizes: tuple[int, ...], **changes: Any) -> EngineLoop:
    more = {key: changes.pop(key) for key in ("on_kv_written",) if key in changes}
    return EngineLoop(
        model,
        kit.settings(overlap=True, chunk_graph_tokens=sizes, **changes),
        executor=lambda *built: DeviceExecutor(*built, runtime),
        **more,
    )


def test_chunks_take_the_next_size_and_longer_ones_are_issued_eagerly(kit: Any) -> None:
    runtime = CountingRuntime()
    loop = _loop(kit, kit.FakeModel(), runtime, (5, 16, 32), chunk_tokens=48, prefix_cache=False)
    assert runtime.captured == [32, 16, 5], "the largest first, and all of them at the start"
    assert loop.executor.road.startswith("chunks up to 32 tokens as graphs")
    for length, expected in ((3, [5]), (5, [5]), (6, [16]), (30, [32]), (40, []), (48 + 17, [32])):
        runtime.replayed.clear()
        request = kit.request(f"r{length}", kit.prompt_of(length), max_tokens=1)
        loop.submit(request)
        said = kit.run(loop)
        assert runtime.replayed == expected, length
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)
    assert runtime.captured == [32, 16, 5]


def test_a_step_of_several_prompts_is_not_replayed(kit: Any) -> None:
    runtime = CountingRuntime()
    loop = _loop(kit, kit.FakeModel(), runtime, (32,))
    requests = [kit.request(f"r{i}", kit.prompt_of(9 + i, i), max_tokens=2) for i in range(2)]
    for request in requests:
        loop.submit(request)
    said = kit.run(loop)
    assert runtime.replayed == []
    for request in requests:
        assert said.tokens[request.request_id] == kit.FakeModel().expected(request)


def test_padding_is_no_sequences_and_writes_nowhere(kit: Any) -> None:
    model = kit.FakeModel()
    seen: list[Any] = []
    forward = model.forward

    def spied(batch: Any, kv: Any, after_layer: Any = None) -> Tensor:
        seen.append(
            [
                value.tolist()
                for value in (
                    *(batch.token_ids, batch.positions, batch.full.query_start, batch.full.kv_len),
                    *(batch.full.slot, batch.sliding.slot),
                )
            ]
        )
        out: Tensor = forward(batch, kv, after_layer)
        return out

    model.forward = spied
    loop = _loop(kit, model, HostRuntime(), (32,), chunk_tokens=32, prefix_cache=False)
    prompt = kit.prompt_of(32 + 7, 3)
    loop.submit(kit.request("r", prompt, kind=RequestKind.PREFILL_ONLY))
    events = [event for _ in range(6) for event in loop.step()]
    assert any(isinstance(event, PrefillComputed) for event in events)
    tokens, positions, starts, lengths, full, sliding = seen[-1]
    assert (starts, lengths) == ([0, 6], [38])
    assert tokens == [*prompt[32:38], *[0] * 26]
    assert positions == [*range(32, 38), *[0] * 26]
    for slots in (full, sliding):
        assert min(slots[:6]) >= 0
        assert slots[6:] == [-1] * 26


@pytest.mark.parametrize("groups", [1, 2])
def test_each_group_is_announced_when_its_layers_are_written(kit: Any, groups: int) -> None:
    """A shipper that reads a group at its announcement finds it; what it reads of later groups is stale."""
    model = kit.FakeModel()
    layers = model.config.num_hidden_layers
    held: list[list[bool]] = []

    def look(event: KvWritten) -> None:
        page = event.full_pages[0][1]
        held.append([bool(loop.kv_cache.memory("full")[page, i].any()) for i in range(layers // 2)])

    loop = _loop(kit, model, HostRuntime(), (16,), chunk_tokens=16, layer_groups=groups, on_kv_written=look)
    loop.submit(kit.request("r", kit.prompt_of(12), kind=RequestKind.PREFILL_ONLY))
    for _ in range(3):
        loop.step()
    assert held == ([[True, True]] if groups == 1 else [[True, False], [True, True]])


def test_the_plain_model_writes_what_it_writes_eagerly(kit: Any) -> None:
    """Through a real network: pages and first tokens with chunks padded and not."""
    config = preset("tiny")
    model = Transformer(config, torch.float32)
    fill(model, synthesize_parameters(config, 0))
    memories = []
    for sizes in ((), (24, 64)):
        settings = kit.settings(
            page_size_tokens=16,
            window_tokens=config.sliding_window,
            vocab_size=config.vocab_size,
            chunk_tokens=64,
            sliding_pages=64,
            overlap=True,
            chunk_graph_tokens=sizes,
        )
        loop = EngineLoop(model, settings, executor=lambda *built: DeviceExecutor(*built, HostRuntime()))
        prompt = tuple(i * 7 % config.vocab_size for i in range(64 + 21))
        loop.submit(kit.request("r", prompt, max_tokens=3))
        said = kit.run(loop)
        memories.append((said.tokens["r"], loop.kv_cache.memory("full"), loop.kv_cache.memory("sliding")))
    (tokens, *eager), (same, *padded) = memories
    assert tokens == same
    for one, other in zip(eager, padded, strict=True):
        assert bool(one.any())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overlap": False, "chunk_graph_tokens": (32,)}, "without overlap"),
        ({"chunk_graph_tokens": (32, 16)}, "ascend"),
        ({"chunk_graph_tokens": (1, 16)}, "within 2"),
        ({"chunk_graph_tokens": (16, 64)}, "chunk_tokens 32"),
    ],
)
def test_sizes_that_cannot_be_are_refused(kit: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kit.settings(**{"overlap": True, "chunk_tokens": 32, **changes})


def test_a_model_over_ranks_has_all_of_them_replay_the_parts(kit: Any) -> None:
    model, given = kit.FakeModel(), []
    model.for_all_ranks = lambda captured: captured
    model.parts_for_all_ranks = lambda captured: given.append(captured) or captured
    _loop(kit, model, HostRuntime(), (16, 32))
    assert len(given) == 2


def test_other_threads_may_use_the_device_while_this_one_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's thread asks the device about collectives that it waits for; no capture may break on that."""
    modes: list[str] = []

    class Graph:
        def capture_begin(self, pool: int | None, capture_error_mode: str) -> None:
            modes.append(capture_error_mode)

        def capture_end(self) -> None: ...

        def pool(self) -> int:
            return 7

    class Stream:
        def wait_stream(self, stream: Stream) -> None: ...

    @contextmanager
    def recording(graph: Graph, pool: int | None, capture_error_mode: str) -> Iterator[None]:
        modes.append(capture_error_mode)
        yield

    for name, stand_in in {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": nullcontext,
        "device": nullcontext,
        "graph": recording,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def in_three(cut: Callable[[], None]) -> Tensor:
        cut()
        cut()
        return torch.zeros(1)

    runtime = CudaRuntime(torch.device("cuda"))
    runtime.capture(lambda: torch.zeros(1))
    runtime.capture_parts(in_three)
    assert modes == ["thread_local"] * 4
