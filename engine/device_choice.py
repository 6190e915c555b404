"""What the device does to choose tokens: issued from start to end without a word from it.

Everything that depends on the rows' wishes is in ``StepMemory``, or known to the host in advance.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from antiphon.engine.sampling_math import (
    CANDIDATES,
    draw_by_id,
    draw_truncated,
    lowest_best,
    scaled_weights,
)
from antiphon.engine.step_memory import INVERSE_TEMPERATURE, MIN_P, TOP_K, TOP_P, UNIFORM, StepMemory
from antiphon.engine.token_masks import TokenMasks, forbid
from antiphon.kernels.sampling import choose_tokens
from antiphon.model.forward import ChoosesTokens, LanguageModel
from antiphon.protocol.messages import SamplingParams

STATUS_COLUMN, CHOSEN_COLUMN, TOP_COLUMN = 1, 2, 3
"""Columns of a result behind the token: its status, its log-probability, the best ids and then theirs."""
FINE, NOT_FINITE, UNDECIDED = 0.0, 1.0, 2.0


class Way(IntEnum):
    """How a row is sampled; rows lie in this order in ``StepMemory.order``."""

    GREEDY = 0
    BY_ID = 1
    """Drawn from the whole vocabulary."""
    CANDIDATES = 2
    """Cut by top-k or top-p among the best candidates, which may leave the draw undecided."""
    WHOLE_ROW = 3
    """The same, with the whole row sorted."""


def way_of(params: SamplingParams, *, sorts_whole_row: bool) -> Way:
    """How a row of these parameters is sampled."""
    if params.temperature == 0:
        return Way.GREEDY
    if params.top_k == 0 and params.top_p == 1:
        return Way.BY_ID
    return Way.WHOLE_ROW if sorts_whole_row or 2 * params.top_k > CANDIDATES else Way.CANDIDATES


@dataclass(frozen=True, slots=True)
class Group:
    """Rows ``order[begin : end]``, sampled in one way."""

    way: Way
    begin: int
    end: int
    has_min_p: bool
    is_everyone: bool


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Flat places in the logits, [n] int64: what is added there, and where nothing may be chosen."""

    added_at: np.ndarray
    added: np.ndarray
    banned_at: np.ndarray


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the rows of one step want, as far as the host must know it to issue the right work.

    Attributes:
        adjustments: None when no row asks for any.
        masks: what grammars allow; None when no row has one.
        asked: rows that want log-probabilities, [n] int64; most: of how many best tokens at most.
    """

    groups: tuple[Group, ...]
    adjustments: Adjustments | None
    asked: np.ndarray
    most: int
    masks: TokenMasks | None = None

    @property
    def uniform_way(self) -> Way | None:
        """The way of every row, when they want nothing else and it needs no sorting."""
        return self.groups[0].way if self.plain and len(self.groups) == 1 else None

    @property
    def plain(self) -> bool:
        """Whether every row is greedy or drawn from the whole vocabulary, and wants nothing else."""
        nothing_else = self.adjustments is None and self.masks is None and not len(self.asked)
        return nothing_else and all(group.way <= Way.BY_ID and not group.has_min_p for group in self.groups)

    def columns(self, vocabulary: int) -> int:
        """Width of a result."""
        return TOP_COLUMN + 2 * min(self.most, vocabulary) if len(self.asked) else CHOSEN_COLUMN


def uniform_wishes(way: Way, rows: int) -> Wishes:
    """Wishes of which ``way`` is the ``uniform_way``."""
    return Wishes((Group(way, 0, rows, False, True),), None, np.zeros(0, dtype=np.int64), 0)


def choose(memory: StepMemory, logits: Tensor, wishes: Wishes) -> Tensor:
    """Issue the choice of one token per row.

    Args:
        logits: [M, V] float32 by row; not changed.

    Returns:
        [M, columns] float64: token, status and log-probabilities. The tokens are also left in
        ``memory.sampled``; each is a valid id, whatever the logits are.
    """
    best = lowest_best(logits)
    finite = torch.isfinite(logits.gather(-1, best[:, None])).squeeze(-1)
    status = torch.logical_not(finite).double()  # FINE or NOT_FINITE
    adjusted, tokens = logits, best
    if wishes.adjustments is not None:
        adjusted = _adjust(memory, logits, wishes.adjustments)
    if wishes.masks is not None and len(wishes.masks.rows):
        adjusted = forbid(adjusted, memory.send(wishes.masks.rows), memory.send(wishes.masks.bits))
    if adjusted is not logits:
        tokens = lowest_best(adjusted)
    for group in wishes.groups:
        if group.way is not Way.GREEDY:
            tokens, status = _draw(memory, adjusted, tokens, status, group)
    memory.sampled[: len(logits)].copy_(tokens)
    columns = [tokens.double()[:, None], status[:, None]]
    if len(wishes.asked):
        columns.append(_log_probabilities(memory, logits, tokens, wishes))
    return torch.cat(columns, dim=-1)


def choose_uniform(memory: StepMemory, model: LanguageModel, hidden: Tensor, way: Way) -> Tensor:
    """``choose`` for rows that all want ``way``, GREEDY or BY_ID, and no more; on a GPU in few launches.

    Where several ranks hold the vocabulary, each chooses among its own tokens, and no logits are gathered;
    rows of both ways may go together there, as BY_ID.

    Args:
        hidden: [M, H] by row.
    """
    rows = len(hidden)
    if isinstance(model, ChoosesTokens):
        parameters = memory.parameters[:, :rows]
        draws = torch.stack((parameters[INVERSE_TEMPERATURE], parameters[UNIFORM]))
        chosen = model.choose(hidden, None if way is Way.GREEDY else draws)
        memory.sampled[:rows].copy_(chosen[:, 0].long())
        return chosen
    logits = model.logits(hidden)
    if not logits.is_cuda:
        return choose(memory, logits, uniform_wishes(way, rows))
    pdl = torch.cuda.get_device_capability(logits.device) >= (9, 0)
    sampled = memory.sampled[:rows]
    if way is Way.GREEDY:
        return choose_tokens(logits, sampled, pdl=pdl)
    parameters = memory.parameters[:, :rows]
    return choose_tokens(logits, sampled, parameters[INVERSE_TEMPERATURE], parameters[UNIFORM], pdl)


def _adjust(memory: StepMemory, logits: Tensor, adjustments: Adjustments) -> Tensor:
    adjusted = logits.clone()
    flat = adjusted.view(-1)
    if len(adjustments.added):
        flat.index_add_(0, memory.send(adjustments.added_at), memory.send(adjustments.added))
    if len(adjustments.banned_at):
        flat.index_fill_(0, memory.send(adjustments.banned_at), float("-inf"))
    return adjusted


def _draw(
    memory: StepMemory, logits: Tensor, tokens: Tensor, status: Tensor, group: Group
) -> tuple[Tensor, Tensor]:
    """Replace the tokens of one group's rows, and mark those that are undecided."""
    index = memory.order[group.begin : group.end]
    parameters = memory.parameters.index_select(1, index)
    part = logits if group.is_everyone else logits.index_select(0, index)

    def column(which: int) -> Tensor:
        return parameters[which][:, None]

    least = column(MIN_P) if group.has_min_p else None
    weights = scaled_weights(part, column(INVERSE_TEMPERATURE), least)
    if group.way is Way.BY_ID:
        drawn = draw_by_id(weights, column(UNIFORM))
        return drawn if group.is_everyone else tokens.index_copy(0, index, drawn), status
    vocabulary = logits.shape[-1]
    count = vocabulary if group.way is Way.WHOLE_ROW else min(vocabulary, CANDIDATES)
    drawn, settled = draw_truncated(
        part, weights, column(TOP_K).long(), column(TOP_P), column(UNIFORM), count
    )
    so_far = status.index_select(0, index)
    so_far = torch.where(settled | (so_far != FINE), so_far, UNDECIDED)
    return tokens.index_copy(0, index, drawn), status.index_copy(0, index, so_far)


def _log_probabilities(memory: StepMemory, logits: Tensor, tokens: Tensor, wishes: Wishes) -> Tensor:
    """[M, 1 + 2 n] float64: of the chosen token, the n best ids and theirs; zeros where nobody asked."""
    index = memory.send(wishes.asked)
    part = logits.index_select(0, index)
    normaliser = torch.logsumexp(part, dim=-1, keepdim=True)
    chosen = part.gather(-1, tokens.index_select(0, index)[:, None]) - normaliser
    values, ids = torch.topk(part, min(wishes.most, part.shape[-1]), dim=-1)
    found = torch.cat((chosen.double(), ids.double(), (values - normaliser).double()), dim=-1)
    rows = torch.zeros(logits.shape[0], found.shape[-1], dtype=torch.float64, device=logits.device)
    return rows.index_copy(0, index, found)
