"""The packed demo model as an ordinary checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from antiphon.demo.packed import UNSEEN_INPUT, UNSEEN_OUTPUT, PackedModel
from antiphon.model.checkpoint.layout import Layout, parameter_specs
from antiphon.model.checkpoint.write import write_checkpoint


def expand(model: PackedModel, directory: Path) -> None:
    """Write the complete checkpoint of a packed model into ``directory``."""
    write_checkpoint(directory, model.config, _full_parameters(model), Layout.HUGGING_FACE)


def _full_parameters(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    rows = torch.tensor(model.token_ids)
    for spec in parameter_specs(model.config, Layout.OPENAI):
        if spec.name in ("embedding.weight", "unembedding.weight"):
            unseen = model.weights[UNSEEN_INPUT if spec.name == "embedding.weight" else UNSEEN_OUTPUT]
            full = unseen.repeat(model.config.vocab_size, 1)
            full[rows] = model.weights["embedding.weight"]
            yield spec.name, full
        else:
            yield spec.name, model.weights[spec.name]
