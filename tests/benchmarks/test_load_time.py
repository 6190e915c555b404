"""The time to load a checkpoint, measured on a tiny one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from antiphon.benchmarks import load
from antiphon.benchmarks.load import Load
from antiphon.benchmarks.records import load_records
from antiphon.model.checkpoint.synthesize import synthesize
from antiphon.model.weight_cache.store import WeightCache


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    synthesize(tmp_path / "tiny", like="tiny", seed=0)
    return tmp_path / "tiny"


def test_loads_are_measured_and_kept(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    assert load.main([str(checkpoint), "--device", "cpu", "--repeats", "2", "--out", str(out)]) == 0
    records = load_records(out)
    assert [record.bench for record in records] == ["load_cold", "load_converted"]
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    for record in records:
        assert (record.model, record.unit) == ("tiny", "s")
        assert record.value > 0
        assert record.extra["checkpoint_bytes"] == size > 0


def test_a_gpu_is_also_measured_with_the_cache(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in that is slower where it converts, and slowest where it writes."""
    cache = WeightCache(tmp_path / "cache", 1 << 40)

    def load_once(
        directory: Path, device: torch.device, resident_fp8: bool, used: WeightCache | None
    ) -> Load:
        assert (directory, device.type, resident_fp8) == (checkpoint, "cuda", True)
        if used is None:
            return Load(2.0, 0, "hopper")
        if used.files():
            return Load(1.0, 0, "hopper")
        used.directory.mkdir(exist_ok=True)
        used.path("x").write_bytes(b"12345")
        return Load(4.0, 0, "hopper")

    monkeypatch.setattr(load, "load_once", load_once)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "a GPU")
    records = load.measure(checkpoint, torch.device("cuda"), True, 2, cache)
    assert {record.bench: record.value for record in records} == {
        "load_cold": 2.0,
        "load_converted": 2.0,
        "load_stored": 4.0,
        "load_warm": 1.0,
    }
    assert records[-1].extra["cache_bytes"] == 5


def test_a_checkpoint_is_made_where_there_is_none(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "made"), "--like", "tiny", "--device", "cpu", "--repeats", "1"]
    out = tmp_path / "load.json"
    for kinds, expected in (("cold", ["load_cold"]), ("converted", ["load_cold", "load_converted"])):
        assert load.main([*arguments, "--kinds", kinds, "--out", str(out)]) == 0
        assert [record.bench for record in load_records(out)] == expected
    with pytest.raises(SystemExit):
        load.main([*arguments, "--kinds", "tepid"])


@pytest.mark.parametrize("kinds", ["stored", "warm", "cold,stored"])
def test_what_a_cpu_does_not_have_is_an_error_and_not_nothing(
    kinds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "made"), "--like", "tiny", "--device", "cpu", "--kinds", kinds]
    with pytest.raises(SystemExit):
        load.main([*arguments, "--out", str(tmp_path / "load.json")])
    assert "expected some of cold, converted on cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_cache_with_something_in_it_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="not empty"), load.cache_in(tmp_path):
        pass
    with load.cache_in(None) as cache:
        scratch = cache.directory
        assert scratch.is_dir()
    assert not scratch.exists()
