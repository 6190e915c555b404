"""What rank 0 tells the others to do: a header of fixed size over the control group, then its tensors.

command     numbers in the header                                   then, over the model's communicator
FORWARD     sizes of the batch, pages of rank 0 and what they hold  the packed batch
LOGITS      rows                                                    hidden states
GREEDY      rows                                                    hidden states
TOP_K       rows, k                                                 hidden states
CHOOSE      rows, whether some are drawn                            hidden states, and then what draws need
MESSAGE     bytes                                                   (control group) the bytes
HEARTBEAT                                                           (control group) a sum of ones
RESERVE     tokens
CAPTURE     number of a graph, whether it is cut into parts         the command to record follows
REPLAY      number of a graph
STOP
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from antiphon.kernels.fp8_pages import Fp8Pages
from antiphon.model.config import GptOssConfig
from antiphon.model.forward import KvLayers, LanguageModel
from antiphon.model.parallel.communicator import Communicator
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.protocol.errors import RankLostError

_NUMBERS = 9


class Command(IntEnum):
    """The first number of a header."""

    STOP = 0
    HEARTBEAT = 1
    MESSAGE = 2
    FORWARD = 3
    LOGITS = 4
    GREEDY = 5
    TOP_K = 6
    CAPTURE = 7
    REPLAY = 8
    CHOOSE = 9
    RESERVE = 10


class RankModel(LanguageModel, Protocol):
    """One rank of a model over several: every rank makes the same calls in the same order."""

    layout: ParallelLayout
    dtype: torch.dtype
    device: torch.device

    def greedy(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M] int64, the lowest id among the highest logits."""

    def top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[M, H] -> the k best logits [M, k] float32 and their ids [M, k] int64."""

    def choose(self, hidden: Tensor, draws: Tensor | None = None) -> Tensor:
        """See ``model.forward.ChoosesTokens``."""

    def facts(self) -> dict[str, object]:
        """What all ranks must have in common, by name."""


@runtime_checkable
class SharesMemory(Protocol):
    """A rank whose kernels read and write memory of other ranks."""

    def stop_sharing(self) -> None:
        """Close the others' memory, then free this rank's; every rank calls this after its last step."""


class CommandChannel:
    """The order of commands: rank 0 sends, the others receive each exactly once."""

    def __init__(self, control: Communicator) -> None:
        self._control = control
        self._count = 0

    def send(self, command: Command, *numbers: int) -> None:
        """Rank 0 only.

        Raises:
            RankLostError: another rank died or hangs.
        """
        padding = [0] * (_NUMBERS - len(numbers))
        self._control.broadcast(torch.tensor([self._count, command, *numbers, *padding]))
        self._count += 1

    def receive(self) -> tuple[Command, list[int]]:
        """The other ranks: wait for the next command and its numbers.

        Raises:
            RankLostError: rank 0 died, hangs or is out of step.
        """
        header = self._control.broadcast(torch.empty(2 + _NUMBERS, dtype=torch.int64))
        count, command, *numbers = header.tolist()
        if count != self._count:
            raise RankLostError(f"command {self._count} was expected of rank 0, it sent number {count}")
        self._count += 1
        return Command(command), numbers


KV_GEOMETRY = ("full pages", "sliding pages", "page size", "FP8 in full layers")
"""Names of what ``kv_geometry`` returns."""


def kv_geometry(config: GptOssConfig, kv: KvLayers) -> tuple[int, int, int, int]:
    """(pages of the full layers, of the sliding layers, positions per page, 1 where full layers hold FP8).

    0 pages without layers.
    """
    full, sliding = (
        kv.layer(layers[0]) if layers else None for layers in (config.full_layers, config.sliding_layers)
    )
    page_size = next(int(layer.shape[3]) for layer in (full, sliding) if layer is not None)
    counts = [0 if layer is None else int(layer.shape[0]) for layer in (full, sliding)]
    return counts[0], counts[1], page_size, int(isinstance(full, Fp8Pages))
