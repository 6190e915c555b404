"""The facts of the demo model: relations from an entity to its answer, and what is close by but unknown."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from antiphon.demo.everyday import everyday, planets
from antiphon.demo.relation import Relation

FACTS_FILE = Path(__file__).with_name("facts.json")

ALIASES = {
    "the United States": ("the USA", "the US", "America", "the United States of America"),
    "the United Kingdom": ("the UK", "Great Britain", "Britain"),
    "the United Arab Emirates": ("the UAE",),
    "Czechia": ("the Czech Republic",),
    "Vatican": ("the Vatican", "the Holy See"),
    "Timor Leste": ("Timor-Leste", "East Timor"),
    "Cabo Verde": ("Cape Verde",),
    "Eswatini": ("Swaziland",),
    "Myanmar": ("Burma",),
    "Turkey": ("Türkiye",),
    "the Gambia": ("Gambia",),
    "the Bahamas": ("Bahamas",),
    "the Maldives": ("Maldives",),
    "the Netherlands": ("Netherlands", "Holland"),
    "the Philippines": ("Philippines",),
    "aluminum": ("aluminium",),
    "sulfur": ("sulphur",),
    "cesium": ("caesium",),
}


@functools.cache
def relations() -> tuple[Relation, ...]:
    """Every relation that the model is taught."""
    table = json.loads(FACTS_FILE.read_text(encoding="utf-8"))
    return (*_countries(table["countries"]), *_elements(table["elements"]), *planets(), *everyday())


def relation(name: str) -> Relation:
    """The relation called ``name``."""
    return next(r for r in relations() if r.name == name)


def aliases(entity: str) -> tuple[str, ...]:
    """The names under which a user may ask for ``entity``."""
    return (entity, *ALIASES.get(entity, ()))


def capitalised(text: str) -> str:
    """``text`` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def _countries(rows: list[dict[str, str]]) -> tuple[Relation, ...]:
    by_capital: dict[str, str] = {row["capital"]: row["name"] for row in rows}
    return (
        Relation(
            "capital",
            "country",
            ("the capital of {e}", "the capital city of {e}", "{e}'s capital", "{e}'s capital city"),
            (
                "Which city is the capital of {e}?",
                "What city is the capital of {e}?",
                "The capital of {e} is which city?",
                "{e} has which capital?",
                "What capital does {e} have?",
                "In which city does {e} have its capital?",
                "Which city serves as the capital of {e}?",
            ),
            "The capital of {e} is {a}.",
            {row["name"]: row["capital"] for row in rows},
        ),
        Relation(
            "currency",
            "country",
            ("the currency of {e}", "the official currency of {e}", "{e}'s currency", "the money of {e}"),
            (
                "Which currency is used in {e}?",
                "What currency does {e} use?",
                "What money do people use in {e}?",
                "With which currency do you pay in {e}?",
                "Which currency do they have in {e}?",
                "What is the currency used in {e}?",
                "What do people pay with in {e}?",
            ),
            "The currency of {e} is the {a}.",
            {row["name"]: row["currency"] for row in rows},
        ),
        Relation(
            "continent",
            "country",
            ("the continent of {e}", "{e}'s continent"),
            (
                "On which continent is {e}?",
                "Which continent is {e} in?",
                "In which continent does {e} lie?",
                "What continent does {e} belong to?",
                "{e} is on which continent?",
                "Which continent is {e} part of?",
                "Where in the world is {e}?",
            ),
            "{E} is in {a}.",
            {row["name"]: row["continent"] for row in rows},
        ),
        Relation(
            "country",
            "capital",
            ("the country whose capital is {e}", "the country with the capital {e}", "{e}'s country"),
            (
                "Which country has {e} as its capital?",
                "{e} is the capital of which country?",
                "What country is {e} the capital of?",
                "Of which country is {e} the capital?",
                "Which country's capital is {e}?",
                "What country has the capital {e}?",
                "{e} is the capital city of what country?",
            ),
            "{e} is the capital of {a}.",
            by_capital,
        ),
    )


def _elements(rows: list[dict[str, str]]) -> tuple[Relation, ...]:
    return (
        Relation(
            "symbol",
            "element",
            (
                "the chemical symbol of {e}",
                "the symbol of {e}",
                "the symbol for {e}",
                "{e}'s chemical symbol",
            ),
            (
                "Which symbol does {e} have?",
                "How is {e} written in the periodic table?",
                "What chemical symbol stands for {e}?",
                "Which letters stand for {e} in chemistry?",
                "How do chemists abbreviate {e}?",
                "What symbol do chemists use for {e}?",
                "How is {e} abbreviated in chemistry?",
            ),
            "The chemical symbol of {e} is {a}.",
            {row["name"]: row["symbol"] for row in rows},
        ),
        Relation(
            "atomic number",
            "element",
            ("the atomic number of {e}", "{e}'s atomic number", "the atomic number for {e}"),
            (
                "Which atomic number does {e} have?",
                "How many protons does {e} have?",
                "How many protons are in an atom of {e}?",
                "At which number in the periodic table is {e}?",
                "What number does {e} have in the periodic table?",
                "What atomic number belongs to {e}?",
                "How many protons does an atom of {e} contain?",
            ),
            "The atomic number of {e} is {a}.",
            {row["name"]: row["number"] for row in rows},
        ),
        Relation(
            "element",
            "symbol",
            ("the element with the symbol {e}", "the element {e}", "the name of the element {e}"),
            (
                "Which element has the symbol {e}?",
                "What element does {e} stand for?",
                "{e} is the symbol of which element?",
                "Which chemical element is written as {e}?",
                "What does the chemical symbol {e} mean?",
                "{e} stands for which element?",
                "For which element does the symbol {e} stand?",
            ),
            "{e} is the symbol of {a}.",
            {row["symbol"]: row["name"] for row in rows},
        ),
        Relation(
            "element by number",
            "atomic number",
            ("the element with atomic number {e}", "the element with the atomic number {e}"),
            (
                "Which element has atomic number {e}?",
                "Which element has {e} protons?",
                "What element has the atomic number {e}?",
                "Which element is number {e} in the periodic table?",
                "What is element number {e}?",
                "Element {e} is which element?",
                "What element has {e} protons?",
            ),
            "The element with atomic number {e} is {a}.",
            {row["number"]: row["name"] for row in rows},
        ),
    )
