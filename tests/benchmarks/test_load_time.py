"""The time to load a checkpoint, measured on a tiny one."""

from __future__ import annotations

from pathlib import Path

from antiphon.benchmarks import load
from antiphon.benchmarks.records import load_records
from antiphon.model.checkpoint.synthesize import synthesize


def test_a_load_is_measured_and_kept(tmp_path: Path) -> None:
    directory, out = tmp_path / "tiny", tmp_path / "load.json"
    synthesize(directory, like="tiny", seed=0)
    assert load.main([str(directory), "--device", "cpu", "--repeats", "2", "--out", str(out)]) == 0
    (record,) = load_records(out)
    assert (record.bench, record.model, record.unit) == ("load", "tiny", "s")
    assert record.value > 0
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert record.extra["checkpoint_bytes"] == size > 0
