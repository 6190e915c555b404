"""What the ranks of one worker say to each other about KV; rank 0 calls, the others answer.

These travel on links of the worker's own, over loopback, beside the commands of a step: a step never waits
for one of them.
"""

from __future__ import annotations

import msgspec

from antiphon.protocol.kv_messages import RankMemory, WriteKey
from antiphon.protocol.messages import Message


class StepMark(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A point in the order of a worker's steps, the same on every rank: behind one layer group of a step."""

    step: int
    """Forward passes that rank 0 had begun, this one included."""
    layer_group: int


class ShipOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write one layer group of one chunk; every rank plans its own part of it.

    ``full`` and ``sliding`` are (own page, peer's page) pairs, the same on every rank.
    """

    request_id: str
    attempt: int
    decode_epoch: int
    chunk: int
    layer_group: int
    full: tuple[tuple[int, int], ...]
    sliding: tuple[tuple[int, int], ...]
    ready_after: StepMark
    """The source pages hold their bytes from there on."""


class RankMeeting(Message, frozen=True):
    """Rank 0 -> the others, in order with the commands: where its end of their links listens."""

    worker_id: str
    epoch: int
    endpoint: str


class RankReady(Message, frozen=True):
    """Another rank -> rank 0: its pages are registered."""

    memory: RankMemory


class ConnectPeer(Message, frozen=True):
    """Connect this rank's transfer agent to every rank of a decode worker. Twice is harmless."""

    call: int
    worker_id: str
    epoch: int
    tensor_parallel: int
    ranks: tuple[RankMemory, ...]
    staging: tuple[int, int] | None = None
    """(first, count) of the slots of each of its ranks that this worker may write."""
    granted: tuple[int, int] | None = None
    """The same of this worker's slots, which it may write."""
    severed: bool = False
    """It has ended every earlier connection of ours."""


class DisconnectPeer(Message, frozen=True):
    """This life of a decode worker is over."""

    call: int
    worker_id: str
    epoch: int


class ClearProbe(Message, frozen=True):
    """Zero the probe pages, so that an earlier probe cannot pass for the next one."""

    call: int


class WriteProbe(Message, frozen=True):
    """Write this rank's part of the probe into a peer's probe pages (page group -> page)."""

    call: int
    worker_id: str
    epoch: int
    pages: dict[str, int]


class CheckProbe(Message, frozen=True):
    """Compare this rank's probe pages with what this life of a writer writes."""

    call: int
    worker_id: str
    epoch: int


class ShipPages(Message, frozen=True):
    """Carry out an order towards a peer."""

    call: int
    worker_id: str
    epoch: int
    order: ShipOrder


class SeverWriter(Message, frozen=True):
    """End the connections of a living writer: answered once nothing that it sent over them changes a byte."""

    call: int
    worker_id: str
    epoch: int


class DropWriter(Message, frozen=True):
    """This life of a writer is over: the same, for good."""

    call: int
    worker_id: str
    epoch: int


class RepeatStaged(Message, frozen=True):
    """Tell the peer once more of staged writes that it has not said to have spread; not answered."""

    request_id: str
    attempt: int
    keys: tuple[WriteKey, ...]


class RankLanded(Message, frozen=True):
    """Another rank -> rank 0: what ``notification`` says, of a staged write that it has spread or refused."""

    sender: str
    notification: bytes


class ExpectWrites(Message, frozen=True):
    """Add to (or take from) the number of sets whose writes are being waited for; not answered."""

    change: int


class WriteSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one write that arrived took."""

    seconds: float
    """From posting it, or from when its source was ready if that was later, to seeing it done."""
    post_seconds: float
    """Posting it."""
    size_bytes: int
    descriptors: int
    """Runs of bytes in it."""


class RankAnswer(Message, frozen=True):
    """What became of a call."""

    call: int
    stage: str = ""
    """As in TransferError; empty when it went well."""
    reason: str = ""
    notification: bytes = b""
    """ShipPages: the WriteDone that the peer was sent."""
    size_bytes: int = 0
    """ShipPages: what was written. CheckProbe: what came over TCP."""
    mapped: bool = False
    """ConnectPeer: this rank's GPU writes straight into the pages of every rank of the peer."""
    writes: tuple[WriteSample, ...] = ()
    """Writes of this rank that ended since its last answer, for rank 0's metrics."""


RankCall = (
    ConnectPeer | DisconnectPeer | ClearProbe | WriteProbe | CheckProbe | ShipPages | SeverWriter | DropWriter
)
"""Everything that is answered by a RankAnswer with the same ``call``."""

RankMessage = RankMeeting | RankReady | RankCall | ExpectWrites | RepeatStaged | RankLanded | RankAnswer
"""Every message of these links."""
