"""The sampler of ``engine.sampler`` without a word from the device in between: the host says in advance what
it wants, and one small copy brings tokens and log-probabilities back.

Rows are of one of four ways: greedy; drawn from the whole vocabulary; cut by top-k or top-p among the best
candidates; the same with the whole row sorted. Candidates may turn out not to settle a draw. That row is then
``undecided``, its position is computed again, and from then on its sequence sorts whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from antiphon.engine.batch import Work
from antiphon.engine.device_runtime import Completion
from antiphon.engine.executor import sampling_params
from antiphon.engine.sampler import GOLDEN, Choice, bans_stop_ids, logit_changes, mixed_seed
from antiphon.engine.sampling_math import (
    CANDIDATES,
    draw_by_id,
    draw_truncated,
    lowest_best,
    scaled_weights,
)
from antiphon.engine.sequence import Sequence as EngineSequence
from antiphon.engine.step_memory import (
    INVERSE_TEMPERATURE,
    MIN_P,
    TOP_K,
    TOP_P,
    UNIFORM,
    HostMemory,
    StepMemory,
)
from antiphon.protocol.messages import SamplingParams, TokenLogprobs

_STATUS_COLUMN, _CHOSEN_COLUMN, _TOP_COLUMN = 1, 2, 3
_FINE, _NOT_FINITE, _UNDECIDED = 0.0, 1.0, 2.0


class Way(IntEnum):
    """How a row is sampled; rows lie in this order in ``StepMemory.order``."""

    GREEDY = 0
    BY_ID = 1
    CANDIDATES = 2
    WHOLE_ROW = 3


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows ``order[begin : end]``, sampled in one way."""

    way: Way
    begin: int
    end: int
    has_min_p: bool
    is_everyone: bool


@dataclass(frozen=True, slots=True)
class _Adjustments:
    """Places in the logits, [n] rows and [n] ids: what is added there, and where nothing may be chosen."""

    added_at: np.ndarray
    added: np.ndarray
    banned_at: np.ndarray


