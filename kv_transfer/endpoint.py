"""The KV end of the rank that runs in this process: its pages, its transfer agent and the agent's thread."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from antiphon.kv_transfer.arrival_ends import ArrivalEnds
from antiphon.kv_transfer.arrivals import ARRIVALS, Arrivals
from antiphon.kv_transfer.futures import done, failed, with_result, without_result
from antiphon.kv_transfer.handshake import PeerKv, RankPages, agent_name, rank_pages, span_of
from antiphon.kv_transfer.plan import Shard, group_layouts
from antiphon.kv_transfer.probe_pages import KvPages, ProbePages
from antiphon.kv_transfer.ranks import PeerLife, Shipped, all_of
from antiphon.kv_transfer.shipper import Shipper
from antiphon.kv_transfer.staged_receiver import StagedReceiver
from antiphon.kv_transfer.staged_sender import StagedSender
from antiphon.kv_transfer.staging import SlotRange, StagingMemory
from antiphon.kv_transfer.step_fences import StepFences
from antiphon.kv_transfer.transfer_thread import TransferThread, WriteOutcome
from antiphon.kv_transfer.transport import Copies, Transport, TransportFactory
from antiphon.protocol.codec import decode
from antiphon.protocol.errors import TransferError, WireError
from antiphon.protocol.identity import KvFingerprint
from antiphon.protocol.kv_messages import MemoryRegion, RankMemory, WriteKey
from antiphon.protocol.rank_messages import ShipOrder
from antiphon.protocol.staging_messages import SlotFree, StagedWrite

_log = logging.getLogger(__name__)
T = TypeVar("T")


DIRECT_POLL_S = 0.0003
FAST_POLL_S = 0.0001
"""Of GPUs, and of staged writes, which pass through four hands: each waits for the next poll."""
SWITCH_S = 0.0002
"""How long a thread of a process with a GPU may keep the interpreter from one that waits for it.

