"""Speaks to any OpenAI-compatible server: finds out what it can do, and sends one request of a session."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import httpx
import orjson

from antiphon.benchmarks.serve.arrivals import WorkloadError
from antiphon.benchmarks.serve.observation import Observation, parse_server_timing
from antiphon.benchmarks.serve.prompts import ids_of, text_of
from antiphon.benchmarks.serve.stream import Endpoint, StreamFailed, post_stream, resolve
from antiphon.benchmarks.serve.workload import Segment, Turn
from antiphon.protocol.errors import AntiphonError

Kind = Literal["token-ids", "chat"]
PROBE_TIMEOUT_S = 60.0


class ServerUnusable(AntiphonError):
    """The server cannot be measured; the message says what it answered."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how it is asked."""

    base_url: str
    kind: Kind
    model: str
    api_key: str | None = None
    force_length: bool = True
    """Send ``ignore_eos`` and ``min_tokens``, so that an answer is as long as asked."""
    overhead_tokens: int = 0
    """Chat: tokens that the format puts around a user message."""
    timeout_s: float = 600.0
    extra: Mapping[str, object] | None = None
    """Further fields of every request's body."""
    further_urls: tuple[str, ...] = ()
    """Of replicas of the same server; sessions take turns among all."""

    @property
    def path(self) -> str:
        """The endpoint that is measured."""
        return "/v1/completions" if self.kind == "token-ids" else "/v1/chat/completions"


