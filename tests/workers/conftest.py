"""A prefill worker, a decode worker and a router stand-in, joined by real links and any transport."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.configs.schema import DeploymentConfig
from antiphon.decode_worker.worker import DecodeWorker
from antiphon.engine.loop import EngineLoop
from antiphon.kv_transfer.transport import TransportFactory
from antiphon.prefill_worker.worker import PrefillWorker
from antiphon.protocol.identity import Topology, WorkerAddress
from antiphon.protocol.status import WorkerStatus

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "engine" / "fakes"))
sys.path.insert(0, str(Path(__file__).parent.parent / "kv_transfer"))

from fake_engines import settings
from fake_model import FakeModel
from router_stand_in import LEASE_S, TOKEN, RouterStandIn, wait_until

torch.set_num_threads(1)


def config(**transfer: Any) -> DeploymentConfig:
    """Nothing is overdue however busy the machine is; tests of what is overdue put a clock forward."""
    times = {"completion_timeout_s": 120.0, "lease_s": LEASE_S, "heartbeat_s": 0.1, "layer_groups": 2}
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
        model = FakeModel()
        self.models.append(model)
        return kind(
            worker_id,
            self.config,
            lambda on_scheduled, on_kv_written: EngineLoop(
                model,
                settings(**changes),
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
        self.wait_ready()

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
        self.wait_ready()

    def wait_ready(self) -> None:
        """Each of the two is ready for the other."""

        def described() -> str:
            return f"readiness: {[(s.worker_id, s.failed, s.detail) for s in self.statuses()]}"

        wait_until(lambda: all(s.ready for s in self.statuses()), what=described)

    def statuses(self) -> tuple[WorkerStatus, WorkerStatus]:
        return self.prefill.status(), self.decode.status()

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Both workers hold nothing and nothing has failed."""

        def idle() -> bool:
            for status in self.statuses():
                assert status.failed is None
            return all(s.pages_held == 0 and s.requests == 0 for s in self.statuses())

        wait_until(idle, seconds, lambda: f"zero pages held: {self.statuses()}")

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
