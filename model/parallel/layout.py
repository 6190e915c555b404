"""How one model is spread over ranks, and what one of them holds.

Attention is split by groups of heads that share a kv head, the vocabulary by rows. Experts are either split
each (tensor parallel: every rank holds some of each expert's intermediate columns) or dealt out whole (expert
parallel: inputs are replicated, every rank computes the tokens routed to its own experts).
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.kernels.reference import MXFP4_BLOCK
from antiphon.model.config import GptOssConfig
from antiphon.protocol.errors import ConfigError

INNER_ALIGNMENT = 128
"""Expert columns of a rank are padded with zeros to a multiple of this, the tile of the FP8 kernels."""


@dataclass(frozen=True, slots=True)
class RankShape:
    """What one rank holds of every layer; ranges count the whole model's heads, experts and so on.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads; query head h reads kv head h // (Q / G) on the rank as in the model.
        experts: expert ids; all of them unless experts are dealt out whole.
        inner: columns of each of these experts' intermediate size.
        inner_padded: columns in memory; those beyond ``inner`` are zero and add nothing, exactly, since
            swiglu(0, 0) = 0.
        vocabulary: token ids whose embedding and logit this rank holds.
    """

    heads: range
    kv_heads: range
    experts: range
    inner: range
    inner_padded: int
    vocabulary: range

    @staticmethod
    def whole(config: GptOssConfig) -> RankShape:
        """Everything, without padding: the only rank of a model that is not split."""
        return RankShape(
            heads=range(config.num_attention_heads),
            kv_heads=range(config.num_key_value_heads),
            experts=range(config.num_experts),
            inner=range(config.intermediate_size),
            inner_padded=config.intermediate_size,
            vocabulary=range(config.vocab_size),
        )


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """One rank of a worker of ``tensor_parallel`` ranks.

    Attributes:
        tensor_parallel: ranks of the worker.
        expert_parallel: experts are dealt out whole over the same ranks (EP = TP) instead of being split.
        rank: this one, 0 plans and the others follow.

    Raises:
        ConfigError: no ranks, or a rank that is not one of them.
    """

    tensor_parallel: int = 1
    expert_parallel: bool = False
    rank: int = 0

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ConfigError(f"tensor_parallel must be at least 1, found {self.tensor_parallel}")
        if not 0 <= self.rank < self.tensor_parallel:
            raise ConfigError(
                f"rank {self.rank} is not one of the {self.tensor_parallel} ranks of the layout"
            )

    @property
    def name(self) -> str:
        """As people write it: ``TP4`` or ``EP4 TP4``."""
        tensor = f"TP{self.tensor_parallel}"
        return f"EP{self.tensor_parallel} {tensor}" if self.expert_parallel else tensor

    def check(self, config: GptOssConfig) -> None:
        """Whether a model can be spread this way.

        Raises:
            ConfigError: it cannot; every obstacle is named with both values.
        """
        ranks = self.tensor_parallel
        divided = {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "vocab_size": config.vocab_size,
        }
        problems = [
            f"tensor_parallel {ranks} does not divide {name} {value}"
            for name, value in divided.items()
            if value % ranks
        ]
        blocks = config.intermediate_size // MXFP4_BLOCK
        if self.expert_parallel and config.num_experts % ranks:
            problems.append(
                f"expert_parallel over {ranks} ranks does not divide num_experts {config.num_experts}"
            )
        elif not self.expert_parallel and blocks < ranks:
            problems.append(
                f"tensor_parallel {ranks} exceeds the {blocks} MXFP4 blocks of {MXFP4_BLOCK} columns in "
                f"intermediate_size {config.intermediate_size}"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    def shape(self, config: GptOssConfig) -> RankShape:
        """What this rank holds.

        Raises:
            ConfigError: see ``check``.
        """
        self.check(config)
        whole = RankShape.whole(config)
        if self.tensor_parallel == 1:
            return whole
        experts, inner, padded = whole.experts, whole.inner, whole.inner_padded
        if self.expert_parallel:
            experts = self._even(config.num_experts)
        else:
            inner, padded = self._inner(config.intermediate_size)
        return RankShape(
            heads=self._even(config.num_attention_heads),
            kv_heads=self._even(config.num_key_value_heads),
            experts=experts,
            inner=inner,
            inner_padded=padded,
            vocabulary=self._even(config.vocab_size),
        )

    def _even(self, count: int) -> range:
        each = count // self.tensor_parallel
        return range(self.rank * each, (self.rank + 1) * each)

    def _inner(self, intermediate_size: int) -> tuple[range, int]:
        """Columns of this rank, cut between MXFP4 blocks, and the padded width that all ranks share."""
        blocks = intermediate_size // MXFP4_BLOCK
        begin, end = (blocks * r // self.tensor_parallel for r in (self.rank, self.rank + 1))
        most = -(-blocks // self.tensor_parallel) * MXFP4_BLOCK
        padded = -(-most // INNER_ALIGNMENT) * INNER_ALIGNMENT
        return range(begin * MXFP4_BLOCK, end * MXFP4_BLOCK), padded
