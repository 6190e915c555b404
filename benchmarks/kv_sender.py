"""The sending process of a hand-off that is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection

import numpy as np
import torch

from antiphon.benchmarks.kv_sides import (
    PAGE,
    RECEIVER,
    SENDER,
    Plan,
    make_endpoint,
    now,
    raw_bytes,
    span_of_tensor,
    written,
)
from antiphon.kv_transfer.nixl_transport import NixlTransport
from antiphon.kv_transfer.staging import SlotRange
from antiphon.kv_transfer.step_fences import StepFences
from antiphon.kv_transfer.transport import Copies, WriteState
from antiphon.prefill_worker.orders import source_fence
from antiphon.protocol.rank_messages import ShipOrder, StepMark

WAKE_S = 0.03


@dataclass(frozen=True, slots=True)
class Outcome:
    """One hand-off."""

    tokens: int
    total_bytes: int
    seconds: float
    """From the order until the receiver has been told that all of it lies in its pages."""
    descriptors: int
    median_descriptor_bytes: int
    tail_ms: float
    """From the moment at which the last layer group was computed."""


def pace(marks: Sequence[StepMark], last_layers: Sequence[int], seconds: float) -> list[float]:
    """Seconds that end with each mark, of a prefill whose layers all take the same time.

    Args:
        last_layers: of each layer group, ascending.
        seconds: of the whole.
    """
    ends = (-1, *last_layers)
    layers = [ends[mark.layer_group + 1] - ends[mark.layer_group] for mark in marks]
    return [seconds * count / sum(layers) for count in layers]


class Sender:
    """The sending process's end of everything."""

    def __init__(self, plan: Plan, pipe: Connection) -> None:
        self.plan, self._pipe = plan, pipe
        self._fences = StepFences()
        self._step = 0
        self.cache, self._endpoint = make_endpoint(plan, 0, SENDER, self._fences)
        for group in ("full", "sliding"):
            for page in range(0, self.cache.memory(group).shape[0], 256):
                self.cache.memory(group)[page : page + 256].normal_()
        mine = self._endpoint.start()
        self._theirs, metadata, self._raw_target = pipe.recv()
        pipe.send(mine)
        slots = SlotRange(0, plan.slots) if plan.way == "staged" else None
        self._endpoint.connect(RECEIVER, 1, [self._theirs], slots).result()
        if pipe.recv() != "connected":
            raise RuntimeError("the receiver did not connect")
        self._source = torch.ones(2 * raw_bytes(plan), dtype=torch.uint8, device=self.cache.device)
        self._raw = NixlTransport("raw/sender")
        self._raw.register([span_of_tensor(self._source)])
        self._peer = self._raw.connect(metadata)
        generator = np.random.default_rng(5)
        self._target_pages = {
            "full": generator.permutation(plan.pages).tolist(),
            "sliding": generator.permutation(min(plan.pages, 64)).tolist(),
        }

    def nixl_rate(self, total: int, descriptor: int) -> float:
        """Bytes per second of one write, in descriptors that are neighbours on neither side."""
        start = np.arange(max(1, total // descriptor), dtype=np.int64) * descriptor * 2
        runs = np.stack((start, start, np.full_like(start, min(descriptor, total))), axis=1)
        span, seconds = span_of_tensor(self._source), []
        for _ in range(self.plan.repeats + 1):
            self.wake_device()
            begin = time.perf_counter()
            write = self._raw.post_write(self._peer, [Copies(span, self._raw_target, runs)], b"")
            while (state := self._raw.state(write)) is WriteState.IN_PROGRESS:
                pass
            seconds.append(time.perf_counter() - begin)
            self._raw.release(write)
            if state is not WriteState.DONE:
                raise RuntimeError(f"a write ended as {state}")
        return float(runs[:, 2].sum() / statistics.median(seconds[1:]))

    def orders(self, tokens: int) -> list[tuple[StepMark, ShipOrder]]:
        """What a prefill of so many tokens orders: each chunk's layer groups, sliding pages with the last."""
        plan, found = self.plan, []
        chunks = -(-tokens // plan.chunk_tokens)
        for chunk in range(chunks):
            begin, end = chunk * plan.chunk_tokens, min(tokens, (chunk + 1) * plan.chunk_tokens)
            pages = range(begin // PAGE, -(-end // PAGE))
            full = tuple((page, self._target_pages["full"][page]) for page in pages)
            window = range(max(0, -(-tokens // PAGE) - 3), -(-tokens // PAGE)) if chunk + 1 == chunks else ()
            sliding = tuple(
                (page % 64, self._target_pages["sliding"][page % len(self._target_pages["sliding"])])
                for page in window
            )
            self._step += 1
            for group in range(plan.layer_groups):
                mark = StepMark(self._step, group)
                found.append(
                    (mark, ShipOrder(f"r{self._step}", 1, RECEIVER.epoch, chunk, group, full, sliding, mark))
                )
        return found

    def hand_off(self, tokens: int, compute_s: float, *, after_a_pause: bool = True) -> Outcome:
        """Ship a prompt whose layer groups become ready over ``compute_s``; 0: all at once.

        Args:
            after_a_pause: the device is kept busy first, while the threads of both sides rest.
        """
        orders = self.orders(tokens)
        written.clear()
        if after_a_pause:
            self.wake_device()
        begin = now()
        if not compute_s:
            for mark, _ in orders:
                self._fences.record(mark, None)
        shipped = [self._endpoint.ship(RECEIVER, order) for _, order in orders]
        if compute_s:
            self._compute([mark for mark, _ in orders], compute_s)
        ready = now() if compute_s else begin
        sizes = [each.result(120).size_bytes for each in shipped]
        self._pipe.send(len(orders))
        end: float = self._pipe.recv()
        moved = [length for part in written for length in part.runs[:, 2].tolist()]
        return Outcome(
            *(tokens, sum(sizes), end - begin, len(moved), int(statistics.median(moved))),
            tail_ms=(end - ready) * 1e3,
        )

    def wake_device(self) -> None:
        """Keep the device busy for a moment, as it was by the prompt whose KV is handed off.

        One that has been idle runs at a sixth of its clock, and needs milliseconds to leave that.
        """
        if self.cache.device.type == "cuda":
            _keep_busy(int(WAKE_S * self._cycles_per_s))
            torch.cuda.current_stream(self.cache.device).synchronize()

    def _compute(self, marks: list[StepMark], seconds: float) -> None:
        """What a prefill does meanwhile, as far as a transfer sees it; returns when the last mark has passed.

        Every layer takes the same time. A GPU is given everything at once, as by a worker; a CPU passes one
        mark after the other.
        """
        parts_s = pace(marks, self.cache.last_layers(self.plan.layer_groups), seconds)
        device = self.cache.device
        if device.type == "cpu":
            due = time.perf_counter()
            for mark, part_s in zip(marks, parts_s, strict=True):
                due += part_s
                time.sleep(max(0.0, due - time.perf_counter()))
                self._fences.record(mark, None)
            return
        cycles_per_s = self._cycles_per_s
        for mark, part_s in zip(marks, parts_s, strict=True):
            _keep_busy(int(part_s * cycles_per_s))
            self._fences.record(mark, source_fence(device))
        torch.cuda.current_stream(device).synchronize()

    @cached_property
    def _cycles_per_s(self) -> float:
        """Of the clock by which the device is kept busy."""
        cycles, stream = 100_000_000, torch.cuda.current_stream(self.cache.device)
        for _ in range(2):  # the first one loads the kernel
            begin = time.perf_counter()
            _keep_busy(cycles)
            stream.synchronize()
        return cycles / (time.perf_counter() - begin)

    def check(self, tokens: int) -> None:
        """Compare some pages on both sides.

        Raises:
            RuntimeError: one differs.
        """
        pages = -(-tokens // PAGE)
        asked = [("full", page) for page in sorted({0, pages // 2, pages - 1})]
        self._pipe.send([(group, self._target_pages[group][page]) for group, page in asked])
        for (group, page), theirs in zip(asked, self._pipe.recv(), strict=True):
            if self.cache.read_page(group, page) != theirs:
                raise RuntimeError(f"{group} page {page} did not arrive as it was sent")

    def close(self) -> None:
        """End both sides."""
        self._pipe.send("end")
        self._endpoint.stop()
        self._raw.close()


def _keep_busy(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
