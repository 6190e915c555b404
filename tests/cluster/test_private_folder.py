"""The folder of a private cluster goes, whoever writes into it while it is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from antiphon.cluster import ray_cluster


def test_a_folder_goes_though_something_still_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, removals = tmp_path / "antiphon-1-x", []
    remove = ray_cluster.shutil.rmtree

    def written_meanwhile(path: Path, *, ignore_errors: bool) -> None:
        removals.append(path)
        remove(path, ignore_errors=ignore_errors)
        if len(removals) < 3:
            (folder / "session" / "logs").mkdir(parents=True)

    monkeypatch.setattr(ray_cluster.shutil, "rmtree", written_meanwhile)
    (folder / "session").mkdir(parents=True)
    ray_cluster._remove(folder)
    assert removals == [folder] * 3
    assert not folder.exists()


def test_one_that_does_not_go_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "REMOVAL_S", 0.2)
    folder = tmp_path / "antiphon-1-x"
    folder.mkdir()
    monkeypatch.setattr(ray_cluster.shutil, "rmtree", lambda path, ignore_errors: None)
    with capture_logs() as logs:
        ray_cluster._remove(folder)
    assert [each["folder"] for each in logs] == [str(folder)]
