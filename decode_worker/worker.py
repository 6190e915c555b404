"""The decode worker: reserves pages, receives KV, decodes in continuous batches."""

from __future__ import annotations

from collections.abc import Callable

from antiphon.configs.schema import DeploymentConfig
from antiphon.engine.events import KvWritten, PagesReserved, PrefillStarted
from antiphon.engine.loop import EngineLoop
from antiphon.kv_transfer.transport import TransportFactory
from antiphon.protocol.identity import Topology, WorkerAddress
from antiphon.protocol.status import WorkerStatus

EngineFactory = Callable[
    [Callable[[PagesReserved | PrefillStarted], None], Callable[[KvWritten], None]], EngineLoop
]
"""Makes the engine from the two callbacks (``on_scheduled``, ``on_kv_written``) that the worker brings."""


class DecodeWorker:
    """One decode worker of one life (epoch). All methods are blocking and safe from any thread."""

    def __init__(
        self,
        worker_id: str,
        config: DeploymentConfig,
        engine_factory: EngineFactory,
        *,
        bind_host: str,
        cluster_token: str,
        transport_factory: TransportFactory | None = None,
    ) -> None:
        """``transport_factory`` makes the KV transport from an agent name; absent means NIXL."""
        raise NotImplementedError

    def start(self, topology: Topology | None = None) -> WorkerAddress:
        """Listen, start the engine's thread, wait for prefill workers and routers to connect."""
        raise NotImplementedError

    def set_topology(self, topology: Topology) -> None:
        """Take a new list of living workers; a peer that is gone or has a new epoch is dead."""
        raise NotImplementedError

    def status(self) -> WorkerStatus:
        """A snapshot."""
        raise NotImplementedError

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, finish those held; True when none is left in time."""
        raise NotImplementedError

    def stop(self) -> None:
        """End everything this worker started."""
        raise NotImplementedError
