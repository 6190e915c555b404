"""Processes that measure beside one another see their own GPUs alone, by the name that CUDA reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest

from antiphon.benchmarks.peers.meter import PeerOpener, PeerSystem
from antiphon.benchmarks.peers.replicas import PeerReplicas
from antiphon.benchmarks.records import Layout
from antiphon.benchmarks.sweep import ranks, replicas
from antiphon.benchmarks.sweep.meter import Effort

SEEN = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPUs 4 and 7 are those of this process."""
    monkeypatch.setenv(SEEN, "4,7")


def test_a_replica_sees_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def opener(*_: object) -> Callable[..., Any]:
        assert os.environ[SEEN] == "7"
        raise EOFError

    monkeypatch.setattr(replicas, "engine_opener", opener)
    here, there = Pipe()
    with here, there:
        replicas.serve_replica(
            there, replicas.visible_devices([1]), [], "tiny", Layout(), [], "cuda", Effort()
        )
    assert os.environ[SEEN] == "7"


def test_a_further_rank_sees_those_of_its_replica() -> None:
    here, there = Pipe()
    with there:
        here.close()
        ranks.wait_for_plan(there, replicas.visible_devices([1, 0]))
    assert os.environ[SEEN] == "7,4"


def test_another_system_sees_its_own() -> None:
    system = PeerSystem("vllm", "python", "0")
    opener = PeerOpener(system, Effort(), {}, devices=(1,))
    assert opener._visible() == {SEEN: "7"}
    served = PeerReplicas(system, "tiny", 2, 64, 1, 128)
    assert [served._visible(number) for number in range(2)] == [{SEEN: "4"}, {SEEN: "7"}]
