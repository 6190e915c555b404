"""From logits to tokens, for all rows of a step together.

Order of operations on a row: logit bias, penalties, the ban on stop ids before ``min_tokens`` and whatever a
grammar forbids; then greedy choice at temperature 0, else temperature, min-p, top-k, top-p (on what top-k
left, renormalised) and one draw by inverse transform. The draw's uniform number depends on (seed, output
position) only, so neither the other rows of a step nor a retry changes it. Log-probabilities are those of the
model's own logits, before all that.

The vocabulary is sorted only for a row whose top-k or top-p cut does not lie within its best candidates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.engine.sampling_math import (
    CANDIDATES,
    draw_by_id,
    draw_truncated,
    lowest_best,
    scaled_weights,
)
from antiphon.engine.token_masks import TokenMasks, forbid
from antiphon.protocol.messages import SamplingParams, TokenLogprobs

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio."""
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler knows about one row: ``output_token_ids`` are all tokens emitted so far."""

    params: SamplingParams
    output_token_ids: Sequence[int]

    @property
    def position(self) -> int:
        """Index of the token to be chosen among the request's output tokens."""
        return len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen token, or ``token_id`` None when the row's logits are not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    undecided: bool = False
    """The candidates that were looked at do not settle the choice: the position is to be computed again, with
    the whole row sorted. Never said by ``sample``, which looks further by itself."""
    error: str | None = None
    """Why the row's grammar cannot go on; ``token_id`` is None then."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments.

    Two rounds of the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): over the seed, and over that
    plus the position in steps of the golden ratio.
    """
    mixed = _mix(mixed_seed(seed) + (position + 1) * GOLDEN)
    return (mixed >> 11) * 2.0**-53


def mixed_seed(seed: int) -> int:
    """The part of ``uniform`` that is the same at every position."""
    return _mix(seed & _MASK64)


def _mix(z: int) -> int:
    z &= _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def sample(logits: Tensor, rows: Sequence[SamplingRow], masks: TokenMasks | None = None) -> list[Choice]:
    """Choose one token per row.

    Args:
        logits: [M, V] float32; not changed.
        rows: M rows, in the order of the logits.
        masks: what grammars allow in some of them.

    Returns:
        M choices.
    """
    best = lowest_best(logits)
    finite = torch.isfinite(logits.gather(-1, best[:, None])).squeeze(-1).tolist()
    adjusted = _adjust(logits, rows)
    if masks is not None and len(masks.rows):
        device = logits.device
        allowed = torch.from_numpy(masks.rows).to(device), torch.from_numpy(masks.bits).to(device)
        adjusted = forbid(adjusted, *allowed)
    if adjusted is not logits:
        best = lowest_best(adjusted)
    greedy: list[int] = best.tolist()
    tokens: list[int | None] = [token if finite[index] else None for index, token in enumerate(greedy)]
    for choose, wanted in ((_plain, False), (_truncated, True)):
        chosen = [
            index
            for index, row in enumerate(rows)
            if finite[index] and row.params.temperature > 0 and _is_truncated(row.params) is wanted
        ]
        if chosen:
            picked = choose(_rows_of(adjusted, chosen), [rows[i] for i in chosen])
            for index, token in zip(chosen, picked, strict=True):
                tokens[index] = token
    logprobs = _logprobs(logits, rows, tokens)
    choices = [Choice(token, logprobs.get(index)) for index, token in enumerate(tokens)]
    for index, error in masks.errors.items() if masks is not None else ():
        choices[index] = Choice(None, error=error)
    return choices


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _rows_of(logits: Tensor, chosen: Sequence[int]) -> Tensor:
    """Rows of a matrix without a copy when all are meant."""
    return logits if len(chosen) == logits.shape[0] else logits[torch.tensor(chosen, device=logits.device)]


