"""Which part of every parameter a rank holds.

Three cases. Most bytes are *sharded*: exactly one rank reads each. What every rank needs whole is
*replicated*: norms and the router. A bias that is added after a sum over ranks is held by the *first rank*
and is zero on the others, so that fast and plain kernels alike add it once without knowing about ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from antiphon.kernels.reference import MXFP4_BLOCK
from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.layout import ParallelLayout, RankShape
from antiphon.protocol.errors import CheckpointError

_REPLICATED = frozenset(
    {"norm.scale", "attn.norm.scale", "mlp.norm.scale", "mlp.gate.weight", "mlp.gate.bias"}
)


class Spread(StrEnum):
    """How a parameter's bytes are spread over ranks."""

    SHARDED = "sharded"
    REPLICATED = "replicated"
    FIRST_RANK = "first_rank"


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank holds of one parameter: ``ranges`` of one axis, side by side, then zeros.

    Attributes:
        spread: how the ranks share it.
        axis: of the parameter as it is in the checkpoint.
        ranges: indices along that axis; none at all for a bias that another rank holds.
        size: length of the axis in this rank's memory, the zeros included.
    """

    spread: Spread
    axis: int
    ranges: tuple[range, ...]
    size: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape on this rank of a parameter of shape ``whole``."""
        return (*whole[: self.axis], self.size, *whole[self.axis + 1 :])


class ParameterCuts:
    """The cut of every parameter for one rank of a model.

    Raises:
        ConfigError: the model cannot be spread this way.
    """

    def __init__(self, config: GptOssConfig, layout: ParallelLayout) -> None:
        shape = layout.shape(config)
        self._first = layout.rank == 0
        self._cuts = {
            "embedding.weight": _sharded(0, shape.vocabulary),
            "unembedding.weight": _sharded(0, shape.vocabulary),
            **_attention_cuts(config, shape),
            **(_whole_expert_cuts(shape) if layout.expert_parallel else _split_expert_cuts(shape)),
        }
        experts_first_rank = set() if layout.expert_parallel else {"mlp.mlp2_bias"}
        self._first_rank = frozenset({"attn.out.bias"} | experts_first_rank)

    def of(self, name: str, shape: tuple[int, ...]) -> Cut:
        """The cut of a parameter.

        Args:
            name: OpenAI's (``block.3.attn.qkv.weight``); experts as ``...blocks`` and ``...scales``.
            shape: of the whole parameter.

        Raises:
            CheckpointError: a parameter that no layout knows.
        """
        leaf = name.split(".", 2)[2] if name.startswith("block.") else name
        if leaf in self._cuts:
            return self._cuts[leaf]
        if leaf in _REPLICATED:
            return Cut(Spread.REPLICATED, 0, (range(shape[0]),), shape[0])
        if leaf in self._first_rank:
            ranges = (range(shape[0]),) if self._first else ()
            return Cut(Spread.FIRST_RANK, 0, ranges, shape[0])
        raise CheckpointError(f"{name}: no rule says which rank holds it")


def _sharded(axis: int, *ranges: range, size: int | None = None) -> Cut:
    held = sum(len(r) for r in ranges)
    return Cut(Spread.SHARDED, axis, ranges, held if size is None else size)


def _scaled(units: range, each: int) -> range:
    """Indices of units that are ``each`` indices long."""
    return range(units.start * each, units.stop * each)


def _attention_cuts(config: GptOssConfig, shape: RankShape) -> dict[str, Cut]:
    dim = config.head_dim
    query, kv = _scaled(shape.heads, dim), _scaled(shape.kv_heads, dim)
    key_begin, value_begin = config.query_width, config.query_width + config.kv_width
    key = range(key_begin + kv.start, key_begin + kv.stop)
    value = range(value_begin + kv.start, value_begin + kv.stop)
    return {
        "attn.sinks": _sharded(0, shape.heads),
        "attn.qkv.weight": _sharded(0, query, key, value),
        "attn.qkv.bias": _sharded(0, query, key, value),
        "attn.out.weight": _sharded(1, query),
    }


def _whole_expert_cuts(shape: RankShape) -> dict[str, Cut]:
    matrices = ("mlp1_weight.blocks", "mlp1_weight.scales", "mlp2_weight.blocks", "mlp2_weight.scales")
    return {f"mlp.{leaf}": _sharded(0, shape.experts) for leaf in (*matrices, "mlp1_bias", "mlp2_bias")}


def _split_expert_cuts(shape: RankShape) -> dict[str, Cut]:
    """Rows of mlp1 in pairs (gate even, up odd), columns of mlp2 in blocks."""
    rows = _sharded(1, _scaled(shape.inner, 2), size=2 * shape.inner_padded)
    blocks = range(shape.inner.start // MXFP4_BLOCK, shape.inner.stop // MXFP4_BLOCK)
    columns = _sharded(2, blocks, size=shape.inner_padded // MXFP4_BLOCK)
    return {
        "mlp.mlp1_weight.blocks": rows,
        "mlp.mlp1_weight.scales": rows,
        "mlp.mlp1_bias": rows,
        "mlp.mlp2_weight.blocks": columns,
        "mlp.mlp2_weight.scales": columns,
    }


def assemble(
    cut: Cut, whole: tuple[int, ...], dtype: torch.dtype, read: Callable[[tuple[slice, ...]], Tensor]
) -> Tensor:
    """This rank's part of one parameter.

    Args:
        cut: which part.
        whole: shape of the whole parameter.
        dtype: of the parameter; used where there is nothing to read.
        read: gives the part at some slices (one per leading axis) of the whole parameter.

    Returns:
        A tensor of ``cut.shape(whole)``; a view of what ``read`` gave where that is all there is.
    """
    before = (slice(None),) * cut.axis
    pieces = [read((*before, slice(r.start, r.stop))) for r in cut.ranges]
    if len(pieces) == 1 and pieces[0].shape[cut.axis] == cut.size:
        return pieces[0]
    device = pieces[0].device if pieces else None
    out = torch.zeros(cut.shape(whole), dtype=dtype, device=device)
    begin = 0
    for piece in pieces:
        length = piece.shape[cut.axis]
        out.narrow(cut.axis, begin, length).copy_(piece)
        begin += length
    return out


def shard_parameters(
    config: GptOssConfig, layout: ParallelLayout, parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of whole parameters that are in memory already, such as random ones made on a device.

    Args:
        parameters: (OpenAI's name, whole tensor).

    Yields:
        (name, this rank's part), views where possible.

    Raises:
        ConfigError: the model cannot be spread this way.
        CheckpointError: a parameter that no layout knows.
    """
    cuts = ParameterCuts(config, layout)
    for name, tensor in parameters:
        cut = cuts.of(name, tuple(tensor.shape))
        yield name, assemble(cut, tuple(tensor.shape), tensor.dtype, tensor.__getitem__)
