"""How ranks meet: all of them, on this host, with the same model, however long loading takes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.rank_group import GroupCommunicator, RankGroup, open_store
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.protocol.errors import ConfigError, RankLostError

Build = Callable[..., ParallelTransformer]
Ranks = Callable[..., list[Any]]
PAGE = 8


def test_a_rank_that_still_loads_is_waited_for(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    """Loading may take longer than any operation of a step."""
    waits, groups = threading.Event(), list[RankGroup]()

    def work(group: RankGroup) -> bool:
        model = build(small, group)
        groups.append(group)
        if group.rank > 0:
            assert waits.wait(60)
            time.sleep(1.0)
            for each in groups:
                each.timeout_s = 60.0  # only while one loads is an operation of a step so short
            FollowerLoop(model, one_sequence(model, 8, PAGE), group).run()
            return True
        leader = LeaderModel(model, group)
        waits.set()
        leader.start()
        leader.close()
        return True

    assert in_ranks(2, work, timeout_s=0.5) == [True, True]


Change = dict[str, Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 16}, r"num_experts: rank 0 has 8, rank 1 has 16"),
        ({"rms_norm_eps": 1e-6}, r"rms_norm_eps: rank 0 has 1e-05, rank 1 has 1e-06"),
    ],
)
def test_ranks_with_different_models_do_not_start(
    change: Change, message: str, small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    def work(group: RankGroup) -> None:
        model = build(small if group.rank == 0 else replace(small, **change), group)
        if group.rank == 0:
            with pytest.raises(ConfigError, match=message):
                LeaderModel(model, group).start()
        else:
            with pytest.raises(ConfigError, match=message):
                FollowerLoop(model, one_sequence(model, 8, PAGE), group).run()

    in_ranks(2, work)


def test_a_rank_that_does_not_appear_is_named_as_such() -> None:
    with pytest.raises(RankLostError, match=r"rank 0 of 2: the ranks did not all join within 0.2 s"):
        RankGroup.join(dist.HashStore(), 0, 2, join_timeout_s=0.2)


def test_the_meeting_place_is_open_to_this_host_only() -> None:
    store = open_store(0, 2)
    connections = psutil.Process().net_connections("tcp")
    listening = {
        c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port
    }
    assert listening == {"127.0.0.1"}
    other = open_store(1, 2, port=store.port, timeout_s=60.0)
    store.set("word", "said")
    assert other.get("word") == b"said"


def test_a_meeting_place_that_is_taken_or_not_there_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RankLostError, match=rf"rank 0 of 2: no meeting place at 127\.0\.0\.1:{port}: .*in use"
        ):
            open_store(0, 2, port=port)
    with socket.socket() as deaf:  # bound, so that nobody else listens there either
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        with pytest.raises(RankLostError, match=rf"rank 1 of 2: no meeting place at 127\.0\.0\.1:{port}"):
            open_store(1, 2, port=port, timeout_s=1.0)


class Stuck:
    """Collectives whose abort waits for a graph that never ends, as NCCL's may."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def abort(self) -> None:
        self.released.wait(200)


def test_leaving_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck()
    communicator = GroupCommunicator(stuck, 1, 2)  # type: ignore[arg-type]  # nothing else is asked of it
    begin = time.monotonic()
    communicator.close(timeout_s=0.1)
    assert time.monotonic() - begin < 60
    assert "rank 1 of 2: the connections did not end within 0.1 s" in caplog.text
    communicator.close()
    with pytest.raises(RankLostError, match="this rank has left"):
        communicator.all_reduce(torch.ones(1))
    stuck.released.set()


class Ending:
    """Collectives whose abort does as it is told."""

    def __init__(self, abort: Callable[[], object]) -> None:
        self.abort = abort


def test_others_learn_at_once_of_a_rank_that_leaves_with_a_kernel_running() -> None:
    """They wait for its commands, and may be what the kernel waits for."""
    control_ended, in_time = threading.Event(), threading.Event()

    def kernel() -> None:
        if control_ended.wait(2):  # less than a kernel is waited for
            in_time.set()

    ends = [GroupCommunicator(Ending(abort), 0, 2) for abort in (kernel, control_ended.set)]  # type: ignore[arg-type]
    RankGroup(0, 2, *ends, 30.0, 30.0).close()
    assert in_time.is_set()


def test_an_end_that_fails_is_told_and_is_no_error_of_who_leaves(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("[Rank 1] unhandled cuda error. Run again with more words")

    GroupCommunicator(Ending(fail), 1, 2).close()  # type: ignore[arg-type]  # nothing else is asked of it
    assert "rank 1 of 2: the connections did not end: unhandled cuda error" in caplog.text
