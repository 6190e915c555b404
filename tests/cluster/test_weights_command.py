"""``antiphon weights``: what is in the folder of converted weights, and room in it."""

from __future__ import annotations

import os
from pathlib import Path

from typer.testing import CliRunner

from antiphon.cluster.cli import app
from antiphon.cluster.rank_assembly import weight_cache
from antiphon.configs.schema import DeploymentConfig


def filled(directory: Path) -> Path:
    for age, name in enumerate(("new", "old")):
        path = directory / f"{name}.weights"
        path.write_bytes(bytes(2**20))
        os.utime(path, (1e9 - age, 1e9 - age))
    (directory / "half.weights.partial").touch()
    return directory


def test_files_are_listed_by_use_and_the_oldest_go(tmp_path: Path) -> None:
    directory, cli = filled(tmp_path), CliRunner()
    listed = cli.invoke(app, ["weights", "list", str(directory)])
    assert listed.exit_code == 0
    assert [line.split()[-1] for line in listed.output.splitlines()[:2]] == ["old.weights", "new.weights"]
    assert "0.00 GiB in 2 files" in listed.output
    pruned = cli.invoke(app, ["weights", "prune", str(directory), "--limit-gib", str(1.5 / 1024)])
    assert pruned.exit_code == 0
    assert "old.weights" in pruned.output
    assert [path.name for path in directory.iterdir()] == ["new.weights"]
    assert cli.invoke(app, ["weights", "prune", str(directory), "--limit-gib", "0"]).exit_code == 0
    assert list(directory.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["weights", "list", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "nowhere: no such folder" in str(result.exception)


def test_workers_take_the_folder_and_the_limit_of_the_configuration(tmp_path: Path) -> None:
    def cache_of(settings: dict[str, object]) -> object:
        return weight_cache(
            DeploymentConfig.model_validate({"model": {"path": "m"}, "weight_cache": settings})
        )

    assert cache_of({}) is None
    cache = weight_cache(
        DeploymentConfig.model_validate(
            {"model": {"path": "m"}, "weight_cache": {"directory": "~/converted", "limit_gib": 0.5}}
        )
    )
    assert cache is not None
    assert (cache.directory, cache.limit_bytes) == (Path.home() / "converted", 2**29)
