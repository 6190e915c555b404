"""The frozen messages between a prefill and a decode worker: who they are, what is written where, its end.

Each class says who sends it to whom. For what identifies a unit of work see ``protocol.messages``.
"""

from __future__ import annotations

import msgspec

from antiphon.protocol.identity import KvFingerprint
from antiphon.protocol.messages import Message


class MemoryRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One page group's registered memory on one rank: ``pages`` pages of ``page_bytes`` from ``address``."""

    group: str
    """``full`` or ``sliding``."""
    address: int
    pages: int
    page_bytes: int
    memory: str
    """``DRAM`` or ``VRAM``."""
    device: int


class RankMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's transfer agent and what it registered."""

    rank: int
    agent_name: str
    agent_metadata: bytes
    regions: tuple[MemoryRegion, ...]


class KvHello(Message, frozen=True):
    """Prefill -> decode: who I am; answered by KvWelcome or KvRefused."""

    worker_id: str
    epoch: int
    fingerprint: KvFingerprint
    tensor_parallel: int
    ranks: tuple[RankMemory, ...]
    broken: bool = False
    """Its connection to you broke: end what is left of it before you welcome it."""
    handshake: int = 0
    """How many handshakes this life of the sender began up to this one, with anybody. Each message of the
    handshake repeats it, both ways, so that what comes late ends no other."""


class KvWelcome(Message, frozen=True):
    """Decode -> prefill: compatible; here is where my pages are. ``probe_page`` may be written as a test.

    Answered by KvProbe or KvRefused.
    """

    worker_id: str
    epoch: int
    fingerprint: KvFingerprint
    tensor_parallel: int
    ranks: tuple[RankMemory, ...]
    probe_pages: dict[str, int]
    """A page per group that belongs to nobody, for the readiness self-test."""
    staging: tuple[int, int] | None = None
    """(first, count) of the staging slots that are this writer's alone; None: it writes pages directly."""
    severed: bool = False
    """Nothing that came over an earlier connection of yours can change a page or a slot of mine any more."""
    handshake: int = 0
    """As in KvHello."""


class KvRefused(Message, frozen=True):
    """Decode -> prefill: incompatible; each difference names both values.

    Prefill -> decode, after a welcome: no probe of mine will come, for these reasons.
    """

    differences: list[str]
    handshake: int = 0
    """As in KvHello."""


class KvProbe(Message, frozen=True):
    """Prefill -> decode: every rank wrote its part of the probe of ``prefill_epoch``; check and answer."""

    prefill_epoch: int
    decode_epoch: int
    written_bytes: int = 0
    """Of the timed rounds that followed the first one, all ranks together."""
    seconds: float = 0.0
    """How long those rounds took."""
    mapped: bool = False
    """Every rank's GPU wrote straight into your pages, which it has mapped."""
    handshake: int = 0
    """As in KvHello."""


class KvProbeResult(Message, frozen=True):
    """Decode -> prefill: whether the probe arrived intact; both sides are ready only after ``ok``."""

    decode_epoch: int
    ok: bool
    detail: str
    path: str = ""
    """``mapped``: the writer's GPUs write into the pages themselves. Otherwise what the transport between
    processes took: ``tcp``, or ``direct``, which is shared memory, CUDA IPC or RDMA."""
    handshake: int = 0
    """As in KvHello."""


class WriteKey(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One element of a completion set: the writes of one source rank, chunk and layer group."""

    source_rank: int
    chunk: int
    layer_group: int


class AnnounceWrites(Message, frozen=True):
    """Prefill -> decode, before its first write: may I write, and this is the whole set to expect."""

    request_id: str
    attempt: int
    prefill_worker_id: str
    prefill_epoch: int
    decode_epoch: int
    announcement: int
    """Of this work on the attempt: a number that the worker gives no other in its life."""
    writes: list[WriteKey]


class GrantWrites(Message, frozen=True):
    """Decode -> prefill: you are now the only writer of these pages.

    It names the announcement that it answers. One that an earlier work on the same attempt has asked for may
    come while another waits for its own, and must not let that one write.
    """

    request_id: str
    attempt: int
    decode_epoch: int
    announcement: int


class RefuseWrites(Message, frozen=True):
    """Decode -> prefill: the reservation is gone or another writer holds it; write nothing."""

    request_id: str
    attempt: int
    decode_epoch: int
    announcement: int
    reason: str


class WriteChecksum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the bytes of one write must be where they arrived."""

    spans: list[tuple[str, int, int]]
    """(page group, offset, length) in bytes within the receiver's memory of that group, in order."""
    crc32: int
    """Over the spans' bytes, one after the other."""


class WriteDone(Message, frozen=True):
    """Prefill -> decode, as the transfer's own notification: these bytes are in your memory."""

    request_id: str
    attempt: int
    prefill_epoch: int
    decode_epoch: int
    key: WriteKey
    checksum: WriteChecksum | None = None
    """Only with ``transfer.verify_checksums``."""
    part: int = 0
    parts: int = 1
    """This is one of so many parts; the write is done with the last of them."""


class MissingWrites(Message, frozen=True):
    """Decode -> prefill: the set's deadline passed without these; notify or write them again."""

    request_id: str
    attempt: int
    decode_epoch: int
    keys: list[WriteKey]


class CancelWrites(Message, frozen=True):
    """Decode -> prefill: stop writing; answer WritesDrained once no write can still land."""

    request_id: str
    attempt: int
    decode_epoch: int


class WritesDrained(Message, frozen=True):
    """Prefill -> decode: for this attempt and epoch nothing of mine will be written any more."""

    request_id: str
    attempt: int
    prefill_epoch: int
    decode_epoch: int


class WritesFailed(Message, frozen=True):
    """Prefill -> decode: the set will not be completed, and nothing more will be written."""

    request_id: str
    attempt: int
    prefill_epoch: int
    decode_epoch: int
    stage: str
    reason: str


KvMessage = (
    KvHello
    | KvWelcome
    | KvRefused
    | KvProbe
    | KvProbeResult
    | AnnounceWrites
    | GrantWrites
    | RefuseWrites
    | WriteDone
    | MissingWrites
    | CancelWrites
    | WritesDrained
    | WritesFailed
)
"""What prefill and decode workers say to each other."""
