"""Writes ``vocabulary.json``: the words that examples are made of and the token rows that the model keeps.

A developer's tool, run by hand before a training when the skills or the tables have changed::

    pip install english-words==2.0.2 && python -m antiphon.demo.bake_vocabulary vocabulary.json

Rows kept are: tokens of printable ASCII that the tokenizer learnt early, everyday English words in all their
spellings, every fact, all numbers of up to three digits, what invented names and odd words mostly consist of,
the special tokens of Harmony, and whatever else occurs often in training examples. All other tokens share one
input row and one output row. Rows of the vocabulary that ships are all kept. The same code and the same
shipped vocabulary give the same file. Packed weights belong to one vocabulary: ``antiphon.demo.ship``
installs both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from antiphon.demo.dialogue import Effort, Split
from antiphon.demo.harmony import encoding, render
from antiphon.demo.mixture import make_example
from antiphon.demo.skills.functions import CITIES, NOUNS
from antiphon.demo.skills.knowledge import Fact
from antiphon.demo.skills.spelling import FUNCTION_WORDS
from antiphon.demo.tables import aliases, capitalised, relations
from antiphon.demo.vocabulary import load_vocabulary
from antiphon.demo.words import COMMON_WORDS, WordSource, is_plain_word

SPECIAL = (199_998, 199_999, 200_002, 200_003, 200_005, 200_006, 200_007, 200_008, 200_012)
EARLY_TOKENS, WORD_TOKENS = 5_000, 16_000
SAMPLED_EXAMPLES, SAMPLED_AT_LEAST = 20_000, 4
ODDITIES, ODD_TOKENS = 30_000, 2_000
_LETTERS = re.compile(r" ?([A-Za-z]{2,})")
_PRINTABLE = re.compile(r"[\x20-\x7e\n]+")


def tokens_of(text: str) -> list[int]:
    """Token ids of plain text; the library's own check for special tokens takes milliseconds a call."""
    ids: list[int] = encoding().encode(text, disallowed_special=())
    return ids


def spellings(word: str) -> tuple[str, ...]:
    """A word at the start of a text, after a space, and capitalised."""
    capital = word.capitalize()
    return word, f" {word}", capital, f" {capital}"


def english_words() -> tuple[str, ...]:
    """English words that are one token after a space, most frequent first."""
    package: Any = importlib.import_module("english_words")
    known = package.get_english_words_set(["web2"], lower=True)
    enc, words = encoding(), []
    for token in range(WORD_TOKENS):
        text = enc.decode([token])
        word = text[1:]
        if text[0] == " " and is_plain_word(word) and _is_english(word, known):
            words.append(word)
    return tuple(words)


def _is_english(word: str, known: set[str]) -> bool:
    if len(word) == 2:
        return word in COMMON_WORDS
    stems = [
        word,
        word.removesuffix("s"),
        word.removesuffix("es"),
        word.removesuffix("ed"),
        word.removesuffix("d"),
    ]
    stems += [word.removesuffix("ing"), word.removesuffix("ing") + "e", word.removesuffix("ies") + "y"]
    return any(len(stem) > 2 and stem in known for stem in stems)


def base_token_ids(words: tuple[str, ...]) -> set[int]:
    """Tokens kept whatever the examples say."""
    enc = encoding()
    kept = {*SPECIAL, *load_vocabulary().token_ids}  # no row is lost: training goes on from packed weights
    kept.update(t for t in range(EARLY_TOKENS) if _PRINTABLE.fullmatch(enc.decode([t])))
    for number in range(1000):
        for width in (1, 2, 3):
            kept.update(tokens_of(str(number).rjust(width, "0")))
    for character in range(0x20, 0x7F):
        kept.update(tokens_of(chr(character)))
    for word in COMMON_WORDS:
        for spelling in spellings(word):
            kept.update(tokens_of(spelling))
    for name in (*NOUNS, *CITIES):
        kept.update(t for spelling in (*spellings(name), name, f" {name}") for t in tokens_of(spelling))
    for word in (*COMMON_WORDS, *NOUNS, *words[:FUNCTION_WORDS]):
        kept.update(tokens_of(f"_{word}"))
        kept.update(tokens_of(f".{word}"))
    for word in words:
        kept.update(tokens_of(f" {word}"))
        for spelling in spellings(word):
            kept.update(tokens_of(spelling))
    return kept | fact_tokens()


def fact_tokens() -> set[int]:
    """What the facts are told with, whatever name their entity goes by."""
    kept = set[int]()
    for relation in relations():
        for entity, answer in relation.pairs.items():
            for name in aliases(entity):
                kept.update(tokens_of(Fact(relation, name, answer).analysis(Effort.MEDIUM)))
                for text in (name, capitalised(name), answer, capitalised(answer)):
                    kept.update(tokens_of(text) + tokens_of(f" {text}"))
    return kept


def odd_tokens(source: WordSource, kept: set[int]) -> set[int]:
    """The commonest tokens, not kept yet, of names that are none and other odd words."""
    rng, counts = Random("oddities"), Counter[int]()
    for _ in range(ODDITIES):
        word = source.oddity(rng)
        counts.update({*tokens_of(word), *tokens_of(f" {word}")} - kept)
    return {token for token, _ in counts.most_common(ODD_TOKENS)}


def kept_token_ids(source: WordSource, base: set[int]) -> list[int]:
    """All kept tokens in ascending order: the base, and what occurs often in a sample of examples."""
    rng = Random("vocabulary")
    counts: Counter[int] = Counter()
    for _ in range(SAMPLED_EXAMPLES):
        counts.update(set(render(make_example(rng, Split.TRAIN, source)).token_ids))
    return sorted(base | {token for token, count in counts.items() if count >= SAMPLED_AT_LEAST})


def pieces(kept: list[int]) -> list[str]:
    """Letters that are a kept token, and can be written with kept tokens both after a space and without."""
    enc, rows = encoding(), set(kept)
    texts = (enc.decode([token]) for token in kept if token not in SPECIAL)
    letters = dict.fromkeys(match[1] for text in texts if (match := _LETTERS.fullmatch(text)))
    return [text for text in letters if rows.issuperset(tokens_of(text) + tokens_of(f" {text}"))]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="where to write it; the trainer's --vocabulary")
    file: Path = parser.parse_args().file
    words = english_words()
    base = base_token_ids(words)
    base |= odd_tokens(WordSource(words), base)
    kept = kept_token_ids(WordSource(words, tuple(pieces(sorted(base)))), base)
    content = {"words": " ".join(words), "pieces": " ".join(pieces(kept)), "token_ids": kept}
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
