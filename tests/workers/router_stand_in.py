"""A router's part of the protocol, and what it saw of each request."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from fake_model import VOCABULARY, FakeModel

from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.protocol.identity import Role, WorkerAddress
from antiphon.protocol.link import LinkNode, LinkSettings, Peer
from antiphon.protocol.link_thread import LinkThread
from antiphon.protocol.messages import (
    AbortRequest,
    Finish,
    GenerateRequest,
    KvTicket,
    LoadReport,
    PrefillFailed,
    PrefillFinished,
    PrefillRequest,
    RequestRefused,
    Reserved,
    SamplingParams,
    TokenBatch,
    TokensAck,
)

TOKEN = "a cluster token for tests"
LEASE_S = 6.0
"""Of links. A farewell may be lost, and then a test waits for this."""


def wait_until(
    condition: Callable[[], object], seconds: float = 60.0, what: str | Callable[[], str] = "condition"
) -> None:
    """Poll until true; fails the test otherwise."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            named = what if isinstance(what, str) else what()
            pytest.fail(f"{named} did not come within {seconds} s")
        time.sleep(0.005)


@dataclass
class Outcome:
    """What the router stand-in saw of one request."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    refused: RequestRefused | None = None
    attempts: list[int] = field(default_factory=list)
    prefill_failures: list[PrefillFailed] = field(default_factory=list)
    prefilled: int = 0

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.refused is not None

    def expected(self) -> list[int]:
        """What an engine without any transfer would have said."""
        request = EngineRequest(
            "expected", 1, RequestKind.COLOCATED, tuple(self.prompt), sampling=self.sampling
        )
        return list(FakeModel().expected(request))


class RouterStandIn:
    """Plays a router's part of the protocol as simply as possible."""

    def __init__(self, name: str = "router-0", seed: int = 0, lease_s: float = LEASE_S) -> None:
        self.errors: list[BaseException] = []
        self.thread = LinkThread(name, self.errors.append)
        self.thread.start()
        settings = LinkSettings(heartbeat_s=0.1, lease_s=lease_s)
        self.node = LinkNode(Peer(Role.ROUTER, name, 1), TOKEN, self, settings)
        self.thread.call(self.node.start)
        self.requests: dict[str, Outcome] = {}
        self.loads: dict[Peer, LoadReport] = {}
        self.tickets: dict[str, KvTicket] = {}
        self.prefilling: dict[str, Peer] = {}
        self.last_batch: dict[Peer, int] = {}
        self.acknowledge = True
        self.hold_prefill = False
        self.aborted: set[str] = set()
        self.lost: list[Peer] = []
        self._random = random.Random(seed)
        self._names = itertools.count()
        self._turn = itertools.count()
        self._epochs: dict[Peer, int] = {}

    def connect(self, *addresses: WorkerAddress) -> None:
        peers = [self.thread.call(self.node.connect, address) for address in addresses]
        wait_until(lambda: all(self.node.is_up(peer) for peer in peers), what="links")

    def _peer(self, role: Role) -> Peer:
        """One of the linked peers of a role, in turn."""
        found = sorted(peer for peer in self.node.peers() if peer.role is role)
        return found[next(self._turn) % len(found)]

    def generate(
        self,
        prompt: list[int],
        max_tokens: int = 6,
        deadline_s: float | None = None,
        name: str | None = None,
        *,
        fork_of: str = "",
        seed: int = 7,
        temperature: float = 0.0,
    ) -> str:
        name = name or f"request-{next(self._names)}"
        sampling = SamplingParams(max_tokens, seed, temperature=temperature, ignore_eos=True)
        self.requests[name] = Outcome(prompt, sampling)
        message = GenerateRequest(name, 1, prompt, [], sampling, deadline_s=deadline_s, fork_of=fork_of)
        assert self.node.send(self._peer(Role.DECODE), message)
        return name

    def random_prompt(self, length: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(length)]

    def abort(self, name: str, attempt: int = 99) -> None:
        self.aborted.add(name)
        for peer in self.node.peers():
            self.node.send(peer, AbortRequest(name, attempt, "test"))

    def abort_at(self, worker_id: str, name: str, attempt: int) -> None:
        peer = next(peer for peer in self.node.peers() if peer.worker_id == worker_id)
        self.node.send(peer, AbortRequest(name, attempt, "test"))

    def abort_rest(self, name: str) -> None:
        """End every other request that is still open."""
        for other, outcome in self.requests.items():
            if other != name and not outcome.ended:
                self.abort(other)

    def prefill_with_wrong_attempt(self, name: str) -> None:
        ticket = self.tickets[name]
        request = PrefillRequest(name, ticket.attempt + 1, self.requests[name].prompt, ticket)
        self.node.send(self._peer(Role.PREFILL), request)

    def wait(self, *names: str, seconds: float = 60.0) -> None:
        def describe() -> str:
            unfinished = {name: self.requests[name] for name in names if not self.requests[name].ended}
            return f"end of {unfinished}, linked to {self.node.peers()}, errors {self.errors}"

        wait_until(lambda: all(self.requests[name].ended for name in names), seconds, describe)

    def wait_tokens(self, name: str, seconds: float = 60.0) -> None:
        wait_until(lambda: self.requests[name].tokens, seconds, lambda: f"tokens of {name}")

    def wait_prefilled(self, *names: str) -> None:
        """A prefill worker says so over a link of its own: it may come after the tokens."""
        wait_until(
            lambda: all(self.requests[name].prefilled for name in names),
            what=lambda: f"word of a prefill for each of {[self.requests[name] for name in names]}",
        )

    def wait_prefill_failed(self, name: str) -> None:
        """As above."""
        wait_until(lambda: self.requests[name].prefill_failures, what=f"a failed prefill of {name}")

    def begin_prefill(self) -> None:
        """Ask for every prefill that was held back, and hold back none any more."""

        def begin() -> None:
            self.hold_prefill = False
            for name, ticket in self.tickets.items():
                if name not in self.prefilling:
                    self._prefill_again(name, ticket.attempt)

        self.thread.call(begin)

    def on_up(self, peer: Peer) -> None:
        self.last_batch[peer] = 0

    def on_lost(self, peer: Peer, reason: str) -> None:
        self.lost.append(peer)
        for request_id, worker in self.prefilling.items():
            if worker == peer:  # if it was writing, decode refuses the old ticket and reserves again
                self.thread.later(0.05, self._prefill_again, request_id, self.tickets[request_id].attempt)

    def on_message(self, peer: Peer, message: object) -> None:
        if isinstance(message, LoadReport):
            self.loads[peer] = message
        elif isinstance(message, Reserved):
            self._on_reserved(message)
        elif isinstance(message, TokenBatch):
            self._on_tokens(peer, message)
        elif isinstance(message, PrefillFinished):
            self.requests[message.request_id].prefilled += 1
            self.prefilling.pop(message.request_id, None)
        elif isinstance(message, PrefillFailed):
            self._on_prefill_failed(message)
        elif isinstance(message, RequestRefused):
            self.requests[message.request_id].refused = message
        else:
            raise AssertionError(f"unexpected {message}")

    def _on_prefill_failed(self, message: PrefillFailed) -> None:
        """Before any permission to write, the ticket is as good as new; after it, decode reserves again."""
        outcome = self.requests[message.request_id]
        outcome.prefill_failures.append(message)
        self.prefilling.pop(message.request_id, None)
        ticket = self.tickets.get(message.request_id)
        unused = message.stage in ("handshake", "reserve")
        if unused and ticket is not None and ticket.attempt == message.attempt:
            self.thread.later(0.05, self._prefill_again, message.request_id, message.attempt)

    def _on_reserved(self, message: Reserved) -> None:
        outcome = self.requests[message.request_id]
        outcome.attempts.append(message.attempt)
        self.prefilling.pop(message.request_id, None)  # whoever was at it, is at an attempt of the past
        if message.ticket is None:
            return
        self.tickets[message.request_id] = message.ticket
        if not self.hold_prefill:
            self._prefill(message.request_id, message.attempt)

    def _prefill_again(self, request_id: str, attempt: int) -> None:
        outcome, ticket = self.requests[request_id], self.tickets[request_id]
        if ticket.kv_tokens == len(outcome.prompt) + len(outcome.tokens) - 1:  # else its KV had arrived
            self._prefill(request_id, attempt)

    def _prefill(self, request_id: str, attempt: int) -> None:
        outcome, ticket = self.requests[request_id], self.tickets[request_id]
        up = any(peer.role is Role.PREFILL for peer in self.node.peers())
        # Prefill may hear of an abort first; decode then reserves once more, and no router answers that.
        if request_id in self.aborted:
            return
        if outcome.ended or ticket.attempt != attempt or self.hold_prefill or not up:
            return
        tokens = outcome.prompt + outcome.tokens
        assert ticket.kv_tokens == len(tokens) - 1
        request = PrefillRequest(request_id, attempt, tokens, ticket)
        peer = self._peer(Role.PREFILL)
        self.prefilling[request_id] = peer
        assert self.node.send(peer, request)

    def _on_tokens(self, peer: Peer, batch: TokenBatch) -> None:
        assert batch.epoch == peer.epoch
        assert batch.sequence_number == self.last_batch[peer] + 1, "batches are numbered without gaps"
        self.last_batch[peer] = batch.sequence_number
        if self.acknowledge:
            self.node.send(peer, TokensAck(batch.sequence_number))
        for output in batch.outputs:
            outcome = self.requests[output.request_id]
            assert output.position == len(outcome.tokens), "tokens come in order, once"
            assert outcome.finish is None, "nothing follows the end"
            outcome.tokens += output.token_ids
            outcome.finish = output.finish

    def stop(self) -> None:
        self.thread.call(self.node.close)
        self.thread.stop()
