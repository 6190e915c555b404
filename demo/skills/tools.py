"""Calling a function that fits, answering from its result, and not calling one that does not fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from random import Random

from antiphon.demo.dialogue import (
    AssistantTurn,
    Effort,
    Example,
    Expect,
    Split,
    Tool,
    ToolTurn,
    Turn,
    UserTurn,
)
from antiphon.demo.phrasing import by_effort, fill, phrases, pick
from antiphon.demo.skills.arithmetic import arithmetic
from antiphon.demo.skills.chat import chat
from antiphon.demo.skills.copying import copying
from antiphon.demo.skills.functions import Request, bare, call_of, command, place, query, value_for, weather
from antiphon.demo.skills.knowledge import known_fact, unknown
from antiphon.demo.words import WordSource

Maker = Callable[[Random, Split, Effort, WordSource], Example]

AGAIN = phrases("call_again")


def make_request(rng: Random, split: Split, words: WordSource, generic: bool) -> Request:
    """A wish that one function serves: the weather, or a generic function."""
    if not generic:
        return weather(rng, split, words)
    return rng.choices((query, command, bare), (5, 5, 1))[0](rng, split, words)


def offered(rng: Random, split: Split, words: WordSource, request: Request | None) -> tuple[Tool, ...]:
    """The functions on offer: the request's among others whose names differ."""
    others = rng.choice((0, 0, 1, 1, 2, 3, 5)) if request else rng.choice((1, 1, 2, 3))
    tools = [request.tool] if request else []
    taken = request.text.lower() if request else ""
    while others:
        other = make_request(rng, split, words, generic=request is None or rng.random() < 0.85)
        clash = (
            other.tool.name.lower() in {t.name.lower() for t in tools} or "weather" in other.tool.name.lower()
        )
        noun = other.subject.split()[-1 if other.parameter == "" else 1].lower()
        if not clash and noun not in taken.split():
            tools.append(other.tool)
        others -= 1
    rng.shuffle(tools)
    return tuple(tools)


def call_reply(request: Request, effort: Effort) -> AssistantTurn:
    """The thought before a call, and the call."""
    core = f"I call functions.{request.call.name} with {request.call.arguments}."
    lead = "One of the functions fits what the user wants."
    thought = by_effort(effort, core, lead, "The arguments come from the user's words, and none is missing.")
    return AssistantTurn(thought, call=request.call)


def result_sentence(subject: str, result: str) -> str:
    """The final answer that tells a function's result."""
    try:
        value = json.loads(result)
    except json.JSONDecodeError:
        return f"{subject}: {result.rstrip('.')}."
    if not isinstance(value, dict):
        return f"{subject}: {result}."
    if "error" in value:
        return f"The function failed: {value['error']}."
    parts = [f"{key} {_plain(item)}" for key, item in value.items()]
    return f"{subject}: {', '.join(parts)}."


def _plain(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def result_reply(request: Request, effort: Effort) -> AssistantTurn:
    """The thought after a result, and the answer."""
    core = "I tell the result."
    lead = f"The function functions.{request.call.name} has answered."
    thought = by_effort(effort, core, lead, "I copy the values exactly as they are.")
    return AssistantTurn(thought, result_sentence(request.subject, request.result))


def _loop(rng: Random, request: Request) -> tuple[Turn, ...]:
    """A call and its result; many clients do not send the thought back."""
    call = call_reply(request, Effort.LOW)
    if rng.random() < 0.5:
        call = dataclasses.replace(call, analysis="")
    return call, ToolTurn(request.call.name, request.result)


def follow_up(rng: Random, split: Split, words: WordSource, request: Request) -> tuple[Request, str]:
    """The same function again for another value: (new request, phrasing)."""
    is_weather = request.subject.startswith("The weather in")
    value = place(rng, words) if is_weather else value_for(rng, words)
    phrasing = pick(rng, AGAIN, split)
    arguments = json.loads(request.call.arguments) | {request.parameter: value}
    kind = "The weather in" if is_weather else request.subject.rsplit(f" {request.value}", 1)[0]
    again = dataclasses.replace(
        request,
        text=fill(phrasing, x=value),
        call=call_of(request.call.name, arguments),
        subject=f"{kind} {value}",
        value=value,
    )
    return again, phrasing


def _judge(request: Request, after_result: bool) -> Expect:
    if not after_result:
        return Expect(call=request.call)
    sentence = result_sentence("", request.result).lstrip(": ").rstrip(".")
    return Expect(contains=tuple(sentence.removeprefix("The function failed: ").split(", ")))


def _example(
    skill: str, rng: Random, split: Split, effort: Effort, words: WordSource, generic: bool
) -> Example:
    request = make_request(rng, split, words, generic)
    tools = offered(rng, split, words, request)
    turns: tuple[Turn, ...] = (UserTurn(request.text),)
    keys = [f"function {request.tool.name}"] if generic else []
    keys.append(f"function phrasing {request.phrasing}")
    again = isinstance(request.value, str) and request.value and " of " in f" {request.subject} "
    again = again or request.subject.startswith("The weather in")
    if again and rng.random() < 0.15:
        first = (*_loop(rng, request), AssistantTurn("", result_sentence(request.subject, request.result)))
        request, phrasing = follow_up(rng, split, words, request)
        turns = (*turns, *first, UserTurn(request.text))
        keys.append(f"function follow-up {phrasing}")
    after_result = rng.random() < 0.35
    if after_result:
        turns = (*turns, *_loop(rng, request))
    reply = result_reply(request, effort) if after_result else call_reply(request, effort)
    judge = _judge(request, after_result)
    return Example(skill, turns, reply, judge, effort, tools, keys=tuple(keys))


def weather_call(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """The weather function, alone or among others."""
    return _example("tools", rng, split, effort, words, generic=False)


def generic_call(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """A function of any name."""
    return _example("tools_unseen", rng, split, effort, words, generic=True)


def no_call(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """Functions are on offer and none fits: answer, or say that one does not know."""
    makers: tuple[Maker, ...] = (known_fact, arithmetic, copying, chat, unknown)
    example = rng.choices(makers, (3, 2, 2, 2, 3))[0](rng, split, effort, words)
    tools = list(offered(rng, split, words, None))
    text = " ".join(turn.text for turn in example.turns if isinstance(turn, UserTurn)).lower()
    if "weather" not in text and "rain" not in text and "sunny" not in text and rng.random() < 0.5:
        tools.append(weather(rng, split, words).tool)
    fitting = [tool for tool in tools if not _may_fit(tool, text)]
    return dataclasses.replace(example, skill="no_call", tools=tuple(fitting))


def _may_fit(tool: Tool, text: str) -> bool:
    """Whether a word of the function's name or description is in the user's text."""
    vague = {
        "the",
        "of",
        "a",
        "for",
        "get",
        "returns",
        "given",
        "gives",
        "find",
        "show",
        "check",
        "in",
        "city",
        "",
    }
    named = f"{tool.name.replace('_', ' ')} {tool.description}".lower().replace(".", "").split()
    return bool((set(named) - vague) & set(text.replace("?", "").replace(".", "").split()))
