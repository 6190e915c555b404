"""What a model's forward pass takes: the seam between an engine that plans and a model that computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from antiphon.kernels.fp8_pages import KvLayer
from antiphon.kernels.reference import PagedSequences
from antiphon.model.config import GptOssConfig


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step, sequence after sequence.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, position of each token in its sequence.
        full, sliding: pages of the two groups of layers; same sequences, same order.
    """

    token_ids: Tensor
    positions: Tensor
    full: PagedSequences
    sliding: PagedSequences


class KvLayers(Protocol):
    """Per-layer views of a paged KV cache."""

    def layer(self, index: int) -> KvLayer:
        """Pages of model layer ``index`` (its own page group's memory): [N, G, 2, S, D], or in FP8."""


@runtime_checkable
class ReservesBuffers(Protocol):
    """A model that keeps buffers from step to step."""

    def reserve(self, tokens: int) -> None:
        """Have buffers for steps of up to so many tokens that never move: graphs may hold them."""


@runtime_checkable
class ReservesForPages(Protocol):
    """A model that may need room besides the pages where it computes chunks of prompts."""

    def reserve_for_chunks(self, kv: KvLayers) -> None:
        """Have what chunks need besides these pages, so that a step finds it there."""


@runtime_checkable
class ChoosesTokens(Protocol):
    """A model that chooses tokens without the whole logits in one place, because several ranks hold them."""

    def choose(self, hidden: Tensor, draws: Tensor | None = None) -> Tensor:
        """[M, H] -> [M, 2] float64: a token per row, and 0 or, where the best logit is not finite, 1.

        Args:
            draws: [2, M] float64, 1 / temperature and a number in [0, 1) for each row, whose token is drawn
                from the whole vocabulary in the order of ids. Absent, or with 0 for 1 / temperature, it is
                the lowest id among the best.
        """


class LanguageModel(Protocol):
    """A model on one rank."""

    config: GptOssConfig

    def forward(
        self, batch: ForwardBatch, kv: KvLayers, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Write the batch's KV, return final-norm hidden states [T, H]; ``after_layer(i)`` runs after it."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, V] float32. A model loaded without its output projection raises RuntimeError."""
