"""``antiphon chat``: a terminal client of the router's own API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import httpx

from antiphon.protocol.errors import AntiphonError

DIM, PLAIN = "\x1b[2m", "\x1b[0m"

Part = tuple[Literal["reasoning", "content"], str]


class ChatFailed(AntiphonError):
    """The server could not be reached or answered with an error."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What is sent with every turn; None leaves it to the server."""

    model: str | None = None
    effort: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


class ChatClient:
    """One conversation with a server: keeps the messages, streams the answers."""

    def __init__(self, url: str, api_key: str | None, options: ChatOptions) -> None:
        self._options = options
        self._messages: list[dict[str, str]] = []
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # An answer may take long to begin, so there is no read timeout; connecting has one.
        timeout = httpx.Timeout(None, connect=5.0)
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout, trust_env=False)
        self._model = options.model

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def ask(self, text: str) -> Iterator[Part]:
        """Send one turn; yields the answer's parts as they arrive. A turn that fails is not remembered.

        Raises:
            ChatFailed: names the server and what it said.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        answer: list[str] = []
        try:
            for kind, piece in self._stream(messages):
                if kind == "content":
                    answer.append(piece)
                yield kind, piece
        except httpx.TransportError as error:
            raise ChatFailed(f"{self._http.base_url}: {error or type(error).__name__}") from error
        self._messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[Part]:
        if self._model is None:
            self._model = self._served_model()
        optional = {
            "reasoning_effort": self._options.effort,
            "max_completion_tokens": self._options.max_tokens,
            "temperature": self._options.temperature,
        }
        body = {"model": self._model, "messages": messages, "stream": True}
        body |= {key: value for key, value in optional.items() if value is not None}
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise ChatFailed(_error_text(response))
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                yield from _parts(json.loads(data))

    def _served_model(self) -> str:
        response = self._http.get("/v1/models")
        if response.is_error:
            raise ChatFailed(_error_text(response))
        return str(response.json()["data"][0]["id"])


def converse(client: ChatClient, prompt: str | None) -> None:
    """Answer one prompt, or read prompts until end of file; errors end the first and not the second."""
    if prompt is not None:
        _print_answer(client, prompt)
        return
    print("Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            continue
        try:
            _print_answer(client, text)
        except ChatFailed as error:
            print(f"antiphon: {error}", file=sys.stderr)
        except KeyboardInterrupt:  # cuts this answer short, the conversation goes on
            print(PLAIN if sys.stdout.isatty() else "")


def _print_answer(client: ChatClient, text: str) -> None:
    colour = sys.stdout.isatty()
    last: str | None = None
    for kind, piece in client.ask(text):
        if kind != last:
            if last is not None:
                print()
            if colour:
                sys.stdout.write(DIM if kind == "reasoning" else PLAIN)
            last = kind
        sys.stdout.write(piece)
        sys.stdout.flush()
    print(PLAIN if colour else "")


def _parts(chunk: dict[str, object]) -> Iterator[Part]:
    """Reasoning and content of one stream chunk."""
    if isinstance(error := chunk.get("error"), dict):
        raise ChatFailed(str(error.get("message", error)))
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices:
        return
    delta = choices[0].get("delta", {})
    if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
        yield "reasoning", str(reasoning)
    if content := delta.get("content"):
        yield "content", str(content)


def _error_text(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:200]}"
