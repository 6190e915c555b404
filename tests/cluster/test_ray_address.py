"""A head that is not there is told by its address, in time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from antiphon.cluster import deployment, ray_address
from antiphon.cluster.deployment import deploy
from antiphon.cluster.ray_address import await_head
from antiphon.cluster.ray_cluster import Interrupted
from antiphon.cluster.resolution import ResolvedDeployment
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.errors import ConfigError
from antiphon.router.served_model import ServedModel


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """A port that is somebody's who does not listen."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


def address_of(held: socket.socket) -> str:
    return f"127.0.0.1:{held.getsockname()[1]}"


async def test_a_head_that_is_not_there_is_named_with_the_reason(deaf: socket.socket) -> None:
    with pytest.raises(ConfigError, match=rf"ray.address: {address_of(deaf)}: no Ray .*Connect call failed"):
        await await_head(address_of(deaf), within_s=0.2)


async def test_a_head_that_starts_later_is_found(
    deaf: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_address, "RETRY_S", 0.01)
    waiting = asyncio.create_task(await_head(address_of(deaf)))
    await asyncio.sleep(0)
    assert not waiting.done()
    deaf.listen()
    await waiting


@pytest.mark.parametrize("address", [None, "auto", "local", "ray://127.0.0.1:1"])
async def test_what_ray_looks_up_itself_is_left_to_it(address: str | None) -> None:
    await await_head(address)


def config_at(address: str) -> ResolvedDeployment:
    config = DeploymentConfig.model_validate(
        {"model": {"path": "nowhere"}, "router": {"port": 0}, "ray": {"address": address}}
    )
    return ResolvedDeployment(config, ServedModel("nothing", 1024, 0, "fp_0"))


async def test_a_deployment_does_not_start_without_its_head(
    deaf: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(address: str | None) -> None:
        await await_head(address, within_s=0.1)

    monkeypatch.setattr(deployment, "await_head", at_once)
    with pytest.raises(ConfigError, match="no Ray"):
        async with deploy(config_at(address_of(deaf))):
            pass


async def test_a_signal_ends_the_wait_for_a_head(deaf: socket.socket) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_soon(stop.set)
    with pytest.raises(Interrupted):
        async with deploy(config_at(address_of(deaf)), stop=stop):
            pass
