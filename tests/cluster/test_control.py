"""The socket by which a running deployment is operated."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from antiphon.cluster import control
from antiphon.cluster.control import (
    Answer,
    AskStatus,
    ControlFailed,
    ControlServer,
    Request,
    RollAll,
    ScalePool,
    UpgradeTo,
    ask,
    find_socket,
)
from antiphon.protocol.errors import AntiphonError, ConfigError


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "control"
    monkeypatch.setattr(control, "control_folder", lambda: folder)
    return folder


async def refuse(request: Request) -> Answer:
    raise AntiphonError("not today")


async def test_a_request_is_carried_out_and_answered() -> None:
    seen: list[Request] = []

    async def operate(request: Request) -> Answer:
        seen.append(request)
        return Answer("done")

    async with ControlServer(operate) as server:
        for request in (ScalePool({"prefill": 3}), RollAll(), UpgradeTo("b"), AskStatus()):
            assert (await ask(find_socket(), request)).said == "done"
            assert seen[-1] == request
        assert server.path.parent.stat().st_mode & 0o777 == 0o700
    assert not server.path.parent.exists()


async def test_an_error_is_the_askers_and_the_server_goes_on() -> None:
    async with ControlServer(refuse) as server:
        for _ in range(2):
            with pytest.raises(ControlFailed, match="not today"):
                await ask(server.path, RollAll())
        reader, writer = await asyncio.open_unix_connection(str(server.path))
        writer.write(b'{"type": "explode"}\n')
        assert b"not understood" in await reader.readline()
        writer.close()


async def test_nobody_or_several_to_ask(own_folder: Path) -> None:
    with pytest.raises(ControlFailed, match="no deployment"):
        find_socket()
    async with ControlServer(refuse) as server:
        abandoned = (
            own_folder / f"{os.getppid()}.sock"
        )  # of one that was killed, its number taken by another process
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(abandoned))
        assert find_socket() == server.path
        abandoned.unlink()
        other = await asyncio.start_unix_server(lambda *_: None, str(own_folder / "1.sock"))
        with pytest.raises(ControlFailed, match="several"):
            find_socket()
        other.close()
        (own_folder / "1.sock").unlink()
    with pytest.raises(ControlFailed):
        await ask(server.path, AskStatus())


async def test_what_a_killed_deployment_left_is_swept_by_the_next(own_folder: Path) -> None:
    os.mkdir(own_folder, mode=0o700)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(own_folder / "999999999.sock"))
    async with ControlServer(refuse) as server:
        assert os.listdir(own_folder) == [server.path.name]
    assert not server.path.parent.exists()


async def test_a_folder_that_others_may_enter_is_not_used(own_folder: Path) -> None:
    os.mkdir(own_folder)
    os.chmod(own_folder, 0o755)
    with pytest.raises(ConfigError, match="open to others"):
        async with ControlServer(refuse):
            raise AssertionError("it listens")
