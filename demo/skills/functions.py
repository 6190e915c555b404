"""The functions that examples offer: one everyday function and endless generic ones with made-up names.

A function's nouns belong to one split, so that a held-out function has a name that training never showed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from antiphon.demo.dialogue import Split, Tool, ToolCall, split_of
from antiphon.demo.phrasing import FRAMES, dress, fill, phrase_list, phrases, pick
from antiphon.demo.skills.knowledge import joined_noun
from antiphon.demo.tables import relation
from antiphon.demo.words import WordSource

ENTITY_PARAMETERS = phrase_list("entity_parameters")
QUERY_VERBS, ACTION_VERBS = phrase_list("query_verbs"), phrase_list("action_verbs")
EXPLICIT, EXPLICIT_BARE = phrases("call_by_name"), phrases("call_bare_by_name")
QUERY_FORMS, ACTION_FORMS = phrases("call_query"), phrases("call_action")
WEATHER_FORMS = phrases("call_weather")
WEATHER_ENDINGS = phrase_list("weather_endings")
CITIES = phrase_list("cities")
NOUNS = phrase_list("function_nouns")
WEATHER_DESCRIPTIONS = phrase_list("weather_descriptions")
PLACE_DESCRIPTIONS = phrase_list("place_descriptions")
CONDITIONS = phrase_list("weather_conditions")
TEMPERATURE_AND_SKY = (
    ("temperature", "condition"),
    ("temp", "sky"),
    ("temperature", "conditions"),
    ("t", "c"),
    ("temperature_c", "forecast"),
    ("degrees", "weather"),
    ("temp_c", "summary"),
)
"""How services call the two."""


@dataclass(frozen=True, slots=True)
class Request:
    """A user's wish that one function serves.

    Attributes:
        text, phrasing: what the user says, and the frame of it.
        call: the call it asks for.
        subject: how the answer begins.
        result: what the function returns.
        again: None, or the value of a follow-up ("And {value}?") and its call.
    """

    text: str
    phrasing: str
    tool: Tool
    call: ToolCall
    subject: str
    result: str
    parameter: str
    value: str | int


def call_of(name: str, arguments: dict[str, object]) -> ToolCall:
    """A call with its arguments as JSON."""
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _schema(rng: Random, properties: dict[str, dict[str, object]], required: list[str]) -> dict[str, object]:
    schema: dict[str, object] = {"type": "object", "properties": properties}
    if required or rng.random() < 0.5:
        schema["required"] = required
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return schema


def place(rng: Random, words: WordSource) -> str:
    """A city, mostly a real one; or an invented one."""
    chance = rng.random()
    if chance < 0.4:
        return rng.choice(list(relation("capital").pairs.values()))
    if chance < 0.82:
        return rng.choice(CITIES)
    if chance < 0.94:
        return words.invented_name(rng)
    return words.word(rng).capitalize()


def weather_tool(rng: Random) -> tuple[Tool, str]:
    """One of many spellings of the weather function, and the name of its place parameter."""
    name = rng.choice(
        ("get_weather", "get_weather", "get_weather", "get_current_weather", "weather", "getWeather")
    )
    parameter = rng.choice(("location", "location", "location", "city", "place"))
    described: dict[str, object] = {"type": "string"}
    if rng.random() < 0.6:
        described["description"] = rng.choice(PLACE_DESCRIPTIONS)
    properties: dict[str, dict[str, object]] = {parameter: described}
    if rng.random() < 0.25:
        unit = rng.choice(("unit", "units", "format"))
        properties[unit] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    description = rng.choice(WEATHER_DESCRIPTIONS)
    return Tool(name, description, _schema(rng, properties, [parameter])), parameter


def weather_result(rng: Random) -> str:
    """What a weather service says."""
    temperature, condition = rng.randint(-20, 42), rng.choice(CONDITIONS)
    if rng.random() < 0.25:
        unit = rng.choice((" degrees", "°C", " C", " degrees Celsius"))
        return rng.choice((f"{condition}, {temperature}{unit}", f"{temperature}{unit} and {condition}"))
    names = rng.choice(TEMPERATURE_AND_SKY)
    result: dict[str, object] = {names[0]: temperature, names[1]: condition}
    if rng.random() < 0.3:
        result["unit"] = rng.choice(("celsius", "C"))
    if rng.random() < 0.2:
        result["humidity"] = rng.randint(10, 99)
    if rng.random() < 0.2:
        del result[names[1]]
    return dump(rng, result)


def dump(rng: Random, value: object) -> str:
    """JSON as services write it: with spaces, or compact."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if rng.random() < 0.5 else None)


