"""One enum, one table, and nothing beside it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from antiphon.engine.prefix_cache import chain_root, page_key
from antiphon.engine.sequence import LEGAL_MOVES, Sequence, SequenceStatus
from antiphon.protocol.errors import IllegalTransition


@pytest.mark.parametrize(("old", "new"), list(product(SequenceStatus, SequenceStatus)))
def test_exactly_the_moves_of_the_table_are_legal(kit: Any, old: SequenceStatus, new: SequenceStatus) -> None:
    sequence = Sequence(kit.request("x", (1, 2)), arrival=1, submitted_s=0.0)
    sequence.status = old
    if new in LEGAL_MOVES[old]:
        sequence.move(new)
        assert sequence.status is new
    else:
        with pytest.raises(IllegalTransition, match=f"{old} -> {new}"):
            sequence.move(new)
        assert sequence.status is old


def test_every_state_can_be_reached_and_can_end() -> None:
    reached = {SequenceStatus.QUEUED}
    for _ in SequenceStatus:
        reached |= {new for old in reached for new in LEGAL_MOVES[old]}
    assert reached == set(SequenceStatus)
    for status in set(SequenceStatus) - {SequenceStatus.FINISHED}:
        assert SequenceStatus.FINISHED in LEGAL_MOVES[status]
    assert not LEGAL_MOVES[SequenceStatus.FINISHED]


def test_page_keys_grow_with_the_sequence_and_never_change(kit: Any) -> None:
    sequence = Sequence(kit.request("x", kit.prompt_of(40)), arrival=1, submitted_s=0.0)
    two = list(sequence.page_keys(2, 16))
    sequence.token_ids.extend([1] * 30)
    assert sequence.page_keys(4, 16)[:2] == two
    assert sequence.page_keys(1, 16) == two[:1]


def test_page_keys_are_a_chain_one_by_one_as_at_once(kit: Any) -> None:
    one_by_one, at_once, mixed = (
        Sequence(kit.request("x", kit.prompt_of(100)), arrival=1, submitted_s=0.0) for _ in range(3)
    )
    expected = [chain_root("")]
    for page in range(6):
        expected.append(page_key(expected[-1], kit.prompt_of(100)[16 * page : 16 * (page + 1)]))
    expected = expected[1:]
    assert at_once.page_keys(6, 16) == expected
    assert list(one_by_one.each_page_key(6, 16)) == expected
    some = mixed.each_page_key(6, 16)
    first = next(some)
    mixed.page_keys(4, 16)  # others ask meanwhile
    assert [first, *some] == expected


def test_recomputation_stands_at_the_head_of_its_priority(kit: Any) -> None:
    fresh = Sequence(kit.request("a", (1,)), arrival=1, submitted_s=0.0)
    retried = Sequence(kit.request("b", (1,), output=(2,)), arrival=2, submitted_s=0.0)
    urgent = Sequence(kit.request("c", (1,), priority=-1), arrival=3, submitted_s=0.0)
    order = sorted((fresh, retried, urgent), key=lambda sequence: sequence.queue_order)
    assert [sequence.request.request_id for sequence in order] == ["c", "b", "a"]
