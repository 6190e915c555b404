"""Which form of the expert weights serves a step of a given size faster."""

from __future__ import annotations

from antiphon.kernels.moe.decode import MAX_TOKENS

_TOKENS_PER_EXPERT = 8


def streams_4_bit(tokens: int, experts: int) -> bool:
    """Whether the streamed MXFP4 kernels are the faster choice where FP8 tiles are at hand as well.

    FP8 reads twice the bytes and wins once an expert's tokens fill its tiles. Measured on one H200 for a
    layer: streamed 171 us at 128 tokens (gpt-oss-20b) and 516 us at 256 (-120b); FP8 302 us at 512 (-20b) and
    1,095 us at 2,048 (-120b). The crossing is taken to lie between those points, at 8 tokens (32 pairs) an
    expert, and is capped by what the streamed kernels take.
    """
    return tokens <= min(MAX_TOKENS, _TOKENS_PER_EXPERT * experts)
