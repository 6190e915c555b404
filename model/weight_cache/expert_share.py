"""What a rank holds of every layer's experts, and what tells its files from those of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.sharding import Cut, ParameterCuts, Spread


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Some experts whole, or columns of each.

    Attributes:
        experts: their ids.
        columns: which of each expert's intermediate columns.
        columns_held: how many there are in memory; zeros pad those of split experts.
        layout: of the rank that holds columns; None holds whole experts.
    """

    experts: range
    columns: range
    columns_held: int
    layout: ParallelLayout | None

    @classmethod
    def of(cls, config: GptOssConfig, held: range | ParallelLayout) -> ExpertShare:
        """What ``held`` says: ids of experts held whole, or the layout of a rank, whole or split.

        Raises:
            ConfigError: the model cannot be spread this way.
        """
        if isinstance(held, range):
            return cls(held, range(config.intermediate_size), config.intermediate_size, None)
        shape = held.shape(config)
        split = len(shape.inner) != config.intermediate_size
        return cls(shape.experts, shape.inner, shape.inner_padded, held if split else None)

    @property
    def part(self) -> str:
        """Which part of each expert; empty for whole ones. No two ranks or layouts have the same one."""
        if self.layout is None:
            return ""
        rank, ranks = self.layout.rank, self.layout.tensor_parallel
        return f"rank-{rank}-of-{ranks}-columns-{self.columns.start}-{self.columns.stop}"

    @property
    def name(self) -> str:
        """Of files: experts, and part of each."""
        experts = f"experts-{self.experts.start}-{self.experts.stop}"
        return f"{experts}-{self.part}" if self.part else experts

    def __str__(self) -> str:
        """In words for the log."""
        experts = f"experts {self.experts.start} to {self.experts.stop - 1}"
        if self.layout is None:
            return experts
        return f"columns {self.columns.start} to {self.columns.stop - 1} of {experts}"

    def cuts(self, config: GptOssConfig) -> Callable[[str, tuple[int, ...]], Cut]:
        """Where it lies in a parameter of experts, by name and shape as in ``ParameterCuts.of``."""
        if self.layout is not None:
            return ParameterCuts(config, self.layout).of
        whole = Cut(Spread.SHARDED, 0, (self.experts,), len(self.experts))
        return lambda name, shape: whole
