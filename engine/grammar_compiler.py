"""Compiles grammars for one vocabulary, off the engine's thread, and keeps what was compiled.

The parser behind JSON schemas and context-free grammars is llguidance's: it knows the bytes of every token
and answers which of them may come next, as a bit per token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from antiphon.protocol.errors import AntiphonError
from antiphon.protocol.grammar import GrammarRegion, GrammarSpec, JsonSchema, LarkGrammar, OneOfSequences

JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between the tokens of JSON: enough to indent, too little for a model to get lost in."""
_KEPT_GRAMMARS = 256
_COMPILERS = 2
_ROW_THREADS = 4


class GrammarError(AntiphonError):
    """A grammar cannot be compiled, or its parser gave up: the fault of one request alone."""


class _TokenTable:
    """A vocabulary as llguidance reads it. Calling it gives the token ids of a text: where the grammar leaves
    no choice, the tokens are those in which the text would be written."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, pieces: Sequence[bytes], markers: Sequence[int], encode: Callable[[str], list[int]]
    ) -> None:
        hidden = frozenset(markers)
        self.tokens = [b"" if token in hidden else piece for token, piece in enumerate(pieces)]
        self.special_token_ids = list(markers)
        self.eos_token_id = markers[0]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._encode(text)


@dataclass(frozen=True, slots=True)
class SequenceTree:
    """Token sequences that share beginnings: what may follow, and what follows that; a leaf is empty."""

    children: dict[int, SequenceTree]

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, ...]]) -> SequenceTree:
        """The tree of some sequences."""
        root = cls({})
        for sequence in sequences:
            node = root
            for token in sequence:
                node = node.children.setdefault(token, cls({}))
        return root


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """A region ready for use; one of ``tree`` and ``matcher`` is set, neither for free text."""

    closed_by: frozenset[int]
    tree: SequenceTree | None = None
    matcher: LLMatcher | None = None
    """In its first state; to be copied."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar ready for use by any number of outputs."""

    compiler: GrammarCompiler
    regions: tuple[CompiledRegion, ...]
    triggers: dict[int, dict[tuple[int, ...], int]]
    """By length, longest first: the sequence to the region that it opens."""
    prefix_token_ids: tuple[int, ...]

    @property
    def longest_trigger(self) -> int:
        """In tokens."""
        return max(self.triggers, default=0)


class GrammarCompiler:
    """Compiles grammars and fills masks. Safe to use from several threads.

    Args:
        pieces: the bytes of every token id.
        markers: ids that are no text; there is at least one.
        encode: token ids of a text, as the model was trained to write it.

    Raises:
        GrammarError: there is no marker.
    """

    def __init__(
        self, pieces: Sequence[bytes], markers: Sequence[int], encode: Callable[[str], list[int]]
    ) -> None:
        if not markers:
            raise GrammarError("a vocabulary without markers cannot end a text")
        self.size = len(pieces)
        self.words = -(-self.size // 32)
        """32-bit words of a mask: bit ``id % 32`` of word ``id // 32`` is set where a token may follow."""
        self.end_id = markers[0]
        """Stands in a parser's masks for "may end here"."""
        self._tokenizer = LLTokenizer(_TokenTable(pieces, markers, encode), eos_token=self.end_id)  # type: ignore[arg-type]
        self.text_mask = np.full(self.words, -1, dtype=np.int32)
        """Every token but markers."""
        spare = np.arange(self.size, self.words * 32)
        clear_bits(self.text_mask, [*markers, *spare.tolist(), *_without_bytes(pieces)])
        self._pool = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar")
        self._rows = LLExecutor(_ROW_THREADS)
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Begin to compile; the future raises GrammarError when it cannot be done."""
        return self._pool.submit(self._compile, spec)

    def fill(self, matchers: Sequence[tuple[LLMatcher, int]], masks: np.ndarray) -> None:
        """Write the mask of each parser into its row of ``masks``, [n, words] int32, contiguous."""
        self._rows.unsafe_compute_mask_ptr(
            list(matchers), masks.ctypes.data, masks.shape[1] * masks.itemsize, masks.shape[0]
        )

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if (problem := spec.problem()) is not None:
            raise GrammarError(problem)
        regions = tuple(self._region(region) for region in spec.regions)
        triggers: dict[int, dict[tuple[int, ...], int]] = {}
        pairs = [(trigger, n) for n, region in enumerate(spec.regions) for trigger in region.triggers]
        for trigger, number in sorted(pairs, key=lambda pair: -len(pair[0])):
            triggers.setdefault(len(trigger), {})[trigger] = number
        return CompiledGrammar(self, regions, triggers, spec.prefix_token_ids)

    def _region(self, region: GrammarRegion) -> CompiledRegion:
        closed_by = frozenset(region.closed_by)
        content = region.content
        ids = (
            [t for s in content.sequences for t in s] if isinstance(content, OneOfSequences) else [*closed_by]
        )
        if any(not 0 <= token < self.size for token in ids):
            raise GrammarError(f"a token id of a grammar is not below {self.size}")
        if isinstance(content, OneOfSequences):
            return CompiledRegion(closed_by, tree=SequenceTree.of(content.sequences))
        if isinstance(content, JsonSchema):
            return CompiledRegion(closed_by, matcher=self._matcher(json_grammar(content.schema)))
        if isinstance(content, LarkGrammar):
            return CompiledRegion(
                closed_by, matcher=self._matcher(LLMatcher.grammar_from_lark(content.grammar))
            )
        return CompiledRegion(closed_by)

    def _matcher(self, grammar: str) -> LLMatcher:
        with self._lock:
            if (kept := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return kept
        matcher = LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error()}")
        with self._lock:
            self._kept[grammar] = matcher
            while len(self._kept) > _KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return matcher


def json_grammar(schema: str) -> str:
    """The grammar of a JSON schema.

    Raises:
        GrammarError: it is no JSON object.
    """
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": JSON_WHITESPACE})
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error


def set_bits(mask: np.ndarray, tokens: Sequence[int] | frozenset[int]) -> None:
    """Allow tokens in one mask, [words] int32."""
    for token in tokens:
        mask[token >> 5] |= np.int32(_BITS[token & 31])


def clear_bits(mask: np.ndarray, tokens: Sequence[int] | frozenset[int]) -> None:
    """Forbid tokens in one mask, [words] int32."""
    for token in tokens:
        mask[token >> 5] &= np.int32(~_BITS[token & 31])


_BITS = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)


def _without_bytes(pieces: Sequence[bytes]) -> list[int]:
    return [token for token, piece in enumerate(pieces) if not piece]
