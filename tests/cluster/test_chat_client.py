"""``antiphon chat`` against a scripted server: what it sends, what it shows, what it remembers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from antiphon.cluster.cli_chat import DIM, PLAIN, ChatClient, ChatFailed, ChatOptions, converse

Script = list[list[dict[str, Any]]]


class ScriptedServer:
    """Answers each chat request with the next script of deltas; keeps the request bodies."""

    def __init__(self) -> None:
        self.scripts: Script = []
        self.bodies: list[dict[str, Any]] = []
        self.authorization: list[str | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send("application/json", json.dumps({"data": [{"id": "gpt-oss-tiny"}]}).encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.bodies.append(json.loads(body))
                server.authorization.append(self.headers.get("Authorization"))
                script = server.scripts.pop(0)
                if "status" in script[0]:
                    error = json.dumps({"error": {"message": script[0]["message"]}}).encode()
                    self._send("application/json", error, script[0]["status"])
                    return
                lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in script]
                self._send(
                    "text/event-stream", (": keep-alive\n\n" + "".join(lines) + "data: [DONE]\n\n").encode()
                )

            def _send(self, kind: str, content: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    running = ScriptedServer()
    yield running
    running.close()


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[ChatClient]:
    with ChatClient(server.url, None, ChatOptions()) as chat:
        yield chat


def test_reasoning_and_answer_come_apart_and_the_model_is_asked_for(
    server: ScriptedServer, client: ChatClient
) -> None:
    server.scripts = [
        [delta(role="assistant", content=""), delta(reasoning="hm"), delta(content="a"), delta(content="b")]
    ]
    assert list(client.ask("q")) == [("reasoning", "hm"), ("content", "a"), ("content", "b")]
    assert server.bodies[0]["model"] == "gpt-oss-tiny"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "q"}]
    assert "temperature" not in server.bodies[0]


def test_options_and_key_are_sent(server: ScriptedServer) -> None:
    server.scripts = [[delta(content="x")]]
    options = ChatOptions(model="m", effort="high", max_tokens=5, temperature=0.0)
    with ChatClient(server.url + "/", "secret", options) as chat:
        assert list(chat.ask("q"))
    body = server.bodies[0]
    assert (body["model"], body["reasoning_effort"], body["max_completion_tokens"]) == ("m", "high", 5)
    assert body["temperature"] == 0.0
    assert server.authorization == ["Bearer secret"]


def test_the_conversation_is_kept_without_its_reasoning(server: ScriptedServer, client: ChatClient) -> None:
    server.scripts = [[delta(reasoning="hm"), delta(content="one")], [delta(content="two")]]
    for question in ("first", "second"):
        assert list(client.ask(question))
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
    ]


def test_a_turn_that_fails_is_told_and_forgotten(server: ScriptedServer, client: ChatClient) -> None:
    server.scripts = [
        [{"status": 503, "message": "not ready"}],
        [delta(content="par"), {"error": {"message": "the worker died"}}],
        [delta(content="fine")],
    ]
    with pytest.raises(ChatFailed, match="503: not ready"):
        list(client.ask("one"))
    with pytest.raises(ChatFailed, match="the worker died"):
        list(client.ask("two"))
    assert list(client.ask("three")) == [("content", "fine")]
    assert server.bodies[2]["messages"] == [{"role": "user", "content": "three"}]


def test_a_terminal_sees_reasoning_dimmed(
    server: ScriptedServer,
    client: ChatClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.scripts = [[delta(reasoning="hm"), delta(content="ok")]] * 2
    converse(client, "q")
    assert capsys.readouterr().out == "hm\nok\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    converse(client, "q")
    assert capsys.readouterr().out == f"{DIM}hm\n{PLAIN}ok{PLAIN}\n"


def test_the_prompt_goes_on_after_an_error_until_end_of_file(
    server: ScriptedServer,
    client: ChatClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.scripts = [[{"status": 429, "message": "busy"}], [delta(content="ok")]]
    typed = iter(["one", "", "two"])

    def read(prompt: str) -> str:
        text = next(typed, None)
        if text is None:
            raise EOFError
        return text

    monkeypatch.setattr("builtins.input", read)
    converse(client, None)
    seen = capsys.readouterr()
    assert "429: busy" in seen.err
    assert "ok" in seen.out
    assert len(server.bodies) == 2
