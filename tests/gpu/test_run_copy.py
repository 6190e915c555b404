"""Copies of runs of bytes on one GPU and between two, into memory that another process exported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from anywhere import anywhere

from antiphon.kernels.ipc.run_copy import RunCopier, RunningCopy
from antiphon.kv_transfer.peer_memory import PlacedCopies

SCRIPT = Path(__file__).parent / "memory_owner.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def finish(copy: RunningCopy) -> None:
    deadline = time.monotonic() + 30
    while not copy.done():
        assert time.monotonic() < deadline


def check(lengths: list[int], blocks: int, target_device: int) -> None:
    """Every run arrives; what lies between runs stays."""
    gap, source_device = 64, torch.device("cuda", 0)
    size = sum(lengths) + gap * len(lengths)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=source_device)
    target = torch.full((size,), 0xAB, dtype=torch.uint8, device=torch.device("cuda", target_device))
    expected = target.cpu()
    order, places, at = torch.randperm(len(lengths)).tolist(), {}, 0
    for index in order:
        places[index] = at
        at += lengths[index] + gap
    rows, to, held = [], 0, source.cpu()
    for index, length in enumerate(lengths):
        rows.append((source.data_ptr() + places[index], target.data_ptr() + to, length))
        expected[to : to + length] = held[places[index] : places[index] + length]
        to += length + gap
    torch.cuda.synchronize(target.device)
    torch.cuda.synchronize(source_device)
    finish(RunCopier(source_device, blocks).copy(anywhere(rows)))
    assert torch.equal(target.cpu(), expected)


LENGTHS = {
    "one word": [16],
    "one run": [50_331_648],
    "pages of a group": [393_216] * 131,
    "thousands of short runs": [16 * (1 + index % 200) for index in range(5000)],
}


@pytest.mark.parametrize("blocks", [1, 8, 32, 264])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_runs_arrive_and_nothing_else_changes(lengths: list[int], blocks: int) -> None:
    check(lengths, blocks, 0)


def test_a_run_of_no_whole_words_is_refused() -> None:
    memory = torch.zeros(256, dtype=torch.uint8, device="cuda")
    copier, first = RunCopier(torch.device("cuda")), memory.data_ptr()
    with pytest.raises(ValueError, match=r"24.*no multiples of 16"):
        copier.copy(anywhere([(first, first + 128, 24)]))
    finish(copier.copy(anywhere([(first, first + 128, 32)])))


def test_a_copy_waits_for_its_event_and_one_without_does_not() -> None:
    memory = torch.zeros(3, 4096, dtype=torch.uint8, device="cuda")
    copier, event = RunCopier(torch.device("cuda")), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    memory[0].fill_(7)
    event.record()
    late, now = memory[0].data_ptr(), memory[1].data_ptr()
    waiting = copier.copy(anywhere([(late, now, 4096)]), event.cuda_event)
    ready = copier.copy(anywhere([(now, memory[2].data_ptr(), 4096)]))
    finish(ready)
    assert not waiting.done()
    finish(waiting)
    assert memory[1].eq(7).all()


def test_parts_of_pages_go_where_they_belong() -> None:
    """The two groups of a hand-off in one copy: some layers of some pages, in another order."""
    device, page, place = torch.device("cuda"), 4096, 1024
    source = torch.randint(0, 256, (2, 9, page), dtype=torch.uint8, device=device)
    target = torch.zeros(2, 12, page, dtype=torch.uint8, device=device)
    expected, parts = target.cpu(), []
    for group, pairs in enumerate(([(8, 0), (2, 11), (3, 5)], [(0, 1)])):
        spans = [(each[group].data_ptr(), each[group].numel()) for each in (source, target)]
        places = np.array([[place, place], [3 * place, 2 * place]], dtype=np.int64)
        entries = np.array(pairs, dtype=np.int64)
        parts.append(PlacedCopies(entries, (page, page), places, place, spans[0], spans[1]))
        for mine, theirs in pairs:
            for begin, to in places.tolist():
                expected[group, theirs, to : to + place] = source[group, mine, begin : begin + place].cpu()
    torch.cuda.synchronize()
    finish(RunCopier(device).copy(parts))
    assert torch.equal(target.cpu(), expected)


@contextmanager
def writing(devices: int, *, sees_all: bool) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """A process that owns memory, and one that has written into it; neither outlives the block."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:devices]
    mine, theirs = (visible, visible) if sees_all else (visible[:1], visible[-1:])
    with ExitStack() as started:
        owner = _start(started, theirs, "own", str(len(theirs) - 1))
        assert owner.stdout is not None
        writer = _start(started, mine, "write", *owner.stdout.readline().split())
        assert writer.stdout is not None
        said = writer.stdout.readline()
        assert said == "written\n", said + writer.communicate(timeout=60)[0]
        yield owner, writer


def _start(started: ExitStack, visible: list[str], *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started.callback(process.communicate)  # closes its pipes too, whoever killed it
    started.callback(process.kill)
    return process


@pytest.mark.parametrize("devices", [1, 2], ids=["one GPU", "two GPUs"])
@pytest.mark.parametrize("sees_all", [True, False], ids=["both seen", "its own seen"])
def test_what_another_process_exported_is_written(devices: int, sees_all: bool) -> None:
    with writing(devices, sees_all=sees_all) as (owner, writer):
        said, _ = writer.communicate("again\n", timeout=120)
        assert "written again and closed" in said, said
        said, _ = owner.communicate("compare\n", timeout=120)
        assert "as it was written, and nothing else" in said, said


@pytest.mark.parametrize("devices", [1, 2], ids=["one GPU", "two GPUs"])
def test_a_writer_outlives_the_owner_of_what_it_writes(devices: int) -> None:
    """A killed process' memory stays until it is closed here: copies into it go on, and hurt nobody."""
    with writing(devices, sees_all=False) as (owner, writer):
        owner.kill()
        owner.wait()
        said, _ = writer.communicate("again\n", timeout=120)
        assert "written again and closed" in said, said


def test_memory_of_expandable_segments_is_not_exported() -> None:
    owner = subprocess.run(
        [sys.executable, str(SCRIPT), "own", "0"],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert owner.returncode != 0
    assert "IpcMemoryError: export of" in owner.stderr
    assert "memory of expandable segments has no handle" in owner.stderr
