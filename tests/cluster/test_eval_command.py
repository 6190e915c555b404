"""``antiphon eval`` against a scripted server: what is asked, how it is judged, what is printed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from antiphon.cluster.cli import app
from antiphon.cluster.eval_client import EvaluationFailed
from antiphon.cluster.eval_run import built_in_questions
from antiphon.cluster.question_sets import QuestionSetError, read_question_set
from antiphon.demo.dialogue import Expect
from antiphon.demo.mixture import SKILLS

Reply = dict[str, Any] | tuple[int, dict[str, str], str]
"""A message of a chat completion, or (status, headers, text)."""
Script = Callable[[dict[str, Any]], Reply]


class ScriptedServer:
    """A chat API whose answers are a function of the request; keeps what it was asked."""

    def __init__(self) -> None:
        self.script: Script = lambda body: {"content": "4"}
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self._send(200, {}, json.dumps({"data": [{"id": "scripted"}]}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append(body)
                outer.headers.append(dict(self.headers))
                reply = outer.script(body)
                if isinstance(reply, tuple):
                    self._send(*reply)
                    return
                reason = reply.pop("finish_reason", "tool_calls" if reply.get("tool_calls") else "stop")
                choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant"} | reply}
                self._send(200, {}, json.dumps({"choices": [choice]}))

            def _send(self, status: int, headers: dict[str, str], text: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


def run(server: ScriptedServer, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["eval", "--base-url", server.url, *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def rows(output: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.split()[1:2] != []}


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def called(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_the_table_counts_right_answers_per_skill(server: ScriptedServer, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    path = write_lines(
        tmp_path / "set.jsonl",
        {"messages": [{"role": "user", "content": "2+2?"}], "expect": {"contains": ["4"]}, "skill": "sums"},
        {"messages": [{"role": "user", "content": "2+3?"}], "expect": {"contains": ["5"]}, "skill": "sums"},
        {
            "messages": [{"role": "user", "content": "call f"}],
            "tools": [tool],
            "expect": {"call": {"name": "f", "arguments": '{"x": 1}'}},
        },
    )
    server.script = lambda body: called("f", '{"x":1}') if "tools" in body else {"content": "It is 4."}
    code, output = run(server, "--questions", str(path), "--effort", "low", "--api-key", "secret")
    assert code == 0
    assert rows(output)["sums"][:3] == ["1", "2", "50.0%"]
    assert rows(output)["set"][:3] == ["1", "1", "100.0%"]
    assert rows(output)["well_formed"][:3] == ["3", "3", "100.0%"]
    assert {body["model"] for body in server.asked} == {"scripted"}
    assert {body["reasoning_effort"] for body in server.asked} == {"low"}
    assert {body["temperature"] for body in server.asked} == {0}
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("So the total is 72.\nAnswer: 1,072", True),
        ("Answer: $1072.00", True),
        ("1072 apples, of which 3 are red", False),
        ("none", False),
    ],
)
def test_a_numeric_answer_is_the_last_number(
    server: ScriptedServer, tmp_path: Path, said: str, right: bool
) -> None:
    line = {"question": "How many apples?", "answer": "Half of 2144 is <<2144/2=1072>>1072.\n#### 1,072"}
    server.script = lambda body: {"content": said}
    _, output = run(server, "--questions", str(write_lines(tmp_path / "gsm8k.jsonl", line)))
    assert rows(output)["gsm8k"][0] == str(int(right))
    assert "#### 1,072" not in json.dumps(server.asked)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("Answer: B", True),
        ("It could be A.\n\n**Answer: (B)**", True),
        (r"The answer is $\boxed{\text{B}}$.", True),
        ("B", True),
        ("Answer: C", False),
        ("Blue, because of the air.", False),
    ],
)
def test_multiple_choice_is_judged_by_the_letter(
    server: ScriptedServer, tmp_path: Path, said: str, right: bool
) -> None:
    line = {"question": "The sky is", "choices": ["red", "blue", "green"], "answer": "B"}
    server.script = lambda body: {"content": said}
    _, output = run(server, "--questions", str(write_lines(tmp_path / "sky.jsonl", line)))
    assert rows(output)["sky"][0] == str(int(right))
    assert "A) red\nB) blue\nC) green" in server.asked[0]["messages"][0]["content"]


@pytest.mark.parametrize("answer", ["B", "b", 1, "blue"])
def test_the_right_option_is_given_as_letter_number_or_text(tmp_path: Path, answer: str | int) -> None:
    line = {"question": "The sky is", "choices": ["red", "blue", "green"], "answer": answer}
    (question,) = read_question_set(write_lines(tmp_path / "sky.jsonl", line))
    assert question.expect == Expect(choice="B")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": "q"}', "answer"),
        ('{"question": "q", "answer": "none"}', "no number"),
        ('{"question": "q", "choices": ["a"], "answer": "A"}', "2 to 26"),
        ('{"question": "q", "choices": ["a", "b"], "answer": "C"}', "none of the 2"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "none of the 2"),
        ('{"question": "q", "answer": 1, "subject": "x"}', "subject"),
        ('{"question": "q", "answer": 1, "effort": "huge"}', "huge"),
        ('{"messages": [], "expect": {"sounds": "good"}}', "sounds"),
        ("[1]", "JSON object"),
        ("{", "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "q", "answer": 1}\n' + line + "\n")
    with pytest.raises(QuestionSetError, match=r"set\.jsonl, line 2") as caught:
        read_question_set(path)
    assert complaint in str(caught.value)


def test_a_missing_an_empty_and_a_binary_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", "empty", "binary"):
        with pytest.raises(QuestionSetError, match=name):
            read_question_set(tmp_path / f"{name}.jsonl")


def test_a_line_of_messages_takes_its_skill_from_the_file(tmp_path: Path) -> None:
    line = {"messages": [{"role": "user", "content": "hi"}], "expect": {"number": "3"}}
    (question,) = read_question_set(write_lines(tmp_path / "mine.jsonl", line))
    assert question.skill == "mine"
    assert question.expect == Expect(number="3")


def test_a_busy_server_is_asked_again_and_a_failure_is_counted(
    server: ScriptedServer, tmp_path: Path
) -> None:
    path = write_lines(
        tmp_path / "set.jsonl", {"question": "busy", "answer": 4}, {"question": "broken", "answer": 4}
    )

    def script(body: dict[str, Any]) -> Reply:
        if "broken" in body["messages"][0]["content"]:
            return 500, {}, "out of order"
        return (429, {"retry-after": "0"}, "busy") if len(server.asked) < 4 else {"content": "Answer: 4"}

    server.script = script
    code, output = run(server, "--questions", str(path), "--concurrency", "1")
    assert code == 0
    assert rows(output)["set"][:2] == ["1", "2"]
    assert "1 questions were not answered; the first: 500: out of order" in output


def test_an_answer_cut_off_at_its_length_is_wrong(server: ScriptedServer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "set.jsonl", {"question": "q", "answer": 4})
    server.script = lambda body: {"content": "4", "finish_reason": "length"}
    _, output = run(server, "--questions", str(path), "--max-tokens", "7")
    assert rows(output)["set"][:2] == ["0", "1"]
    assert rows(output)["well_formed"][:2] == ["0", "1"]
    assert server.asked[0]["max_completion_tokens"] == 7


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_server_that_answers_nothing_is_an_error(
    server: ScriptedServer, tmp_path: Path, status: int
) -> None:
    path = write_lines(tmp_path / "set.jsonl", {"question": "q", "answer": 4})
    server.script = lambda body: (status, {}, "no")
    with pytest.raises(EvaluationFailed, match=f"{server.url}.*{status}: no"):
        run(server, "--questions", str(path))


def test_wrong_answers_and_the_table_are_written(server: ScriptedServer, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "set.jsonl", {"question": "two", "answer": 2}, {"question": "four", "answer": 4}
    )
    server.script = lambda body: {"content": "4", "reasoning": "easy"}
    wrong, table = tmp_path / "wrong.jsonl", tmp_path / "table.json"
    run(server, "--questions", str(path), "--answers", str(wrong), "--output", str(table))
    (line,) = [json.loads(text) for text in wrong.read_text().splitlines()]
    assert line["messages"][0]["content"].startswith("two")
    assert line["got"]["content"] == "4"
    assert line["got"]["reasoning"] == "easy"
    assert json.loads(table.read_text())["set"] == {"right": 1, "total": 2}


def test_built_in_questions_are_asked_per_skill_and_efforts_compared(server: ScriptedServer) -> None:
    thoughts = {"low": "a", "medium": "a b", "high": "a b c"}
    server.script = lambda body: {"content": "I don't know.", "reasoning": thoughts[body["reasoning_effort"]]}
    code, output = run(server, "--per-skill", "3", "--skill", "refusal", "--skill", "tools")
    assert code == 0
    assert rows(output)["refusal"] == ["3", "3", "100.0%", "90.0%"]
    assert rows(output)["tools"][1] == "3"
    assert rows(output)["effort"][:2] == ["3", "3"]
    assert len(server.asked) == 6 + 9
    assert sum("tools" in body for body in server.asked) == 3


def test_built_in_questions_cover_every_skill_and_need_no_date_of_their_own() -> None:
    questions = built_in_questions(12, list(SKILLS))
    assert {question.skill for question in questions} == set(SKILLS)
    assert not any("Today is" in json.dumps(question.to_json()["expect"]) for question in questions)


def test_an_unknown_skill_is_refused(server: ScriptedServer) -> None:
    code, output = run(server, "--skill", "poetry")
    assert code == 2
    assert "poetry" in output
