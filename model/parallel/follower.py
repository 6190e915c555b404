"""What every rank but the first does: wait for a command, take part in it, and wait again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from antiphon.model.forward import KvLayers, ReservesBuffers
from antiphon.model.parallel.batch_wire import BatchSizes, unpack
from antiphon.model.parallel.commands import (
    KV_GEOMETRY,
    Command,
    CommandChannel,
    RankModel,
    SharesMemory,
    kv_geometry,
)
from antiphon.model.parallel.rank_graphs import RankGraphs
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.protocol.errors import ConfigError, RankLostError


class FollowerLoop:
    """The whole life of a rank other than 0.

    Args:
        model: this rank's part.
        kv: this rank's pages: as many of the same size as rank 0 has, with this rank's kv heads.
        group: the ranks.
        after_layer: called during a step with its number (from 1, as rank 0 counts) and a layer, right after
            that layer of it was issued.
        on_message: called with what rank 0 published, in order with the steps.
        on_lost: called once with what ends this rank before rank 0 says stop, and before the connections are
            closed, which on a GPU takes seconds while a kernel waits for a rank that is lost.
        group_ends: last layer of each layer group, by which steps are cut that are recorded in parts.
    """

    def __init__(
        self,
        model: RankModel,
        kv: KvLayers,
        group: RankGroup,
        *,
        after_layer: Callable[[int, int], None] | None = None,
        on_message: Callable[[bytes], None] | None = None,
        on_lost: Callable[[BaseException], None] | None = None,
        group_ends: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._kv = kv
        self._group = group
        self._channel = CommandChannel(group.control)
        self._after_layer = after_layer
        self._on_message = on_message
        self._on_lost = on_lost
        self._geometry = kv_geometry(model.config, kv)
        self._steps = 0
        self._graphs = RankGraphs()
        self._group_ends = tuple(group_ends)

    @torch.inference_mode()
    def run(self) -> None:
        """Follow until rank 0 says stop. However this ends, the group is left, so that no rank waits for it.

        Raises:
            ConfigError: rank 0 was given another model, layout, dtype or cache; the message has both values.
            RankLostError: a rank died or hangs.
        """
        try:
            self._group.agree(self._model.facts())
            while self._follow():
                pass
            self._graphs.clear()
            if isinstance(self._model, SharesMemory):
                self._model.stop_sharing()
        except BaseException as error:
            if self._on_lost is not None:
                self._on_lost(error)
            raise
        finally:
            self._group.close()

    def _follow(self) -> bool:
        return self._carry_out(*self._channel.receive())

    def _capture(self, number: int, *, in_parts: bool) -> None:
        """Record what the next command computes, as rank 0 does now; it is issued at every replay."""
        command, numbers = self._channel.receive()
        if not in_parts:
            self._graphs.capture(number, partial(self._carry_out, command, numbers))
            return
        if command is not Command.FORWARD:
            raise RankLostError(f"rank 0 cuts a {command.name} into parts")
        self._graphs.capture_parts(number, lambda cut: self._forward(numbers, cut))

    def _replay(self, number: int) -> None:
        if not self._graphs.is_step(number):
            self._graphs.replay(number, lambda part: None)
            return
        self._steps += 1
        step = self._steps

        def after_part(part: int) -> None:
            if self._after_layer is not None:
                self._after_layer(step, self._group_ends[part])

        self._graphs.replay(number, after_part)

    def _carry_out(self, command: Command, numbers: list[int]) -> bool:
        match command:
            case Command.FORWARD:
                self._forward(numbers)
            case Command.LOGITS:
                self._model.logits(self._hidden(numbers[0]))
            case Command.GREEDY:
                self._model.greedy(self._hidden(numbers[0]))
            case Command.TOP_K:
                self._model.top_k(self._hidden(numbers[0]), numbers[1])
            case Command.CHOOSE:
                self._choose(numbers[0], with_draws=bool(numbers[1]))
            case Command.CAPTURE:
                self._capture(numbers[0], in_parts=bool(numbers[1]))
            case Command.REPLAY:
                self._replay(numbers[0])
            case Command.RESERVE:
                if isinstance(self._model, ReservesBuffers):
                    self._model.reserve(numbers[0])
            case Command.MESSAGE:
                self._message(numbers[0])
            case Command.HEARTBEAT:
                self._group.control.all_reduce(torch.ones(1))
            case Command.STOP:
                return False
        return True

    def _forward(self, numbers: list[int], cut: Callable[[], None] | None = None) -> None:
        """A step; ``cut`` is called between the layer groups of one that is being recorded."""
        count = len(fields(BatchSizes))
        sizes, theirs = BatchSizes(*numbers[:count]), tuple(numbers[count : count + len(KV_GEOMETRY)])
        if theirs != self._geometry:
            named = zip(KV_GEOMETRY, theirs, self._geometry, strict=True)
            differing = [f"{name}: rank 0 has {a}, this one {b}" for name, a, b in named if a != b]
            raise ConfigError(f"rank {self._group.rank}'s KV cache differs: " + "; ".join(differing))
        buffer = torch.empty(sizes.total_bytes, dtype=torch.uint8, device=self._model.device)
        batch = unpack(self._group.communicator.broadcast(buffer), sizes)
        self._steps += 1
        after_layer: Callable[[int], None] | None = None
        if cut is not None:
            after_layer = partial(self._cut_after, cut)
        elif self._after_layer is not None:
            after_layer = partial(self._after_layer, self._steps)
        self._model.forward(batch, self._kv, after_layer)

    def _cut_after(self, cut: Callable[[], None], layer: int) -> None:
        if layer in self._group_ends[:-1]:
            cut()

    def _choose(self, rows: int, *, with_draws: bool) -> None:
        hidden, draws = self._hidden(rows), None
        if with_draws:
            empty = torch.empty(2, rows, dtype=torch.float64, device=self._model.device)
            draws = self._group.communicator.broadcast(empty)
        self._model.choose(hidden, draws)

    def _hidden(self, rows: int) -> Tensor:
        shape = (rows, self._model.config.hidden_size)
        empty = torch.empty(shape, dtype=self._model.dtype, device=self._model.device)
        return self._group.communicator.broadcast(empty)

    def _message(self, length: int) -> None:
        payload = b""
        if length:
            received = self._group.control.broadcast(torch.empty(length, dtype=torch.uint8))
            payload = received.numpy().tobytes()
        if self._on_message is None:
            raise ConfigError(f"rank 0 published {length} bytes, rank {self._group.rank} takes no messages")
        self._on_message(payload)
