"""Facts that need no source: planets, units, days and months."""

from __future__ import annotations

from antiphon.demo.relation import Relation

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


def planets() -> tuple[Relation, ...]:
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


def everyday() -> tuple[Relation, ...]:
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
