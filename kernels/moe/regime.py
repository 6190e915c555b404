"""Which form of the expert weights serves a step of a given size faster."""

from __future__ import annotations

_TOKENS_PER_EXPERT = 8
_MOST_TOKENS = 256


def streams_4_bit(tokens: int, experts: int) -> bool:
    """Whether the streamed MXFP4 kernels are taken for a step, rather than those that multiply in e4m3.

    They lose nothing, and read the weights again for every 24 tokens of an expert. Measured on one H200, us a
    layer: gpt-oss-20b streamed 166, 233 and 293 at 128, 192 and 256 tokens, e4m3 at most 189 at 256 and 237
    at 512; -120b streamed 513 and 632 at 256 and 512, e4m3 467 at 512. So they cross between 160 and 192
    tokens of -20b, where e4m3 was not measured within decode steps and is not taken yet, and at some 256 of
    -120b.
    """
    return tokens <= min(_MOST_TOKENS, _TOKENS_PER_EXPERT * experts)
