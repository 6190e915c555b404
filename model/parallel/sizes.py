"""How many bytes of weights one rank holds, before anything is loaded."""

from __future__ import annotations

import math
from collections import Counter

from antiphon.model.checkpoint.layout import Layout, TensorKind, parameter_specs
from antiphon.model.checkpoint.safetensors_file import DTYPE_BYTES
from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.sharding import ParameterCuts


def rank_bytes(
    config: GptOssConfig, layout: ParallelLayout, with_unembedding: bool = True
) -> dict[TensorKind, int]:
    """Bytes of one rank's parameters by kind, as checkpoints store them: MXFP4 experts, all else bfloat16.

    The zeros that pad a rank's expert columns count, and so do the zero biases of ranks other than 0, since
    both take memory.

    Args:
        with_unembedding: False for a worker that never samples.

    Raises:
        ConfigError: the model cannot be spread this way.
    """
    cuts = ParameterCuts(config, layout)
    found: Counter[TensorKind] = Counter()
    for spec in parameter_specs(config, Layout.OPENAI):
        if spec.kind is TensorKind.UNEMBEDDING and not with_unembedding:
            continue
        shape = cuts.of(spec.name, spec.shape).shape(spec.shape)
        found[spec.kind] += math.prod(shape) * DTYPE_BYTES[spec.parts[0].dtypes[0]]
    return dict(found)
