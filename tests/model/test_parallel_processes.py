"""Ranks as processes: the same text as one rank, and an end within seconds when one of them is gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.model.checkpoint.layout import Layout
from antiphon.model.checkpoint.load import load_model
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.checkpoint.write import write_checkpoint
from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.load import load_parallel_model
from antiphon.model.parallel.rank_group import RankGroup, open_store
from antiphon.model.transformer import Transformer
from antiphon.protocol.errors import RankLostError

SCRIPT = Path(__file__).with_name("rank_process.py")
CAPACITY, PAGE = 64, 8
TIMEOUT_S = 120.0
"""Longest that an operation may take; who waits for less heard of a loss."""
LOST = 3
"""The script's exit code for a lost rank."""

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, spread_config: GptOssConfig) -> Path:
    directory: Path = tmp_path_factory.mktemp("ranks") / "checkpoint"
    config = replace(spread_config, num_hidden_layers=2)
    write_checkpoint(directory, config, synthesize_parameters(config), Layout.HUGGING_FACE, 10**9)
    return directory


@pytest.fixture
def spawn(checkpoint: Path) -> Iterator[Spawn]:
    """Starts a rank; whatever a test leaves running is killed."""
    running: list[subprocess.Popen[str]] = []

    def start(rank: int, size: int, port: int | None, timeout_s: float) -> subprocess.Popen[str]:
        numbers = {"rank": rank, "size": size, "port": port, "timeout-s": timeout_s}
        options = [f"--{name}={value}" for name, value in numbers.items() if value is not None]
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *options, f"--checkpoint={checkpoint}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and standard error of a process that ends by itself, long before an operation's timeout."""
    _, errors = process.communicate(timeout=TIMEOUT_S / 2)
    return process.returncode, errors


class Leading:
    """Rank 0 in this process, the others in their own."""

    def __init__(self, checkpoint: Path, spawn: Spawn, size: int) -> None:
        store = open_store(0, size)
        self.followers = [spawn(rank, size, store.port, TIMEOUT_S) for rank in range(1, size)]
        self.group = RankGroup.join(store, 0, size, timeout_s=TIMEOUT_S)
        layout = ParallelLayout(size, True, 0)
        self.model = load_parallel_model(checkpoint, layout, self.group.communicator, torch.float32)
        self.lost = threading.Event()
        self.leader = LeaderModel(self.model, self.group, heartbeat_s=0.25, on_lost=lambda _: self.lost.set())
        self.leader.start()


def generate(
    model: Any, kv: Any, prompt: Tensor, count: int, margins: list[float] | None = None
) -> list[int]:
    """Greedy text; ``margins`` collects by how much each choice was the best."""
    hidden = model.forward(kv.batch(prompt[:10], 0), kv)
    hidden = model.forward(kv.batch(prompt[10:], 10), kv)
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        values, ids = model.logits(hidden[-1:])[0].topk(2)
        tokens.append(int(ids[0]))
        if margins is not None:
            margins.append(float(values[0] - values[1]))
        hidden = model.forward(kv.batch(torch.tensor(tokens[-1:]), position), kv)
    return tokens


def pages(model: Any, one_sequence: Any) -> Any:
    """As many pages of the same size as the script's."""
    return one_sequence(model, CAPACITY, PAGE)


def test_four_processes_say_what_one_says_and_a_killed_one_ends_all(
    checkpoint: Path, spawn: Spawn, one_sequence: Any
) -> None:
    single: Transformer = load_model(checkpoint, torch.float32)
    prompt = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(5))
    margins: list[float] = []
    expected = generate(single, pages(single, one_sequence), prompt, 20, margins)
    assert len(set(expected)) > 5
    assert min(margins) > 1e-3, "a near tie: choose another seed"

    leading = Leading(checkpoint, spawn, size=4)
    kv = pages(leading.model, one_sequence)
    assert generate(leading.leader, kv, prompt, 20) == expected

    leading.followers[1].kill()
    begin = time.monotonic()
    assert leading.lost.wait(TIMEOUT_S / 2), "an idle leader did not notice"
    with pytest.raises(RankLostError, match="stopped before"):
        leading.leader.forward(kv.batch(prompt[:1], 0), kv)
    for survivor in (leading.followers[0], leading.followers[2]):
        code, errors = ended(survivor)
        assert code == LOST, errors
        assert re.search(r"rank [13] of 4: \w+ failed", errors)
    assert time.monotonic() - begin < TIMEOUT_S / 2
    leading.leader.close()


def test_a_rank_that_hangs_ends_the_step_after_the_timeout(
    checkpoint: Path, spawn: Spawn, one_sequence: Any
) -> None:
    leading = Leading(checkpoint, spawn, size=2)
    kv = pages(leading.model, one_sequence)
    leading.leader.forward(kv.batch(torch.tensor([1]), 0), kv)
    leading.group.control.set_timeout(2.0)  # from now on: what was needed until here may have taken longer
    os.kill(leading.followers[0].pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(RankLostError, match=r"rank 0 of 2|stopped before"):
        leading.leader.forward(kv.batch(torch.tensor([1]), 0), kv)
    assert time.monotonic() - begin < TIMEOUT_S / 2
    leading.leader.close()


def test_a_leader_that_is_killed_ends_its_followers(spawn: Spawn) -> None:
    leader, follower = (spawn(rank, 2, None, TIMEOUT_S) for rank in range(2))
    assert leader.stdout is not None
    assert follower.stdin is not None
    follower.stdin.write(leader.stdout.readline())
    follower.stdin.flush()
    assert leader.stdout.readline() == "computed\n"
    leader.kill()
    code, errors = ended(follower)
    assert code == LOST, errors
    assert re.search(r"rank 1 of 2: \w+ failed", errors)


def test_a_clean_end_is_no_error(checkpoint: Path, spawn: Spawn) -> None:
    leading = Leading(checkpoint, spawn, size=2)
    leading.leader.close()
    assert ended(leading.followers[0]) == (0, "")
    assert not leading.lost.is_set()
