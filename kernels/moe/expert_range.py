"""What all kernels of the experts take: so many a token and a model, and the range that a rank holds."""

from __future__ import annotations

TOP_K = 4
MAX_EXPERTS = 128


def held_experts(all_experts: int, first_expert: int = 0, experts: int | None = None) -> int:
    """How many experts a rank holds, from ``first_expert`` on: ``experts``, or all that follow.

    Raises:
        ValueError: more experts than the kernels take, or a range that is not within the model's.
    """
    if not 1 <= all_experts <= MAX_EXPERTS:
        raise ValueError(f"{all_experts} experts; the kernels take 1 to {MAX_EXPERTS}")
    held = all_experts - first_expert if experts is None else experts
    if first_expert < 0 or held < 1 or first_expert + held > all_experts:
        raise ValueError(f"experts {first_expert} + {held} are not within {all_experts}")
    return held
