"""The demo model on a GPU says what it says in float32 on a CPU."""

from __future__ import annotations

import pytest
import torch

from antiphon.benchmarks.rank_agreement import LEAST_SHARE, choices, subject
from antiphon.demo.shape import MODEL_NAME
from antiphon.model.checkpoint.load import fill
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.transformer import Transformer

CPU = torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_teacher_forced_replies_follow_float32_on_a_cpu() -> None:
    """Prompts in one chunk and replies in decode steps, which are told what was said before."""
    about, cuda = subject(MODEL_NAME), torch.device("cuda")
    exact = Transformer(about.config, torch.float32)
    fill(exact, about.parameters(CPU))
    fast = CudaTransformer(about.config, about.parameters(cuda), cuda)
    equal = [
        (choices(fast, text, cuda, None).cpu() == choices(exact, text, CPU, None))[begin:]
        for text, begin in zip(about.texts, about.counted_from, strict=True)
    ]
    same = torch.cat(equal)
    share = same.float().mean().item()
    print(f"{fast.road} in bfloat16: argmax equal at {share:.4f} of {len(same)} positions")
    assert len(same) > 400
    assert share >= LEAST_SHARE
