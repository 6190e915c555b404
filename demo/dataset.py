"""Training tokens: shards of packed rows, made by worker processes from a seed, in a fixed order."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from antiphon.demo.dialogue import Effort, Example, Split
from antiphon.demo.harmony import Rendered, render, system_tokens
from antiphon.demo.mixture import SKILLS, TOOL_SKILLS, depends_on_date, make_example
from antiphon.demo.vocabulary import FULL_VOCABULARY, VOCABULARY_FILE, Vocabulary, load_vocabulary
from antiphon.demo.words import WordSource

IGNORED = -1
"""Target of a position that is not trained: prompts and padding."""
UNKEPT = FULL_VOCABULARY - 1
"""A token that no text has, so its row is the one that all tokens without a row share."""
RowTable = npt.NDArray[np.int16]
"""[201088] row of every token."""

TOOL_ROWS = 0.45
"""Share of the rows whose conversations offer functions; their conversations are longer, so fewer fit."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of packed conversations; R rows of T tokens.

    The conversations of a row share its first tokens, their system message, and see nothing else in common.

    Attributes:
        inputs: [R, T] int16, vocabulary rows.
        targets: [R, T] int16, the next token's row where the model is to speak, else IGNORED.
        documents: [R, T] int16, 0 for the shared system message, then the number of the conversation within
            its row; padding has its own.
        positions: [R, T] int16, where a token stands in its conversation.
    """

    inputs: npt.NDArray[np.int16]
    targets: npt.NDArray[np.int16]
    documents: npt.NDArray[np.int16]
    positions: npt.NDArray[np.int16]


class ExampleSource:
    """Training examples, row by row: those of a row share effort, date and whether functions are offered."""

    def __init__(self, rng: Random, vocabulary: Vocabulary) -> None:
        self._rng, self._vocabulary = rng, vocabulary
        self._waiting: dict[bool, list[Example]] = {True: [], False: []}

    def first(self, with_tools: bool) -> Example:
        """The first of a row: one that did not fit into an earlier row, or a new one."""
        waiting = self._waiting[with_tools]
        return waiting.pop(0) if waiting else self._draw(with_tools, None)

    def next_like(self, first: Example) -> Example:
        """Another for the row of ``first``; one that needs a date of its own waits for a row of its own."""
        with_tools = bool(first.tools)
        while True:
            example = self._draw(with_tools, first.effort)
            if not depends_on_date(example):
                return dataclasses.replace(example, date=first.date)
            self._waiting[with_tools].append(example)

    def put_back(self, example: Example) -> None:
        """Keep an example that did not fit for a later row."""
        self._waiting[bool(example.tools)].append(example)

    def _draw(self, with_tools: bool, effort: Effort | None) -> Example:
        """One that (does not) offer functions; the skill is drawn by weight among those that can."""
        names = [name for name in SKILLS if (name in TOOL_SKILLS) == with_tools]
        skill = self._rng.choices(names, [SKILLS[name][1] for name in names])[0]
        while True:
            example = make_example(self._rng, Split.TRAIN, self._vocabulary.words, skill, effort)
            if bool(example.tools) == with_tools:
                return example


def spellable(example: Example, rows: RowTable) -> Rendered | None:
    """Its tokens, or None when the reply has one that is not kept: the model has no row to write it with."""
    rendered = render(example)
    reply = rows[rendered.token_ids[rendered.prompt_tokens :]]
    return None if (reply == rows[UNKEPT]).any() else rendered


def make_shard(
    seed: int, index: int, rows: int, row_tokens: int, vocabulary_file: Path = VOCABULARY_FILE
) -> Shard:
    """Shard ``index`` of the stream of ``seed``."""
    rng = Random(f"shard {seed} {index}")
    source = ExampleSource(rng, load_vocabulary(vocabulary_file))
    table = row_table(vocabulary_file)
    shape = (rows, row_tokens)
    shard = Shard(
        np.full(shape, table[199_999], np.int16),
        np.full(shape, IGNORED, np.int16),
        np.zeros(shape, np.int16),
        np.zeros(shape, np.int16),
    )
    for row in range(rows):
        _fill_row(shard, row, source, table, with_tools=row < round(rows * TOOL_ROWS))
    return shard


def _fill_row(shard: Shard, row: int, source: ExampleSource, table: RowTable, *, with_tools: bool) -> None:
    """One system message, then conversations until a few in turn do not fit."""
    capacity = shard.inputs.shape[1]
    first = example = source.first(with_tools)
    opening = system_tokens(first.effort, first.date, with_tools)
    used, count, misfits = len(opening), 0, 0
    shard.inputs[row, :used] = table[list(opening)]
    shard.positions[row, :used] = np.arange(used)
    while misfits < 3:
        rendered = spellable(example, table)
        if rendered is not None:
            ids = table[rendered.token_ids[len(opening) :]]
            end = used + len(ids) - 1
            if end <= capacity:
                count += 1
                start = rendered.prompt_tokens - len(opening) - 1
                shard.inputs[row, used:end] = ids[:-1]
                shard.targets[row, used + start : end] = ids[start + 1 :]
                shard.documents[row, used:end] = count
                shard.positions[row, used:end] = len(opening) + np.arange(end - used)
                used = end
            else:
                if misfits == 0 and count > 0:
                    source.put_back(example)
                misfits += 1
        example = source.next_like(first)
    shard.documents[row, used:] = count + 1


def held_out_examples(
    seed: int,
    per_skill: int,
    skills: tuple[str, ...] = tuple(SKILLS),
    vocabulary_file: Path = VOCABULARY_FILE,
) -> list[Example]:
    """Questions of the held-out split, ``per_skill`` of each skill, whose answers the model can spell."""
    words, table = load_vocabulary(vocabulary_file).words, row_table(vocabulary_file)
    return [
        _held_out(Random(f"held out {seed} {skill} {i}"), skill, words, table)
        for skill in skills
        for i in range(per_skill)
    ]


def _held_out(rng: Random, skill: str, words: WordSource, table: RowTable) -> Example:
    while True:
        example = make_example(rng, Split.HELD_OUT, words, skill)
        if spellable(example, table) is not None:
            return example


def shard_stream(
    seed: int,
    rows: int,
    row_tokens: int,
    workers: int,
    count: int,
    vocabulary_file: Path = VOCABULARY_FILE,
) -> Iterator[Shard]:
    """``count`` shards in order; ``workers`` processes make them ahead of time (0: in this process)."""
    if workers == 0:
        for index in range(count):
            yield make_shard(seed, index, rows, row_tokens, vocabulary_file)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        pending = []
        ahead = 4 * workers
        for index in range(min(ahead, count)):
            pending.append(pool.apply_async(make_shard, (seed, index, rows, row_tokens, vocabulary_file)))
        for index in range(count):
            shard = pending.pop(0).get()
            if index + ahead < count:
                later = (seed, index + ahead, rows, row_tokens, vocabulary_file)
                pending.append(pool.apply_async(make_shard, later))
            yield shard


@functools.cache
def row_table(vocabulary_file: Path = VOCABULARY_FILE) -> RowTable:
    """Row of every token, made once per process."""
    return np.asarray(load_vocabulary(vocabulary_file).row_table(), np.int16)
