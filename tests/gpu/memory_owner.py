"""Either process of ``test_run_copy``: one owns memory of torch's, the other writes into it.

``own DEVICE`` prints a handle and an offset, waits for a line, and compares. ``write HANDLE OFFSET`` maps the
memory twice, as two peers do that lie in one allocation, writes every second page of it, says so, waits for a
line, writes again, and closes it.
"""

from __future__ import annotations

import sys
import time

import torch
from anywhere import anywhere

from antiphon.kernels.ipc.memory import CudaIpcMemory
from antiphon.kernels.ipc.run_copy import RunCopier

PAGES, PAGE_BYTES, POISON = 64, 65_536, 0xAB


def pages() -> torch.Tensor:
    """[PAGES, PAGE_BYTES] uint8 on the CPU, the same in both processes."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, 256, (PAGES, PAGE_BYTES), generator=generator).byte()


def own(device: torch.device) -> None:
    """Hold memory until it was written."""
    torch.cuda.set_device(device)
    whole = torch.full((PAGES + 1, PAGE_BYTES), POISON, dtype=torch.uint8, device=device)
    mine = whole[1:]  # not where its allocation begins
    torch.cuda.synchronize()
    handle, offset = CudaIpcMemory(device).export(mine.data_ptr(), mine.numel())
    print(handle.hex(), offset, flush=True)
    sys.stdin.readline()
    expected = torch.full((PAGES + 1, PAGE_BYTES), POISON, dtype=torch.uint8)
    expected[1:][::2] = pages()[::2]
    assert torch.equal(whole.cpu(), expected)
    print("as it was written, and nothing else", flush=True)


def write(handle: bytes, offset: int) -> None:
    """Write every second page of another process' memory."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    source = pages().to(device)
    torch.cuda.synchronize()
    memory = CudaIpcMemory(device)
    target, again = memory.open(handle), memory.open(handle)
    assert target == again
    assert memory.size(target) >= offset + PAGES * PAGE_BYTES, "the driver knows what was opened"
    memory.close(again)
    places = [index * PAGE_BYTES for index in range(0, PAGES, 2)]
    rows = [(source.data_ptr() + place, target + offset + place, PAGE_BYTES) for place in places]
    copier, parts = RunCopier(device), anywhere(rows)

    def copy() -> None:
        running = copier.copy(parts)
        while not running.done():
            time.sleep(0.001)

    copy()
    print("written", flush=True)
    sys.stdin.readline()
    for _ in range(20):
        copy()
    memory.close(target)
    assert torch.equal(source.cpu(), pages()), "the device goes on"
    print("written again and closed", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "own":
        own(torch.device("cuda", int(sys.argv[2])))
    else:
        write(bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
