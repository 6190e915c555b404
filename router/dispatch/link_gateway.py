"""The worker gateway over the deployment's encrypted links."""

from __future__ import annotations

import asyncio
from typing import get_args

import structlog

from antiphon.protocol.codec import AnyMessage
from antiphon.protocol.identity import Role, Topology, WorkerAddress, new_epoch
from antiphon.protocol.link import LinkNode, LinkSettings
from antiphon.protocol.link_wire import Peer
from antiphon.protocol.messages import Message
from antiphon.router.dispatch.gateway import (
    GatewayListener,
    WorkerBacklogged,
    WorkerMessage,
    WorkerUnreachable,
    may_wait,
)

log = structlog.get_logger("antiphon.router.links")

MAX_BACKLOG_BYTES = 32 * 1024 * 1024
"""With so much on its way to a worker no more work is begun there. A link is given up, with everybody's
requests, at twice as much; what may still follow are acknowledgements, aborts and what is attempted again."""
_WORKER_MESSAGES = get_args(WorkerMessage)


class LinkGateway:
    """Keeps a link to every worker of the topology. Implements ``WorkerGateway`` and ``LinkHandler``."""

    def __init__(self, router_id: str, cluster_token: str, settings: LinkSettings | None = None) -> None:
        """Raises ConfigError when the token is too short."""
        self._node = LinkNode(Peer(Role.ROUTER, router_id, new_epoch()), cluster_token, self, settings)
        self._listener: GatewayListener | None = None
        self._topology: Topology | None = None
        self._wanted: dict[Peer, WorkerAddress] = {}
        self._up: dict[str, Peer] = {}

    @property
    def epoch(self) -> int:
        """By which workers know this life of the router."""
        return self._node.me.epoch

    async def start(self, listener: GatewayListener) -> None:
        """Begin to link; callbacks come on this loop."""
        self._listener = listener
        self._node.start()
        self._apply()

    def set_topology(self, topology: Topology) -> None:
        """Replace the set of workers; an older version than the current one is ignored."""
        if self._topology is not None and topology.version < self._topology.version:
            log.warning("stale_topology", version=topology.version, current=self._topology.version)
            return
        self._topology = topology
        self._apply()

    def send(self, worker_id: str, message: Message) -> None:
        """Queue a message on the worker's link.

        Raises:
            WorkerUnreachable: no session stands with the worker.
            WorkerBacklogged: more than ``MAX_BACKLOG_BYTES`` are on their way to it, and this is more work.
        """
        peer = self._up.get(worker_id)
        if peer is not None and may_wait(message):
            backlog = self._node.backlog_bytes(peer)
            if backlog > MAX_BACKLOG_BYTES:
                raise WorkerBacklogged(f"{backlog} bytes are still on their way to worker {worker_id}")
        if peer is None or not self._node.send(peer, message):
            raise WorkerUnreachable(f"no link to worker {worker_id}")

    async def close(self) -> None:
        """Say farewell on all links."""
        self._listener = None
        self._node.close()
        await asyncio.sleep(0)

    def on_up(self, peer: Peer) -> None:
        """A session with a worker began."""
        address = self._wanted.get(peer)
        if address is None or self._listener is None:
            return
        self._up[peer.worker_id] = peer
        self._listener.worker_up(address)

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        """A worker said something."""
        if self._listener is None or self._up.get(peer.worker_id) != peer:
            return
        if isinstance(message, _WORKER_MESSAGES):
            self._listener.worker_message(peer.worker_id, message)
        else:
            log.error("unexpected_message", worker=peer.worker_id, message=type(message).__name__)

    def on_lost(self, peer: Peer, reason: str) -> None:
        """A session with a worker ended."""
        if self._up.get(peer.worker_id) != peer:
            return
        del self._up[peer.worker_id]
        if self._listener is not None:
            self._listener.worker_down(peer.worker_id, peer.epoch, reason)

    def _apply(self) -> None:
        if self._listener is None or self._topology is None:
            return
        workers = [w for w in self._topology.workers if w.role in (Role.PREFILL, Role.DECODE)]
        wanted = {Peer(w.role, w.worker_id, w.epoch): w for w in workers}
        for peer in self._wanted.keys() - wanted.keys():
            self._node.disconnect(peer, "left the topology")
        self._wanted = wanted
        for address in wanted.values():
            self._node.connect(address)
