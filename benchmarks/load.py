"""How long a worker takes from a checkpoint to a model that can compute, by where its bytes are.

Run: ``python -m antiphon.benchmarks.load DIRECTORY [--device cuda] [--resident-fp8] [--cache FOLDER]``; with
``--like gpt-oss-20b`` a random checkpoint is made there first, on the device, unless one is there.

- cold: the checkpoint is not in the page cache, and experts are converted;
- converted: it is, and experts are converted;
- stored: the same, and the converted experts are written to the weight cache;
- warm: they are read from there.

Files are dropped from the page cache by advice to the kernel, which it may decline; a record says how many
bytes had to be read from the disk, so that a cold start that was none is seen. A CPU has no experts to
convert, and so none to store: there it is cold and converted only, and asking for another kind is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from antiphon.benchmarks.records import RESULTS, Layout, Record, append_records, checkout_commit, now
from antiphon.model.checkpoint.load import load_model
from antiphon.model.checkpoint.synthesize import parameters_on_host
from antiphon.model.checkpoint.write import write_checkpoint
from antiphon.model.config import preset
from antiphon.model.weight_cache.store import WeightCache

BENCH_LOAD = "load"
KINDS = ("cold", "converted", "stored", "warm")
CPU_KINDS = ("cold", "converted")
_BLOCK = 1 << 24
_IO_COUNTERS = Path("/proc/self/io")


@dataclass(frozen=True, slots=True)
class Load:
    """One load: seconds until the model is on the device, bytes read from a disk, which kernels it takes."""

    seconds: float
    disk_bytes: int
    road: str


def read_through(files: Sequence[Path]) -> int:
    """Read files once, so that they are in the page cache; returns their bytes."""
    total = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                total += len(block)
    return total


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Advise the kernel to forget files; what was not written to the disk yet is written first."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_once(directory: Path, device: torch.device, resident_fp8: bool, cache: WeightCache | None) -> Load:
    """Load, say how long it took, and free everything."""
    before = disk_bytes_read()
    begin = time.perf_counter()
    if device.type == "cpu":
        load_model(directory, torch.bfloat16)
        return Load(time.perf_counter() - begin, disk_bytes_read() - before, "plain torch")
    from antiphon.model.cuda_load import load_cuda_model  # loads Triton

    model = load_cuda_model(directory, device, resident_fp8=resident_fp8, weight_cache=cache)
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    road = str(model.road)
    del model
    torch.cuda.empty_cache()
    return Load(seconds, disk_bytes_read() - before, road)


def disk_bytes_read() -> int:
    """Bytes that this process has had read from disks so far."""
    counters = dict(line.split(": ") for line in _IO_COUNTERS.read_text().splitlines())
    return int(counters["read_bytes"])


def measure(
    directory: Path,
    device: torch.device,
    resident_fp8: bool,
    repeats: int,
    cache: WeightCache,
    wanted: Sequence[str] = KINDS,
) -> list[Record]:
    """The median of several loads of one checkpoint, of the wanted kinds that the device has."""
    files = sorted(directory.glob("*.safetensors"))
    size = read_through(files)
    kinds: dict[str, tuple[Callable[[], object], WeightCache | None]] = {
        "cold": (lambda: drop_from_page_cache(files), None),
        "converted": (lambda: read_through(files), None),
    }
    cuda = device.type == "cuda"
    if cuda:
        kinds["stored"] = (lambda: (read_through(files), cache.prune(0)), cache)
        kinds["warm"] = (lambda: read_through([file.path for file in cache.files()]), cache)
    records = []
    for kind, (prepare, used) in kinds.items():
        if kind not in wanted:
            continue
        loads = []
        for _ in range(repeats):
            prepare()
            loads.append(load_once(directory, device, resident_fp8, used))
        extra: dict[str, object] = {
            "checkpoint_bytes": size,
            "disk_bytes": max(load.disk_bytes for load in loads),
            "seconds": [round(load.seconds, 3) for load in loads],
            "repeats": repeats,
            "road": loads[0].road,
            "resident_weights": ("mxfp4 and fp8" if resident_fp8 else "mxfp4") if cuda else "bfloat16",
        }
        if kind == "warm":
            extra["cache_bytes"] = sum(file.size_bytes for file in cache.files())
        records.append(
            Record(
                bench=f"{BENCH_LOAD}_{kind}",
                model=directory.name,
                layout=Layout().name,
                device=torch.cuda.get_device_name(device) if cuda else "CPU",
                commit=checkout_commit(),
                date=now(),
                value=round(statistics.median(load.seconds for load in loads), 3),
                unit="s",
                extra=extra,
            )
        )
    return records


def make_checkpoint(directory: Path, like: str, device: torch.device) -> None:
    """Write a random checkpoint, its numbers drawn on the device, unless the folder is there.

    Raises:
        ConfigError: no shape of that name.
    """
    if not directory.exists():
        config = preset(like)
        write_checkpoint(directory, config, parameters_on_host(config, device=device))


@contextmanager
def cache_in(folder: Path | None) -> Iterator[WeightCache]:
    """An empty weight cache of no limit; in a folder that is deleted afterwards when none is given.

    Raises:
        SystemExit: the folder has something in it.
    """
    if folder is None:
        scratch = Path(tempfile.mkdtemp(prefix="antiphon-weights-"))
        try:
            yield WeightCache(scratch, 1 << 62)
        finally:
            shutil.rmtree(scratch)
        return
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: this measures a cache of its own")
    yield WeightCache(folder, 1 << 62)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and append the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="checkpoint of either layout")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--resident-fp8", action="store_true", help="hold FP8 experts for long chunks too")
    parser.add_argument("--like", help="make a checkpoint of this shape first")
    parser.add_argument("--kinds", help="which, with commas between them; all that the device has by default")
    parser.add_argument("--cache", type=Path, help="an empty or absent folder; a temporary one by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "load.json")
    options = parser.parse_args(arguments)
    directory, device = options.directory.resolve(), torch.device(options.device)
    there = CPU_KINDS if device.type == "cpu" else KINDS
    kinds = options.kinds.split(",") if options.kinds is not None else list(there)
    if not set(kinds) <= set(there):
        parser.error(f"--kinds {options.kinds}: expected some of {', '.join(there)} on {device.type}")
    if options.like is not None:
        make_checkpoint(directory, options.like, device)
    with cache_in(options.cache) as cache:
        records = measure(directory, device, options.resident_fp8, options.repeats, cache, kinds)
    for record in records:
        rate = float(str(record.extra["checkpoint_bytes"])) / record.value / 1e9
        print(
            f"{record.model}, {record.bench}: ready in {record.value} s, {rate:.2f} GB/s, "
            f"{record.extra['road']}",
            flush=True,
        )
    append_records(options.out, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
