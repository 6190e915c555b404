"""Rank 0's model as an engine sees it: one ``LanguageModel`` whose calls set all ranks to work."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial

import torch
from torch import Tensor

from antiphon.model.forward import ForwardBatch, KvLayers, ReservesBuffers, ReservesForPages
from antiphon.model.parallel.batch_wire import BatchSizes, pack
from antiphon.model.parallel.commands import Command, CommandChannel, RankModel, SharesMemory, kv_geometry
from antiphon.model.parallel.graphs_over_ranks import (
    Captured,
    CapturedParts,
    GraphOverRanks,
    PartsOverRanks,
)
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.protocol.errors import RankLostError

_log = logging.getLogger(__name__)


class LeaderModel:
    """Implements ``model.forward.LanguageModel``: tells the other ranks what comes, then takes part in it.

    One thread, the engine's, makes the model's calls. While it makes none, a thread of this object asks every
    rank for a sign of life, so that a dead or hanging one is noticed without a request, and so that the
    others can tell a quiet leader from a hanging one. Once a rank is lost every call raises: a worker cannot
    go on with a part of its model.

    Args:
        model: rank 0's part.
        group: the ranks.
        heartbeat_s: between signs of life; a quarter of the group's timeout when absent.
        on_lost: called at most once, on the thread that noticed, when a rank is lost or a call fails here;
            before the connections are closed, which on a GPU takes seconds while a kernel waits for the lost.
    """

    def __init__(
        self,
        model: RankModel,
        group: RankGroup,
        *,
        heartbeat_s: float | None = None,
        on_lost: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.config = model.config
        self._model = model
        self._group = group
        self._channel = CommandChannel(group.control)
        self._heartbeat_s = group.timeout_s / 4 if heartbeat_s is None else heartbeat_s
        self._on_lost = on_lost
        self._turn = threading.Lock()
        self._busy: int | None = None
        """The thread whose command is under way; it holds ``_turn``."""
        self._deferred: list[bytes] = []
        self._steps = 0
        self._captures = 0
        self._claimed = 0
        """Of the captures, those that a graph stands for already."""
        self._on_all: weakref.WeakSet[GraphOverRanks | PartsOverRanks] = weakref.WeakSet()
        self._computing = False
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._heartbeat: threading.Thread | None = None

    @property
    def size(self) -> int:
        """Ranks, this one included."""
        return self._group.size

    @property
    def steps(self) -> int:
        """Forward passes begun so far; the other ranks count the same ones."""
        return self._steps

    @property
    def computing(self) -> bool:
        """Whether one is being issued right now; asked on the thread that does so."""
        return self._computing

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Set ``on_lost``; called at once if the ranks were lost already."""
        self._on_lost = on_lost
        if self._failure is not None and not self._stopping.is_set():
            on_lost(self._failure)

    def start(self) -> None:
        """Meet the other ranks; to be called once, while they call ``FollowerLoop.run``.

        Raises:
            ConfigError: they were given another model, layout or dtype; the message has both values.
            RankLostError: one of them did not answer.
        """
        with self._command():
            self._group.agree(self._model.facts())
        if self._group.size > 1:
            self._heartbeat = threading.Thread(target=self._watch, name="rank-heartbeat", daemon=True)
            self._heartbeat.start()

    def forward(
        self, batch: ForwardBatch, kv: KvLayers, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """See ``LanguageModel``; each rank writes its own kv heads into its own pages, ``kv`` is rank 0's.

        Raises:
            RankLostError: another rank died, hangs, or was lost before.
        """
        sizes = BatchSizes.of(batch)
        packed = pack(batch)
        with self._command(in_parts=after_layer is not None):
            self._channel.send(Command.FORWARD, *astuple(sizes), *kv_geometry(self.config, kv))
            self._group.communicator.broadcast(packed)
            self._steps += 1
            self._computing = True
            try:
                return self._model.forward(batch, kv, after_layer)
            finally:
                self._computing = False

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, V] float32.

        Raises:
            RankLostError: another rank died, hangs, or was lost before.
            RuntimeError: the model was built without its output projection.
        """
        with self._command():
            return self._model.logits(self._announce(Command.LOGITS, hidden))

    def greedy(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M] int64, the lowest id among the highest logits; raises as ``logits`` does."""
        with self._command():
            return self._model.greedy(self._announce(Command.GREEDY, hidden))

    def top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[M, H] -> the k best logits [M, k] and ids [M, k]; raises as ``logits`` does.

        Raises:
            ValueError: k is not within 1 and the vocabulary.
        """
        if not 1 <= k <= self.config.vocab_size:
            raise ValueError(f"k {k} is not within 1 .. {self.config.vocab_size}")
        with self._command():
            return self._model.top_k(self._announce(Command.TOP_K, hidden, k), k)

    def choose(self, hidden: Tensor, draws: Tensor | None = None) -> Tensor:
        """See ``model.forward.ChoosesTokens``; raises as ``logits`` does."""
        with self._command():
            hidden = self._announce(Command.CHOOSE, hidden, int(draws is not None))
            if draws is not None:
                draws = self._group.communicator.broadcast(draws.contiguous())
            return self._model.choose(hidden, draws)

    def for_all_ranks(self, captured: Captured) -> Captured:
        """What replays a graph on every rank, given the one that was just captured here.

        Raises:
            RuntimeError: it holds several calls of this model, of which the others would replay only one.
        """
        number = self._claim()
        if number is None:
            return captured
        on_all = GraphOverRanks(captured, partial(self.replay, number))
        self._on_all.add(on_all)
        return on_all

    def parts_for_all_ranks(self, captured: CapturedParts) -> CapturedParts:
        """The same for a step that was captured in parts; see ``for_all_ranks``."""
        number = self._claim()
        if number is None:
            return captured
        on_all = PartsOverRanks(captured, partial(self.replay_parts, number))
        self._on_all.add(on_all)
        return on_all

    def reserve(self, tokens: int) -> None:
        """Have every rank keep buffers for steps of up to so many tokens; see ``model.forward``."""
        with self._command():
            self._channel.send(Command.RESERVE, tokens)
            if isinstance(self._model, ReservesBuffers):
                self._model.reserve(tokens)

    def reserve_for_chunks(self, kv: KvLayers) -> None:
        """See ``model.forward.ReservesForPages``; on this rank alone, the others have pages of their own."""
        if isinstance(self._model, ReservesForPages):
            self._model.reserve_for_chunks(kv)

    def _claim(self) -> int | None:
        """The number of the one command that was captured since the last time; None when there was none."""
        made, self._claimed = range(self._claimed + 1, self._captures + 1), self._captures
        if len(made) > 1:
            raise RuntimeError(f"a graph of {len(made)} commands cannot be replayed as one")
        return made.start if made else None

    def replay(self, number: int, captured: Captured) -> None:
        """Issue a captured command on every rank.

        Raises:
            RankLostError: another rank died, hangs, or was lost before.
        """
        with self._command():
            self._channel.send(Command.REPLAY, number)
            captured.replay()

    def replay_parts(self, number: int, captured: CapturedParts, after_part: Callable[[int], None]) -> None:
        """Issue a step that was captured in parts on every rank; it counts as one that was begun.

        Raises:
            RankLostError: another rank died, hangs, or was lost before.
        """
        with self._command():
            self._channel.send(Command.REPLAY, number)
            self._steps += 1
            self._computing = True
            try:
                captured.replay(after_part)
            finally:
                self._computing = False

    def publish(self, message: bytes) -> None:
        """Hand every other rank a message, in order with the steps; from any thread.

        It arrives before a step that is asked for later begins there. Given during a step, by a callback of
        it, it is sent right after that step.

        Raises:
            RankLostError: another rank died, hangs, or was lost before.
        """
        if self._busy == threading.get_ident():
            self._deferred.append(message)
            return
        with self._command():
            self._deferred.append(message)

    def close(self) -> None:
        """Let the other ranks' loops end, let go of graphs that all replay, and leave the group.

        May be called twice, and from ``on_lost``.

        Raises:
            RankLostError: another rank died or hangs and was not known to.
        """
        self._stopping.set()
        if self._heartbeat is not None and self._heartbeat is not threading.current_thread():
            self._heartbeat.join()
        try:
            if self._failure is None:
                with self._command():
                    self._channel.send(Command.STOP)
                self._failure = RankLostError("the leader was closed")
                for captured in list(self._on_all):  # NCCL's communicator does not end before its graphs
                    captured.release()
                if isinstance(self._model, SharesMemory):
                    self._model.stop_sharing()
        finally:
            self._group.close()

    def _announce(self, command: Command, hidden: Tensor, *numbers: int) -> Tensor:
        hidden = hidden.to(self._model.dtype).contiguous()
        self._channel.send(command, hidden.shape[0], *numbers)
        return self._group.communicator.broadcast(hidden)

    @contextmanager
    def _command(self, *, in_parts: bool = False) -> Iterator[None]:
        """One command, from its header to the end of its work on this rank.

        Args:
            in_parts: where it is being captured, it is cut between the layer groups.
        """
        capturing = self._model.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._turn:
            if self._failure is not None:
                raise RankLostError(f"the ranks were stopped before: {self._failure}") from self._failure
            self._busy = threading.get_ident()
            try:
                if capturing:
                    self._captures += 1
                    self._channel.send(Command.CAPTURE, self._captures, int(in_parts))
                yield
                self._send_deferred()
            except BaseException as error:
                # The others are in the middle of something that will not be completed: release them.
                self._fail(error)
                raise
            finally:
                self._busy = None

    def _send_deferred(self) -> None:
        messages, self._deferred = self._deferred, []
        for message in messages:
            self._channel.send(Command.MESSAGE, len(message))
            if message:
                self._group.control.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        try:
            if self._on_lost is not None:
                self._on_lost(error)
        finally:
            self._group.close()

    def _watch(self) -> None:
        while not self._stopping.wait(self._heartbeat_s):
            if not self._turn.acquire(blocking=False):
                continue  # a step is under way, which needs every rank anyway
            try:
                if self._failure is not None:
                    return
                self._channel.send(Command.HEARTBEAT)
                self._group.control.all_reduce(torch.ones(1))
            except RankLostError as error:
                _log.error("a rank was lost while idle: %s", error)
                self._fail(error)
                return
            finally:
                self._turn.release()
