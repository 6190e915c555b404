"""Ranks that nobody is left to end: each ends by itself, and with it whatever it held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from antiphon.cluster.lifeline import EXIT_STATUS
from antiphon.model.checkpoint.synthesize import synthesize

SCRIPT = Path(__file__).with_name("worker_rank.py")


@dataclass
class TwoRanks:
    """Rank 0 computes step after step; nobody asks for either."""

    leader: subprocess.Popen[str]
    follower: subprocess.Popen[str]

    def heard(self, of: subprocess.Popen[str]) -> str:
        assert of.stdout is not None
        return of.stdout.readline().strip()

    def tell_follower(self, line: str) -> None:
        assert self.follower.stdin is not None
        self.follower.stdin.write(f"{line}\n")
        self.follower.stdin.flush()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[TwoRanks]:
    synthesize(tmp_path / "tiny", like="tiny", seed=1)

    def start(rank: int) -> subprocess.Popen[str]:
        options = (f"--rank={rank}", f"--checkpoint={tmp_path / 'tiny'}", "--lease-s=1.0")
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    both = TwoRanks(start(0), start(1))
    try:
        both.tell_follower(both.heard(both.leader).removeprefix("meet at "))
        assert both.heard(both.leader) == "computing"
        yield both
    finally:
        for process in (both.leader, both.follower):
            process.kill()
            process.communicate()


def test_a_leader_killed_within_a_step_ends_its_followers_process(ranks: TwoRanks) -> None:
    """Nobody else is there: without an end of its own the process would keep what it loaded."""
    os.kill(ranks.leader.pid, signal.SIGKILL)
    assert ranks.heard(ranks.follower) == "ended: RankLostError"
    assert ranks.follower.wait(60) == EXIT_STATUS


def test_a_rank_that_nobody_asks_for_ends_while_its_leader_computes(ranks: TwoRanks) -> None:
    ranks.tell_follower("is it there?")
    assert ranks.follower.wait(60) == EXIT_STATUS
    assert ranks.heard(ranks.follower) in ("asked", ""), "it had nothing to say of a rank that was lost"
    ranks.leader.wait(60)  # a worker lives as long as all its ranks
