"""What the end-to-end tests share: a checkpoint and a deployment's configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from antiphon.configs.schema import DeploymentConfig
from antiphon.model.checkpoint.synthesize import synthesize

# Modules of this folder are imported by tests here and, in one test, by the processes of a deployment.
sys.path.insert(0, str(Path(__file__).parent))

from left_behind import private_home
from observed_deployment import Observed, SpanReceiver, observed_deployment

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


@pytest.fixture(scope="session")
def observed(
    local_deployment: DeploymentConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Observed]:
    """That deployment by the command line, with every request's spans recorded."""
    folder = tmp_path_factory.mktemp("observed")
    spans = SpanReceiver()
    tree = local_deployment.model_dump(mode="json")
    tree["router"] |= {"max_in_flight_requests": 8, "max_queued_requests": 2, "slow_client_buffer_tokens": 64}
    # So few pages that a crowd has to give some back, and so short a wait that a stopped writer is given up.
    tree["decode"]["kv_cache"] |= {"full_pages": 40}
    tree["transfer"] |= {"completion_timeout_s": 2.0, "lease_s": 15.0}
    tree["log"] |= {"level": "info"}
    tree["metrics"] |= {"compat": "vllm"}
    tree["tracing"] |= {"otlp_endpoint": spans.url, "sample_ratio": 0.0}
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(tree))
    try:
        with private_home() as home, observed_deployment(file, folder / "log", spans, home) as running:
            yield running
    finally:
        spans.close()
