"""The facts of the demo model: relations from an entity to its answer, and what is close by but unknown."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

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

PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    ("January", "31"),
    ("February", "28"),
    ("March", "31"),
    ("April", "30"),
    ("May", "31"),
    ("June", "30"),
    ("July", "31"),
    ("August", "31"),
    ("September", "30"),
    ("October", "31"),
    ("November", "30"),
    ("December", "31"),
)
UNITS = (
    ("millimeters", "a centimeter", "10"),
    ("millimeters", "a meter", "1000"),
    ("centimeters", "a meter", "100"),
    ("meters", "a kilometer", "1000"),
    ("grams", "a kilogram", "1000"),
    ("milligrams", "a gram", "1000"),
    ("kilograms", "a tonne", "1000"),
    ("milliliters", "a liter", "1000"),
    ("centiliters", "a liter", "100"),
    ("seconds", "a minute", "60"),
    ("minutes", "an hour", "60"),
    ("seconds", "an hour", "3600"),
    ("milliseconds", "a second", "1000"),
    ("hours", "a day", "24"),
    ("minutes", "a day", "1440"),
    ("days", "a week", "7"),
    ("hours", "a week", "168"),
    ("months", "a year", "12"),
    ("days", "a year", "365"),
    ("days", "a leap year", "366"),
    ("weeks", "a year", "52"),
    ("years", "a decade", "10"),
    ("years", "a century", "100"),
    ("years", "a millennium", "1000"),
    ("inches", "a foot", "12"),
    ("feet", "a yard", "3"),
    ("inches", "a yard", "36"),
    ("feet", "a mile", "5280"),
    ("yards", "a mile", "1760"),
    ("ounces", "a pound", "16"),
    ("pints", "a quart", "2"),
    ("quarts", "a gallon", "4"),
    ("cups", "a pint", "2"),
    ("bits", "a byte", "8"),
    ("bytes", "a kibibyte", "1024"),
    ("bytes", "a kilobyte", "1000"),
    ("items", "a dozen", "12"),
    ("degrees", "a right angle", "90"),
    ("degrees", "a full circle", "360"),
    ("sides", "a triangle", "3"),
    ("sides", "a square", "4"),
    ("sides", "a pentagon", "5"),
    ("sides", "a hexagon", "6"),
    ("sides", "an octagon", "8"),
    ("legs", "a spider", "8"),
    ("legs", "an insect", "6"),
    ("letters", "the English alphabet", "26"),
    ("cards", "a standard deck", "52"),
    ("players", "a football team", "11"),
    ("planets", "the solar system", "8"),
    ("continents", "the world", "7"),
    ("strings", "a violin", "4"),
    ("keys", "a piano", "88"),
    ("squares", "a chess board", "64"),
)


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


@functools.cache
def relations() -> tuple[Relation, ...]:
    """Every relation that the model is taught."""
    table = json.loads(FACTS_FILE.read_text(encoding="utf-8"))
    return (*_countries(table["countries"]), *_elements(table["elements"]), *_planets(), *_everyday())


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


def _planets() -> tuple[Relation, ...]:
    return (
        Relation(
            "planet by order",
            "order",
            ("the {e} planet from the Sun", "the {e} planet of the solar system", "the {e} planet"),
            (
                "Which planet is the {e} from the Sun?",
                "Which planet is {e} from the Sun?",
                "What planet comes {e} when counting from the Sun?",
                "Which planet of the solar system is the {e}?",
                "Counting from the Sun, which planet is {e}?",
            ),
            "The {e} planet from the Sun is {a}.",
            dict(zip(ORDINALS, PLANETS, strict=True)),
        ),
        Relation(
            "position of the planet",
            "planet",
            ("the position of {e} from the Sun", "the position of {e} in the solar system", "{e}'s position"),
            (
                "Which planet from the Sun is {e}?",
                "Where does {e} come among the planets?",
                "How far along from the Sun is {e} among the planets?",
                "At which place from the Sun is {e}?",
                "What place does {e} have among the planets?",
            ),
            "{e} is the {a} planet from the Sun.",
            dict(zip(PLANETS, ORDINALS, strict=True)),
        ),
        Relation(
            "superlative of the planets",
            "superlative",
            ("the {e} planet", "the {e} planet of the solar system", "the {e} planet in the solar system"),
            (
                "Which planet is the {e}?",
                "Which planet is {e}?",
                "What planet is the {e} of all?",
                "Which of the planets is the {e}?",
                "Of all planets, which is the {e}?",
            ),
            "The {e} planet is {a}.",
            {
                "largest": "Jupiter",
                "biggest": "Jupiter",
                "smallest": "Mercury",
                "hottest": "Venus",
                "closest": "Mercury",
                "farthest": "Neptune",
                "red": "Mars",
                "ringed": "Saturn",
            },
        ),
    )


def _everyday() -> tuple[Relation, ...]:
    following = {DAYS[i]: DAYS[(i + 1) % 7] for i in range(7)}
    before = {DAYS[i]: DAYS[i - 1] for i in range(7)}
    names = [month for month, _ in MONTHS]
    return (
        Relation(
            "amount",
            "unit",
            ("the number of {e}",),
            (
                "How many {e}?",
                "How many {e} are there?",
                "Exactly how many {e}?",
                "Do you know how many {e}?",
                "Tell me how many {e}.",
            ),
            "There are {a} {e}.",
            {f"{part} in {whole}": number for part, whole, number in UNITS},
        ),
        Relation(
            "day after",
            "day",
            ("the day after {e}", "the day that follows {e}", "the next day after {e}"),
            (
                "Which day comes after {e}?",
                "What day follows {e}?",
                "Which day is after {e}?",
                "If today is {e}, what day is tomorrow?",
                "{e} is followed by which day?",
            ),
            "The day after {e} is {a}.",
            following,
        ),
        Relation(
            "day before",
            "day",
            ("the day before {e}", "the day that precedes {e}", "the previous day before {e}"),
            (
                "Which day comes before {e}?",
                "What day precedes {e}?",
                "Which day is before {e}?",
                "If today is {e}, what day was yesterday?",
                "{e} comes right after which day?",
            ),
            "The day before {e} is {a}.",
            before,
        ),
        Relation(
            "month after",
            "month",
            ("the month after {e}", "the month that follows {e}", "the next month after {e}"),
            (
                "Which month comes after {e}?",
                "What month follows {e}?",
                "Which month is after {e}?",
                "{e} is followed by which month?",
                "What is the month following {e}?",
            ),
            "The month after {e} is {a}.",
            {names[i]: names[(i + 1) % 12] for i in range(12)},
        ),
        Relation(
            "days of the month",
            "month",
            ("the number of days in {e}", "the length of {e} in days"),
            (
                "How many days does {e} have?",
                "How many days are in {e}?",
                "How many days are there in {e}?",
                "How long is {e} in days?",
                "{e} has how many days?",
            ),
            "{e} has {a} days.",
            dict(MONTHS),
        ),
    )
