"""What both processes of a hand-off have, and the receiving one: pages, an endpoint and a raw agent."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.kv_mapping import HostMapping, KvMapping
from antiphon.engine.kv_staging import make_staging
from antiphon.kv_transfer.endpoint import EndpointSettings, KvEndpoint, nixl_transport
from antiphon.kv_transfer.mapped_transport import Side, with_same_host
from antiphon.kv_transfer.nixl_transport import NixlTransport
from antiphon.kv_transfer.plan import Shard
from antiphon.kv_transfer.ranks import PeerLife
from antiphon.kv_transfer.staging import SlotRange
from antiphon.kv_transfer.step_fences import StepFences
from antiphon.kv_transfer.transport import (
    Copies,
    DeviceEvent,
    Memory,
    Transport,
    TransportFactory,
    WriteId,
)
from antiphon.model.config import GptOssConfig, preset
from antiphon.protocol.codec import decode
from antiphon.protocol.kv_messages import RankMemory, WriteDone

PAGE = 64
MIB = 2**20
Way = Literal["mapped", "staged", "pages"]
"""Copies by the sender's GPU into the receiver's pages; slots of either side; every run of pages by NIXL."""
SENDER, RECEIVER = PeerLife("prefill", 1), PeerLife("decode", 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured; the same in both processes."""

    model: str
    device: str
    tokens: tuple[int, ...]
    chunk_tokens: int
    layer_groups: int
    way: Way
    slots: int
    """Of ``staged`` alone."""
    slot_mib: int
    blocks: int | None
    """Of a copy of ``mapped``; None: as workers have them."""
    repeats: int

    @property
    def config(self) -> GptOssConfig:
        """The model's shape."""
        return preset(self.model)

    @property
    def way_name(self) -> str:
        """The way, with what it depends on."""
        if self.way == "mapped":
            return "mapped" if self.blocks is None else f"mapped, {self.blocks} blocks"
        return f"slots of {self.slot_mib} MiB" if self.way == "staged" else "pages by NIXL"

    @property
    def pages(self) -> int:
        """Pages of the longest prompt."""
        return -(-max(self.tokens) // PAGE)

    def device_of(self, side: int) -> torch.device:
        """Sender 0, receiver 1: on two GPUs, both on the only one, or on the CPU."""
        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", min(side, torch.cuda.device_count() - 1))


class Arrivals:
    """When the receiver was told of each write that lies in its pages."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def note(self, sender: str, payload: bytes) -> None:
        """A notification came."""
        at = now()
        if isinstance(decode(payload), WriteDone):
            self._times.append(at)

    def take(self, count: int, seconds: float = 30.0) -> float:
        """When the last of so many came; the next ones are counted anew.

        Raises:
            RuntimeError: they did not come.
        """
        limit = now() + seconds
        while len(self._times) < count:
            if now() > limit:
                raise RuntimeError(f"{len(self._times)} of {count} writes arrived within {seconds:g} s")
            time.sleep(0.001)
        last = max(self._times)
        self._times.clear()
        return last


def now() -> float:
    """Seconds by a clock that all processes of the host share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def make_endpoint(
    plan: Plan, side: int, life: PeerLife, fences: StepFences, arrivals: Arrivals | None = None
) -> tuple[PagedKvCache, KvEndpoint]:
    """Pages full of random bytes, and their endpoint."""
    note = (lambda sender, payload: None) if arrivals is None else arrivals.note
    device = plan.device_of(side)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sliding = min(plan.pages, 64)
    cache = PagedKvCache(
        plan.config,
        full_pages=plan.pages,
        sliding_pages=sliding,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device=device,
    )
    settings = EndpointSettings(
        *(life.worker_id, life.epoch, cache.fingerprint(plan.model, "")),
        layer_groups=plan.layer_groups,
        write_timeout_s=60.0,
    )
    reach = None
    if plan.way == "mapped":
        reach = HostMapping(KvMapping(device, plan.blocks), "", required=True)
    transports = with_same_host(nixl_transport, Side.IS_WRITTEN if side else Side.WRITES, reach)
    endpoint = KvEndpoint(
        *(settings, Shard(1, 0), cache, fences),
        staging=make_staging(cache, plan.slots if plan.way == "staged" else 0, plan.slot_mib),
        on_notification=note,
        on_landed=note,
        on_failure=_fail,
        transport_factory=_keeping_copies(transports),
    )
    return cache, endpoint


def receive(pipe: Connection, plan: Plan) -> None:
    """The receiving process: own the destination until told to end."""
    arrivals = Arrivals()
    cache, endpoint = make_endpoint(plan, 1, RECEIVER, StepFences(), arrivals)
    memory = endpoint.start()
    endpoint.expect(1)  # polls as a worker does that waits for KV
    target = torch.zeros(2 * raw_bytes(plan), dtype=torch.uint8, device=cache.device)
    raw = NixlTransport("raw/receiver")
    span = span_of_tensor(target)
    raw.register([span])
    pipe.send((memory, raw.metadata(), span))
    sender: RankMemory = pipe.recv()
    granted = SlotRange(0, plan.slots) if plan.slots else None
    endpoint.connect(SENDER, 1, [sender], granted=granted).result()
    pipe.send("connected")
    while not pipe.poll(0.0005):
        raw.notifications()
    while (asked := pipe.recv()) != "end":
        if isinstance(asked, int):
            pipe.send(arrivals.take(asked))
        else:
            pipe.send([cache.read_page(group, page) for group, page in asked])
    endpoint.stop()
    raw.close()


written: list[Copies] = []
"""All that this process wrote."""


def _keeping_copies(factory: TransportFactory) -> TransportFactory:
    """Keep what is written through a transport."""

    def make(name: str) -> Transport:
        transport = factory(name)
        post = transport.post_write

        def keeping(
            peer: str, copies: Sequence[Copies], notification: bytes, after: DeviceEvent | None = None
        ) -> WriteId:
            written.extend(copies)
            return post(peer, copies, notification, after)

        transport.post_write = keeping  # type: ignore[method-assign]
        return transport

    return make


def raw_bytes(plan: Plan) -> int:
    return 256 * MIB if plan.device == "cuda" else 64 * MIB


def span_of_tensor(tensor: torch.Tensor) -> Memory:
    cuda = tensor.device.type == "cuda"
    device = (tensor.device.index or 0) if cuda else 0
    return Memory(tensor.data_ptr(), tensor.numel(), "VRAM" if cuda else "DRAM", device)


def _fail(error: BaseException) -> None:
    """A transfer thread that died must not leave the other process waiting."""
    print(f"a transfer thread died: {error!r}", flush=True)
    os._exit(1)
