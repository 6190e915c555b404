"""Chunks whose launches begin while the ones ahead end, on a real GPU: the bits must be those in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from repeated import alone_and_beside_copies
from test_chunk_graphs import Chunks, same

from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import preset
from antiphon.model.cuda_roads import ChunkChoices
from antiphon.model.cuda_transformer import CudaTransformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REPLAYS = 40
COPY_BYTES, COPIES = 256 << 20, 20


@alone_and_beside_copies
@pytest.mark.parametrize("router", [False, True], ids=["two launches", "one launch"])
@pytest.mark.parametrize("shape", ["gpt-oss-20b", "gpt-oss-120b"])
def test_every_overlapping_chunk_is_the_one_in_turn(shape: str, router: bool, beside: bool) -> None:
    """Two prompts take turns, so that what one replay leaves is wrong for the next."""
    config = replace(preset(shape), num_hidden_layers=4)
    in_turn = CudaTransformer(
        config,
        synthesize_parameters(config, 0, "cuda"),
        resident_fp8=False,
        chunks=ChunkChoices(one_launch_router=router),
    )
    plain = Chunks(in_turn)
    expected = []
    for seed in range(2):
        plain.poison()
        hidden = plain.replay(plain.work(0, 1024, seed))
        expected.append([hidden, *plain.pages()])
    assert not same(*expected)
    overlapping = Chunks(
        in_turn.sharing(resident_fp8=False, chunks=ChunkChoices(one_launch_router=router, overlap=True))
    )
    other, blocks = torch.cuda.Stream(), torch.zeros(2, COPY_BYTES, dtype=torch.uint8, device="cuda")
    for index in range(REPLAYS):
        overlapping.poison()
        with torch.cuda.stream(other):
            for _ in range(COPIES if beside else 0):
                blocks[0].copy_(blocks[1])
        hidden = overlapping.replay(overlapping.work(0, 1024, index % 2))
        assert same([hidden, *overlapping.pages()], expected[index % 2]), index
