"""What the end-to-end tests share: a checkpoint and a deployment's configuration."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from antiphon.configs.schema import DeploymentConfig
from antiphon.model.checkpoint.synthesize import synthesize

# Modules of this folder are imported by tests here and, in one test, by the processes of a deployment.
sys.path.insert(0, str(Path(__file__).parent))

# A test process computes a reference while a deployment may run beside it: leave it a core.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the tiny shape."""
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synthesize(directory, like="tiny", seed=1)
    return directory


@pytest.fixture(scope="session")
def local_deployment(checkpoint: Path) -> DeploymentConfig:
    """One prefill worker, one decode worker and one router in float32 on this machine, on a free port."""
    return DeploymentConfig.model_validate(
        {
            "model": {"path": str(checkpoint), "served_name": "gpt-oss-tiny", "dtype": "float32"},
            "router": {"port": 0},
            "prefill": {"chunk_tokens": 128, "kv_cache": {"full_pages": 128, "sliding_pages": 64}},
            "decode": {"chunk_tokens": 128, "kv_cache": {"full_pages": 256, "sliding_pages": 128}},
            "transfer": {"lease_s": 10.0, "heartbeat_s": 0.5},
        }
    )
