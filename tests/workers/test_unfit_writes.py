"""A write that does not fit into its pages, or would leave some out, fails alone: it is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mapped_network import MappedNetwork
from msgspec.structs import replace
from numpy.typing import NDArray
from router_stand_in import wait_until

from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.protocol.messages import KvTicket, PrefillRequest

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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {"full_pages": t.full_pages[:-1]}, "5 full pages from page 0 on, where 0 .. 5 are wanted"),
        (
            lambda t: {"sliding_pages": t.sliding_pages[:-1]},
            "1 sliding pages from page 4 on, where 4 .. 5 are wanted",
        ),
        (
            lambda t: {"sliding_pages": t.sliding_pages[1:], "sliding_first_page": 5},
            "1 sliding pages from page 5 on, where 4 .. 5 are wanted",
        ),
        (lambda t: {"skip_tokens": 5}, "5 of 89 positions to skip, with pages of 16"),
        (lambda t: {"skip_tokens": 96, "full_pages": []}, "96 of 89 positions to skip, with pages of 16"),
        (lambda t: {"skip_tokens": -16}, "-16 of 89 positions to skip, with pages of 16"),
    ],
)
def test_a_ticket_without_all_pages_is_refused(
    change: Callable[[KvTicket], dict[str, Any]], reason: str, started: Start
) -> None:
    """Every write of it would be done, and the pages that it leaves out never written."""
    pair, router = started(InProcessNetwork().transport)
    for length in (90, 90, 90, 90):  # what lies in a page that is not written
        router.wait(router.generate(router.random_prompt(length)))
    router.hold_prefill = True
    name = router.generate(router.random_prompt(90))
    wait_until(lambda: name in router.tickets, what="the reservation")
    ticket = router.tickets[name]
    bad = replace(ticket, **change(ticket))
    tokens = router.requests[name].prompt
    peer = pair.prefill._node.me
    router.node.send(peer, PrefillRequest(name, ticket.attempt, tokens, bad))
    router.wait_prefill_failed(name)
    (failure,) = router.requests[name].prefill_failures
    assert (failure.stage, failure.reason) == ("reserve", f"a ticket of decode-0 for {reason}")
    router.begin_prefill()
    router.wait(name)
    assert router.requests[name].tokens == router.requests[name].expected()
    pair.wait_idle()


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
