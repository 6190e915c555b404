"""Which of the 201,088 token rows the demo model keeps, and the words that examples are made of."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from antiphon.demo.words import WordSource

VOCABULARY_FILE = Path(__file__).with_name("vocabulary.json")
FULL_VOCABULARY = 201_088


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The kept rows, ascending; a token's row is its place in the list, all others share ``unseen``."""

    token_ids: tuple[int, ...]
    words: WordSource

    @property
    def unseen(self) -> int:
        """The row of every token that is not kept; also the number of kept rows."""
        return len(self.token_ids)

    @property
    def unseen_tokens(self) -> int:
        """How many tokens share the unseen row."""
        return FULL_VOCABULARY - len(self.token_ids)

    def row_table(self) -> list[int]:
        """[201088] row of every token."""
        table = [self.unseen] * FULL_VOCABULARY
        for row, token in enumerate(self.token_ids):
            table[token] = row
        return table


@functools.cache
def load_vocabulary() -> Vocabulary:
    """The vocabulary that the project's packed model was trained with."""
    content = json.loads(VOCABULARY_FILE.read_text(encoding="utf-8"))
    return Vocabulary(
        tuple(content["token_ids"]),
        WordSource(tuple(content["words"].split()), tuple(content["pieces"].split())),
    )