def weather(rng: Random, split: Split, words: WordSource) -> Request:
    """A question for the weather somewhere."""
    tool, parameter = weather_tool(rng)
    city = place(rng, words)
    phrasing = pick(rng, WEATHER_FORMS, split)
    text = dress(rng, fill(phrasing, x=city, s=rng.choice(WEATHER_ENDINGS)), split)
    value = city.lower() if text == text.lower() else city
    call = call_of(tool.name, {parameter: value})
    return Request(
        text, phrasing, tool, call, f"The weather in {value}", weather_result(rng), parameter, value
    )


def function_noun(rng: Random, split: Split, words: WordSource) -> str:
    """A noun for function names; every noun belongs to one split. Training also names functions at random."""
    while True:
        chance = rng.random() if split is Split.TRAIN else 1.0
        if chance < 0.35:
            noun = joined_noun(rng, words)
        elif chance < 0.5:
            noun = made_up(rng, words)
        else:
            noun = rng.choice(NOUNS)
        if (
            len(noun) > 2
            and noun not in ("the", "weather", "you", "and")
            and split_of(f"function {noun}") is split
        ):
            return noun


def made_up(rng: Random, words: WordSource) -> str:
    """One or two pieces of words in lower case, or a name that is none; nobody has met it."""
    if rng.random() < 0.3:
        return words.invented_name(rng).lower()
    return "".join(words.piece(rng).lower() for _ in range(rng.choice((1, 2))))


def function_name(rng: Random, verb: str, noun: str, words: WordSource) -> str:
    """A name as programmers write them.

    A verb that is a noun, too, stands first: ``post_order`` belongs to the split of its noun ``order`` alone.
    """
    style = rng.random()
    if style < 0.6:
        return f"{verb}_{noun}"
    if style < 0.75:
        return f"{verb}{noun.capitalize()}"
    if style < 0.9:
        turned = rng.random() < 0.5 and verb not in NOUNS
        return f"{noun}_{verb}" if turned else f"{verb}_{noun}_{words.word(rng)}"
    return noun


def parameter_name(rng: Random, words: WordSource) -> str:
    """An everyday name, a word, two words, or something made up."""
    chance = rng.random()
    if chance < 0.45:
        return rng.choice(ENTITY_PARAMETERS)
    if chance < 0.8:
        return words.word(rng)
    if chance < 0.9:
        return f"{words.word(rng)}_{words.word(rng)}"
    return made_up(rng, words)


def value_for(rng: Random, words: WordSource) -> str:
    """A text argument."""
    chance = rng.random()
    if chance < 0.22:
        return words.person(rng)
    if chance < 0.37:
        return rng.choice((*relation("capital").pairs.values(), *CITIES))
    if chance < 0.47:
        return words.title(rng)
    if chance < 0.55:
        return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4)))
    if chance < 0.6:
        return words.invented_name(rng)
    if chance < 0.7:
        return words.piece(rng)
    return " ".join(words.distinct_words(rng, rng.choice((1, 1, 1, 2, 3))))


def _described(rng: Random, kind: str, text: str, words: WordSource) -> dict[str, object]:
    schema: dict[str, object] = {"type": kind}
    if rng.random() < 0.5:
        schema["description"] = rambling(rng, words) if rng.random() < 0.15 else text
    return schema


def rambling(rng: Random, words: WordSource) -> str:
    """A description that says nothing, as long as real ones are; the names have to do."""
    return " ".join(words.distinct_words(rng, rng.randint(3, 14))).capitalize() + rng.choice(("", "."))


def query(rng: Random, split: Split, words: WordSource) -> Request:
    """A generic function that looks something up for one entity."""
    verb, noun = rng.choice(QUERY_VERBS), function_noun(rng, split, words)
    parameter = parameter_name(rng, words) if rng.random() < 0.4 else rng.choice(ENTITY_PARAMETERS)
    name = function_name(rng, verb, noun, words)
    shown = parameter.replace("_", " ")
    number = parameter.endswith("id") and rng.random() < 0.5
    value: str | int = rng.randint(0, 999) if number else value_for(rng, words)
    described = _described(rng, "integer" if number else "string", f"The {shown}", words)
    description = rng.choice(
        (
            f"{verb.capitalize()} the {noun} of a {shown}.",
            f"Returns the {noun} for a {shown}",
            f"Get the {noun}.",
            f"Gives the {noun} of the given {shown}.",
            f"{verb.capitalize()} {noun}",
            f"The {noun} of a {shown}.",
            rambling(rng, words),
        )
    )
    tool = Tool(name, description, _schema(rng, {parameter: described}, [parameter]))
    if rng.random() < 0.35:
        phrasing = pick(rng, FRAMES, split)
        text = fill(phrasing, x=f"the {noun} of {value}")
    else:
        phrasing = pick(rng, QUERY_FORMS, split)
        quoted = f'"{value}"' if isinstance(value, str) and rng.random() < 0.15 else str(value)
        text = fill(phrasing, V=verb.capitalize(), v=verb, n=noun, x=quoted)
    result: object = {rng.choice((noun, noun, "result", "value")): _result_value(rng, words)}
    call = call_of(name, {parameter: value})
    return Request(text, phrasing, tool, call, f"The {noun} of {value}", dump(rng, result), parameter, value)


