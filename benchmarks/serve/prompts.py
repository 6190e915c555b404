"""Prompts of an exact number of tokens, as token ids or as text.

Token ids are exact by construction. Text is made of words that are one token each when a space goes before
them, so that a prompt of n words has n tokens and what the server's format puts around them; that overhead is
measured on the server itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from antiphon.benchmarks.serve.workload import Segment

FIRST_ID, END_ID = 256, 190_000
"""Ordinary tokens of the o200k vocabulary; special ones begin at 199,998."""

_LIST = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point home
    water room mother area money story fact month lot right study book eye job word business issue side kind
    head house service friend father power hour game line end member law car city community name president
    team minute idea body information back parent face others level office door health person art war history
    party result change morning reason research girl guy moment air teacher force education
"""
WORDS = tuple(_LIST.split())


@lru_cache(maxsize=4096)
def segment_ids(segment: Segment) -> tuple[int, ...]:
    """The token ids of a segment."""
    rng = random.Random(segment.seed)
    return tuple(rng.choices(range(FIRST_ID, END_ID), k=segment.tokens))


@lru_cache(maxsize=4096)
def segment_text(segment: Segment) -> str:
    """As many words as the segment has tokens, each with a space before it."""
    rng = random.Random(segment.seed)
    return "".join(f" {word}" for word in rng.choices(WORDS, k=segment.tokens))


def ids_of(segments: Sequence[Segment]) -> list[int]:
    """The token ids of segments, one after the other."""
    return [token for segment in segments for token in segment_ids(segment)]


def text_of(segments: Sequence[Segment], overhead_tokens: int) -> str:
    """Text that becomes the segments' number of tokens when the server adds ``overhead_tokens``.

    The last segment is shortened before the shared beginning is. The text has at least one word, so prompts
    shorter than the overhead come out longer than asked; the server's own count is what gets reported.
    """
    *shared, last = segments
    missing = max(1 - sum(s.tokens for s in shared), last.tokens - overhead_tokens)
    text = "".join(segment_text(segment) for segment in shared)
    if missing >= 0:
        return text + segment_text(Segment(last.seed, missing))
    words = text.split(" ")
    return " ".join(words[:missing])
