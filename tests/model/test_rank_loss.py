"""Ranks that fail, fall silent or differ: whoever waits for them is released, and soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.protocol.errors import ConfigError, RankLostError

Build = Callable[..., ParallelTransformer]
Ranks = Callable[..., list[Any]]
PAGE = 8
TIMEOUT_S = 120.0
"""Longest that an operation may take; who waits for less heard of a loss."""


def prompt(config: GptOssConfig, length: int) -> Tensor:
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("capacity", "page", "message"),
    [(64, 8, r"full pages: rank 0 has 4, this one 8"), (16, 4, r"page size: rank 0 has 8, this one 4")],
)
def test_a_follower_with_other_pages_refuses_the_step_and_releases_the_leader(
    capacity: int,
    page: int,
    message: str,
    small: GptOssConfig,
    in_ranks: Ranks,
    one_sequence: Any,
    build: Build,
) -> None:
    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank == 0:
            kv = one_sequence(model, 32, PAGE)
            leader = LeaderModel(model, group)
            leader.start()
            begin = time.monotonic()
            with pytest.raises(RankLostError, match="rank 0 of 2"):
                leader.forward(kv.batch(prompt(small, 8), 0), kv)
            assert time.monotonic() - begin < TIMEOUT_S / 2
            with pytest.raises(RankLostError, match="stopped before"):
                leader.logits(torch.zeros(1, small.hidden_size))
            leader.close()
        else:
            with pytest.raises(ConfigError, match=message):
                FollowerLoop(model, one_sequence(model, capacity, page), group).run()

    in_ranks(2, work, timeout_s=TIMEOUT_S)


def test_ranks_whose_full_layers_hold_different_things_do_not_compute_together(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank == 0:
            kv = one_sequence(model, 64, 16)
            leader = LeaderModel(model, group)
            leader.start()
            with pytest.raises(RankLostError, match="rank 0 of 2"):
                leader.forward(kv.batch(prompt(small, 8), 0), kv)
            leader.close()
            return
        pages = PagedKvCache(
            *(small,),
            full_pages=3,
            sliding_pages=3,
            page_size=16,
            dtype=torch.float32,
            kv_heads=len(model.shape.kv_heads),
            full_fp8=True,
        )
        with pytest.raises(ConfigError, match=r"FP8 in full layers: rank 0 has 0, this one 1$"):
            FollowerLoop(model, pages, group).run()

    in_ranks(2, work)


def test_a_failure_on_rank_0_releases_the_others(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    """Rank 0's step fails half-way, for a reason of its own; the others must not wait for the rest of it."""
    lost: list[BaseException] = []
    released = threading.Event()

    def fail(layer: int) -> None:
        raise MemoryError(f"no memory after layer {layer}")

    def work(group: RankGroup) -> None:
        model = build(small, group)
        kv = one_sequence(model, 8, PAGE)
        if group.rank == 0:
            leader = LeaderModel(model, group, on_lost=lost.append)
            leader.start()
            with pytest.raises(MemoryError):
                leader.forward(kv.batch(prompt(small, 8), 0), kv, fail)
            assert released.wait(TIMEOUT_S / 2)  # before anybody tidies up here
            leader.close()
        else:
            with pytest.raises(RankLostError, match="rank 1 of 2"):
                FollowerLoop(model, kv, group).run()
            released.set()

    in_ranks(2, work, timeout_s=TIMEOUT_S)
    assert [type(error) for error in lost] == [MemoryError]


