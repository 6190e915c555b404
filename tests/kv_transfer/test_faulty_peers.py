"""What a faulty peer says of staged writes: it is dropped and heard of, and touches nothing."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np
import pytest
from staged_ends import PAGES, Ends, until

from antiphon.protocol.codec import decode, encode
from antiphon.protocol.kv_messages import WriteDone, WriteKey
from antiphon.protocol.messages import Message
from antiphon.protocol.staging_messages import SlotFree, StagedPages, StagedWrite

SLOT = 2**14
GOOD = StagedWrite(
    "r", 1, 1, 2, WriteKey(0, 0, 0), part=0, parts=1, source_ranks=1, slot=1, offset=SLOT, pages=()
)
ONE_PAGE = (StagedPages("full", (3,)),)

FAULTS: dict[str, dict[str, Any]] = {
    "a rank that it is not": {"key": WriteKey(1, 0, 0)},
    "a rank that nobody is": {"key": WriteKey(-1, 0, 0)},
    "ranks that it has not": {"source_ranks": 2},
    "no ranks": {"source_ranks": 0},
    "ranks that no heads can be spread over": {"source_ranks": 3},
    "a layer group that there is not": {"key": WriteKey(0, 0, 2)},
    "a negative layer group": {"key": WriteKey(0, 0, -1)},
    "a slot of another writer": {"slot": 2, "offset": 2 * SLOT},
    "a slot that there is not": {"slot": 4, "offset": 4 * SLOT},
    "a negative slot": {"slot": -1, "offset": -SLOT},
    "an offset in another slot": {"offset": 2 * SLOT},
    "an offset past the memory": {"offset": 2**62},
    "a negative offset": {"offset": -8},
    "an offset between two words": {"offset": SLOT + 4},
    "a group that there is not": {"pages": (StagedPages("half", (3,)),)},
    "a page that there is not": {"pages": (StagedPages("full", (3, 2**40)),)},
    "a negative page": {"pages": (StagedPages("sliding", (-1,)),)},
    "more pages than a slot holds": {"pages": (StagedPages("full", tuple(range(PAGES)) * 2),)},
    "a part past the last": {"part": 1},
    "a negative part": {"part": -1},
    "no parts": {"parts": 0},
}


def say(ends: Ends, message: Message) -> None:
    """Have the writer's own agent send it."""
    sender = ends.source.endpoint._transfer
    sender.run(lambda t: t.notify(ends.target.memory.agent_name, encode(message))).result(60)


def heard(ends: Ends, kind: type[Message]) -> list[Message]:
    return [m for _, payload in ends.target.heard if isinstance(m := decode(payload), kind)]


def everything(ends: Ends) -> list[np.ndarray]:
    return [ends.target.cache.memory(group).numpy().copy() for group in ("full", "sliding")]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_staged_write_is_dropped(fault: str, ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    ends.target.endpoint._staging._memory.fill_(7)  # type: ignore[union-attr]
    before = everything(ends)
    message = msgspec.structs.replace(GOOD, **{"pages": ONE_PAGE} | FAULTS[fault])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            say(ends, message)
        until(lambda: len(heard(ends, StagedWrite)) == 3)
    assert heard(ends, StagedWrite) == [message] * 3, "each is counted"
    said = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert len(said) == 1, "the first is logged"
    assert ends.source.memory.agent_name in said[0]
    assert not heard(ends, WriteDone), "nothing is said to have landed"
    assert all(np.array_equal(was, now) for was, now in zip(before, everything(ends), strict=True))
    for group in (0, 1):
        ends.ship(group).result(60)  # the end still works
    ends.check()


def test_an_agent_that_was_given_no_slots_stages_nothing(ends: Ends) -> None:
    before = everything(ends)
    stranger = ends.network.transport("not an agent's name")
    stranger.connect(ends.target.memory.agent_metadata)
    stranger.notify(ends.target.memory.agent_name, encode(msgspec.structs.replace(GOOD, pages=ONE_PAGE)))
    until(lambda: bool(heard(ends, StagedWrite)))
    assert all(np.array_equal(was, now) for was, now in zip(before, everything(ends), strict=True))
    ends.ship(0).result(60)


def test_a_slot_that_is_being_spread_takes_nothing_else(ends: Ends) -> None:
    """A writer that uses a slot before it was told that it is free."""
    spread = [False]
    memory = ends.target.endpoint._staging
    assert memory is not None
    scatter = memory.scatter
    memory.scatter = lambda *arguments: (scatter(*arguments), lambda: spread[0])[1]  # type: ignore[method-assign]
    first, second = (msgspec.structs.replace(GOOD, request_id=name, pages=ONE_PAGE) for name in "ab")
    say(ends, first)
    say(ends, second)
    until(lambda: heard(ends, StagedWrite) == [second])
    spread[0] = True
    until(lambda: bool(heard(ends, WriteDone)))
    del memory.scatter
    for group in (0, 1):
        ends.ship(group).result(60)
    ends.check()


@pytest.mark.parametrize("slot", [1, -1, 99])
def test_the_wrong_slot_is_not_freed(slot: int, ends: Ends) -> None:
    ends.target.arrivals.closed.clear()
    severed = ends.target.endpoint.sever(ends.source.life)  # so that nothing is answered
    shipped = ends.ship(0)
    sender = ends.source.endpoint._sender
    assert sender is not None
    until(lambda: any(not staged.writing and staged.slot == 0 for staged in list(sender._landing.values())))
    wrong = SlotFree("r", 1, WriteKey(0, 0, 0), 0, slot)
    teller = ends.target.endpoint._transfer
    teller.run(lambda t: t.notify(ends.source.memory.agent_name, encode(wrong))).result(60)
    until(lambda: bool(ends.source.heard))
    assert [decode(payload) for _, payload in ends.source.heard] == [wrong]
    assert not shipped.done()
    ends.target.arrivals.closed.set()
    severed.result(60)
    ends.connect(severed=True)
    ends.probe()
    for group in (0, 1):
        ends.ship(group).result(60)
    ends.check()