def _result_value(rng: Random, words: WordSource) -> object:
    if rng.random() < 0.5:
        return rng.randint(0, 999)
    return value_for(rng, words)


def command(rng: Random, split: Split, words: WordSource) -> Request:
    """A generic function that does something, with one to three arguments; sometimes called by its name."""
    verb, noun = rng.choice(ACTION_VERBS + QUERY_VERBS), function_noun(rng, split, words)
    name = function_name(rng, verb, noun, words)
    properties: dict[str, dict[str, object]] = {}
    arguments: dict[str, object] = {}
    spoken = []
    for parameter in _parameter_names(rng, words):
        schema, value = _typed_value(rng, parameter, words)
        properties[parameter] = schema
        if arguments and rng.random() < 0.15:
            continue  # optional and not mentioned
        arguments[parameter] = value
        spoken.append(_spoken(rng, parameter, value))
    description = rng.choice(
        (
            f"{verb.capitalize()} the {noun}.",
            f"{verb.capitalize()} a {noun}",
            f"Can {verb} the {noun}.",
            "",
            rambling(rng, words),
        )
    )
    tool = Tool(name, description, _schema(rng, properties, list(arguments)))
    forms = EXPLICIT if rng.random() < 0.5 else ACTION_FORMS
    phrasing = pick(rng, forms, split)
    text = fill(phrasing, V=verb.capitalize(), v=verb, n=noun, f=name, a=" and ".join(spoken))
    result = rng.choice(
        (
            dump(rng, {"status": "ok"}),
            "ok",
            "done",
            dump(rng, {"result": _result_value(rng, words)}),
            dump(rng, {"success": True}),
            dump(rng, {"error": f"no such {noun}"}),
        )
    )
    first = next(iter(arguments))
    value = arguments[first]
    call = call_of(name, arguments)
    parameter, shown = first, value if isinstance(value, (str, int)) else str(value)
    return Request(text, phrasing, tool, call, f"The result of {name}", result, parameter, shown)


def bare(rng: Random, split: Split, words: WordSource) -> Request:
    """A function without parameters."""
    verb, noun = rng.choice(QUERY_VERBS), function_noun(rng, split, words)
    name = function_name(rng, verb, noun, words)
    parameters: dict[str, object] | None = (
        {"type": "object", "properties": {}} if rng.random() < 0.6 else None
    )
    tool = Tool(name, rng.choice((f"{verb.capitalize()} the {noun}.", f"Returns the {noun}")), parameters)
    if rng.random() < 0.5:
        phrasing = pick(rng, EXPLICIT_BARE, split)
        text = fill(phrasing, f=name)
    else:
        phrasing = pick(rng, FRAMES, split)
        text = fill(phrasing, x=f"the {noun}")
    result = dump(rng, {noun: _result_value(rng, words)})
    return Request(text, phrasing, tool, ToolCall(name, "{}"), f"The {noun}", result, "", "")


def _parameter_names(rng: Random, words: WordSource) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < rng.choice((1, 1, 2, 2, 3)):
        names[parameter_name(rng, words)] = None
    return list(names)


def _typed_value(rng: Random, parameter: str, words: WordSource) -> tuple[dict[str, object], object]:
    chance = rng.random()
    shown = f"The {parameter.replace('_', ' ')}"
    if chance < 0.3:
        return _described(rng, rng.choice(("integer", "number")), shown, words), rng.randint(0, 999)
    if chance < 0.42:
        options = words.distinct_words(rng, rng.randint(2, 4))
        return {"type": "string", "enum": options}, rng.choice(options)
    if chance < 0.48:
        return _described(rng, "boolean", shown, words), rng.random() < 0.5
    return _described(rng, "string", shown, words), value_for(rng, words)


def _spoken(rng: Random, parameter: str, value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, str) and rng.random() < 0.3:
        text = f'"{text}"'
    name = parameter.replace("_", " ") if rng.random() < 0.5 else parameter
    return rng.choice((f"{name} {text}", f"{name} = {text}", f"{name}={text}", f"{name} set to {text}"))