class DeviceSampler:
    """Owns what the rows of a step want, as far as it stays the same from step to step."""

    def __init__(self, memory: StepMemory, vocab_size: int) -> None:
        rows = memory.max_batch_size
        self._memory = memory
        self._vocabulary = vocab_size
        self._owners: list[EngineSequence | None] = [None] * rows
        self._version = -1
        self._parameters = np.zeros((5, rows))
        self._seeds = np.zeros(rows, dtype=np.uint64)
        self._prompt_tokens = np.zeros(rows, dtype=np.int64)
        self._way = np.zeros(rows, dtype=np.int64)
        self._logprobs = np.full(rows, -1, dtype=np.int64)
        self._adjusts = np.zeros(rows, dtype=bool)
        self._groups: tuple[_Group, ...] = ()
        self._order = np.zeros(rows, dtype=np.int64)
        self._asked: np.ndarray = np.zeros(0, dtype=np.int64)
        self._adjusting: np.ndarray = np.zeros(0, dtype=np.int64)

    # ------------------------------------------------------------------------------------------ on the host

    def prepare(
        self, work: Sequence[Work], rows: np.ndarray, version: int, host: HostMemory
    ) -> tuple[Callable[[Tensor], None], Callable[[Completion], list[Choice]]]:
        """Write down what the sampled items of a step want.

        Args:
            work: [M] items; rows: [M] their rows, a permutation of 0 .. M - 1; version: changes with them.

        Returns:
            What issues the choice, given logits [M, V] float32 by row, and what waits for it and reads it.
        """
        if version != self._version:
            self._settle_rows(work, rows)
            self._version = version
        count = len(work)
        parameters, ends = host.parameters.numpy(), np.array([item.end for item in work])
        parameters[:, :count] = self._parameters[:, :count]
        parameters[UNIFORM, rows] = uniforms(self._seeds[rows], ends - self._prompt_tokens[rows])
        host.order.numpy()[:count] = self._order[:count]
        adjustments = self._adjustments(work, rows) if len(self._adjusting) else None
        groups, asked = self._groups, self._asked
        most = int(self._logprobs[asked].max()) if len(asked) else 0
        columns = _TOP_COLUMN + 2 * min(most, self._vocabulary) if len(asked) else _CHOSEN_COLUMN
        if count * columns > len(host.results):
            host.results = self._memory.runtime.host_memory(count * columns, dtype=torch.float64)
        arrived = host.results[: count * columns].view(count, columns)

        def issue(logits: Tensor) -> None:
            arrived.copy_(self._choose(logits, host, groups, adjustments, asked, most), non_blocking=True)

        def read(completion: Completion) -> list[Choice]:
            completion.wait()
            return self._read(arrived.numpy(), work, rows, bool(len(asked)))

        return issue, read

    def _settle_rows(self, work: Sequence[Work], rows: np.ndarray) -> None:
        """Write down new owners of rows, and group the rows by the way they are sampled."""
        for item, row in zip(work, rows.tolist(), strict=True):
            if self._owners[row] is not item.sequence:
                self._owners[row] = item.sequence
                self._write_row(row, item.sequence, sampling_params(item))
        count = len(work)
        ways = self._way[:count]
        self._order[:count] = np.argsort(ways, kind="stable")
        bounds = np.searchsorted(ways[self._order[:count]], range(len(Way) + 1))
        self._groups = tuple(
            _Group(
                way,
                int(begin := bounds[way]),
                int(end := bounds[way + 1]),
                bool((self._parameters[MIN_P, self._order[begin:end]] > 0).any()),
                bool(end - begin == count),
            )
            for way in Way
            if bounds[way] < bounds[way + 1]
        )
        self._asked = np.flatnonzero(self._logprobs[:count] >= 0)
        self._adjusting = np.flatnonzero(self._adjusts[:count])

    def _write_row(self, row: int, sequence: EngineSequence, params: SamplingParams) -> None:
        top_k = params.top_k or self._vocabulary
        values = self._parameters[:, row]
        values[INVERSE_TEMPERATURE] = 1.0 / params.temperature if params.temperature > 0 else 0.0
        values[MIN_P], values[TOP_K], values[TOP_P] = params.min_p, top_k, params.top_p
        self._seeds[row] = mixed_seed(params.seed)
        self._prompt_tokens[row] = sequence.prompt_tokens
        self._logprobs[row] = -1 if params.top_logprobs is None else params.top_logprobs
        self._adjusts[row] = bool(
            params.logit_bias
            or params.presence_penalty
            or params.frequency_penalty
            or (params.min_tokens and params.stop_token_ids)
        )
        if params.temperature == 0:
            self._way[row] = Way.GREEDY
        elif params.top_k == 0 and params.top_p == 1:
            self._way[row] = Way.BY_ID
        elif sequence.sorts_whole_row or (params.top_k and 2 * params.top_k > CANDIDATES):
            self._way[row] = Way.WHOLE_ROW
        else:
            self._way[row] = Way.CANDIDATES

    def _adjustments(self, work: Sequence[Work], rows: np.ndarray) -> _Adjustments:
        item_of = dict(zip(rows.tolist(), work, strict=True))
        added_at: list[tuple[int, int]] = []
        added: list[float] = []
        banned_at: list[tuple[int, int]] = []
        for row in self._adjusting.tolist():
            item = item_of[row]
            params, sequence = sampling_params(item), item.sequence
            changes = logit_changes(params, sequence.output)
            added_at += [(row, token) for token in changes]
            added += changes.values()
            if bans_stop_ids(params, item.end - sequence.prompt_tokens):
                banned_at += [(row, token) for token in params.stop_token_ids]
        return _Adjustments(_places(added_at), np.array(added, dtype=np.float32), _places(banned_at))

    def _read(
        self, values: np.ndarray, work: Sequence[Work], rows: np.ndarray, with_logprobs: bool
    ) -> list[Choice]:
        tokens = values[rows, 0].astype(np.int64).tolist()
        statuses = values[rows, _STATUS_COLUMN]
        if not with_logprobs and not statuses.any():
            return [Choice(token) for token in tokens]
        choices = []
        for item, row, token, status in zip(work, rows.tolist(), tokens, statuses.tolist(), strict=True):
            if status == _UNDECIDED:
                self._forget(item.sequence)
                choices.append(Choice(None, undecided=True))
            elif status == _NOT_FINITE:
                choices.append(Choice(None))
            else:
                choices.append(Choice(token, _logprobs(values[row], sampling_params(item).top_logprobs)))
        return choices

    def _forget(self, sequence: EngineSequence) -> None:
        """Have a sequence written down again before the next step: it will sort its whole row."""
        self._owners = [None if owner is sequence else owner for owner in self._owners]
        self._version = -1

    # ---------------------------------------------------------------------------------------- on the device

    def _choose(
        self,
        logits: Tensor,
        host: HostMemory,
        groups: tuple[_Group, ...],
        adjustments: _Adjustments | None,
        asked: np.ndarray,
        most: int,
    ) -> Tensor:
        """Issue the choice; returns [M, columns] float64: token, status and log-probabilities, by row."""
        memory, count = self._memory, logits.shape[0]
        memory.parameters.copy_(host.parameters, non_blocking=True)
        memory.order.copy_(host.order, non_blocking=True)
        best = lowest_best(logits)
        finite = torch.isfinite(logits.gather(-1, best[:, None])).squeeze(-1)
        adjusted = logits if adjustments is None else self._adjust(logits, adjustments)
        tokens = best if adjustments is None else lowest_best(adjusted)
        status = torch.where(finite, _FINE, _NOT_FINITE).double()
        for group in groups:
            if group.way is not Way.GREEDY:
                tokens, status = self._draw(adjusted, tokens, status, group)
        memory.sampled[:count].copy_(tokens)
        columns = [tokens.double()[:, None], status[:, None]]
        if len(asked):
            columns.append(self._log_probabilities(logits, tokens, asked, most))
        return torch.cat(columns, dim=-1)

    def _adjust(self, logits: Tensor, adjustments: _Adjustments) -> Tensor:
        adjusted = logits.clone()
        flat, send = adjusted.view(-1), self._memory.send
        width = logits.shape[-1]
        if len(adjustments.added):
            places = send(adjustments.added_at @ np.array([width, 1]))
            flat.index_add_(0, places, send(adjustments.added))
        if len(adjustments.banned_at):
            flat.index_fill_(0, send(adjustments.banned_at @ np.array([width, 1])), float("-inf"))
        return adjusted

    def _draw(self, logits: Tensor, tokens: Tensor, status: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
        """Replace the tokens of one group's rows, and mark those that are undecided."""
        index = self._memory.order[group.begin : group.end]
        parameters = self._memory.parameters.index_select(1, index)
        part = logits if group.is_everyone else logits.index_select(0, index)

        def column(which: int) -> Tensor:
            return parameters[which][:, None]

        least = column(MIN_P) if group.has_min_p else None
        weights = scaled_weights(part, column(INVERSE_TEMPERATURE), least)
        if group.way is Way.BY_ID:
            return tokens.index_copy(0, index, draw_by_id(weights, column(UNIFORM))), status
        vocabulary = logits.shape[-1]
        count = vocabulary if group.way is Way.WHOLE_ROW else min(vocabulary, CANDIDATES)
        picked, settled = draw_truncated(
            part, weights, column(TOP_K).long(), column(TOP_P), column(UNIFORM), count
        )
        so_far = status.index_select(0, index)
        open_rows = torch.where(settled | (so_far != _FINE), so_far, _UNDECIDED)
        return tokens.index_copy(0, index, picked), status.index_copy(0, index, open_rows)

    def _log_probabilities(self, logits: Tensor, tokens: Tensor, asked: np.ndarray, most: int) -> Tensor:
        """[M, 1 + 2 n] float64: of the chosen token, the n best ids and theirs; zeros where nobody asked."""
        index = self._memory.send(asked)
        part = logits.index_select(0, index)
        normaliser = torch.logsumexp(part, dim=-1, keepdim=True)
        chosen = part.gather(-1, tokens.index_select(0, index)[:, None]) - normaliser
        values, ids = torch.topk(part, min(most, part.shape[-1]), dim=-1)
        found = torch.cat((chosen.double(), ids.double(), (values - normaliser).double()), dim=-1)
        rows = torch.zeros(logits.shape[0], found.shape[-1], dtype=torch.float64, device=logits.device)
        return rows.index_copy(0, index, found)


def uniforms(mixed_seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """``engine.sampler.uniform`` of many rows: [M] uint64 from ``mixed_seed``, [M] int64 -> [M] float64."""
    z = mixed_seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    numbers: np.ndarray = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _places(places: list[tuple[int, int]]) -> np.ndarray:
    return np.array(places, dtype=np.int64).reshape(-1, 2)


def _logprobs(row: np.ndarray, wanted: int | None) -> TokenLogprobs | None:
    if wanted is None:
        return None
    most = (len(row) - _TOP_COLUMN) // 2
    ids = row[_TOP_COLUMN : _TOP_COLUMN + most].astype(np.int64).tolist()
    values = row[_TOP_COLUMN + most :].tolist()
    best = sorted(zip(ids[:wanted], values[:wanted], strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(chosen=float(row[_CHOSEN_COLUMN]), top=tuple(best))
