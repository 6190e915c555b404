"""A transport inside one process that loses, delays, repeats, corrupts, fails and holds on demand.

It really moves bytes between addresses, under the same checks as the real one. Time is counted in polls and
chance comes from one seed, so a run in one thread is deterministic.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from antiphon.kv_transfer.transport import (
    Copies,
    DeviceEvent,
    Memory,
    WriteId,
    WriteState,
    refuse_waiting,
    require_name,
)
from antiphon.protocol.errors import TransferError


class Fault(Enum):
    """What may happen to one write."""

    LOSE_NOTIFICATION = "the bytes arrive, the notification does not"
    REPEAT_NOTIFICATION = "the notification arrives twice"
    CORRUPT = "one byte arrives changed"
    FAIL_POST = "the post is refused"
    FAIL_WRITE = "half of the runs arrive, then the write fails"
    HOLD = "nothing arrives until release_held"
    LATE = "the write is reported as failed, and arrives at release_late, unless its sender was severed"


@dataclass(slots=True)
class _Injection:
    fault: Fault
    remaining: int
    match: Callable[[bytes], bool]


@dataclass(slots=True)
class _Write:
    sender: str
    receiver: str
    copies: tuple[Copies, ...]
    notification: bytes
    faults: frozenset[Fault]
    due: int
    state: WriteState = WriteState.IN_PROGRESS


class _Metadata(msgspec.Struct, frozen=True):
    agent_name: str
    spans: list[tuple[int, int]]


@dataclass(slots=True)
class _Agent:
    memory: list[Memory] = field(default_factory=list)
    inbox: deque[tuple[str, bytes]] = field(default_factory=deque)
    polls: int = 0


class InProcessNetwork:
    """Joins the transports of one process and decides what happens to their writes.

    Args:
        seed: of every random choice.
        rates: probability per write of each fault.
        max_delay_polls: a write takes effect after 0 to this many polls of any transport.
    """

    def __init__(
        self, seed: int = 0, rates: Mapping[Fault, float] | None = None, max_delay_polls: int = 0
    ) -> None:
        self._random = random.Random(seed)
        self._rates = dict(rates or {})
        self._max_delay_polls = max_delay_polls
        self._injections: list[_Injection] = []
        self._agents: dict[str, _Agent] = {}
        self._writes: list[_Write] = []
        self._late: list[_Write] = []
        self._polls = 0
        self._lock = threading.RLock()
        self.happened: dict[Fault, int] = dict.fromkeys(Fault, 0)
        """How often each fault struck."""

    def transport(self, agent_name: str) -> InProcessTransport:
        """A new agent on this network; a TransportFactory."""
        with self._lock:
            if agent_name in self._agents:
                raise TransferError("handshake", f"agent name {agent_name} is taken")
            self._agents[agent_name] = _Agent()
        return InProcessTransport(self, agent_name)

    def inject(
        self, fault: Fault, count: int = 1, match: Callable[[bytes], bool] = lambda notification: True
    ) -> None:
        """Let a fault strike the next ``count`` writes whose notification matches."""
        with self._lock:
            self._injections.append(_Injection(fault, count, match))

    @property
    def held(self) -> int:
        """Writes that wait for ``release_held``."""
        with self._lock:
            return sum(Fault.HOLD in w.faults and w.state is WriteState.IN_PROGRESS for w in self._writes)

    def release_held(self) -> None:
        """Let held writes take effect at the next poll."""
        with self._lock:
            for write in self._writes:
                if Fault.HOLD in write.faults:
                    write.faults -= {Fault.HOLD}
                    write.due = self._polls

    def release_late(self) -> int:
        """Let arrive what the network still holds of writes that failed; how many those were."""
        with self._lock:
            late, self._late = self._late, []
            for write in late:
                write.faults -= {Fault.LATE}
                self._perform(write)
            return len(late)

    def sever(self, sender_prefix: str, receiver_prefix: str) -> None:
        """Agents whose names begin so end the connections of some others: what those sent is lost."""
        with self._lock:
            self._late = [
                write
                for write in self._late
                if not write.receiver.startswith(receiver_prefix)
                or not write.sender.startswith(sender_prefix)
            ]

    def kill(self, agent_name: str) -> None:
        """End an agent as a crash would: what it was writing stops, writes to it fail, nobody is told."""
        with self._lock:
            self._agents.pop(agent_name, None)
            for write in self._writes:
                if agent_name in (write.sender, write.receiver) and write.state is WriteState.IN_PROGRESS:
                    write.state = WriteState.FAILED

    # ---------------------------------------------------------------------------- called by the transports

    def agent(self, name: str, stage: str) -> _Agent:
        """A living agent; raises TransferError at ``stage`` when there is none."""
        with self._lock:
            agent = self._agents.get(name)
        if agent is None:
            raise TransferError(stage, f"agent {name} is gone")
        return agent

    def post(self, sender: str, receiver: str, copies: Sequence[Copies], notification: bytes) -> _Write:
        """Accept a write after checking every address."""
        with self._lock:
            faults = self._draw(notification)
            for part in copies:
                part.check()
                _require(self.agent(sender, "post").memory, part.source, sender)
                _require(self.agent(receiver, "post").memory, part.destination, receiver)
            if Fault.FAIL_POST in faults:
                raise TransferError("post", "refused by fault injection")
            due = self._polls + self._random.randint(0, self._max_delay_polls)
            write = _Write(sender, receiver, tuple(copies), notification, faults, due)
            self._writes.append(write)
            return write

    def notify(self, sender: str, receiver: str, payload: bytes) -> None:
        """Deliver a notification without a write."""
        with self._lock:
            self.agent(receiver, "notify").inbox.append((sender, payload))

    def poll(self) -> None:
        """Let time pass and what is due happen."""
        with self._lock:
            self._polls += 1
            for write in self._writes:
                due = write.due <= self._polls and Fault.HOLD not in write.faults
                if due and write.state is WriteState.IN_PROGRESS:
                    self._perform(write)
            self._writes = [w for w in self._writes if w.state is WriteState.IN_PROGRESS]

    def take_inbox(self, name: str) -> list[tuple[str, bytes]]:
        """Everything that has arrived for an agent."""
        with self._lock:
            inbox = self.agent(name, "notify").inbox
            taken = list(inbox)
            inbox.clear()
            return taken

    def _draw(self, notification: bytes) -> frozenset[Fault]:
        faults = {fault for fault, rate in self._rates.items() if self._random.random() < rate}
        for injection in self._injections:
            if injection.remaining and injection.match(notification):
                injection.remaining -= 1
                faults.add(injection.fault)
        for fault in faults:
            self.happened[fault] += 1
        return frozenset(faults)

    def _perform(self, write: _Write) -> None:
        receiver = self._agents.get(write.receiver)
        if receiver is None:
            write.state = WriteState.FAILED
            return
        runs = [
            (part.source.address + int(source), part.destination.address + int(destination), int(length))
            for part in write.copies
            for source, destination, length in part.runs
        ]
        if Fault.LATE in write.faults:
            write.state = WriteState.FAILED
            self._late.append(write)
            return
        if Fault.FAIL_WRITE in write.faults:
            runs = runs[: len(runs) // 2]
        for source, destination, length in runs:
            ctypes.memmove(destination, source, length)
        if Fault.FAIL_WRITE in write.faults:
            write.state = WriteState.FAILED
            return
        if Fault.CORRUPT in write.faults and runs:
            _, destination, length = self._random.choice(runs)
            byte = (ctypes.c_uint8 * length).from_address(destination)
            byte[self._random.randrange(length)] ^= 1 << self._random.randrange(8)
        write.state = WriteState.DONE
        copies = 2 if Fault.REPEAT_NOTIFICATION in write.faults else 1
        if write.notification and Fault.LOSE_NOTIFICATION not in write.faults:
            receiver.inbox.extend([(write.sender, write.notification)] * copies)


class InProcessTransport:
    """One agent of an InProcessNetwork; see Transport."""

    def __init__(self, network: InProcessNetwork, agent_name: str) -> None:
        self._network = network
        self._name = agent_name
        self._writes: dict[WriteId, _Write] = {}
        self._peers: set[str] = set()
        self._next_id = 0

    @property
    def agent_name(self) -> str:
        """See Transport."""
        return self._name

    def register(self, memory: Sequence[Memory]) -> None:
        """See Transport."""
        self._network.agent(self._name, "handshake").memory.extend(memory)

    def metadata(self) -> bytes:
        """See Transport."""
        memory = self._network.agent(self._name, "handshake").memory
        spans = [(span.address, span.length_bytes) for span in memory]
        return msgspec.msgpack.encode(_Metadata(self._name, spans))

    def connect(self, metadata: bytes, expected: str = "") -> str:
        """See Transport."""
        try:
            peer = msgspec.msgpack.decode(metadata, type=_Metadata).agent_name
        except msgspec.DecodeError as error:
            raise TransferError("handshake", f"undecodable metadata: {error}") from error
        require_name(peer, expected)
        self._network.agent(peer, "handshake")
        self._peers.add(peer)
        return peer

    def maps(self, peer: str, memory: Sequence[Memory] = ()) -> bool:
        """See Transport."""
        return False

    def disconnect(self, peer: str) -> None:
        """See Transport."""
        self._peers.discard(peer)

    def post_write(
        self,
        peer: str,
        copies: Sequence[Copies],
        notification: bytes,
        after: DeviceEvent | None = None,
    ) -> WriteId:
        """See Transport."""
        refuse_waiting(peer, after)
        if peer not in self._peers:
            raise TransferError("post", f"not connected to {peer}")
        write = self._network.post(self._name, peer, copies, notification)
        self._next_id += 1
        name = WriteId(self._next_id)
        self._writes[name] = write
        return name

    def state(self, write: WriteId) -> WriteState:
        """See Transport."""
        self._network.poll()
        return self._writes[write].state

    def release(self, write: WriteId) -> bool:
        """See Transport."""
        if self._writes[write].state is WriteState.IN_PROGRESS:
            return False
        del self._writes[write]
        return True

    def notify(self, peer: str, payload: bytes) -> None:
        """See Transport."""
        if peer not in self._peers:
            raise TransferError("notify", f"not connected to {peer}")
        self._network.notify(self._name, peer, payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        """See Transport."""
        self._network.poll()
        return self._network.take_inbox(self._name)

    def close(self) -> None:
        """See Transport."""
        self._network.kill(self._name)
        self._peers.clear()


def _require(registered: Sequence[Memory], part: Memory, owner: str) -> None:
    for span in registered:
        if span.kind == part.kind and span.address <= part.address and part.end <= span.end:
            return
    raise TransferError("post", f"{part} is not registered by {owner}")
