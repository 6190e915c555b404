"""One kind of fact: a relation from an entity to its answer, and how it is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Relation:
    """A question that can be asked of every entity of a kind.

    Attributes:
        name: how the relation is called, e.g. ``capital``.
        kind: what it is asked of, e.g. ``country``.
        noun_phrases: ``{e}`` marks the entity; each fits "What is …?".
        questions: whole questions of this relation alone.
        answer: the final sentence, with ``{e}`` and ``{a}``.
        pairs: entity -> answer.
    """

    name: str
    kind: str
    noun_phrases: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    pairs: dict[str, str]
