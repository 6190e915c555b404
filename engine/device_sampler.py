"""The sampler of ``engine.sampler`` without a word from the device in between: the host says in advance what
it wants, and one small copy brings tokens and log-probabilities back.

Rows are of one of four ways: greedy; drawn from the whole vocabulary; cut by top-k or top-p among the best
candidates; the same with the whole row sorted. Candidates may turn out not to settle a draw. That row is then
``undecided``, its position is computed again, and from then on its sequence sorts whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from antiphon.engine.batch import Work
from antiphon.engine.device_choice import (
    CHOSEN_COLUMN,
    NOT_FINITE,
    STATUS_COLUMN,
    TOP_COLUMN,
    UNDECIDED,
    Adjustments,
    Group,
    Way,
    Wishes,
    choose,
    choose_uniform,
    way_of,
)
from antiphon.engine.device_runtime import Completion
from antiphon.engine.executor import sampling_params
from antiphon.engine.sampler import GOLDEN, Choice, bans_stop_ids, logit_changes, mixed_seed
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
from antiphon.engine.token_masks import TokenMasks
from antiphon.model.forward import ChoosesTokens, LanguageModel
from antiphon.protocol.messages import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepSampling:
    """How one step is sampled: issued in three parts, then read."""

    sampler: DeviceSampler
    host: HostMemory
    work: Sequence[Work]
    rows: np.ndarray
    wishes: Wishes
    arrived: Tensor
    """[M, columns] float64 in host memory."""

    def send(self) -> None:
        """Issue the copy of what the rows want."""
        self.sampler.memory.send_for_choice(self.host)

    def choose(self, logits: Tensor) -> Tensor:
        """Issue the choice, [M, V] float32 by row -> result."""
        return choose(self.sampler.memory, logits, self.wishes)

    def choose_from(self, model: LanguageModel, hidden: Tensor) -> Tensor:
        """Issue the choice, hidden states [M, H] by row -> result.

        Where several ranks hold the vocabulary, logits are gathered whole only if a row asks for more than a
        greedy or a plainly drawn token: top-k, top-p, min-p, penalties, biases, log-probabilities, a grammar.
        """
        if self.wishes.plain and isinstance(model, ChoosesTokens):
            way = max(group.way for group in self.wishes.groups)
            return choose_uniform(self.sampler.memory, model, hidden, way)
        return self.choose(model.logits(hidden))

    def fetch(self, result: Tensor) -> None:
        """Issue the copy of the result to the host."""
        self.arrived.copy_(result, non_blocking=True)

    def constrained(self, masks: TokenMasks | None) -> StepSampling:
        """The same, within what grammars allow."""
        return replace(self, wishes=replace(self.wishes, masks=masks))

    def read(self, completion: Completion) -> list[Choice]:
        """Wait for the result, and say what was chosen for each item of the work."""
        completion.wait()
        return self.sampler.read(self)


class DeviceSampler:
    """Owns what the rows of a step want, as far as it stays the same from step to step."""

    def __init__(self, memory: StepMemory, vocab_size: int) -> None:
        rows = memory.max_batch_size
        self.memory = memory
        self._vocabulary = vocab_size
        self._owners: list[EngineSequence | None] = [None] * rows
        self._version = -1
        self._parameters = np.zeros((5, rows))
        self._seeds = np.zeros(rows, dtype=np.uint64)
        self._prompt_tokens = np.zeros(rows, dtype=np.int64)
        self._way = np.zeros(rows, dtype=np.int64)
        self._logprobs = np.full(rows, -1, dtype=np.int64)
        self._adjusts = np.zeros(rows, dtype=bool)
        self._order = np.zeros(rows, dtype=np.int64)
        self._wishes = Wishes((), None, np.zeros(0, dtype=np.int64), 0)
        self._adjusting: np.ndarray = np.zeros(0, dtype=np.int64)

    def prepare(self, work: Sequence[Work], rows: np.ndarray, version: int, host: HostMemory) -> StepSampling:
        """Write down what the sampled items of a step want.

        Args:
            work: [M] items; rows: [M] their rows, a permutation of 0 .. M - 1; version: changes with them.
        """
        if version != self._version:
            self._settle_rows(work, rows)
            self._version = version
        count = len(work)
        parameters, ends = host.parameters.numpy(), np.array([item.end for item in work])
        parameters[:, :count] = self._parameters[:, :count]
        parameters[UNIFORM, rows] = uniforms(self._seeds[rows], ends - self._prompt_tokens[rows])
        host.order.numpy()[:count] = self._order[:count]
        wishes = self._wishes
        if len(self._adjusting):
            wishes = replace(wishes, adjustments=self._adjustments(work, rows))
        columns = wishes.columns(self._vocabulary)
        if count * columns > len(host.results):
            host.results = self.memory.runtime.host_memory(count * columns, dtype=torch.float64)
        arrived = host.results[: count * columns].view(count, columns)
        return StepSampling(self, host, work, rows, wishes, arrived)

    def _settle_rows(self, work: Sequence[Work], rows: np.ndarray) -> None:
        """Write down new owners of rows, and group the rows by the way they are sampled."""
        for item, row in zip(work, rows.tolist(), strict=True):
            if self._owners[row] is not item.sequence:
                self._owners[row] = item.sequence
                self._write_row(row, item.sequence, sampling_params(item))
        count = len(work)
        ways = self._way[:count]
        self._order[:count] = np.argsort(ways, kind="stable")
        groups: tuple[Group, ...]
        if (ways == ways[0]).all():
            groups = (self._group(Way(int(ways[0])), 0, count, count),)
        else:
            bounds = np.searchsorted(ways[self._order[:count]], range(len(Way) + 1))
            groups = tuple(
                self._group(way, int(begin), int(end), count)
                for way, begin, end in zip(Way, bounds[:-1], bounds[1:], strict=True)
                if begin < end
            )
        asked = np.flatnonzero(self._logprobs[:count] >= 0)
        self._wishes = Wishes(groups, None, asked, int(self._logprobs[:count].max(initial=0)))
        self._adjusting = np.flatnonzero(self._adjusts[:count])

    def _group(self, way: Way, begin: int, end: int, count: int) -> Group:
        has_min_p = bool((self._parameters[MIN_P, self._order[begin:end]] > 0).any())
        return Group(way, begin, end, has_min_p, is_everyone=end - begin == count)

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
        self._way[row] = way_of(params, sorts_whole_row=sequence.sorts_whole_row)

    def _adjustments(self, work: Sequence[Work], rows: np.ndarray) -> Adjustments:
        item_of = dict(zip(rows.tolist(), work, strict=True))
        added_at: list[int] = []
        added: list[float] = []
        banned_at: list[int] = []
        for row in self._adjusting.tolist():
            item = item_of[row]
            params, sequence = sampling_params(item), item.sequence
            changes = logit_changes(params, sequence.output)
            first = row * self._vocabulary
            added_at += [first + token for token in changes]
            added += changes.values()
            if bans_stop_ids(params, item.end - sequence.prompt_tokens):
                banned_at += [first + token for token in params.stop_token_ids]
        return Adjustments(
            np.array(added_at, dtype=np.int64),
            np.array(added, dtype=np.float32),
            np.array(banned_at, dtype=np.int64),
        )

    def read(self, step: StepSampling) -> list[Choice]:
        """What was chosen for each item of a step whose result has arrived."""
        values, rows = step.arrived.numpy(), step.rows
        tokens = values[rows, 0].astype(np.int64).tolist()
        statuses = values[rows, STATUS_COLUMN]
        errors = step.wishes.masks.errors if step.wishes.masks is not None else {}
        if not len(step.wishes.asked) and not statuses.any() and not errors:
            return [Choice(token) for token in tokens]
        choices = []
        for item, row, token, status in zip(step.work, rows.tolist(), tokens, statuses.tolist(), strict=True):
            if row in errors:
                choices.append(Choice(None, error=errors[row]))
            elif status == UNDECIDED:
                self._forget(item.sequence)
                choices.append(Choice(None, undecided=True))
            elif status == NOT_FINITE:
                choices.append(Choice(None))
            else:
                choices.append(Choice(token, _logprobs(values[row], sampling_params(item).top_logprobs)))
        return choices

    def _forget(self, sequence: EngineSequence) -> None:
        """Have a sequence written down again before the next step: it will sort its whole row."""
        self._owners = [None if owner is sequence else owner for owner in self._owners]
        self._version = -1


def uniforms(mixed_seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """``engine.sampler.uniform`` of many rows: [M] uint64 from ``mixed_seed``, [M] int64 -> [M] float64."""
    z = mixed_seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    numbers: np.ndarray = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _logprobs(row: np.ndarray, wanted: int | None) -> TokenLogprobs | None:
    if wanted is None:
        return None
    most = (len(row) - TOP_COLUMN) // 2
    ids = row[TOP_COLUMN : TOP_COLUMN + most].astype(np.int64).tolist()
    values = row[TOP_COLUMN + most :].tolist()
    best = sorted(zip(ids[:wanted], values[:wanted], strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(chosen=float(row[CHOSEN_COLUMN]), top=tuple(best))
