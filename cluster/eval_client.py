"""Asks a running server the questions of a set, through its chat API, and judges what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from antiphon.demo.dialogue import AssistantTurn, ToolCall
from antiphon.demo.evaluate import Verdict, is_right
from antiphon.demo.questions import Question
from antiphon.protocol.errors import AntiphonError

FINISHED = ("stop", "tool_calls")
RETRIED = (429, 503)
ATTEMPTS = 5


class EvaluationFailed(AntiphonError):
    """The server cannot be reached or refuses to answer at all; names it and what it said."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server to ask, and how.

    Attributes:
        base_url: up to and with ``/v1``, as OpenAI's SDKs take it.
        model: None is the first one that the server lists.
        concurrency: requests in flight.
        max_tokens: longest answer, reasoning included; None leaves it to the server.
        temperature: 0 is greedy.
        effort: ``reasoning_effort`` of every question; None takes each question's own.
        timeout_s: longest wait for one answer.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = None
    concurrency: int = 8
    max_tokens: int | None = None
    temperature: float = 0.0
    effort: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """One answer; ``reply`` is None where the server failed, and ``problem`` then says how."""

    reply: AssistantTurn | None
    finished: bool
    problem: str | None = None
    completion_tokens: int = 0

    def verdict(self, question: Question) -> Verdict:
        """Right and well-formed: it ended by itself with a text or a call, and is what is expected."""
        reply = self.reply
        spoke = self.finished and reply is not None and (reply.final is not None or reply.call is not None)
        right = spoke and reply is not None and is_right(question.expect, reply)
        return Verdict(question, spoke, right, reply)


class EvaluationClient:
    """Asks one server; use as an async context manager."""

    def __init__(self, options: ServerOptions, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._options, self._model = options, options.model
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._http = httpx.AsyncClient(
            base_url=options.base_url.rstrip("/"),
            headers=headers,
            timeout=httpx.Timeout(options.timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=options.concurrency),
            trust_env=False,
            transport=transport,
        )

    async def __aenter__(self) -> EvaluationClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The model that is asked.

        Raises:
            EvaluationFailed: the server cannot be reached, or lists none.
        """
        if self._model is None:
            try:
                response = await self._http.get("/models")
                response.raise_for_status()
                self._model = str(response.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
                text = f"{self._options.base_url}: no list of models: {error or type(error).__name__}"
                raise EvaluationFailed(text) from error
        return self._model

    async def ask_all(
        self, questions: Sequence[Question], answered: Callable[[], None] = lambda: None
    ) -> list[ServerAnswer]:
        """Answers in the order of the questions; ``answered`` is called after each.

        Raises:
            EvaluationFailed: the server cannot be reached, or knows neither us nor the model.
        """
        model, slots = await self.model(), asyncio.Semaphore(self._options.concurrency)

        async def one(question: Question) -> ServerAnswer:
            async with slots:
                answer = await self._ask(model, question)
            answered()
            return answer

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(question)) for question in questions]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # one is enough: the others say the same
        return [task.result() for task in tasks]

    async def _ask(self, model: str, question: Question) -> ServerAnswer:
        body = self._body(model, question)
        for attempt in range(ATTEMPTS):
            try:
                response = await self._http.post("/chat/completions", json=body)
            except httpx.TransportError as error:
                return ServerAnswer(None, False, f"{type(error).__name__}: {error}")
            if response.status_code not in RETRIED or attempt == ATTEMPTS - 1:
                break
            await asyncio.sleep(_retry_after_s(response, attempt))
        if response.status_code in (401, 403, 404):
            raise EvaluationFailed(f"{self._options.base_url}: {response.status_code}: {response.text[:500]}")
        if response.is_error:
            return ServerAnswer(None, False, f"{response.status_code}: {response.text[:500]}")
        try:
            return _answer(response.json())
        except (ValueError, KeyError, IndexError, TypeError) as error:
            return ServerAnswer(None, False, f"not a chat completion: {error!r}")

    def _body(self, model: str, question: Question) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": model,
            "messages": list(question.messages),
            "temperature": options.temperature,
            "reasoning_effort": options.effort or str(question.effort),
        }
        if question.tools:
            body["tools"] = list(question.tools)
        if options.max_tokens is not None:
            body["max_completion_tokens"] = options.max_tokens
        return body


def _retry_after_s(response: httpx.Response, attempt: int) -> float:
    """What the server asks for, at most 30 s; a growing pause where it says nothing that can be read."""
    try:
        return min(float(response.headers.get("retry-after", "")), 30.0)
    except ValueError:
        return 0.5 * 2.0**attempt


def _answer(document: dict[str, Any]) -> ServerAnswer:
    choice = document["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    call = None
    if calls:
        call = ToolCall(calls[0]["function"]["name"], calls[0]["function"]["arguments"])
    thought = message.get("reasoning") or message.get("reasoning_content") or ""
    content = message.get("content")
    final = content if content else None
    tokens = int((document.get("usage") or {}).get("completion_tokens") or 0)
    finished = choice.get("finish_reason") in FINISHED
    return ServerAnswer(AssistantTurn(thought, final, call), finished, None, tokens)
