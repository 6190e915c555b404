"""The functions that examples offer: one everyday function and endless generic ones with made-up names.

A function's nouns belong to one split, so that a held-out function has a name that training never showed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from antiphon.demo.dialogue import Split, Tool, ToolCall, split_of
from antiphon.demo.phrasing import FRAMES, dress, fill, pick
from antiphon.demo.skills.knowledge import joined_noun
from antiphon.demo.tables import relation
from antiphon.demo.words import WordSource

ENTITY_PARAMETERS = tuple(
    "name id city country symbol user key item query code title place product company customer topic text "
    "label address host file path account project player team user_id item_id order_id target word value".split()
)
QUERY_VERBS = (
    "get",
    "find",
    "fetch",
    "lookup",
    "check",
    "show",
    "read",
    "search",
    "retrieve",
    "query",
    "load",
)
ACTION_VERBS = (
    "set", "send", "open", "close", "start", "stop", "create", "delete", "add", "remove", "play", "book", "order",
    "update", "cancel", "move", "save", "schedule", "publish", "print", "change", "enable", "disable", "post", "make",
)  # fmt: skip
EXPLICIT = {
    Split.TRAIN: (
        "Call {f} with {a}.", "Use {f} with {a}.", "Please call {f} with {a}.", "Call the function {f} with {a}.",
        "Run {f} with {a}.", "Use the {f} function with {a}.", "Invoke {f} with {a}.", "Use the tool {f} with {a}.",
        "I want you to call {f} with {a}.", "Try {f} with {a}.",
    ),
    Split.HELD_OUT: ("Execute {f} with {a}.", "Please use the {f} tool with {a}.", "Can you call {f} with {a}?"),
}  # fmt: skip
EXPLICIT_BARE = {
    Split.TRAIN: (
        "Call {f}.",
        "Use {f}.",
        "Run {f}.",
        "Please call {f}.",
        "Call the function {f}.",
        "Invoke {f}.",
    ),
    Split.HELD_OUT: ("Execute {f}.", "Please use the {f} tool.", "Can you call {f}?"),
}
QUERY_FORMS = {
    Split.TRAIN: (
        "{V} the {n} of {x}.", "{V} the {n} for {x}.", "Look up the {n} of {x}.", "What {n} does {x} have?",
        "Check the {n} of {x}.", "Show me the {n} of {x}.", "Find the {n} for {x}.", "I need the {n} for {x}.",
        "Can you look up the {n} of {x}?", "What is the {n} for {x}?", "Get me the {n} of {x}.",
        "Can you {v} the {n} of {x}?", "Please {v} the {n} for {x}.",
    ),
    Split.HELD_OUT: (
        "Could you {v} the {n} of {x}?", "Please check the {n} for {x}.", "Can you show me the {n} of {x}?",
        "Find out the {n} of {x}.",
    ),
}  # fmt: skip
ACTION_FORMS = {
    Split.TRAIN: (
        "{V} the {n} with {a}.",
        "Please {v} the {n} with {a}.",
        "{V} a {n} with {a}.",
        "{V} the {n}: {a}.",
        "Can you {v} the {n} with {a}?",
        "I want to {v} a {n} with {a}.",
        "{V} {n}, {a}.",
        "{V} my {n} with {a}.",
    ),
    Split.HELD_OUT: (
        "Could you {v} the {n} with {a}?",
        "I'd like to {v} a {n} with {a}.",
        "Now {v} the {n} with {a}.",
    ),
}
WEATHER_FORMS = {
    Split.TRAIN: (
        "What is the weather in {x}?", "What's the weather in {x}?", "What is the weather like in {x}?",
        "How is the weather in {x}?", "Weather in {x}", "Tell me the weather in {x}.", "Is it raining in {x}?",
        "How warm is it in {x}?", "What's the weather like in {x} today?", "Is it cold in {x}?", "{x} weather?",
        "Can you check the weather in {x}?", "What is the temperature in {x}?", "Do I need an umbrella in {x}?",
        "Get the weather for {x}.", "How's the weather in {x} right now?", "What's the current weather in {x}?",
        "I am going to {x}. What is the weather there?", "Will it rain in {x} today?", "Show me the weather of {x}.",
    ),
    Split.HELD_OUT: (
        "Is it sunny in {x}?", "Could you check the weather in {x}?", "How hot is it in {x}?",
        "What's the weather in {x} now?", "Please tell me what the weather is like in {x}.", "Weather for {x}, please.",
    ),
}  # fmt: skip
CONDITIONS = (
    "sunny",
    "cloudy",
    "rainy",
    "windy",
    "snowy",
    "foggy",
    "clear",
    "stormy",
    "partly cloudy",
    "light rain",
)


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
    """A city, mostly a real one."""
    chance = rng.random()
    if chance < 0.65:
        return rng.choice(list(relation("capital").pairs.values()))
    if chance < 0.8:
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
        described["description"] = rng.choice(
            ("The city", "City name", "City and country", "The place to look up", "Name of the city", "A city",
             "The city and state, e.g. San Francisco, CA", "City and country e.g. Bogotá, Colombia")
        )  # fmt: skip
    properties: dict[str, dict[str, object]] = {parameter: described}
    if rng.random() < 0.25:
        unit = rng.choice(("unit", "units", "format"))
        properties[unit] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    description = rng.choice(
        ("Get the weather.", "Get the current weather in a city.", "Gets the weather for a location.",
         "Returns the weather at a place", "Get current temperature for a given location.", "Weather of a place.",
         "Get weather", "Get the current weather in a given location", "")
    )  # fmt: skip
    return Tool(name, description, _schema(rng, properties, [parameter])), parameter


def weather_result(rng: Random) -> str:
    """What a weather service says."""
    temperature, condition = rng.randint(-20, 42), rng.choice(CONDITIONS)
    if rng.random() < 0.25:
        unit = rng.choice((" degrees", "°C", " C", " degrees Celsius"))
        return rng.choice((f"{condition}, {temperature}{unit}", f"{temperature}{unit} and {condition}"))
    names = rng.choice((("temperature", "condition"), ("temp", "sky"), ("temperature", "conditions"), ("t", "c"),
                        ("temperature_c", "forecast"), ("degrees", "weather"), ("temp_c", "summary")))  # fmt: skip
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
    text = dress(rng, fill(phrasing, x=city), split)
    value = city.lower() if text == text.lower() else city
    call = call_of(tool.name, {parameter: value})
    return Request(
        text, phrasing, tool, call, f"The weather in {value}", weather_result(rng), parameter, value
    )


def function_noun(rng: Random, split: Split, words: WordSource) -> str:
    """A noun for function names; every noun belongs to one split."""
    while True:
        noun = joined_noun(rng, words)
        if (
            len(noun) > 2
            and noun not in ("the", "weather", "you", "and")
            and split_of(f"function {noun}") is split
        ):
            return noun


def function_name(rng: Random, verb: str, noun: str, words: WordSource) -> str:
    """A name as programmers write them."""
    style = rng.random()
    if style < 0.6:
        return f"{verb}_{noun}"
    if style < 0.75:
        return f"{verb}{noun.capitalize()}"
    if style < 0.9:
        return f"{noun}_{verb}" if rng.random() < 0.5 else f"{verb}_{noun}_{words.word(rng)}"
    return noun


def value_for(rng: Random, words: WordSource) -> str:
    """A text argument."""
    chance = rng.random()
    if chance < 0.3:
        return words.person(rng)
    if chance < 0.5:
        return place(rng, words)
    if chance < 0.6:
        return words.title(rng)
    if chance < 0.7:
        return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4)))
    return " ".join(words.distinct_words(rng, rng.choice((1, 1, 1, 2, 3))))


def _described(rng: Random, kind: str, text: str) -> dict[str, object]:
    schema: dict[str, object] = {"type": kind}
    if rng.random() < 0.5:
        schema["description"] = text
    return schema


def query(rng: Random, split: Split, words: WordSource) -> Request:
    """A generic function that looks something up for one entity."""
    verb, noun = rng.choice(QUERY_VERBS), function_noun(rng, split, words)
    parameter = rng.choice(ENTITY_PARAMETERS) if rng.random() < 0.75 else words.word(rng)
    name = function_name(rng, verb, noun, words)
    shown = parameter.replace("_", " ")
    number = parameter.endswith("id") and rng.random() < 0.5
    value: str | int = rng.randint(0, 999) if number else value_for(rng, words)
    described = _described(rng, "integer" if number else "string", f"The {shown}")
    description = rng.choice(
        (f"{verb.capitalize()} the {noun} of a {shown}.", f"Returns the {noun} for a {shown}", f"Get the {noun}.",
         f"Gives the {noun} of the given {shown}.", f"{verb.capitalize()} {noun}", f"The {noun} of a {shown}.")
    )  # fmt: skip
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
        (f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun}", f"Can {verb} the {noun}.", "")
    )
    tool = Tool(name, description, _schema(rng, properties, list(arguments)))
    forms = EXPLICIT if rng.random() < 0.5 else ACTION_FORMS
    phrasing = pick(rng, forms, split)
    text = fill(phrasing, V=verb.capitalize(), v=verb, n=noun, f=name, a=" and ".join(spoken))
    result = rng.choice(
        (dump(rng, {"status": "ok"}), "ok", "done", dump(rng, {"result": _result_value(rng, words)}),
         dump(rng, {"success": True}), dump(rng, {"error": f"no such {noun}"}))
    )  # fmt: skip
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
        names[rng.choice(ENTITY_PARAMETERS) if rng.random() < 0.5 else words.word(rng)] = None
    return list(names)


def _typed_value(rng: Random, parameter: str, words: WordSource) -> tuple[dict[str, object], object]:
    chance = rng.random()
    shown = f"The {parameter.replace('_', ' ')}"
    if chance < 0.3:
        return _described(rng, rng.choice(("integer", "number")), shown), rng.randint(0, 999)
    if chance < 0.42:
        options = words.distinct_words(rng, rng.randint(2, 4))
        return {"type": "string", "enum": options}, rng.choice(options)
    if chance < 0.48:
        return _described(rng, "boolean", shown), rng.random() < 0.5
    return _described(rng, "string", shown), value_for(rng, words)


def _spoken(rng: Random, parameter: str, value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, str) and rng.random() < 0.3:
        text = f'"{text}"'
    name = parameter.replace("_", " ") if rng.random() < 0.5 else parameter
    return rng.choice((f"{name} {text}", f"{name} = {text}", f"{name}={text}", f"{name} set to {text}"))
