"""The clients of a run: what they ask, what an undisturbed deployment answers, what came of each request."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "gpt-oss-tiny"
TIE = 1e-4
"""Two tokens whose log-probabilities differ by less are equally likely."""
LONGEST_TOKEN_BYTES = 48
BOUND_S = 240.0
"""A request that has not ended after this long counts as hanging."""
PATIENCE_S = 1.0
"""Longest pause before a refused request is sent again, whatever Retry-After says."""
WORDS = ("kyrie", "eleison", "gloria", "laus", "honor", "tibi", "rex", "christe", "puerile", "decus")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find a verse.",
        "parameters": {"type": "object", "properties": {"verse": {"type": "string"}}, "required": ["verse"]},
    },
}


def make_cases(rng: random.Random, count: int, *, short: bool = False) -> list[dict[str, Any]]:
    """Greedy chat requests of mixed length, or only ``short`` ones; every fourth offers a tool."""
    cases: list[dict[str, Any]] = []
    for index in range(count):
        words = [rng.choice(WORDS) for _ in range(2 if short else rng.choice((2, 20, 60, 120, 200)))]
        case: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{index}: {' '.join(words)}"}],
            "temperature": 0,
            "max_completion_tokens": rng.choice((1, 2, 4) if short else (1, 4, 16, 64, 110)),
        }
        if index % 4 == 0:
            case["tools"] = [TOOL]
        cases.append(case)
    return cases


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client was told."""

    text: str
    reasoning: str
    tools: tuple[tuple[str, str], ...]
    finish: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Reference:
    """What an undisturbed deployment answers, and how sure it was of each token."""

    answer: Answer
    ties: tuple[tuple[int, float], ...]
    """(bytes of the output up to a token, how much less likely the second best was there), in order."""

    def explains(self, other: Answer) -> bool:
        """Whether another answer leaves this one where two tokens were equally likely.

        KV of generated tokens is computed one by one, and again in chunks after a loss. The sums differ in
        their last bits, which decides between two tokens that are tied.
        """
        mine, theirs = _written(self.answer), _written(other)
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine))
        return any(gap < TIE for until, gap in self.ties if abs(until - same) <= LONGEST_TOKEN_BYTES)


def _written(answer: Answer) -> bytes:
    return (answer.reasoning + answer.text).encode()


@dataclass(slots=True)
class Tally:
    """What came of all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """Answers that said: not now. By status code and whether Retry-After was there."""
    broken: int = 0
    """Connections that ended with a router."""
    wrong: list[str] = field(default_factory=list)
    """Answers that differ from the undisturbed one."""
    unexpected: list[str] = field(default_factory=list)
    """Ends that no fault explains."""
    seconds: list[float] = field(default_factory=list)
    """How long answered requests took, refusals and pauses included."""
    ended_at: list[tuple[float, str]] = field(default_factory=list)
    in_flight: int = 0


class Refused(Exception):
    """The service said: not now."""


class Failed(Exception):
    """The service gave up on a request; the message is the error's code."""


class HungUp(Exception):
    """The client left."""


