"""Ends the connections over which a writer's KV comes to one rank, and says when nothing can follow."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from dataclasses import dataclass

from antiphon.kv_transfer.arrivals import Arrivals
from antiphon.kv_transfer.futures import done
from antiphon.kv_transfer.ranks import PeerLife
from antiphon.kv_transfer.staged_receiver import StagedReceiver
from antiphon.kv_transfer.transfer_thread import TransferThread

SEVER_POLL_S = 0.02
"""How often the connections that are being ended are looked at until they are closed."""


@dataclass(slots=True)
class _Ending:
    """One wait for the end of a writer's connections."""

    severed: bool = False
    look_again_at: float = 0.0


class ArrivalEnds:
    """See the module.

    Args:
        receiver: spreads what writers stage; absent where nothing is staged.
    """

    def __init__(self, transfer: TransferThread, arrivals: Arrivals, receiver: StagedReceiver | None) -> None:
        self._transfer = transfer
        self._arrivals = arrivals
        self._receiver = receiver
        self._endings: dict[PeerLife, list[_Ending]] = {}
        """Used on the transfer thread only."""

    def end(self, writer: PeerLife, *, for_good: bool) -> Future[None]:
        """Sever a writer; ends once nothing that it sent before can change a page or a slot.

        Args:
            for_good: its life is over, and nothing of it is taken any more.
        """
        ended: Future[None] = Future()
        receiver = self._receiver
        ending = _Ending()

        def begin() -> None:
            self._endings.setdefault(writer, []).append(ending)
            if receiver is not None:
                receiver.shut_out(writer)

        def quiet() -> bool:
            """Once its connections are closed, and one more turn has taken what had come over them."""
            if ending.severed:
                return receiver is None or receiver.quiet(writer)
            now = time.monotonic()
            if now >= ending.look_again_at:  # finding sockets takes longer than a turn
                ending.look_again_at = now + SEVER_POLL_S
                if self._arrivals.sever((writer.worker_id, writer.epoch)):
                    # Of all that wait for it: once one has ended the writer connects anew, and whoever
                    # looked again after that would end the new connection.
                    for each in self._endings.pop(writer):
                        each.severed = True
            return False

        def end() -> None:
            if receiver is not None:
                receiver.forget(writer)
                if not for_good:
                    receiver.severed(writer)
            ended.set_result(None)

        self._transfer.soon(begin)
        self._transfer.when(quiet, end, ended.set_exception)
        return ended

    def connected_anew(self, writer: PeerLife) -> Future[None]:
        """The writer knows that it was severed, if it was; ends once what it sends counts."""
        receiver = self._receiver
        if receiver is None:
            return done()
        counts: Future[None] = Future()
        turns = itertools.count()

        def taken() -> bool:
            """One more turn has taken what it had sent before."""
            return next(turns) > 0

        def admit() -> None:
            receiver.connected_anew(writer)
            counts.set_result(None)

        self._transfer.when(taken, admit, counts.set_exception)
        return counts
