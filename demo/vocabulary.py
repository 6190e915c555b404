"""Which of the 201,088 token rows the demo model keeps, and the words that examples are made of."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from antiphon.demo.words import WordSource
from antiphon.protocol.errors import CheckpointError

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
def load_vocabulary(path: Path = VOCABULARY_FILE) -> Vocabulary:
    """A vocabulary file; by default that of the packed model that ships.

    Raises:
        CheckpointError: it cannot be read, or is no vocabulary; the message names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Vocabulary(
            tuple(content["token_ids"]),
            WordSource(tuple(content["words"].split()), tuple(content["pieces"].split())),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a vocabulary: {error}") from error
