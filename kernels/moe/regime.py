"""Which form of the expert weights serves a step of a given size faster."""

from __future__ import annotations

_ALWAYS = 64
_MOST_OVER_RANKS_OR_RESIDENT = 256


def most_streamed(experts: int, widened_alone: bool) -> int:
    """Tokens of the largest step for which the streamed MXFP4 kernels are taken, rather than e4m3 products.

    They lose nothing, and read the weights again for every 24 tokens of an expert. Whole steps and prompts on
    one H200, streamed and with weights widened to e4m3, ms: gpt-oss-20b 5.34 and 5.17 at 64 tokens, 5.76 and
    5.56 at 80, 6.41 and 5.74 at 96, 6.97 and 6.26 at 128, 12.3 and 9.09 at 256; -120b 20.4 and 20.2 at 128,
    21.3 and 20.8 at 144, 24.7 and 22.1 at 192. So e4m3 is taken from about where it saves a tenth, not for
    the 3 % before that (docs/perf-log.md).

    Args:
        experts: of the model.
        widened_alone: the other kernels are those that widen 4-bit weights on one GPU, where the router and
            the ranks are one launch. Resident FP8 weights cross at some 210 tokens of -20b; over ranks, where
            there are more launches and less to multiply, it was not measured.
    """
    return _ALWAYS + experts // 2 if widened_alone else _MOST_OVER_RANKS_OR_RESIDENT


def streams_4_bit(tokens: int, experts: int, widened_alone: bool) -> bool:
    """Whether a step of so many tokens, padding included, takes the streamed MXFP4 kernels."""
    return tokens <= most_streamed(experts, widened_alone)
