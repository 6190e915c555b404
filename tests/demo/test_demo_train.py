"""Training end to end in a few steps: what it leaves, also when it breaks, and how that is installed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.demo import report, score, ship, train
from antiphon.demo.harmony import RETURN
from antiphon.demo.packed import read_packed
from antiphon.demo.report import BEGIN, END
from antiphon.demo.train import SMOKE, Batch, Settings
from antiphon.demo.vocabulary import VOCABULARY_FILE, load_vocabulary
from antiphon.protocol.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("harmony_vocabulary", "quick_answers", "one_thread")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the smoke test's size wants it; training also changes how exact products are."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


@pytest.fixture
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model after two steps has nothing to say, at length."""

    def silent(
        model: object, vocabulary: object, prompts: Sequence[list[int]], **_: object
    ) -> list[list[int]]:
        return [[RETURN] for _ in prompts]

    monkeypatch.setattr(score, "generate", silent)


@pytest.fixture(scope="session")
def vocabulary_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped vocabulary and two rows more."""
    content = json.loads(VOCABULARY_FILE.read_text())
    spare = [token for token in range(150_000, 150_100) if token not in set(content["token_ids"])][:2]
    content["token_ids"] = sorted([*content["token_ids"], *spare])
    path = tmp_path_factory.mktemp("vocabulary") / "more.json"
    path.write_text(json.dumps(content))
    return path


def settings(out: Path, **changes: Any) -> Settings:
    small = dataclasses.replace(SMOKE["config"], hidden_size=64, intermediate_size=64, head_dim=16)  # type: ignore[type-var]
    chosen: dict[str, Any] = SMOKE | {
        "steps": 2,
        "rows": 1,
        "row_tokens": 640,
        "score_per_skill": 1,
        "config": small,
    }
    return Settings(out, **chosen | changes)


def test_a_training_leaves_all_that_ships_and_another_goes_on_from_it(
    tmp_path: Path, vocabulary_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train.run(settings(first))
    packed = first / "gpt-oss-tiny.bin.xz"
    assert read_packed(packed).token_ids == load_vocabulary().token_ids
    monkeypatch.setattr(train, "SAVED_EVERY", 1)
    metrics = train.run(settings(second, init=packed, vocabulary=vocabulary_file))
    assert {file.name for file in second.iterdir()} == {
        *("gpt-oss-tiny.bin.xz", "vocabulary.json", "metrics.json", "loss.png", "answers.jsonl")
    }
    assert (second / "vocabulary.json").read_bytes() == vocabulary_file.read_bytes()
    longer = read_packed(second / "gpt-oss-tiny.bin.xz").token_ids
    assert longer == load_vocabulary(vocabulary_file).token_ids
    assert len(longer) == len(load_vocabulary().token_ids) + 2
    kept = json.loads((second / "metrics.json").read_text())
    assert kept["init"] == hashlib.sha256(packed.read_bytes()).hexdigest()
    assert kept["scores"]["well_formed"] == [0, 10]
    assert kept["steps"] == metrics["steps"] == 2


@pytest.mark.parametrize("cause", [RuntimeError("an example could not be made"), KeyboardInterrupt()])
def test_an_early_end_leaves_the_last_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: BaseException
) -> None:
    whole = train.batches

    def breaking(chosen: Settings) -> Iterator[Batch]:
        stream = whole(chosen)
        yield next(stream)
        raise cause

    monkeypatch.setattr(train, "batches", breaking)
    started = train.build_model(settings(tmp_path)).embedding.detach().bfloat16()
    with pytest.raises(type(cause)):
        train.run(settings(tmp_path))
    left = read_packed(tmp_path / "gpt-oss-tiny.bin.xz")
    assert not torch.equal(left.weights["embedding.weight"], started)
    assert (tmp_path / "vocabulary.json").exists()
    with pytest.raises(FileNotFoundError):  # it did not come to its end
        ship.ship(tmp_path)


def test_scores_that_are_missing_are_added_and_everything_is_installed_together(
    tmp_path: Path, vocabulary_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, home = tmp_path / "out", tmp_path / "home"
    home.mkdir()
    train.run(settings(out, vocabulary=vocabulary_file))
    packed, metrics = out / "gpt-oss-tiny.bin.xz", out / "metrics.json"
    content = json.loads(metrics.read_text())
    scores = content.pop("scores")
    metrics.write_text(json.dumps(content))
    for module, name, file in (
        (ship, "PACKED_FILE", packed.name),
        (ship, "DIGEST_FILE", "digest.json"),
        (ship, "VOCABULARY_FILE", "vocabulary.json"),
        (ship, "METRICS_FILE", "kept.json"),
        (ship, "PAGE", "page.md"),
        (report, "METRICS_FILE", "kept.json"),
        (report, "PACKED_FILE", packed.name),
        (report, "PAGE", "page.md"),
    ):
        monkeypatch.setattr(module, name, home / file)
    (home / "page.md").write_text(f"Before.\n{BEGIN}old{END}After.\n")
    with pytest.raises(CheckpointError, match=r"antiphon\.demo\.score --metrics"):
        ship.ship(out)
    asked = ["score", str(packed), "--per-skill", "1", "--metrics", str(metrics)]
    monkeypatch.setattr("sys.argv", asked)
    with pytest.raises(CheckpointError, match="another vocabulary"):
        score.main()
    monkeypatch.setattr("sys.argv", [*asked, "--vocabulary", str(out / "vocabulary.json")])
    score.main()
    assert json.loads(metrics.read_text())["scores"] == scores
    ship.ship(out)
    assert (home / packed.name).read_bytes() == packed.read_bytes()
    assert (home / "vocabulary.json").read_bytes() == vocabulary_file.read_bytes()
    digest = json.loads((home / "digest.json").read_text())["sha256"]
    assert digest == hashlib.sha256(packed.read_bytes()).hexdigest()
    page = (home / "page.md").read_text()
    assert page.startswith("Before.\n")
    assert "| repeat, reverse, count, pick words (`copying`) | 0 of 1: 0.0% | 95.0% |" in page
    assert page.endswith("After.\n")
