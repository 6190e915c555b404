"""``antiphon serve`` and ``antiphon config show``."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from pathlib import Path

import structlog
import yaml

from antiphon.cluster.deployment import Deployment, serve_until_stopped
from antiphon.configs import schema
from antiphon.configs.schema import DeploymentConfig, load_deployment

DEFAULT_CONFIG = Path(schema.__file__).with_name("local-cpu.yaml")


def serve(model: str | None, config_file: Path | None, port: int | None, *, verbose: bool) -> None:
    """Run a deployment until a signal ends it.

    Raises:
        AntiphonError: the configuration or the checkpoint cannot be used, or a process cannot start.
    """
    began = time.monotonic()
    _configure_logging(verbose)
    config = read_config(model, config_file, port)

    def announce(deployment: Deployment) -> None:
        print(_greeting(deployment.urls, config.model.name, time.monotonic() - began), flush=True)

    print("Starting Ray, prefill, decode and the router ...", file=sys.stderr, flush=True)
    asyncio.run(serve_until_stopped(config, forward_logs=verbose, on_ready=announce))
    print("Stopped.", file=sys.stderr)


def read_config(model: str | None, config_file: Path | None, port: int | None) -> DeploymentConfig:
    """The configuration of ``antiphon serve``: a file, and what the command line says otherwise.

    Raises:
        ConfigError: see ``load_deployment``.
    """
    overrides: dict[str, object] = {}
    if model is not None:  # the file's name and revision are of the file's model
        overrides |= {"model.path": model, "model.served_name": None, "model.revision": None}
    if port is not None:
        overrides["router.port"] = port
    return load_deployment(config_file or DEFAULT_CONFIG, overrides)


def show_config(config_file: Path | None) -> None:
    """Print a deployment with every default filled in, as YAML."""
    config = load_deployment(config_file or DEFAULT_CONFIG)
    yaml.safe_dump(config.model_dump(mode="json"), sys.stdout, sort_keys=False)


def _greeting(urls: tuple[str, ...], model: str, ready_s: float) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    curl = (
        f"curl -N {urls[0]}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
    return (
        f"\nReady in {ready_s:.1f} s: {model} at {', '.join(f'{url}/v1' for url in urls)}\n\n  {curl}\n\n"
        f'or: antiphon chat --url {urls[0]} "Hello!"\nCtrl-C stops everything.\n'
    )


def _configure_logging(verbose: bool) -> None:
    """Supervisor's log on stderr; warnings only unless verbose."""
    level = logging.INFO if verbose else logging.WARNING
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