class Conversation:
    """The part of a session that has been said."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._segments: list[Segment] = []
        self._messages: list[dict[str, str]] = []

    def prompt(self, turn: Turn) -> tuple[dict[str, object], int]:
        """(the body's fields that hold the prompt of this turn, its tokens as asked)."""
        if self._target.kind == "token-ids":
            self._segments += turn.added
            return {"prompt": ids_of(self._segments)}, sum(s.tokens for s in self._segments)
        overhead = 0 if self._messages else self._target.overhead_tokens
        self._messages.append({"role": "user", "content": text_of(turn.added, overhead)})
        return {"messages": list(self._messages)}, sum(s.tokens for s in turn.added)

    def answered(self, text: str, tokens: int, seed: int) -> None:
        """The server's answer becomes history.

        Of a token-id prompt the server gives no ids back, so random ones stand for the answer: its length is
        right, and it is no prefix hit.
        """
        if self._target.kind == "token-ids":
            self._segments.append(Segment(seed, tokens))
        else:
            self._messages.append({"role": "assistant", "content": text})


class Client:
    """Sends requests; one connection each, so that no request waits for another's."""

    def __init__(self, target: Target) -> None:
        self._target = target
        urls = (target.base_url, *target.further_urls)
        self._endpoints = [Endpoint.parse(url, target.path, target.api_key) for url in urls]
        self._tls = ssl.create_default_context() if any(each.tls for each in self._endpoints) else None

    async def resolve(self) -> None:
        """Look the hosts up once, before the first request.

        Raises:
            ServerUnusable: it has no address that takes a connection.
        """
        try:
            self._endpoints = [await resolve(endpoint) for endpoint in self._endpoints]
        except StreamFailed as error:
            raise ServerUnusable(f"{self._target.base_url}: {error}") from error

    def body(self, prompt: dict[str, object], output_tokens: int) -> bytes:
        """The JSON of one request."""
        limit = "max_tokens" if self._target.kind == "token-ids" else "max_completion_tokens"
        fields: dict[str, object] = {
            "model": self._target.model,
            **prompt,
            limit: output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._target.force_length:
            fields |= {"ignore_eos": True, "min_tokens": output_tokens}
        return orjson.dumps(fields | dict(self._target.extra or {}))

    async def send(self, observation: Observation, body: bytes) -> str:
        """Send one request, fill in what is observed, return the answer's text. Failures are observations."""
        reader = _Reader(observation)
        endpoint = self._endpoints[observation.session % len(self._endpoints)]
        tls = self._tls if endpoint.tls else None
        observation.sent_s = time.monotonic()
        try:
            head, error_body = await post_stream(endpoint, body, reader.event, self._target.timeout_s, tls)
        except StreamFailed as error:
            observation.error = str(error)
        else:
            if head.status != 200:
                observation.error = f"HTTP {head.status}: {_message(error_body)}"
            observation.stages_s |= parse_server_timing(head.headers.get("server-timing", ""))
            reader.close()
        observation.ended_s = time.monotonic()
        return "".join(reader.text)


class _Reader:
    """Turns events into figures of one observation."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._events = 0
        self._whole = False
        self.text: list[str] = []

    def event(self, now_s: float, data: bytes) -> None:
        """One event's data, read at ``now_s``."""
        observation = self._observation
        if data == b"[DONE]":
            self._whole = True
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise StreamFailed(f"an event that is no JSON: {error}") from error
        if not isinstance(chunk, dict):
            raise StreamFailed("an event that is no JSON object")
        if isinstance(failure := chunk.get("error"), dict):
            observation.error = f"event: {str(failure.get('message', failure))[:200]}"
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage(usage)
        carries = False
        for choice in chunk.get("choices") or ():
            if not isinstance(choice, dict):
                raise StreamFailed("an event of another form")
            delta = choice.get("delta") or {}
            visible = choice.get("text") or delta.get("content")
            hidden = delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls")
            carries = carries or bool(visible or hidden)
            if visible:
                self.text.append(visible)
        if carries:
            self._events += 1
            observation.saw_output(now_s)

    def close(self) -> None:
        """The answer has ended: say what is missing."""
        observation = self._observation
        if observation.error is None and not self._whole:
            observation.error = "the stream ended without [DONE]"
        if observation.error is None and observation.first_s is None:
            observation.error = "no event carried output"
        if not observation.usage_reported:
            observation.input_tokens, observation.output_tokens = observation.input_asked, self._events

    def _usage(self, usage: dict[str, object]) -> None:
        observation = self._observation
        if not (isinstance(prompt := usage.get("prompt_tokens"), int)):
            return
        observation.input_tokens = prompt
        if isinstance(completion := usage.get("completion_tokens"), int):
            observation.output_tokens = completion
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
            observation.cached_tokens = cached
        observation.usage_reported = True


async def prepare(
    base_url: str,
    *,
    kind: Kind | None,
    model: str | None,
    api_key: str | None,
    force_length: bool,
    timeout_s: float,
) -> Target:
    """Ask the server what it serves and takes; ``kind`` None prefers token ids.

    Args:
        base_url: one, or those of replicas with ``+`` between them, of which the first is asked.

    Raises:
        ServerUnusable: it cannot be reached, or answers the probes with errors.
        WorkloadError: the URL is no URL.
    """
    first, *others = base_url.split("+")
    root = Endpoint.parse(first, "", api_key)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    scheme, host = ("https" if root.tls else "http"), (f"[{root.host}]" if ":" in root.host else root.host)
    url = f"{scheme}://{host}:{root.port}{root.path}"
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=PROBE_TIMEOUT_S, trust_env=False
    ) as http:
        try:
            name = model or await _served_model(http)
            target = Target(url, kind or "token-ids", name, api_key, force_length, timeout_s=timeout_s)
            if kind is None and not await _takes_token_ids(http, target):
                target = replace(target, kind="chat")
            if target.kind == "chat":
                target = replace(target, overhead_tokens=await _format_overhead(http, target))
            target = replace(target, further_urls=tuple(others))
        except httpx.HTTPError as error:
            raise ServerUnusable(f"{url}: {error or type(error).__name__}") from error
    return target


async def _served_model(http: httpx.AsyncClient) -> str:
    document = _checked(await http.get("/v1/models"))
    try:
        return str(document["data"][0]["id"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError) as error:
        raise ServerUnusable(f"{http.base_url}: /v1/models lists no model") from error


async def _takes_token_ids(http: httpx.AsyncClient, target: Target) -> bool:
    body = {"model": target.model, "prompt": ids_of([Segment(0, 4)]), "max_tokens": 1}
    return (await http.post("/v1/completions", json=body)).is_success


async def _format_overhead(http: httpx.AsyncClient, target: Target) -> int:
    """Tokens around one user message; measured at two lengths, which must agree."""
    overheads = []
    for tokens in (8, 64):
        messages = [{"role": "user", "content": text_of([Segment(0, tokens)], 0)}]
        overheads.append(await _prompt_tokens(http, target, messages) - tokens)
    if overheads[0] != overheads[1] or overheads[0] < 0:
        raise ServerUnusable(
            f"{http.base_url}: this vocabulary does not read one word as one token (8 and 64 words give "
            f"{overheads[0]:+d} and {overheads[1]:+d} tokens); measure it with token-id prompts"
        )
    return overheads[0]


async def _prompt_tokens(http: httpx.AsyncClient, target: Target, messages: list[dict[str, str]]) -> int:
    body = {"model": target.model, "messages": messages}
    counted = await http.post("/tokenize", json=body)
    if counted.is_success and isinstance(count := _checked(counted).get("count"), int):
        return count
    answer = _checked(await http.post("/v1/chat/completions", json=body | {"max_completion_tokens": 1}))
    usage = answer.get("usage")
    if not isinstance(usage, dict) or not isinstance(tokens := usage.get("prompt_tokens"), int):
        raise ServerUnusable(f"{http.base_url}: neither /tokenize nor usage tells the length of a prompt")
    return tokens


def _checked(response: httpx.Response) -> dict[str, object]:
    if response.is_error:
        raise ServerUnusable(f"{response.url}: HTTP {response.status_code}: {_message(response.content)}")
    try:
        document = response.json()
    except ValueError as error:
        raise ServerUnusable(f"{response.url}: not JSON") from error
    if not isinstance(document, dict):
        raise ServerUnusable(f"{response.url}: not a JSON object")
    return document


def _message(body: bytes) -> str:
    try:
        document = orjson.loads(body)
        return str(document["error"]["message"])[:200]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip() or "no body"


__all__ = ["Client", "Conversation", "Kind", "ServerUnusable", "Target", "WorkloadError", "prepare"]
