"""This project's random weights inside vLLM, made where they are used: a load format of a plugin.

vLLM's own random weights leave its 4-bit experts zero and everything else so small that biases decide the
routing: all tokens of a batch go to the same few experts, and a decode step reads less than it would. These
are the weights of this project's own benchmark of its engine, tensor by tensor, handed to the model as a
checkpoint's would be.

``lay_plugin`` makes the folder that an interpreter with vLLM needs on its path; ``register`` runs there, in
each of vLLM's processes. Only torch and the parts of this project that need no more are imported.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import antiphon
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.checkpoint.write import stored_tensors
from antiphon.model.config import preset

LOAD_FORMAT = "antiphon-synthesized"
PLUGIN = "antiphon_synthesized"
"""What ``VLLM_PLUGINS`` has to name, so that no other plugin changes what is measured."""
MODEL_VARIABLE = "ANTIPHON_PEER_MODEL"
"""Environment variable: the name of the shape whose weights are made."""
_METADATA = "Metadata-Version: 2.1\nName: antiphon-peer-weights\nVersion: 0\n"
_ENTRY_POINTS = f"[vllm.general_plugins]\n{PLUGIN} = antiphon.benchmarks.peers.vllm_weights:register\n"


def lay_plugin(folder: Path) -> None:
    """Make ``folder`` a place from which vLLM finds the plugin, and the plugin this project; nothing else.

    Raises:
        OSError: the folder cannot be written.
    """
    metadata = folder / "antiphon_peer_weights-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(_METADATA)
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    package = Path(antiphon.__file__).resolve().parent
    (folder / "antiphon").symlink_to(package, target_is_directory=True)


def register() -> None:
    """Teach vLLM the load format; called by vLLM."""
    loaders: Any = import_module("vllm.model_executor.model_loader")
    base: Any = import_module("vllm.model_executor.model_loader.dummy_loader").DummyModelLoader
    loader = type("SynthesizedLoader", (base,), {"load_weights": load_weights})
    loaders.register_model_loader(LOAD_FORMAT)(loader)


def load_weights(_loader: object, model: Any, _model_config: object) -> None:
    """Give a vLLM model its weights; its own loading takes each rank's part of them.

    Raises:
        ConfigError: no such shape.
    """
    config = preset(os.environ[MODEL_VARIABLE])
    device = next(model.parameters()).device
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # vLLM's is bfloat16 here, in which other numbers are drawn
    try:
        model.load_weights(stored_tensors(config, synthesize_parameters(config, 0, device)))
    finally:
        torch.set_default_dtype(before)