class Client:
    """Sends requests one after another until the budget is used up."""

    def __init__(
        self,
        index: int,
        seed: int,
        cases: Sequence[dict[str, Any]],
        reference: Sequence[Reference],
        urls: Callable[[], Sequence[str]],
        tally: Tally,
    ) -> None:
        self._rng = random.Random(f"{seed} client {index}")
        self._index = index
        self._cases, self._reference = cases, reference
        self._urls, self._tally = urls, tally
        self._asking: asyncio.Task[Answer] | None = None
        self._waits = False
        """For the first part of a stream."""

    def hang_up(self) -> None:
        """Leave the request that is under way, if it is one of which nothing has come."""
        if self._asking is not None and self._waits:
            self._asking.cancel()

    def _has_begun(self) -> None:
        self._waits = False

    async def run(self, http: httpx.AsyncClient, take: Callable[[], bool]) -> None:
        """Until ``take`` says that enough was asked."""
        while take():
            which = self._rng.randrange(len(self._cases))
            began = time.monotonic()
            self._tally.in_flight += 1
            try:
                async with asyncio.timeout(BOUND_S):
                    outcome = await self._one(http, which)
            except TimeoutError:
                outcome = "hanging"
            finally:
                self._tally.in_flight -= 1
            self._tally.outcomes[outcome] += 1
            self._tally.ended_at.append((time.monotonic(), outcome))
            if outcome == "answered":
                self._tally.seconds.append(time.monotonic() - began)

    async def _one(self, http: httpx.AsyncClient, which: int) -> str:
        """One request to its end, sent again while it is refused or its router dies."""
        rng, body = self._rng, dict(self._cases[which])
        if rng.random() < 0.6:
            body["cache_salt"] = f"{rng.random()}"  # nothing of it is cached anywhere
        body["stream"] = rng.random() < 0.7
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        leaves_after = rng.uniform(0.0, 1.5) if rng.random() < 0.15 else None
        hurried = leaves_after is None and rng.random() < 0.05
        if hurried:
            body["timeout_s"] = rng.uniform(0.1, 1.5)
        while True:
            url = rng.choice(self._urls())
            try:
                async with asyncio.timeout(leaves_after):
                    answer = await self._ask(http, url, body)
            except (TimeoutError, HungUp):
                return "left"
            except Refused as refusal:
                self._tally.refusals[str(refusal)] += 1
                if hurried:  # it may be refused for its deadline, which time does not mend
                    return "deadline"
                await asyncio.sleep(rng.uniform(0.2, PATIENCE_S))
            except httpx.TransportError:
                self._tally.broken += 1
                await asyncio.sleep(rng.uniform(0.1, 0.5))
            except Failed as failure:
                if hurried and str(failure) == "timeout":
                    return "deadline"
                self._tally.unexpected.append(f"case {which}: {failure}")
                return "failed"
            else:
                return self._judge(which, answer)

    async def _ask(self, http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
        """``ask``, which ``hang_up`` ends; raises HungUp then."""
        self._waits = bool(body["stream"])
        self._asking = asyncio.create_task(ask(http, url, body, self._has_begun))
        try:
            await asyncio.wait({self._asking})
            if self._asking.cancelled():
                raise HungUp
            return self._asking.result()
        finally:
            self._asking.cancel()
            self._asking = None

    def _judge(self, which: int, answer: Answer) -> str:
        reference = self._reference[which]
        if answer == reference.answer:
            return "answered"
        if reference.explains(answer):
            return "tied"
        wrong = f"case {which}: {answer} instead of {reference.answer}"
        self._tally.wrong.append(wrong)
        sys.stderr.write(f"chaos: WRONG {wrong}\n")
        return "wrong"


async def ask_reference(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Reference:
    """An undisturbed answer with how likely its second choices were.

    Raises:
        See ``ask``.
    """
    response = await http.post(
        f"{url}/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2}
    )
    _check(response.status_code, response)
    document = response.json()
    until, ties = 0, []
    for token in document["choices"][0]["logprobs"]["content"]:
        best, second = (one["logprob"] for one in token["top_logprobs"])
        until += len(token["bytes"] or b"")
        ties.append((until, best - second))
    return Reference(_whole(document), tuple(ties))


async def ask(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], begun: Callable[[], None] = lambda: None
) -> Answer:
    """One attempt at a request; ``begun`` is called with each token of a stream.

    Raises:
        Refused: 429 or 503 before the first token.
        Failed: any other error of the service.
        httpx.TransportError: the connection ended.
    """
    path = f"{url}/v1/chat/completions"
    if not body.get("stream"):
        response = await http.post(path, json=body)
        _check(response.status_code, response)
        return _whole(response.json())
    async with http.stream("POST", path, json=body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            _check(response.status_code, response)
        return await _streamed(response, begun)


def _check(status: int, response: httpx.Response) -> None:
    if status in (429, 503):
        if "retry-after" not in response.headers:
            raise Failed(f"{status} without Retry-After")
        raise Refused(f"{status} {response.json()['error']['message'][:60]}")
    if status != httpx.codes.OK:
        raise Failed(str(response.json()["error"]["code"]))


def _whole(document: dict[str, Any]) -> Answer:
    message = document["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    return Answer(
        message.get("content") or "",
        message.get("reasoning") or "",
        tuple((call["function"]["name"], call["function"]["arguments"]) for call in calls),
        document["choices"][0]["finish_reason"],
        document["usage"]["completion_tokens"],
    )


async def _streamed(response: httpx.Response, begun: Callable[[], None]) -> Answer:
    text, reasoning, finish, tokens = "", "", "", 0
    calls: dict[int, list[str]] = {}
    done = False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise Failed(str(event["error"]["code"]))
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        for choice in event["choices"]:
            delta = choice["delta"]
            if delta.keys() - {"role", "content"} or delta.get("content"):
                begun()
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            finish = choice["finish_reason"] or finish
            for call in delta.get("tool_calls") or []:
                name, arguments = calls.setdefault(call["index"], ["", ""])
                function = call.get("function") or {}
                calls[call["index"]] = [
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                ]
    if not done:
        raise httpx.RemoteProtocolError("the stream ended before its end")
    return Answer(text, reasoning, tuple((n, a) for n, a in calls.values()), finish, tokens)
