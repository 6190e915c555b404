"""``antiphon serve`` and ``antiphon config show``."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from pathlib import Path

import yaml

from antiphon.cluster.deployment import Deployment, check_port_is_free, serve_until_stopped
from antiphon.cluster.logs import configure_logs
from antiphon.cluster.process_plan import plan_processes
from antiphon.cluster.resolution import resolve_deployment
from antiphon.configs import schema
from antiphon.configs.deployment_file import load_deployment
from antiphon.configs.schema import DeploymentConfig

DEFAULT_CONFIG = Path(schema.__file__).with_name("local-cpu.yaml")


def serve(
    model: str | None,
    config_file: Path | None,
    port: int | None,
    *,
    verbose: bool,
    metrics_compat: str | None = None,
) -> None:
    """Run a deployment until a signal ends it.

    Raises:
        AntiphonError: the configuration or the checkpoint cannot be used, or a process cannot start.
    """
    began = time.monotonic()
    config = read_config(model, config_file, port, verbose=verbose, metrics_compat=metrics_compat)
    configure_logs("supervisor", config.log.level)
    # What is wrong with the configuration is said before a model is fetched, and both before anything starts.
    plan_processes(config)
    check_port_is_free(config)
    resolved = resolve_deployment(config)

    def announce(deployment: Deployment) -> None:
        greeting = _greeting(deployment.urls, config.model.name, time.monotonic() - began)
        print(f"{greeting}Watch it with: {_own_name()} top {deployment.metrics_url}\n", flush=True)

    print("Starting Ray, prefill, decode and the router ...", file=sys.stderr, flush=True)

    def reread() -> DeploymentConfig:
        now = read_config(model, config_file, port, verbose=verbose, metrics_compat=metrics_compat)
        return resolve_deployment(now).config

    asyncio.run(
        serve_until_stopped(resolved, on_ready=announce, reread=reread if config_file is not None else None)
    )
    print("Stopped.", file=sys.stderr)


def read_config(
    model: str | None,
    config_file: Path | None,
    port: int | None,
    *,
    verbose: bool = False,
    metrics_compat: str | None = None,
) -> DeploymentConfig:
    """The configuration of ``antiphon serve``: a file, and what the command line says otherwise.

    Raises:
        ConfigError: see ``load_deployment``.
    """
    overrides: dict[str, object] = {}
    if model is not None:  # the file's name and revision are of the file's model
        overrides |= {"model.path": model, "model.served_name": None, "model.revision": None}
    if port is not None:
        overrides["router.port"] = port
    if metrics_compat is not None:
        overrides["metrics.compat"] = metrics_compat
    if verbose:
        overrides["log.level"] = "info"
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
        f'or: {_own_name()} chat --url {urls[0]} "Hello!"\nCtrl-C stops everything.\n'
    )


def _own_name() -> str:
    """How this command was called, so that its hint can be pasted; ``antiphon`` when it is on the path."""
    return sys.argv[0] if sys.argv[0].endswith("/antiphon") and not shutil.which("antiphon") else "antiphon"
