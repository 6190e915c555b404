"""The measurement of how workers start, as far as a machine without a GPU goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.benchmarks import load, start_up
from antiphon.benchmarks.parts import Part


def test_every_part_names_what_exists(tmp_path: Path) -> None:
    chosen = start_up.parts(tmp_path, tmp_path)
    assert len({part.name for part in chosen}) == len(chosen)
    for part in chosen:
        files = [Path(argument) for argument in part.arguments if argument.endswith(".py")]
        assert all(file.is_file() for file in files)
        assert files or "antiphon.benchmarks.load" in part.arguments


def test_loads_are_started_with_options_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(load, "make_checkpoint", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(load, "measure", lambda *_: [])
    for part in start_up.parts(tmp_path, tmp_path):
        if "antiphon.benchmarks.load" in part.arguments:
            assert load.main(part.arguments[2:]) == 0
    assert [like for _, like, _ in seen] == ["gpt-oss-20b", "gpt-oss-20b"]


@pytest.mark.parametrize("failing", [None, "sanitizer", "load of gpt-oss-120b"])
def test_one_part_that_fails_is_told_and_nothing_is_left(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def run(part: Part, deadline: float) -> bool:
        begun.append(part.name)
        return failing is None or not part.name.startswith(failing)

    monkeypatch.setattr(start_up, "build_kernels", lambda _: True)
    monkeypatch.setattr(start_up, "run", run)
    monkeypatch.setattr("antiphon.benchmarks.parts.run", run)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    status = start_up.main(["--out", str(tmp_path / "out"), "--scratch", str(scratch)])
    assert status == (0 if failing is None else 1)
    assert len(begun) == 5
    assert begun[-1].startswith("load of gpt-oss-120b")
    assert list(scratch.iterdir()) == []
