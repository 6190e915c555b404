"""From an operator's file to what is run: processes, limits, names, logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from antiphon.cluster.cli_serve import DEFAULT_CONFIG, read_config
from antiphon.cluster.logs import configure_logs
from antiphon.cluster.process_plan import plan_processes
from antiphon.cluster.resolution import max_context_tokens, resolve_deployment
from antiphon.configs.schema import DeploymentConfig
from antiphon.model.checkpoint.synthesize import synthesize
from antiphon.protocol.errors import CheckpointError, ConfigError
from antiphon.protocol.identity import Role


def config(**sections: Any) -> DeploymentConfig:
    return DeploymentConfig.model_validate({"model": {"path": "nowhere"}, **sections})


def test_every_replica_is_a_process_with_what_it_reserves() -> None:
    specs = plan_processes(
        config(
            prefill={"replicas": 2, "cpu_threads": 3},
            decode={"device": "cuda"},
            router={"replicas": 2, "port": 0},
        )
    )
    assert [spec.worker_id for spec in specs] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
        "router-0",
        "router-1",
    ]
    assert [spec.cpus for spec in specs] == [3, 3, 1, 1, 1]
    assert [spec.gpus for spec in specs] == [0, 0, 1, 0, 0]
    assert specs[-1].role is Role.ROUTER


def test_what_no_process_can_be_made_for_is_named() -> None:
    with pytest.raises(ConfigError, match=r"router\.replicas: 2 .* 8000"):
        plan_processes(config(router={"replicas": 2, "port": 8000}))


def test_context_is_the_least_of_checkpoint_caches_and_wish() -> None:
    caches = {"prefill": {"kv_cache": {"full_pages": 100}}, "decode": {"kv_cache": {"full_pages": 80}}}
    assert max_context_tokens(config(**caches), 131_072) == 80 * 64
    assert max_context_tokens(config(**caches), 4_096) == 4_096
    assert max_context_tokens(config(model={"path": "x", "max_context_tokens": 1_000}), 4_096) == 1_000
    with pytest.raises(ConfigError, match=r"6000 asked for, decode\.kv_cache\.full_pages gives 5120"):
        max_context_tokens(config(**caches, model={"path": "x", "max_context_tokens": 6_000}), 131_072)
    with pytest.raises(ConfigError, match="the checkpoint gives 4096"):
        max_context_tokens(config(model={"path": "x", "max_context_tokens": 5_000}), 4_096)


def test_a_model_is_located_named_and_fingerprinted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthesize(tmp_path / "my-model", like="tiny")
    monkeypatch.chdir(tmp_path)
    resolved = resolve_deployment(config(model={"path": "my-model"}))
    assert resolved.config.model.path == str(tmp_path / "my-model")
    assert resolved.served.name == resolved.config.model.name == "my-model"
    assert resolved.served.max_context_tokens == resolved.config.model.max_context_tokens == 16_384
    same = resolve_deployment(config(model={"path": "my-model", "served_name": "other"}))
    assert same.served.name == "other"
    assert same.served.fingerprint == resolved.served.fingerprint
    (tmp_path / "my-model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="my-model"):
        resolve_deployment(config(model={"path": "my-model"}))


def test_the_command_line_overrides_the_file() -> None:
    plain = read_config(None, None, None)
    assert plain == read_config(None, DEFAULT_CONFIG, None)
    changed = read_config("some/folder", None, 0, verbose=True)
    assert (changed.model.path, changed.model.name) == ("some/folder", "folder")
    assert changed.router.port == 0
    assert changed.log.level == "info"
    assert changed.decode == plain.decode


@pytest.fixture
def restored_logging() -> Iterator[None]:
    logger = logging.getLogger("antiphon")
    saved = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = saved
    structlog.reset_defaults()


@pytest.mark.usefixtures("restored_logging")
def test_both_kinds_of_logger_write_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("decode-0", "info")
    structlog.get_logger("antiphon.router").info("placed", worker="decode-0")
    logging.getLogger("antiphon.decode_worker.worker").warning("link to %s ended", "router-0")
    structlog.get_logger("antiphon.router").debug("too fine")
    secret = "what the user wrote"
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("antiphon.engine").exception("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["placed", "link to router-0 ended", "failed"]
    assert {line["process"] for line in lines} == {"decode-0"}
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert all("timestamp" in line for line in lines)
    assert lines[2]["exception"][0]["exc_value"] == "broken"
    assert secret not in json.dumps(lines)
