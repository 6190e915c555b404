"""Where one output stands in its grammar, and which tokens may follow there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher

from antiphon.engine.grammar_compiler import (
    CompiledGrammar,
    CompiledRegion,
    GrammarCompiler,
    GrammarError,
    SequenceTree,
    clear_bits,
    set_bits,
)
from antiphon.engine.token_masks import TokenMasks


class GrammarState:
    """The state of one output; a function of its tokens alone, so that it can be had again from them."""

    def __init__(self, compiled: CompiledGrammar, output_token_ids: Iterable[int] = ()) -> None:
        self._compiled = compiled
        self._seen: deque[int] = deque(maxlen=compiled.longest_trigger)
        self._region: CompiledRegion | None = None
        self._tree: SequenceTree | None = None
        self._matcher: LLMatcher | None = None
        for token in (*compiled.prefix_token_ids, *output_token_ids):
            self.advance(token)

    @property
    def compiler(self) -> GrammarCompiler:
        """Which compiled it."""
        return self._compiled.compiler

    @property
    def is_open(self) -> bool:
        """Whether the next token is constrained."""
        return self._region is not None

    @property
    def matcher(self) -> LLMatcher | None:
        """The parser that says what may follow, when the open region has one."""
        return self._matcher

    def advance(self, token: int) -> None:
        """The output goes on with this token.

        Raises:
            GrammarError: it may not, or the parser gave up.
        """
        self._seen.append(token)
        if self._tree is not None:
            self._follow(self._tree, token)
        elif self._region is not None:
            self._take(self._region, token)
        if self._region is None:
            self._open()

    def constrain(self, mask: np.ndarray, text_mask: np.ndarray, end_id: int) -> None:
        """Finish the mask of the next token, [words] int32, which the parser, if there is one, has filled.

        Raises:
            GrammarError: the parser gave up, or nothing may follow.
        """
        region = self._region
        if region is None:
            mask.fill(-1)
        elif self._tree is not None:
            mask.fill(0)
            set_bits(mask, list(self._tree.children))
        elif self._matcher is None:
            mask[:] = text_mask
            set_bits(mask, region.closed_by)
        else:
            if self._matcher.is_error():
                raise GrammarError(f"the grammar's parser gave up: {self._matcher.get_error()}")
            clear_bits(mask, (end_id,))
            if self._matcher.is_accepting():
                set_bits(mask, region.closed_by)
            elif not mask.any():
                raise GrammarError("no token continues the output by its grammar")

    def _follow(self, tree: SequenceTree, token: int) -> None:
        following = tree.children.get(token)
        if following is None:
            raise GrammarError(f"token {token} begins none of the sequences that may follow")
        self._tree = following
        if not following.children:
            self._close()

    def _take(self, region: CompiledRegion, token: int) -> None:
        if token in region.closed_by:
            if self._matcher is not None and not self._matcher.is_accepting():
                raise GrammarError(f"token {token} ends a text that is not complete")
            self._close()
        elif self._matcher is not None and not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not fit the grammar: {self._matcher.get_error()}")

    def _close(self) -> None:
        self._region = self._tree = self._matcher = None

    def _open(self) -> None:
        seen = tuple(self._seen)
        for length, regions in self._compiled.triggers.items():
            number = regions.get(seen[-length:]) if length <= len(seen) else None
            if number is not None:
                region = self._compiled.regions[number]
                self._region, self._tree = region, region.tree
                self._matcher = None if region.matcher is None else region.matcher.deep_copy()
                return


class OutputGrammar:
    """The grammar of one sequence, from its compilation to its end."""

    def __init__(self, compiling: Future[CompiledGrammar], output_token_ids: Sequence[int]) -> None:
        self._compiling = compiling
        self._resumed = tuple(output_token_ids)
        self._state: GrammarState | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the compiler is done, well or not."""
        return self._state is not None or self._compiling.done()

    @property
    def state(self) -> GrammarState:
        """Where the output stands. Waits for the compiler unless ``is_ready``.

        Raises:
            GrammarError: the grammar cannot be compiled, or an earlier attempt's output does not fit it.
        """
        if self._state is None:
            self._state = GrammarState(self._compiling.result(), self._resumed)
        return self._state


def step_masks(grammars: Sequence[tuple[int, OutputGrammar]]) -> TokenMasks | None:
    """The masks of the rows with a grammar, each given with its row; None when nothing is constrained."""
    errors: dict[int, str] = {}
    open_rows: list[tuple[int, GrammarState]] = []
    for row, grammar in grammars:
        try:
            if grammar.state.is_open:
                open_rows.append((row, grammar.state))
        except GrammarError as error:
            errors[row] = str(error)
    if not open_rows:
        return (
            TokenMasks(np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int32), errors)
            if errors
            else None
        )
    compiler = open_rows[0][1].compiler
    bits = np.zeros((len(open_rows), compiler.words), dtype=np.int32)
    parsers = [(s.matcher, place) for place, (_, s) in enumerate(open_rows) if s.matcher is not None]
    if parsers:
        compiler.fill(parsers, bits)
    for place, (row, state) in enumerate(open_rows):
        try:
            state.constrain(bits[place], compiler.text_mask, compiler.end_id)
        except GrammarError as error:
            errors[row] = str(error)
            bits[place] = -1
    return TokenMasks(np.array([row for row, _ in open_rows], dtype=np.int64), bits, errors)
