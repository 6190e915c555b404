"""Whether a rank reaches GPUs of its host, by configuration and GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from antiphon.configs.schema import DeploymentConfig
from antiphon.engine import kv_mapping
from antiphon.engine.kv_mapping import host_mapping
from antiphon.protocol.errors import ConfigError

GPU = torch.device("cuda", 0)


def config(same_host: str, **changes: Any) -> DeploymentConfig:
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "prefill": {"device": "cuda"},
        "decode": {"device": "cuda"},
        "transfer": {"same_host": same_host},
    }
    return DeploymentConfig.model_validate(tree | changes)


@pytest.fixture(params=[True, False], ids=["an H200", "another GPU"])
def h200(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(kv_mapping, "serves", lambda device: request.param)
    monkeypatch.setattr(kv_mapping, "KvMapping", lambda device: f"mapping of {device}")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    return bool(request.param)


@pytest.mark.parametrize("same_host", ["auto", "required"])
def test_a_gpu_that_runs_the_copies_reaches_its_host(same_host: str, h200: bool) -> None:
    if not h200 and same_host == "required":
        with pytest.raises(ConfigError, match="same_host required: NVIDIA A100 does not run the copies"):
            host_mapping(config(same_host), GPU)
        return
    reach = host_mapping(config(same_host), GPU)
    assert reach is not None
    assert reach.required is (same_host == "required")
    assert (reach.memory is not None) is h200
    assert ("NVIDIA A100" in reach.obstacle) is not h200


def test_what_is_switched_off_says_so(h200: bool) -> None:
    reach = host_mapping(config("never"), GPU)
    assert reach is not None
    assert (reach.memory, reach.obstacle, reach.required) == (None, "transfer.same_host is never", False)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill": {"device": "cpu"}},
        {"decode": {"device": "cpu"}},
        {
            "prefill": {"device": "cuda", "replicas": 0},
            "decode": {"device": "cuda", "local_prefill": "always"},
        },
    ],
    ids=["prefill on a CPU", "decode on a CPU", "no prefill workers"],
)
def test_there_is_nothing_to_reach_where_no_kv_moves_between_gpus(
    changes: dict[str, Any], h200: bool
) -> None:
    assert host_mapping(config("auto", **changes), GPU) is None
