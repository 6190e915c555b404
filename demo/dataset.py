"""Training tokens: shards of packed rows, made by worker processes from a seed, in a fixed order."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from antiphon.demo.dialogue import Example, Split
from antiphon.demo.harmony import Rendered, render
from antiphon.demo.mixture import SKILLS, make_example
from antiphon.demo.vocabulary import Vocabulary, load_vocabulary

IGNORED = -1
"""Target of a position that is not trained: prompts and padding."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of packed conversations; R rows of T tokens.

    Attributes:
        inputs: [R, T] int16, vocabulary rows.
        targets: [R, T] int16, the next token's row where the model is to speak, else IGNORED.
        documents: [R, T] int16, number of the conversation within its row; padding has its own.
    """

    inputs: npt.NDArray[np.int16]
    targets: npt.NDArray[np.int16]
    documents: npt.NDArray[np.int16]


def trainable_example(rng: Random, vocabulary: Vocabulary, row_of: npt.NDArray[np.int16]) -> Rendered:
    """A rendered training example whose reply consists of kept tokens; the skill is drawn first."""
    skill = rng.choices(list(SKILLS), [weight for _, weight in SKILLS.values()])[0]
    while True:
        rendered = render(make_example(rng, Split.TRAIN, vocabulary.words, skill))
        reply = row_of[rendered.token_ids[rendered.prompt_tokens :]]
        if not (reply == vocabulary.unseen).any():
            return rendered


def make_shard(seed: int, index: int, rows: int, row_tokens: int) -> Shard:
    """Shard ``index`` of the stream of ``seed``: conversations packed first-fit into ``rows`` rows."""
    vocabulary = load_vocabulary()
    row_of = _row_table()
    rng = Random(f"shard {seed} {index}")
    inputs = np.full((rows, row_tokens), row_of[199_999], np.int16)
    targets = np.full((rows, row_tokens), IGNORED, np.int16)
    documents = np.zeros((rows, row_tokens), np.int16)
    used = [0] * rows
    counts = [0] * rows
    first, failures = 0, 0
    while failures < 4 and first < rows:
        rendered = trainable_example(rng, vocabulary, row_of)
        length = len(rendered.token_ids) - 1
        row = next((r for r in range(first, min(first + 24, rows)) if used[r] + length <= row_tokens), None)
        if row is None:
            if length <= row_tokens:
                failures += first + 24 >= rows
                first += first + 24 < rows
            continue
        ids = row_of[rendered.token_ids]
        begin, end = used[row], used[row] + length
        inputs[row, begin:end] = ids[:-1]
        start = rendered.prompt_tokens - 1
        targets[row, begin + start : end] = ids[start + 1 :]
        counts[row] += 1
        documents[row, begin:end] = counts[row]
        used[row] = end
    for row, end in enumerate(used):
        documents[row, end:] = counts[row] + 1
    return Shard(inputs, targets, documents)


def held_out_examples(seed: int, per_skill: int, skills: tuple[str, ...] = tuple(SKILLS)) -> list[Example]:
    """Questions of the held-out split, ``per_skill`` of each skill."""
    vocabulary = load_vocabulary()
    return [
        make_example(Random(f"held out {seed} {skill} {i}"), Split.HELD_OUT, vocabulary.words, skill)
        for skill in skills
        for i in range(per_skill)
    ]


def shard_stream(seed: int, rows: int, row_tokens: int, workers: int, count: int) -> Iterator[Shard]:
    """``count`` shards in order; ``workers`` processes make them ahead of time (0: in this process)."""
    if workers == 0:
        for index in range(count):
            yield make_shard(seed, index, rows, row_tokens)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        pending = []
        ahead = 4 * workers
        for index in range(min(ahead, count)):
            pending.append(pool.apply_async(make_shard, (seed, index, rows, row_tokens)))
        for index in range(count):
            shard = pending.pop(0).get()
            if index + ahead < count:
                pending.append(pool.apply_async(make_shard, (seed, index + ahead, rows, row_tokens)))
            yield shard


_TABLE: list[npt.NDArray[np.int16]] = []


def _row_table() -> npt.NDArray[np.int16]:
    """Row of every token, made once per process."""
    if not _TABLE:
        _TABLE.append(np.asarray(load_vocabulary().row_table(), np.int16))
    return _TABLE[0]
