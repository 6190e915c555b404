"""A rank that ends lets rank 0 know before it closes what takes time to close."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from router_stand_in import TOKEN, wait_until

from antiphon.cluster.rank_assembly import follow_in, lead
from antiphon.cluster.worker_assembly import assemble_worker
from antiphon.configs.schema import DeploymentConfig
from antiphon.kv_transfer.in_process import InProcessNetwork
from antiphon.model.checkpoint.synthesize import synthesize
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.protocol.errors import ConfigError, RankLostError, WireError
from antiphon.protocol.identity import Role


def deployment(directory: Path, pages: int) -> DeploymentConfig:
    """A decode worker of two ranks."""
    synthesize(directory, like="tiny", seed=1)
    cache = {"page_size_tokens": 16, "full_pages": pages, "sliding_pages": pages}
    pool = {"kv_cache": cache, "chunk_tokens": 32}
    return DeploymentConfig.model_validate(
        {
            "model": {"path": str(directory), "dtype": "float32"},
            "prefill": pool,
            "decode": {**pool, "tensor_parallel": 2, "rank_timeout_s": 120},
            "transfer": {"lease_s": 60.0, "heartbeat_s": 0.2, "layer_groups": 2},
        }
    )


class DecodeRanks:
    """A decode worker of two ranks, both threads of this process."""

    def __init__(self, config: DeploymentConfig) -> None:
        network, store = InProcessNetwork(), dist.HashStore()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rank")
        common = {"cluster_token": TOKEN, "transport_factory": network.transport}
        self.follower: Future[None] = self._pool.submit(follow_in, store, Role.DECODE, config, 1, **common)
        self.worker: Any = assemble_worker(
            *(Role.DECODE, "decode-0", config), bind_host="127.0.0.1", ranks=store, **common
        )
        self.worker.start()

    def stop(self) -> None:
        self.worker.stop()
        self._pool.shutdown()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[DecodeRanks]:
    made = DecodeRanks(deployment(tmp_path / "tiny", pages=20))
    yield made
    made.stop()


def test_rank_0_hears_of_another_ranks_end_before_its_connections_are_closed(
    ranks: DecodeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where they do not close while a kernel waits in them; nothing is asked of the ranks."""
    heard, closes = threading.Event(), threading.Event()
    close = RankGroup.close

    def close_slowly(group: RankGroup) -> None:
        if group.rank == 1:
            closes.set()
            assert heard.wait(60), "rank 0 is to hear of it first"
        close(group)

    monkeypatch.setattr(RankGroup, "close", close_slowly)
    ranks.worker._kv._followers.publish(b"what no rank understands")
    assert closes.wait(60)
    wait_until(lambda: ranks.worker.status().failed is not None, seconds=60, what="word of it")
    assert "decode-0/1: its link ended" in ranks.worker.status().failed
    heard.set()
    with pytest.raises(WireError, match="undecodable"):
        ranks.follower.result(60)


def test_a_rank_that_has_no_room_for_its_pages_releases_rank_0(tmp_path: Path) -> None:
    """It has joined by then, so rank 0 waits for it as long as loading may take."""
    config = deployment(tmp_path / "tiny", pages=8)
    store = dist.HashStore()
    with ThreadPoolExecutor(2, thread_name_prefix="rank") as pool:
        follower = pool.submit(follow_in, store, Role.DECODE, config, 1, cluster_token=TOKEN)
        leader = pool.submit(lead, Role.DECODE, config, store)
        with pytest.raises(ConfigError, match="sliding_pages 8 is too small"):
            follower.result(120)
        with pytest.raises(RankLostError):
            leader.result(120)
