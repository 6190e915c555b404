"""Words for copying, names of people and places, most of them made of tokens that the model keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from antiphon.demo.phrasing import phrase_list

COMMON_WORDS = phrase_list("common_words")
FIRST_NAMES, LAST_NAMES = phrase_list("first_names"), phrase_list("last_names")
SYLLABLES, ENDINGS = phrase_list("syllables"), phrase_list("endings")
_PLAIN = re.compile(r"[a-z]{2,14}")


@dataclass(frozen=True, slots=True)
class WordSource:
    """The words that examples are made of.

    Attributes:
        vocabulary: words that are single tokens after a space, most frequent first.
        pieces: the letters of kept tokens, most of them parts of words.
    """

    vocabulary: tuple[str, ...]
    pieces: tuple[str, ...] = ()

    def piece(self, rng: Random) -> str:
        """The letters of any kept token; so each of them is met often enough to be copied."""
        return rng.choice(self.pieces or self.vocabulary)

    def word(self, rng: Random) -> str:
        """A word: everyday ones and the whole vocabulary in equal parts."""
        return rng.choice(COMMON_WORDS if rng.random() < 0.4 else self.vocabulary)

    def distinct_words(self, rng: Random, count: int) -> list[str]:
        """``count`` different words."""
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            chosen[self.word(rng)] = None
        return list(chosen)

    def drill(self, rng: Random, count: int) -> list[str]:
        """``count`` different words of all kinds, rare ones above all: each row is to be met often."""
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            chance = rng.random()
            if chance < 0.65:
                word = self.piece(rng)
            elif chance < 0.82:
                word = rng.choice(self.vocabulary).capitalize()
            else:  # few oddities: one that cannot be spelt spoils the whole list
                word = self.oddity(rng) if chance < 0.84 else rng.choice(self.vocabulary)
            chosen[word] = None
        return list(chosen)

    def person(self, rng: Random) -> str:
        """A first name, or a first and a last name."""
        first = rng.choice(FIRST_NAMES)
        return f"{first} {rng.choice(LAST_NAMES)}" if rng.random() < 0.6 else first

    def title(self, rng: Random) -> str:
        """A made-up title of two or three words."""
        return " ".join(w.capitalize() for w in self.distinct_words(rng, rng.randint(2, 3)))

    def oddity(self, rng: Random) -> str:
        """Something that is no everyday word: a name, a number, capitals, letters at random."""
        chance = rng.random()
        if chance < 0.3:
            return self.invented_name(rng)
        if chance < 0.5:
            return rng.choice(FIRST_NAMES + LAST_NAMES)
        if chance < 0.65:
            return str(rng.randint(0, 999))
        letters = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 4)))
        return letters if chance < 0.8 else letters.upper()

    def invented_name(self, rng: Random) -> str:
        """A name that sounds like a place and is none."""
        body = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 3)))
        return (body + rng.choice(ENDINGS)).capitalize()


def is_plain_word(text: str) -> bool:
    """Whether ``text`` is a lower-case word of 2 to 14 letters."""
    return _PLAIN.fullmatch(text) is not None
