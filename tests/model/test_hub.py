"""Folders and hub ids: what is returned, what is asked for, and one line per way it can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from antiphon.model.hub import fetch
from antiphon.protocol.errors import CheckpointError


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "http://hub.invalid/x"))


@pytest.fixture
def download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the hub was asked for; ``error`` makes it fail."""
    asked: dict[str, Any] = {"error": None}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(repo_id=repo_id, **options)
        if asked["error"] is not None:
            raise asked["error"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_folder_is_itself(tmp_path: Path, download: dict[str, Any]) -> None:
    assert fetch(str(tmp_path)) == tmp_path
    assert "repo_id" not in download


def test_a_folder_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert fetch("~/model") == tmp_path / "model"


def test_a_folder_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, download: dict[str, Any]
) -> None:
    (tmp_path / "openai" / "gpt-oss-20b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert fetch("openai/gpt-oss-20b") == Path("openai/gpt-oss-20b")
    assert "repo_id" not in download


def test_a_hub_id_is_fetched_with_revision_and_token(tmp_path: Path, download: dict[str, Any]) -> None:
    assert fetch("openai/gpt-oss-20b", revision="abc", token="secret") == tmp_path
    assert download["repo_id"] == "openai/gpt-oss-20b"
    assert download["revision"] == "abc"
    assert download["token"] == "secret"


def test_only_one_copy_of_the_weights_is_asked_for(download: dict[str, Any]) -> None:
    fetch("openai/gpt-oss-20b")
    files = [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00000-of-00002.safetensors",
        "original/model.safetensors",
        "original/config.json",
        "metal/model.bin",
        "tokenizer.json",
        "README.md",
    ]
    wanted = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=download["allow_patterns"], ignore_patterns=download["ignore_patterns"]
    )
    assert list(wanted) == files[:4]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.GatedRepoError("x", response=response(403)), "access is restricted"),
        (errors.RepositoryNotFoundError("x", response=response(404)), "no such repository on the hub"),
        (errors.RevisionNotFoundError("x", response=response(404)), "has no such revision"),
        (errors.LocalEntryNotFoundError("x"), "the hub cannot be reached"),
        (errors.HfHubHTTPError("500 Server\nError", response=response(500)), "cannot be fetched: 500 Server"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_failed_download_is_one_line(error: Exception, text: str, download: dict[str, Any]) -> None:
    download["error"] = error
    with pytest.raises(CheckpointError) as caught:
        fetch("openai/gpt-oss-20b", revision="v2")
    message = str(caught.value)
    assert message.startswith("openai/gpt-oss-20b@v2: ")
    assert text in message
    assert "\n" not in message


def test_without_a_network_the_hub_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real client, switched to offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="not in the local hub cache, and the hub cannot be reached"):
        fetch("openai/gpt-oss-20b")


@pytest.mark.parametrize("path", ["no/such/folder", "./absent", "/absent", "absent", "a b/c", "-x/y"])
def test_a_path_that_is_neither(path: str, download: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="no such folder, and not a hub id"):
        fetch(path)
    assert "repo_id" not in download


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        fetch(str(tmp_path / "model.safetensors"))


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="of hub ids only"):
        fetch(str(tmp_path), revision="main")