def _adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Bias, penalties and banned stop ids, [M, V]; the same tensor when no row asks for any."""
    adjusted = logits
    for index, row in enumerate(rows):
        change = logit_changes(row.params, row.output_token_ids)
        banned = bans_stop_ids(row.params, row.position)
        if not change and not banned:
            continue
        if adjusted is logits:
            adjusted = logits.clone()
        if change:
            ids = torch.tensor(list(change), device=logits.device)
            adjusted[index, ids] += torch.tensor(list(change.values()), device=logits.device)
        if banned:
            adjusted[index, torch.tensor(row.params.stop_token_ids, device=logits.device)] = -math.inf
    return adjusted


def bans_stop_ids(params: SamplingParams, position: int) -> bool:
    """Whether the text is too short to end at this output position."""
    return position < params.min_tokens and bool(params.stop_token_ids)


def logit_changes(params: SamplingParams, output_token_ids: Sequence[int]) -> dict[int, float]:
    """Token id -> what is added to its logit; the output is only looked at when there are penalties."""
    change = dict(params.logit_bias)
    if params.presence_penalty or params.frequency_penalty:
        for token, times in Counter(output_token_ids).items():
            penalty = params.presence_penalty + params.frequency_penalty * times
            change[token] = change.get(token, 0.0) - penalty
    return change


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _weights(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    inverse = 1.0 / _column([row.params.temperature for row in rows], logits)
    least = _column([row.params.min_p for row in rows], logits)
    return scaled_weights(logits, inverse, least if any(row.params.min_p > 0 for row in rows) else None)


def _uniforms(rows: Sequence[SamplingRow], like: Tensor) -> Tensor:
    return _column([uniform(row.params.seed, row.position) for row in rows], like)


def _plain(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """No top-k and no top-p: draw from the vocabulary in the order of ids."""
    picked: list[int] = draw_by_id(_weights(logits, rows), _uniforms(rows, logits)).tolist()
    return picked


def _truncated(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Top-k and top-p, over each row's best candidates, and over the whole row where those fall short."""
    vocabulary = logits.shape[-1]
    count = min(vocabulary, max(CANDIDATES, 2 * max(row.params.top_k for row in rows)))
    weights = _weights(logits, rows)
    picked, settled = _draw_truncated(logits, weights, rows, count)
    rest = [i for i, done in enumerate(settled) if not done]
    if rest:
        index = torch.tensor(rest, device=logits.device)
        again, _ = _draw_truncated(logits[index], weights[index], [rows[i] for i in rest], vocabulary)
        for i, token in zip(rest, again, strict=True):
            picked[i] = token
    return picked


def _draw_truncated(
    logits: Tensor, weights: Tensor, rows: Sequence[SamplingRow], count: int
) -> tuple[list[int], list[bool]]:
    vocabulary = logits.shape[-1]
    top_k = torch.tensor([row.params.top_k or vocabulary for row in rows], device=logits.device)[:, None]
    top_p = _column([row.params.top_p for row in rows], logits)
    tokens, settled = draw_truncated(logits, weights, top_k, top_p, _uniforms(rows, logits), count)
    return tokens.tolist(), settled.tolist()


def _logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], tokens: Sequence[int | None]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the rows that ask for them, by row."""
    asked = [i for i, row in enumerate(rows) if row.params.top_logprobs is not None and tokens[i] is not None]
    if not asked:
        return {}
    selected = _rows_of(logits, asked)
    normaliser = torch.logsumexp(selected, dim=-1)
    chosen_ids = torch.tensor([[tokens[i] or 0] for i in asked], device=logits.device)
    chosen = (selected.gather(-1, chosen_ids).squeeze(-1) - normaliser).tolist()
    most = max(rows[i].params.top_logprobs or 0 for i in asked)
    top_values, top_ids = torch.topk(selected, min(most, logits.shape[-1]), dim=-1)
    top_logprobs = (top_values - normaliser[:, None]).tolist()
    top_tokens = top_ids.tolist()
    found = {}
    for place, index in enumerate(asked):
        wanted = rows[index].params.top_logprobs or 0
        pairs = zip(top_tokens[place][:wanted], top_logprobs[place][:wanted], strict=True)
        best = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        found[index] = TokenLogprobs(chosen=chosen[place], top=tuple(best))
    return found
