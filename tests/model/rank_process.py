"""One rank of a worker as a process of its own, for tests that kill it.

Without a port, rank 0 says first where the others meet it; another rank reads that from its standard input.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from antiphon.kernels.reference import PagedSequences
from antiphon.model.forward import ForwardBatch
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.load import load_parallel_model
from antiphon.model.parallel.rank_group import RankGroup, open_store
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.protocol.errors import RankLostError

PAGES, PAGE = 8, 8


class Pages:
    """This rank's pages of one sequence, in order."""

    def __init__(self, model: ParallelTransformer) -> None:
        config = model.config
        shape = (PAGES, len(model.shape.kv_heads), 2, PAGE, config.head_dim)
        self._layers = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]

    def layer(self, index: int) -> torch.Tensor:
        return self._layers[index]


def one_token() -> ForwardBatch:
    first = torch.zeros(1, dtype=torch.int64)
    short = torch.tensor([0, 1], dtype=torch.int32)
    pages = PagedSequences(torch.zeros(1, PAGES, dtype=torch.int32), short, short[1:], first)
    return ForwardBatch(first, first, pages, pages)


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("rank", "size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    options = parser.parse_args()
    rank, size = options.rank, options.size
    if rank == 0:
        store = open_store(rank, size, port=options.port or 0)
        say(str(store.port))
    else:
        store = open_store(rank, size, port=options.port or int(sys.stdin.readline()))
    group = RankGroup.join(store, rank, size, timeout_s=options.timeout_s)
    layout = ParallelLayout(size, True, rank)
    model = load_parallel_model(options.checkpoint, layout, group.communicator, torch.float32)
    pages = Pages(model)
    try:
        if rank > 0:
            FollowerLoop(model, pages, group).run()
        else:
            leader = LeaderModel(model, group)
            leader.start()
            leader.forward(one_token(), pages)
            say("computed")
            time.sleep(600)
    except RankLostError as error:
        sys.stderr.write(f"lost: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