def test_a_quiet_leader_is_not_taken_for_a_dead_one(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    """No request comes, but several signs of life within the time that an operation may take."""
    alive, quiet = threading.Semaphore(0), threading.Event()

    def work(group: RankGroup) -> bool:
        model = build(small, group)
        kv = one_sequence(model, 8, PAGE)
        if group.rank == 0:
            assert LeaderModel(model, group)._heartbeat_s == TIMEOUT_S / 4
            leader = LeaderModel(model, group, heartbeat_s=0.05)
            leader.start()
            quiet.set()
            for _ in range(5):
                assert alive.acquire(timeout=60)
            leader.forward(kv.batch(prompt(small, 8), 0), kv)
            leader.close()
            return True
        reduce = group.control.all_reduce

        def counted(x: Tensor) -> Tensor:
            if quiet.is_set():
                alive.release()
            return reduce(x)

        group.control.all_reduce = counted  # type: ignore[method-assign]
        FollowerLoop(model, kv, group).run()
        return True

    assert in_ranks(2, work, timeout_s=TIMEOUT_S) == [True, True]


def test_a_silent_follower_is_noticed_while_nothing_is_asked(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    """It holds its connection open and answers no more."""
    noticed = threading.Event()

    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank == 0:
            leader: LeaderModel

            def on_lost(error: BaseException) -> None:
                leader.close()
                noticed.set()

            agree = group.agree

            def agree_in_any_time(facts: Mapping[str, object]) -> None:
                agree(facts)
                group.control.set_timeout(0.5)  # type: ignore[attr-defined]

            group.agree = agree_in_any_time  # type: ignore[method-assign]
            leader = LeaderModel(model, group, heartbeat_s=0.05, on_lost=on_lost)
            leader.start()
            assert noticed.wait(TIMEOUT_S / 2)
            with pytest.raises(RankLostError, match="stopped before"):
                leader.logits(torch.zeros(1, small.hidden_size))
            leader.close()
        else:
            group.agree(model.facts())
            assert noticed.wait(TIMEOUT_S / 2)

    in_ranks(2, work, timeout_s=TIMEOUT_S)


def publish_until_noticed(leader: LeaderModel) -> None:
    """A message may be on its way before the other end has closed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        leader.publish(b"more")
        time.sleep(0.05)


def test_a_message_that_nobody_takes_is_an_error(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank == 0:
            leader = LeaderModel(model, group)
            leader.start()
            leader.publish(b"four")
            with pytest.raises(RankLostError):
                publish_until_noticed(leader)
        else:
            with pytest.raises(ConfigError, match="4 bytes"):
                FollowerLoop(model, one_sequence(model, 8, PAGE), group).run()

    in_ranks(2, work)


class SlowEnd:
    """The connections of a rank whose kernels hold up the end: it is over once the loss was heard of."""

    def __init__(self, group: RankGroup) -> None:
        self.heard = threading.Event()
        self.heard_in_time: list[bool] = []
        self._close = group.close
        group.close = self._end  # type: ignore[method-assign]

    def _end(self) -> None:
        self.heard_in_time.append(self.heard.wait(60))
        self._close()


@pytest.mark.parametrize("idle", [False, True])
def test_a_leader_tells_of_a_loss_before_it_closes_what_takes_time(
    idle: bool, small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank > 0:
            group.agree(model.facts())
            group.close()
            return
        end = SlowEnd(group)
        leader = LeaderModel(
            model, group, heartbeat_s=0.05 if idle else 30.0, on_lost=lambda error: end.heard.set()
        )
        leader.start()
        if idle:
            assert end.heard.wait(60)
        else:
            with pytest.raises(RankLostError):
                publish_until_noticed(leader)
        leader.close()
        assert end.heard_in_time[0]

    in_ranks(2, work)


def test_a_leader_whose_listener_fails_closes_all_the_same(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    def tell(error: BaseException) -> None:
        raise ValueError("nobody listens")

    def work(group: RankGroup) -> None:
        model = build(small, group)
        kv = one_sequence(model, 8, PAGE)
        if group.rank > 0:
            with pytest.raises(RankLostError):
                FollowerLoop(model, kv, group).run()
            return
        leader = LeaderModel(model, group, on_lost=tell)
        leader.start()
        model.forward = None  # type: ignore[assignment]
        with pytest.raises(ValueError, match="nobody listens"):
            leader.forward(kv.batch(prompt(small, 8), 0), kv)
        with pytest.raises(RankLostError, match="left"):
            group.control.all_reduce(torch.ones(1))

    in_ranks(2, work)


@pytest.mark.parametrize("lost", [True, False])
def test_a_follower_tells_of_its_end_before_it_closes_what_takes_time(
    lost: bool, small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    told: list[BaseException] = []

    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank == 0:
            leader = LeaderModel(model, group)
            leader.start()
            if lost:
                leader._fail(MemoryError("rank 0 has no memory"))
            leader.close()
            return
        end = SlowEnd(group)
        follower = FollowerLoop(
            model,
            one_sequence(model, 8, PAGE),
            group,
            on_lost=lambda error: (told.append(error), end.heard.set()),
        )
        if not lost:
            end.heard.set()
            follower.run()
            return
        with pytest.raises(RankLostError):
            follower.run()
        assert end.heard_in_time == [True]

    in_ranks(2, work)
    assert [type(error) for error in told] == ([RankLostError] if lost else [])


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_stop_sharing_memory_at_the_normal_end_alone(
    fails: bool, small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    """Both while the others still answer; after a loss a kernel may wait in that memory for ever."""
    stopped: list[int] = []

    def work(group: RankGroup) -> None:
        model = build(small, group)
        model.stop_sharing = lambda: stopped.append(group.rank)  # type: ignore[assignment]
        kv = one_sequence(model, 32, PAGE)
        if group.rank > 0:
            expected = pytest.raises(RankLostError) if fails else nullcontext()
            with expected:
                FollowerLoop(model, kv, group).run()
            return
        leader = LeaderModel(model, group)
        leader.start()
        if fails:
            model.forward = None  # type: ignore[assignment]
            with pytest.raises(TypeError):
                leader.forward(kv.batch(prompt(small, 8), 0), kv)
        leader.close()

    in_ranks(2, work)
    assert sorted(stopped) == ([] if fails else [0, 1])
