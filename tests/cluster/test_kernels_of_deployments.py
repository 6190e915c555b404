"""What the worker image builds ahead is enough for every deployment that comes with the project."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from antiphon.cluster.cli import kernels_build
from antiphon.cluster.cli_kernels import LIBRARIES, build_kernels, parse_layout
from antiphon.cluster.layout_check import layout_of, pools
from antiphon.configs.deployment_file import load_deployment
from antiphon.kernels.cuda_library import CudaLibrary

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
def test_the_defaults_of_the_build_cover_it(file: Path) -> None:
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(kernels_build).parameters.items()
    }
    built = {parse_layout(text).name for text in defaults["layouts"].split(",")}
    config = load_deployment(file)
    for _, worker in pools(config):
        if worker.device == "cuda":
            assert layout_of(worker).name in built
            assert worker.kv_cache.page_size_tokens == defaults["page_size"]
            assert worker.max_batch_size <= defaults["max_batch_size"]
            assert Path(config.model.path).name in defaults["models"].split(",")


@pytest.mark.parametrize(("layouts", "splits"), [(["TP1", "EP4 TP4"], False), (["TP1", "TP2"], True)])
def test_the_kernels_of_split_experts_are_built_only_for_layouts_that_split_them(
    layouts: list[str], splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr(CudaLibrary, "build", lambda library: built.append(library.name))
    build_kernels(None, [], layouts, page_size=64, max_batch_size=1)
    names = [library.name for library in LIBRARIES]
    assert built == [name for name in names if splits or name != "moe_split"]
    assert "moe_split" in names
