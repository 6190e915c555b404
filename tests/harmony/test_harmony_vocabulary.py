"""The shipped vocabulary: unpacked once, checked, never fetched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from antiphon.router.harmony import vocabulary as module
from antiphon.router.harmony.markers import FIRST_SPECIAL, START, VOCABULARY_SIZE
from antiphon.router.harmony.vocabulary import CACHE_VARIABLE, Vocabulary, VocabularyError, ranks_path

_LOAD = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the network was used")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from antiphon.router.harmony.vocabulary import load_vocabulary
print(load_vocabulary().encode("hi"), "torch" in sys.modules)
"""


def test_it_loads_in_a_fresh_process_with_an_empty_cache_and_no_network(tmp_path: Path) -> None:
    environment = {**os.environ, CACHE_VARIABLE: str(tmp_path)}
    environment.pop("TIKTOKEN_ENCODINGS_BASE", None)
    run = [sys.executable, "-c", _LOAD]
    output = subprocess.run(
        run, env=environment, capture_output=True, text=True, check=True, timeout=200
    ).stdout
    assert output.split() == ["[3686]", "False"]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["o200k_base.tiktoken"]


def test_a_damaged_copy_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    path = ranks_path()
    good = path.read_bytes()
    path.write_bytes(good[:1000])
    assert ranks_path() == path
    assert path.read_bytes() == good


def test_an_intact_copy_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    before = ranks_path().stat()
    after = ranks_path().stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_no_folder_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked))
    with pytest.raises(VocabularyError, match=f"{blocked}.*{CACHE_VARIABLE}"):
        ranks_path()


def test_a_home_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    assert ranks_path().is_relative_to(tmp_path / f"antiphon-{os.getuid()}")


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", "/nowhere")
    module.load_vocabulary.__wrapped__()
    assert os.environ["TIKTOKEN_ENCODINGS_BASE"] == "/nowhere"


def test_pieces_cover_every_id(vocabulary: Vocabulary) -> None:
    assert len(vocabulary.pieces) == vocabulary.size == VOCABULARY_SIZE
    assert all(vocabulary.pieces[:FIRST_SPECIAL])
    assert vocabulary.pieces[START] == b"<|start|>"
    assert vocabulary.pieces[VOCABULARY_SIZE - 1].startswith(b"<|reserved_")


@pytest.mark.parametrize(
    "text", ["", "hello", " <|end|>", "naïve 👩‍🔬\r\n\t x", "\x00", "a" * 5000, "思考" * 3000]
)
def test_text_survives(vocabulary: Vocabulary, text: str) -> None:
    token_ids = vocabulary.encode(text)
    assert vocabulary.decode(token_ids) == text
    assert all(token < FIRST_SPECIAL for token in token_ids)


def test_lone_surrogates_are_replaced(vocabulary: Vocabulary) -> None:
    assert vocabulary.decode(vocabulary.encode("a\ud800b")) == "a�b"


def test_only_known_markers_are_markers(vocabulary: Vocabulary) -> None:
    token_ids = vocabulary.encode_marked("<|start|>assistant<|no_such|><|start|")
    assert token_ids.count(START) == 1
    assert vocabulary.decode(token_ids) == "<|start|>assistant<|no_such|><|start|"


def test_words_of_ordinary_length_are_never_cut(vocabulary: Vocabulary) -> None:
    text = "ordinary words, " * 500 + "x" * 900 + " " * 900 + "思考，" * 2000 + "-" * 900
    assert vocabulary.encode(text) == vocabulary._encoding.encode(text, disallowed_special=())


@pytest.mark.parametrize("unit", ["ab", "a\u0301", "!?", " ", "_", "Ж"])
def test_a_megabyte_without_a_break_takes_seconds_not_hours(vocabulary: Vocabulary, unit: str) -> None:
    text = unit * (300_000 // len(unit))
    started = time.process_time()
    token_ids = vocabulary.encode(text)
    assert time.process_time() - started < 10
    assert vocabulary.decode(token_ids) == text
