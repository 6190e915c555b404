"""One layer's experts as the Hopper kernels read them, whatever they were made from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from antiphon.kernels.moe.fp8_weights import Fp8Experts
from antiphon.kernels.moe.mixed import RowExponents
from antiphon.kernels.moe.streamed import StreamedExperts
from antiphon.kernels.reference import ExpertMatrix


@dataclass(frozen=True, slots=True)
class ConvertedExperts:
    """What a rank holds of one layer's experts, routers apart.

    Attributes:
        streamed: MXFP4 weights in the streaming kernel's order, with biases.
        exponents: of their rows, for chunks whose experts are widened while they are multiplied.
        fp8: tiles for chunks where these are resident; None otherwise.
    """

    streamed: StreamedExperts
    exponents: RowExponents
    fp8: Fp8Experts | None

    @classmethod
    def from_checkpoint(
        cls,
        gate_up: ExpertMatrix,
        gate_up_bias: Tensor,
        down: ExpertMatrix,
        down_bias: Tensor,
        *,
        resident_fp8: bool,
    ) -> ConvertedExperts:
        """Convert one layer, on the device where it is.

        Raises:
            ValueError: shapes are not GPT-OSS's, or a block scale is the NaN code (255).
        """
        matrices = (gate_up, gate_up_bias, down, down_bias)
        return cls(
            streamed=StreamedExperts.from_checkpoint(*matrices),
            exponents=RowExponents.from_checkpoint(gate_up, down),
            fp8=Fp8Experts.from_checkpoint(*matrices) if resident_fp8 else None,
        )

    def check(self, resident_fp8: bool) -> None:
        """Whether they can serve layers that multiply long chunks by resident FP8 tiles, or do not.

        Raises:
            ValueError: they have no such tiles, or needlessly.
        """
        if resident_fp8 != (self.fp8 is not None):
            raise ValueError(
                f"experts {'without' if resident_fp8 else 'with'} FP8 tiles for layers of another kind"
            )

    @property
    def inexact(self) -> tuple[int, int]:
        """Blocks of 32 weights (resident FP8: tiles of 128 x 128) that may lose bits in e4m3, and all."""
        if self.fp8 is None:
            return self.exponents.inexact_blocks, self.exponents.blocks
        matrices = (self.fp8.gate_up, self.fp8.down)
        return sum(each.inexact_tiles for each in matrices), sum(each.tiles for each in matrices)
