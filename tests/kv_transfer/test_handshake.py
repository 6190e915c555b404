"""Whom a worker exchanges KV with: peers whose KV means the same, and whose memory can be."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from antiphon.kv_transfer.handshake import check_peer
from antiphon.protocol.errors import HandshakeError
from antiphon.protocol.identity import KvFingerprint
from antiphon.protocol.kv_messages import KvHello, KvWelcome, MemoryRegion, RankMemory

HEAD_BYTES = 2 * 64 * 64 * 2
MINE = KvFingerprint(2, "m", "", "bfloat16", 64, 2, 2, 8, 64, 128, "layers, heads", "bfloat16")


def hello(fingerprint: KvFingerprint = MINE, ranks: int = 2, described: int = 2, **memory: object) -> KvHello:
    each = 2 * 4 * HEAD_BYTES
    regions = tuple(MemoryRegion(group, 0, 4, each, "DRAM", 0) for group in ("full", "sliding"))
    memories = tuple(
        replace_struct(RankMemory(rank, f"p/1/{rank}", b"", regions), **memory) for rank in range(described)
    )
    return KvHello("p", 1, fingerprint, ranks, memories)


def replace_struct(memory: RankMemory, **changes: object) -> RankMemory:
    fields = {name: getattr(memory, name) for name in memory.__struct_fields__}
    return RankMemory(**{**fields, **changes})


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("protocol_version", 1),
        ("model", "another"),
        ("revision", "v2"),
        ("kv_dtype", "float32"),
        ("page_size_tokens", 16),
        ("full_layers", 3),
        ("sliding_layers", 1),
        ("kv_heads", 4),
        ("head_dim", 128),
        ("window_tokens", 64),
        ("layout", "heads, layers"),
        ("full_kv_dtype", "fp8_e4m3"),
    ],
)
def test_a_peer_whose_kv_means_something_else_is_refused_with_both_values(field: str, theirs: object) -> None:
    fields = {name: getattr(MINE, name) for name in MINE.__struct_fields__}
    other = KvFingerprint(**{**fields, field: theirs})
    with pytest.raises(HandshakeError) as refused:
        check_peer(MINE, hello(other))
    assert str(refused.value) == f"{field}: {fields[field]!r} here, {theirs!r} at the peer"


def test_a_peer_that_describes_other_memory_than_it_must_have_is_refused() -> None:
    assert [rank.agent_name for rank in check_peer(MINE, hello()).ranks] == ["p/1/0", "p/1/1"]
    with pytest.raises(HandshakeError, match=r"p has 4 ranks and describes \[0, 1\]"):
        check_peer(MINE, hello(ranks=4))
    with pytest.raises(HandshakeError, match=r"65536 bytes there, 131072 by the fingerprint"):
        check_peer(MINE, with_pages(65536))
    with pytest.raises(HandshakeError, match="rank 0 registered no sliding pages"):
        check_peer(MINE, hello(regions=(MemoryRegion("full", 0, 4, 2 * 4 * HEAD_BYTES, "DRAM", 0),)))
    with pytest.raises(HandshakeError, match="a transfer agent is named q/9/0, not p/1/0"):
        check_peer(MINE, hello(agent_name="q/9/0"))


def with_pages(size: int) -> KvHello:
    regions = tuple(MemoryRegion(group, 0, 4, size, "DRAM", 0) for group in ("full", "sliding"))
    return hello(regions=regions)


@pytest.mark.parametrize(
    ("ranks", "region", "reason"),
    [
        (0, {}, r"p has 0 ranks and describes \[0, 1\]"),
        (-1, {}, r"p has -1 ranks"),
        (2**63 - 1, {}, r"ranks and describes \[0, 1\]"),
        (2, {"pages": 0}, "full memory of rank 0: 0 pages"),
        (2, {"pages": -4}, "full memory of rank 0: -4 pages"),
        (2, {"pages": 2**60}, "full memory of rank 0"),
        (2, {"address": -1}, "bytes at -1"),
        (2, {"address": 2**64 - 1}, "bytes at 18446744073709551615"),
        (2, {"memory": "FILE"}, "FILE 0"),
        (2, {"device": -1}, "DRAM -1"),
    ],
)
def test_numbers_that_no_memory_has_are_refused(ranks: int, region: dict[str, Any], reason: str) -> None:
    full, sliding = (MemoryRegion(group, 0, 4, 8 * HEAD_BYTES, "DRAM", 0) for group in ("full", "sliding"))
    with pytest.raises(HandshakeError, match=reason):
        check_peer(MINE, hello(ranks=ranks, regions=(replace(full, **region), sliding)))


@pytest.mark.parametrize(
    ("probe", "slots", "reason"),
    [
        ({"full": 0, "sliding": 3}, (0, 2), None),
        ({"full": 4, "sliding": 0}, (0, 2), r"full pages \[4\] of d, which has 4"),
        ({"full": 0, "sliding": -1}, (0, 2), r"sliding pages \[-1\] of d"),
        ({"half": 0}, (0, 2), r"half pages \[0\] of d, which has 0"),
        ({}, (1, 2), r"slots 1 .. 2 of rank 0 of d, which has 2"),
        ({}, (-1, 2), "slots -1 .. 0"),
        ({}, (0, 0), "slots 0 .. -1"),
        ({}, (2**63 - 1, 2**63 - 1), "which has 2"),
    ],
)
def test_a_welcome_to_pages_or_slots_that_there_are_not_is_refused(
    probe: dict[str, int], slots: tuple[int, int], reason: str | None
) -> None:
    regions = tuple(MemoryRegion(group, 0, 4, 16 * HEAD_BYTES, "DRAM", 0) for group in ("full", "sliding"))
    memory = RankMemory(0, "d/1/0", b"", (*regions, MemoryRegion("staging", 0, 2, 4096, "DRAM", 0)))
    welcome = KvWelcome("d", 1, MINE, 1, (memory,), probe, slots)
    if reason is None:
        assert check_peer(MINE, welcome).ranks[0].slots == 2
        return
    with pytest.raises(HandshakeError, match=reason):
        check_peer(MINE, welcome)
