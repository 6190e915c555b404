"""A write that does not fit into mapped pages fails alone: its request is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mapped_network import MappedNetwork
from msgspec.structs import replace
from numpy.typing import NDArray
from router_stand_in import wait_until

Start = Callable[..., tuple[Any, Any]]


def check_recomputed(pair: Any, router: Any, name: str, reason: str) -> None:
    router.wait_prefill_failed(name)
    (failure,) = router.requests[name].prefill_failures
    assert failure.stage == "post"
    assert reason in failure.reason
    router.wait(name)
    assert router.requests[name].tokens == router.requests[name].expected(), "decode reserved again"
    again = router.generate(router.random_prompt(60))
    router.wait(again)
    assert router.requests[again].tokens == router.requests[again].expected()
    pair.wait_idle()


@pytest.mark.parametrize("group", ["full_pages", "sliding_pages"])
def test_a_ticket_that_names_a_page_twice_fails_its_job_alone(group: str, started: Start) -> None:
    network = MappedNetwork(required=True)
    pair, router = started(network.transport)
    router.hold_prefill = True
    name = router.generate(router.random_prompt(90))
    wait_until(lambda: name in router.tickets, what="the reservation")
    ticket = router.tickets[name]
    page = getattr(ticket, group)[0]
    router.tickets[name] = replace(ticket, **{group: [page] * len(getattr(ticket, group))})
    router.hold_prefill = False
    router.thread.call(router._prefill_again, name, ticket.attempt)
    check_recomputed(pair, router, name, f"pages [{page}] of decode-0 more than once")


def test_a_copy_that_the_device_refuses_fails_its_job_alone(
    started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = MappedNetwork(required=True)
    pair, router = started(network.transport)
    copy, refused = network.device.copy, []

    def refuse_twice(runs: NDArray[np.int64], after: int | None) -> Any:
        if len(refused) < 2:  # a post is tried once more
            refused.append(len(runs))
            raise ValueError("run 0: 24 bytes from 0x8 to 0x10 are no multiples of 16")
        return copy(runs, after)

    monkeypatch.setattr(network.device, "copy", refuse_twice)
    name = router.generate(router.random_prompt(90))
    check_recomputed(pair, router, name, "run 0: 24 bytes from 0x8")
    assert len(refused) == 2
