"""Greedy requests, and what transformers says about their answers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from antiphon.protocol.messages import SamplingParams

TIE = 1e-3
"""Where the reference's two best logits lie closer than this, either token is right."""
ORDINARY_TOKENS = 199_000
"""Ids below this are text; those above are markers and holes of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Case:
    """One greedy request."""

    prompt: tuple[int, ...]
    max_tokens: int

    @property
    def sampling(self) -> SamplingParams:
        """Greedy, and to the last token: no id stops it."""
        return SamplingParams(max_tokens=self.max_tokens, seed=0, temperature=0.0, ignore_eos=True)


def make_cases(lengths: Iterable[int], max_tokens: int, seed: int = 0) -> list[Case]:
    """A case per length, with the same random prompt every time; other seeds give other prompts."""
    cases = []
    for length in lengths:
        rng = random.Random(length + 1_000_000 * seed)
        cases.append(Case(tuple(rng.randrange(ORDINARY_TOKENS) for _ in range(length)), max_tokens))
    return cases


class Reference:
    """transformers' GPT-OSS in float32, each position from its full context."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import GptOssForCausalLM, Mxfp4Config

        self._model: Any = GptOssForCausalLM.from_pretrained(
            checkpoint,
            dtype=torch.float32,
            quantization_config=Mxfp4Config(dequantize=True),
            attn_implementation="eager",
        ).eval()

    @torch.inference_mode()
    def next_logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """[V] logits of the token after ``tokens``."""
        return self._model(torch.tensor([tokens]), logits_to_keep=1, use_cache=False).logits[0, -1]

    @torch.inference_mode()
    def judge(self, case: Case, output: list[int]) -> int:
        """How many tokens of ``output`` are not the reference's greedy choice, each of them a tie.

        All positions are computed in one pass over prompt and output, which is greedy decoding as long as
        every token before is the choice.

        Raises:
            AssertionError: a token that is neither the choice nor tied with it.
        """
        assert len(output) == case.max_tokens
        tokens = torch.tensor([[*case.prompt, *output[:-1]]])
        logits = self._model(tokens, logits_to_keep=len(output), use_cache=False).logits[0]
        best = logits.topk(2).values
        ties = 0
        for position, token in enumerate(output):
            if int(logits[position].argmax()) == token:
                continue
            gap = float(best[position, 0] - best[position, 1])
            lost = float(best[position, 0] - logits[position, token])
            assert gap < TIE, f"prompt of {len(case.prompt)}, output {position}: {token} is {lost:.2e} short"
            assert lost < TIE, f"prompt of {len(case.prompt)}, output {position}: {token} is not of the tie"
            ties += 1
        return ties
