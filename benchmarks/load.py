"""How long a worker takes from a checkpoint in the page cache to a model that can compute.

Run: ``python -m antiphon.benchmarks.load DIRECTORY [--device cuda] [--resident-fp8]``. A first pass reads
every byte, so that the disk is not what is timed; conversion to the kernels' layouts is part of the time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from antiphon.benchmarks.records import RESULTS, Layout, Record, append_records, checkout_commit, now
from antiphon.model.checkpoint.load import load_model

BENCH_LOAD = "load"
_BLOCK = 1 << 24


def read_through(directory: Path) -> int:
    """Read all weight files once; returns their bytes."""
    total = 0
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                total += len(block)
    return total


def load_once(directory: Path, device: torch.device, resident_fp8: bool) -> tuple[float, str]:
    """(seconds until the model is on the device, which kernels it takes)."""
    begin = time.perf_counter()
    if device.type == "cpu":
        load_model(directory, torch.bfloat16)
        return time.perf_counter() - begin, "plain torch"
    from antiphon.model.cuda_load import load_cuda_model  # loads Triton

    model = load_cuda_model(directory, device, resident_fp8=resident_fp8)
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    road = str(model.road)
    del model
    torch.cuda.empty_cache()
    return seconds, road


def measure(directory: Path, device: torch.device, resident_fp8: bool, repeats: int) -> Record:
    """Median of several loads of one checkpoint."""
    total = read_through(directory)
    loads = [load_once(directory, device, resident_fp8) for _ in range(repeats)]
    cuda = device.type == "cuda"
    extra: dict[str, object] = {
        "checkpoint_bytes": total,
        "repeats": repeats,
        "road": loads[0][1],
        "resident_weights": ("mxfp4 and fp8" if resident_fp8 else "mxfp4") if cuda else "bfloat16",
    }
    return Record(
        bench=BENCH_LOAD,
        model=directory.name,
        layout=Layout().name,
        device=torch.cuda.get_device_name(device) if cuda else "CPU",
        commit=checkout_commit(),
        date=now(),
        value=round(statistics.median(seconds for seconds, _ in loads), 3),
        unit="s",
        extra=extra,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and append a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="checkpoint of either layout")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--resident-fp8", action="store_true", help="hold FP8 experts for long chunks too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "load.json")
    options = parser.parse_args(arguments)
    directory = options.directory.resolve()
    record = measure(directory, torch.device(options.device), options.resident_fp8, options.repeats)
    rate = float(str(record.extra["checkpoint_bytes"])) / record.value / 1e9
    print(f"{record.model}: ready in {record.value} s, {rate:.2f} GB/s, {record.extra['road']}", flush=True)
    append_records(options.out, [record])
    return 0


if __name__ == "__main__":
    sys.exit(main())
