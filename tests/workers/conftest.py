"""A prefill worker, a decode worker and a router stand-in, joined by real links and any transport."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from antiphon.configs.schema import DeploymentConfig
from antiphon.decode_worker.worker import DecodeWorker
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.kv_transfer.transport import TransportFactory
from antiphon.prefill_worker.worker import PrefillWorker
from antiphon.protocol.identity import Role, Topology, WorkerAddress
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
from antiphon.protocol.status import WorkerStatus

TOKEN = "a cluster token for tests"
torch.set_num_threads(1)


def _engine_fakes() -> ModuleType:
    """The engine tests' model, whose output depends on every key that it should see."""
    name = "antiphon_engine_test_fakes"
    if name not in sys.modules:
        path = Path(__file__).parent.parent / "engine" / "conftest.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


fakes = _engine_fakes()


def wait_until(
    condition: Callable[[], bool], seconds: float = 10.0, what: str | Callable[[], str] = "condition"
) -> None:
    """Poll until true; fails the test otherwise."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            named = what if isinstance(what, str) else what()
            pytest.fail(f"{named} did not come within {seconds} s")
        time.sleep(0.005)


def config(**transfer: Any) -> DeploymentConfig:
    """Short times, so that faults show quickly."""
    times = {"completion_timeout_s": 0.4, "lease_s": 3.0, "heartbeat_s": 0.1, "layer_groups": 2}
    return DeploymentConfig.model_validate(
        {
            "model": {"path": "fake", "dtype": "float32"},
            "prefill": {"kv_cache": {"page_size_tokens": 16}, "chunk_tokens": 32},
            "decode": {"kv_cache": {"page_size_tokens": 16}, "chunk_tokens": 32},
            "transfer": times | transfer,
        }
    )


@pytest.fixture
def make_config() -> Callable[..., DeploymentConfig]:
    return config


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
        return list(fakes.FakeModel().expected(request))


class RouterStandIn:
    """Plays a router's part of the protocol as simply as possible."""

    def __init__(self, name: str = "router-0", seed: int = 0, lease_s: float = 3.0) -> None:
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
        return [self._random.randrange(fakes.VOCABULARY) for _ in range(length)]

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

    def wait(self, *names: str, seconds: float = 20.0) -> None:
        def describe() -> str:
            unfinished = {name: self.requests[name] for name in names if not self.requests[name].ended}
            return f"end of {unfinished}, linked to {self.node.peers()}, errors {self.errors}"

        wait_until(lambda: all(self.requests[name].ended for name in names), seconds, describe)

    def wait_tokens(self, name: str, seconds: float = 20.0) -> None:
        wait_until(lambda: self.requests[name].tokens, seconds, lambda: f"tokens of {name}")

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


class Pair:
    """One prefill and one decode worker, each with an engine of its own around the fake model."""

    def __init__(
        self,
        transports: TransportFactory | None,
        deployment: DeploymentConfig | None = None,
        prefill_settings: dict[str, object] | None = None,
        decode_settings: dict[str, object] | None = None,
    ) -> None:
        self.config = deployment or config()
        self.transports = transports
        self.decode_settings = decode_settings or {}
        self.prefill_settings = prefill_settings or {}
        self.models: list[Any] = []
        self.prefill = self._make(PrefillWorker, "prefill-0", self.prefill_settings)
        self.decode = self._make(DecodeWorker, "decode-0", self.decode_settings)
        self.version = 0
        self.stopped: list[PrefillWorker] = []

    def _make(self, kind: Any, worker_id: str, changes: dict[str, object]) -> Any:
        model = fakes.FakeModel()
        self.models.append(model)
        return kind(
            worker_id,
            self.config,
            lambda on_scheduled, on_kv_written: EngineLoop(
                model,
                fakes.settings(**changes),
                on_scheduled=on_scheduled,
                on_kv_written=on_kv_written,
            ),
            bind_host="127.0.0.1",
            cluster_token=TOKEN,
            transport_factory=self.transports,
        )

    @staticmethod
    def topology(version: int, *workers: WorkerAddress) -> Topology:
        return Topology(version, workers)

    def start(self) -> None:
        self.prefill_address = self.prefill.start()
        self.decode_address = self.decode.start()
        self.publish()
        wait_until(lambda: self.prefill.status().ready and self.decode.status().ready, what="readiness")

    def publish(self) -> None:
        """Tell both workers who lives."""
        self.version += 1
        topology = Topology(self.version, (self.prefill_address, self.decode_address))
        self.decode.set_topology(topology)
        self.prefill.set_topology(topology)

    def replace_prefill(self) -> None:
        """A new life of the prefill worker, after the old one has been killed."""
        self.prefill = self._make(PrefillWorker, "prefill-0", self.prefill_settings)
        self.prefill_address = self.prefill.start()
        self.publish()
        wait_until(lambda: self.prefill.status().ready, what="readiness of the new life")

    def replace_decode(self) -> None:
        """A new life of the decode worker, after the old one has been killed."""
        self.decode = self._make(DecodeWorker, "decode-0", self.decode_settings)
        self.decode_address = self.decode.start()
        self.publish()
        wait_until(lambda: all(s.ready for s in self.statuses()), what="readiness of the new life")

    def statuses(self) -> tuple[WorkerStatus, WorkerStatus]:
        return self.prefill.status(), self.decode.status()

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Both workers hold nothing and nothing has failed."""

        def idle() -> bool:
            for status in self.statuses():
                assert status.failed is None
            return all(s.pages_held == 0 and s.requests == 0 for s in self.statuses())

        wait_until(idle, seconds, "zero pages held")

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()


@pytest.fixture
def pair_type() -> type[Pair]:
    return Pair


@pytest.fixture
def router_type() -> type[RouterStandIn]:
    return RouterStandIn


@pytest.fixture
def started() -> Iterator[Callable[..., tuple[Pair, RouterStandIn]]]:
    """Start pairs with a router each; everything ends with the test."""
    made: list[tuple[Pair, RouterStandIn]] = []

    def start(transports: TransportFactory | None, **named: Any) -> tuple[Pair, RouterStandIn]:
        pair, router = Pair(transports, **named), RouterStandIn()
        made.append((pair, router))
        pair.start()
        router.connect(pair.prefill_address, pair.decode_address)
        return pair, router

    yield start
    for pair, router in made:
        router.stop()
        pair.stop()
        assert not router.errors
    assert not [t for t in threading.enumerate() if t.name.startswith(("engine", "kv-transfer", "links-"))]
