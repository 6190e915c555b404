"""How ``antiphon scale`` and its like reach a deployment that runs: a socket that only its own user can open.

The supervisor listens on a Unix socket in a folder of its own under the system's temporary folder. A request
is one JSON line, its answer another; whoever may open the socket may do everything. On Kubernetes the command
runs in the supervisor's container.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog

from antiphon.protocol.errors import AntiphonError, ConfigError

log = structlog.get_logger("antiphon.control")


class ScalePool(msgspec.Struct, frozen=True, tag="scale", forbid_unknown_fields=True):
    """Make pools this large; role -> replicas."""

    pools: dict[str, int]


class RollAll(msgspec.Struct, frozen=True, tag="roll", forbid_unknown_fields=True):
    """Restart every process, one at a time."""


class UpgradeTo(msgspec.Struct, frozen=True, tag="upgrade", forbid_unknown_fields=True):
    """Replace all workers by those of this revision, as the deployment file now describes them."""

    revision: str


class AskStatus(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """Say what runs."""


Request = ScalePool | RollAll | UpgradeTo | AskStatus


class MemberReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process, for people."""

    worker_id: str
    state: str
    ready: bool
    detail: str
    requests: int
    pages_held: int
    restarts: int


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of a request; ``error`` is one line when it was not carried out."""

    said: str = ""
    members: tuple[MemberReport, ...] = ()
    error: str | None = None


class ControlFailed(AntiphonError):
    """The deployment could not be reached, or did not do what was asked; the message says why."""


Operate = Callable[[Request], Awaitable[Answer]]
"""Carries out a request; an AntiphonError becomes the answer's error."""


def control_folder() -> Path:
    """Where this user's deployments listen."""
    return Path(tempfile.gettempdir()) / f"antiphon-control-{os.getuid()}"


class ControlServer:
    """Listens for as long as its block lasts."""

    def __init__(self, operate: Operate) -> None:
        self._operate = operate
        self._server: asyncio.Server | None = None
        self.path = control_folder() / f"{os.getpid()}.sock"

    async def __aenter__(self) -> ControlServer:
        """Begin to listen.

        Raises:
            ConfigError: the folder cannot be used.
        """
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            owned = folder.stat()
            if owned.st_uid != os.getuid() or owned.st_mode & 0o077:
                raise ConfigError(f"{folder}: belongs to another user, or is open to others")
            for path in folder.glob("*.sock"):
                if not _listens(path):  # of a supervisor that was killed
                    path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, str(self.path))
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot listen: {error.strerror or error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another deployment of this user listens in it
            self.path.parent.rmdir()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            if not line:
                return  # only looked whether anybody listens
            writer.write(msgspec.json.encode(await self._answer(line)) + b"\n")
            await writer.drain()
        except ConnectionError:
            log.info("asker left")  # what was asked for goes on all the same
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Answer:
        try:
            request = msgspec.json.decode(line, type=Request)
        except msgspec.DecodeError as error:
            return Answer(error=f"not understood: {error}")
        log.info("asked", request=type(request).__name__)
        try:
            return await self._operate(request)
        except AntiphonError as error:
            return Answer(error=str(error))


def _listens(path: Path) -> bool:
    """Whether anybody listens: a killed process leaves its socket behind, and its number to others."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # too busy to answer at once, or not ours to open: not dead
            return True
    return True


def find_socket() -> Path:
    """The socket of the one deployment of this user that runs here.

    Raises:
        ControlFailed: none runs, or several do.
    """
    alive = [path for path in sorted(control_folder().glob("*.sock")) if _listens(path)]
    if not alive:
        raise ControlFailed("no deployment of this user runs on this machine")
    if len(alive) > 1:
        raise ControlFailed(
            f"several deployments run: choose one with --socket: {', '.join(map(str, alive))}"
        )
    return alive[0]


async def ask(path: Path, request: Request) -> Answer:
    """Ask a deployment and wait until it has done it.

    Raises:
        ControlFailed: it cannot be reached, ended meanwhile, or refused.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError as error:
        raise ControlFailed(f"{path}: {error.strerror or error}") from error
    try:
        writer.write(msgspec.json.encode(request) + b"\n")
        await writer.drain()
        line = await reader.readline()
    except ConnectionError as error:
        raise ControlFailed(f"the deployment ended: {error}") from error
    finally:
        writer.close()
    if not line:
        raise ControlFailed("the deployment ended before it answered")
    answer = msgspec.json.decode(line, type=Answer)
    if answer.error is not None:
        raise ControlFailed(answer.error)
    return answer
