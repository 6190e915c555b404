"""Runs an arrangement's deployment as ``antiphon serve``, for as long as it is measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import yaml

from antiphon.benchmarks.split.arrangements import Arrangement
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.errors import AntiphonError

READY_WITHIN_S = 900.0
"""Longest start: processes, weights, kernels and graphs."""
STOP_WITHIN_S = 60.0
POLL_S = 0.2
FIRST_PORT = 20_000
"""A node of Ray takes the ports of its workers from those below, and does not start on one of them."""
ANY_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Whoever takes any port is given one of these."""
SAID_BYTES = 4000
"""End of what the deployment wrote, for the error when it does not start."""


class NotServing(AntiphonError):
    """An arrangement's deployment did not start, or ended while it was measured."""


@asynccontextmanager
async def start_server(arrangement: Arrangement) -> AsyncIterator[str]:
    """Base URL of the arrangement's own deployment or replicas, or of the server that runs already.

    Raises:
        NotServing, ReplicaFailed: the deployment, or a replica, does not become ready.
    """
    if arrangement.url is not None:
        yield arrangement.url
        return
    if arrangement.replicas is not None:
        async with arrangement.replicas.started(free_ports(arrangement.replicas.count)) as urls:
            yield urls
        return
    if arrangement.config is None:
        raise NotServing(f"{arrangement.label}: neither a deployment nor a server")
    with tempfile.TemporaryDirectory(prefix="antiphon-split-") as folder:
        (port,) = free_ports(1)
        config = _listening_on(arrangement.config, port)
        file, said = Path(folder) / "deployment.yaml", Path(folder) / "said"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        with said.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "antiphon.cluster.cli", "serve", "--config", str(file)),
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            await _wait_ready(process, url, arrangement, said)
            yield url
        finally:
            await _stop(process)


async def _wait_ready(
    process: asyncio.subprocess.Process, url: str, arrangement: Arrangement, said: Path
) -> None:
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_WITHIN_S):
                while process.returncode is None:
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get(f"{url}/ready")).is_success:
                            return
                    await asyncio.sleep(POLL_S)
    ended = "is not ready in time" if process.returncode is None else f"ended with {process.returncode}"
    tail = _end_of(said)
    raise NotServing(f"{arrangement.label}: antiphon serve {ended}: {tail}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Let it drain and end its own processes; what is left of its group after that is killed."""
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_WITHIN_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _end_of(said: Path) -> str:
    return said.read_bytes()[-SAID_BYTES:].decode(errors="replace").strip()


def _listening_on(config: DeploymentConfig, port: int) -> DeploymentConfig:
    router = config.router.model_copy(update={"host": "127.0.0.1", "port": port, "replicas": 1})
    return config.model_copy(update={"router": router})


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens, of those that nobody is given who takes any.

    A deployment takes dozens of the others while it starts, before its router listens.
    """
    first_given = int(ANY_PORT_RANGE.read_text().split()[0])
    candidates = range(FIRST_PORT, max(first_given, FIRST_PORT + 1000))
    ports: list[int] = []
    for port in random.sample(candidates, len(candidates)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports
