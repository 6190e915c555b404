"""One rank of a decode worker as a process without Ray, for tests that leave it alone.

Rank 0 says where the others meet it, then computes step after step. Another rank is told that on its standard
input, and is the actor's object, on an event loop that never ends; whoever writes another line asks for it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import torch

from antiphon.cluster import rank_actor
from antiphon.cluster.rank_actor import RankActor
from antiphon.configs.schema import DeploymentConfig
from antiphon.kernels.reference import PagedSequences
from antiphon.model.forward import ForwardBatch
from antiphon.protocol.identity import Role

rank_actor.END_GRACE_S = 0.5


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def lead(config: DeploymentConfig) -> None:
    from antiphon.cluster.rank_assembly import DTYPES, engine_settings, load_rank
    from antiphon.engine.kv_cache import PagedKvCache
    from antiphon.model.parallel.leader import LeaderModel
    from antiphon.model.parallel.rank_group import open_store

    store = open_store(0, 2)
    say(f"meet at {store.port}")
    model, group = load_rank(Role.DECODE, config, 0, store)
    settings = engine_settings(Role.DECODE, config, model)
    pages = PagedKvCache(
        model.config,
        full_pages=settings.full_pages,
        sliding_pages=settings.sliding_pages,
        page_size=settings.page_size_tokens,
        dtype=DTYPES[config.model.dtype],
        device=model.device,
        kv_heads=model.config.num_key_value_heads // group.size,
    )
    leader = LeaderModel(model, group)
    leader.start()
    on = {"device": model.device}
    first = torch.zeros(1, dtype=torch.int64, **on)
    short = torch.tensor([0, 1], dtype=torch.int32, **on)
    sequences = PagedSequences(torch.zeros(1, 1, dtype=torch.int32, **on), short, short[1:], first)
    batch = ForwardBatch(first, first, sequences, sequences)
    for step in range(10**9):
        leader.forward(batch, pages)
        if step == 3:
            say("computing")


class TellingRank(RankActor):
    """Says why it ends while it is certain to live."""

    def _follow(self, port: int) -> None:
        try:
            super()._follow(port)
        except Exception as error:
            say(f"ended: {type(error).__name__}")
            raise


async def follow(config: DeploymentConfig) -> None:
    port = int(sys.stdin.readline())
    rank = TellingRank(Role.DECODE, 1, "decode-0", config.model_dump_json(), "token", None)
    following = asyncio.create_task(rank.follow(port))
    while not following.done():
        line = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
        await asyncio.wait({line, following}, return_when=asyncio.FIRST_COMPLETED)
        if line.done():
            await rank.asked()
            say("asked")
    following.exception()
    await rank.wait_for_ever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--lease-s", type=float, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    config = DeploymentConfig.model_validate(
        {
            "model": {
                "path": str(options.checkpoint),
                "dtype": "float32" if options.device == "cpu" else "bfloat16",
            },
            "decode": {
                "device": options.device,
                "tensor_parallel": 2,
                "rank_timeout_s": 60.0,
                "chunk_tokens": 64,
                "kv_cache": {"full_pages": 8, "sliding_pages": 8},
            },
            "transfer": {"lease_s": options.lease_s},
        }
    )
    if options.rank == 0:
        lead(config)
    else:
        asyncio.run(follow(config))


if __name__ == "__main__":
    main()
