"""The seam between dispatching and the links to workers."""

from __future__ import annotations

from typing import Protocol

from antiphon.protocol.errors import AntiphonError
from antiphon.protocol.identity import Topology, WorkerAddress
from antiphon.protocol.messages import (
    GenerateRequest,
    LoadReport,
    Message,
    PrefillFailed,
    PrefillFinished,
    PrefillRequest,
    RequestRefused,
    Reserved,
    TokenBatch,
)

WorkerMessage = LoadReport | Reserved | TokenBatch | RequestRefused | PrefillFinished | PrefillFailed
"""What a worker says to a router once the link is up."""


class WorkerUnreachable(AntiphonError):
    """A message could not be handed to a worker: no link to it, or the link's outbox is full."""


class WorkerBacklogged(AntiphonError):
    """So much is on its way to a worker that no work is begun there: another may take it, or it waits."""


def may_wait(message: Message) -> bool:
    """Whether a message begins work that nobody has begun yet, and so may be refused for a worker's backlog.

    A later attempt may not: its client has been answered in part, and it would be given up.
    """
    return isinstance(message, PrefillRequest) or (
        isinstance(message, GenerateRequest) and message.attempt == 0
    )


class GatewayListener(Protocol):
    """Receives what happens on the links; every call comes on the router's event loop, none may block."""

    def worker_up(self, address: WorkerAddress) -> None:
        """A link to this life of this worker stands; both sides have said hello."""
        ...

    def worker_down(self, worker_id: str, epoch: int, reason: str) -> None:
        """That life of the worker will not be heard of again; called once per ``worker_up``."""
        ...

    def worker_message(self, worker_id: str, message: WorkerMessage) -> None:
        """A message of the worker's current life, in the order sent."""
        ...


class WorkerGateway(Protocol):
    """Links to all workers of a topology. Messages to one worker arrive in order or its link goes down."""

    async def start(self, listener: GatewayListener) -> None:
        """Begin to link to the workers of the topology given so far and of every later one."""
        ...

    def set_topology(self, topology: Topology) -> None:
        """Replace the set of workers: link to new ones, drop those that left."""
        ...

    def send(self, worker_id: str, message: Message) -> None:
        """Hand over a message without waiting.

        Raises:
            WorkerUnreachable: the message will not be delivered.
            WorkerBacklogged: neither will this one, which would begin work; others still are.
        """
        ...

    async def close(self) -> None:
        """Drop all links; the listener hears nothing afterwards."""
        ...
