"""The vocabulary by which a decode worker follows grammars: the one that routers write prompts in."""

from __future__ import annotations

import logging

from antiphon.engine.grammar_compiler import GrammarCompiler
from antiphon.router.harmony.markers import FIRST_SPECIAL, VOCABULARY_SIZE
from antiphon.router.harmony.vocabulary import load_vocabulary

_log = logging.getLogger(__name__)


def harmony_grammars(model_vocabulary: int) -> GrammarCompiler | None:
    """A compiler for the Harmony vocabulary, as wide as the model's logits.

    None when the model knows fewer tokens than Harmony has: it can answer no chat, so its requests have no
    grammars either, and one that came all the same would be refused.

    Raises:
        VocabularyError: the vocabulary cannot be unpacked.
    """
    if model_vocabulary < VOCABULARY_SIZE:
        _log.warning("the model's vocabulary of %d tokens is not Harmony's: no grammars", model_vocabulary)
        return None
    markers = range(FIRST_SPECIAL, model_vocabulary)
    vocabulary = load_vocabulary()
    pieces = [*vocabulary.pieces[:FIRST_SPECIAL], *(b"" for _ in markers)]
    return GrammarCompiler(pieces, markers, vocabulary.encode)