Python's 5 ms are longer than a whole transfer. The engine's thread plans and commits a step in up to a
millisecond of Python, which would hold up the word of a prompt that has arrived.
"""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """What all ranks of a worker have in common.

    Attributes:
        worker_id, epoch: this life of the worker.
        layer_groups: parts in which a chunk is shipped.
        write_timeout_s: a longer write is given up.
        verify_checksums: add a checksum to notifications; host memory and one destination rank only.
    """

    worker_id: str
    epoch: int
    fingerprint: KvFingerprint
    layer_groups: int
    write_timeout_s: float
    verify_checksums: bool = False


class KvEndpoint:
    """Implements ``ranks.RankKv`` for this process's rank.

    Args:
        shard: which rank of how many.
        fences: how far this rank's device is.
        staging: this rank's slots; absent, pages are written directly.
        on_notification: called on the transfer thread with (sender's agent name, payload).
        on_landed: the same, with what rank 0 must hear: the WriteDone of a staged write that lies in its
            pages now, or a message of staging that was refused.
        on_failure: called once if the transfer thread dies of an unexpected error.
        transport_factory: makes the transport from an agent name; absent means NIXL.
        arrivals: connections over which writes arrive; those of this process, a stand-in in tests.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        shard: Shard,
        pages: KvPages,
        fences: StepFences,
        *,
        staging: StagingMemory | None = None,
        on_notification: Callable[[str, bytes], None],
        on_landed: Callable[[str, bytes], None],
        on_failure: Callable[[BaseException], None],
        transport_factory: TransportFactory | None = None,
        arrivals: Arrivals = ARRIVALS,
    ) -> None:
        self._settings = settings
        self._shard = shard
        self._pages = pages
        self._fences = fences
        self._layouts = group_layouts(settings.fingerprint)
        self._open = transport_factory or nixl_transport
        self._staging = staging
        self._on_notification = on_notification
        self._on_landed = on_landed
        self._faulty: set[str] = set()
        """Agents whose first refused message was logged."""
        gpus = {region.device for region in pages.memory_regions() if region.memory == "VRAM"}
        self._gpu = next(iter(gpus), None)
        self._transfer = TransferThread(
            *(self._open_transport, self._notified, on_failure),
            write_timeout_s=settings.write_timeout_s,
            busy_poll_s=FAST_POLL_S if staging is not None or gpus else DIRECT_POLL_S,
        )
        self._sender: StagedSender | None = None
        self._receiver: StagedReceiver | None = None
        if staging is not None:
            common = self._layouts, shard, staging, self._transfer, settings.layer_groups
            self._sender = StagedSender(*common, settings.epoch, settings.write_timeout_s)
            counts = {region.group: region.pages for region in pages.memory_regions()}
            self._receiver = StagedReceiver(*common, counts, on_landed)
        self._slots: dict[PeerLife, SlotRange] = {}
        self._mapped: set[PeerLife] = set()
        """Peers into whose pages this rank's GPU writes itself: nothing is staged for them."""
        self._probe = ProbePages(self._layouts, shard, pages, settings.epoch)
        self._arrivals = arrivals
        self._ends = ArrivalEnds(self._transfer, arrivals, self._receiver)
        self._peers: dict[PeerLife, PeerKv] = {}
        self._memory: RankMemory | None = None
        self._local: RankPages | None = None
        self._shipper: Shipper | None = None

    def start(self) -> RankMemory:
        """Open the transport and register the pages.

        Raises:
            TransferError: there is no such transport here, or it cannot take the memory.
            HandshakeError: the pages are not those that the fingerprint says.
        """
        self._transfer.start()
        self._memory = memory = self._transfer.run(self._describe).result()
        self._local = rank_pages(self._layouts, self._shard.tensor_parallel, memory)
        self._shipper = Shipper(
            self._layouts,
            self._local,
            self._transfer,
            self._settings.layer_groups,
            self._settings.epoch,
            verify_checksums=self._settings.verify_checksums,
        )
        return memory

    def stop(self) -> None:
        """Close the transport and end its thread."""
        self._transfer.stop()

    @property
    def memory(self) -> RankMemory:
        """See RankKv."""
        return _started(self._memory)

    @property
    def pages(self) -> RankPages:
        """This rank's registered pages."""
        return _started(self._local)

    def connect(
        self,
        peer: PeerLife,
        tensor_parallel: int,
        ranks: Sequence[RankMemory],
        staging: SlotRange | None = None,
        *,
        granted: SlotRange | None = None,
        severed: bool = False,
    ) -> Future[bool]:
        """See RankKv."""
        pages = tuple(rank_pages(self._layouts, tensor_parallel, memory) for memory in ranks)
        kv = PeerKv(peer.worker_id, peer.epoch, pages)

        def connect_all(transport: Transport) -> bool:
            for memory in ranks:
                transport.connect(memory.agent_metadata, memory.agent_name)
            if severed and self._sender is not None:
                self._sender.severed(peer)
            if granted is not None and self._receiver is not None:
                self._receiver.let_stage(kv, granted)
            mapped = all(transport.maps(rank.agent_name, tuple(rank.spans.values())) for rank in pages)
            (self._mapped.add if mapped else self._mapped.discard)(peer)
            return mapped

        self._peers[peer] = kv
        if staging is not None:
            self._slots[peer] = staging
        return self._transfer.run(connect_all)

    def disconnect(self, peer: PeerLife) -> Future[None]:
        """See RankKv."""
        kv = self._peers.pop(peer, None)
        self._slots.pop(peer, None)
        self._mapped.discard(peer)
        sender, receiver = self._sender, self._receiver
        if sender is not None and receiver is not None:
            self._transfer.soon(lambda: sender.forget(peer))
            self._transfer.soon(lambda: receiver.withdraw(peer))
        for name in sorted(kv.agent_names) if kv is not None else ():
            self._transfer.disconnect(name)
        return done()

    def clear_probe(self) -> Future[None]:
        """See RankKv."""
        self._arrivals.begin_claim()
        self._probe.clear()
        return done()

    def write_probe(self, peer: PeerLife, pages: dict[str, int]) -> Future[None]:
        """See RankKv."""
        kv = self._peers.get(peer)
        if kv is None:
            return failed(TransferError("handshake", f"not connected to {peer}"))
        try:
            writes = self._probe.copies(self.pages, kv.ranks, pages)
        except TransferError as error:
            return failed(error)
        return without_result(all_of([self._write(agent, copies) for agent, copies in writes]))

    def check_probe(self, writer: PeerLife) -> Future[int]:
        """See RankKv."""
        life = writer.worker_id, writer.epoch
        self._arrivals.claim(life)
        try:
            self._probe.check(writer.epoch)
        except TransferError as error:
            return failed(error)
        received = self._arrivals.received_bytes(life)
        return with_result(self._ends.connected_anew(writer), received)

    def ship(self, peer: PeerLife, order: ShipOrder) -> Future[Shipped]:
        """See RankKv."""
        kv = self._peers.get(peer)
        if kv is None:
            return failed(TransferError("handshake", f"not connected to {peer.worker_id}"))
        mark, fences = order.ready_after, self._fences
        shipper = _started(self._shipper)
        if peer in self._mapped:
            _work_on(self._gpu)
            event = partial(fences.device_fence, mark)
            return shipper.ship(kv, order, partial(fences.passed, mark), event)
        slots = self._slots.get(peer)
        if slots is not None and self._sender is not None:
            return self._sender.ship(kv, slots, order, partial(fences.passed, mark))
        return shipper.ship(kv, order, partial(fences.passed, mark))

    def repeat(self, request_id: str, attempt: int, keys: frozenset[WriteKey]) -> None:
        """See RankKv."""
        sender = self._sender
        if sender is not None:
            self._transfer.soon(lambda: sender.repeat(request_id, attempt, keys))

    def sever(self, writer: PeerLife) -> Future[None]:
        """See RankKv."""
        return self._ends.end(writer, for_good=False)

    def drop_writer(self, writer: PeerLife) -> Future[None]:
        """See RankKv."""
        return self._ends.end(writer, for_good=True)

    def notify(self, peer: PeerLife, notification: bytes) -> Future[None]:
        """Repeat the notification of a write that is done, of whichever rank."""
        kv = self._peers.get(peer)
        if kv is None:
            return failed(TransferError("notify", f"not connected to {peer.worker_id}"))
        sent: Future[None] = Future()
        self._transfer.notify(kv.ranks[0].agent_name, notification, lambda outcome: _end(sent, outcome))
        return sent

    def expect(self, change: int) -> None:
        """See RankKv."""
        self._transfer.expect(change)

    def _write(self, agent: str, copies: list[Copies]) -> Future[None]:
        written: Future[None] = Future()
        self._transfer.write(agent, copies, b"", lambda outcome: _end(written, outcome))
        return written

    # ------------------------------------------------------------------------------------ the transfer thread

    def _open_transport(self) -> Transport:
        name = agent_name(self._settings.worker_id, self._settings.epoch, self._shard.rank)
        transport = self._open(name)
        for region in self._regions():
            if region.memory == "VRAM":  # UCX works in the context of the thread that calls it
                import torch

                torch.cuda.set_device(region.device)
                torch.cuda.synchronize()
                sys.setswitchinterval(SWITCH_S)
        transport.register([span_of(region) for region in self._regions()])
        return transport

    def _regions(self) -> tuple[MemoryRegion, ...]:
        staging = () if self._staging is None else (self._staging.region,)
        return (*self._pages.memory_regions(), *staging)

    def _notified(self, sender: str, payload: bytes) -> None:
        if self._sender is None or self._receiver is None:
            self._on_notification(sender, payload)
            return
        try:
            message = decode(payload)
        except WireError:
            self._on_notification(sender, payload)  # counted there
            return
        try:
            if isinstance(message, SlotFree):
                self._sender.slot_free(sender, message)
            elif isinstance(message, StagedWrite):
                self._receiver.staged(sender, message)
            else:
                self._on_notification(sender, payload)
        except TransferError as error:
            if sender not in self._faulty:
                self._faulty.add(sender)
                _log.warning("%s sent a %s that is dropped: %s", sender, type(message).__name__, error.reason)
            self._on_landed(sender, payload)  # counted there

    def _describe(self, transport: Transport) -> RankMemory:
        return RankMemory(self._shard.rank, transport.agent_name, transport.metadata(), self._regions())


def nixl_transport(name: str) -> Transport:
    """The NIXL transport; imported when first asked for, because the import loads UCX."""
    from antiphon.kv_transfer.nixl_transport import NixlTransport

    return NixlTransport(name)


def _work_on(gpu: int | None) -> None:
    """Make a GPU the calling thread's own before a copy may begin there.

    A thread begins with GPU 0, and to come back to it CUDA would make a context there: memory of a GPU that
    is another rank's, and a second in which nothing else of the process goes on.
    """
    if gpu is not None:
        import torch

        torch.cuda.set_device(gpu)


def _started(part: T | None) -> T:
    if part is None:
        raise RuntimeError("the endpoint was not started")
    return part


def _end(future: Future[None], outcome: WriteOutcome) -> None:
    if outcome.error is not None:
        future.set_exception(outcome.error)
    else:
        future.set_result(None)
