"""Another system's engine as replicas that answer HTTP, one on each GPU, for as long as they are measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from antiphon.benchmarks.peers import replica_server, vllm_weights
from antiphon.benchmarks.peers.meter import MEASURED_ENVIRONMENT, PeerSystem
from antiphon.benchmarks.peers.program import Setup
from antiphon.benchmarks.sweep.replicas import VISIBLE, visible_devices
from antiphon.model.checkpoint.write import write_config
from antiphon.model.config import preset
from antiphon.protocol.errors import AntiphonError

PROGRAM = str(Path(replica_server.__file__).resolve())
READY_WITHIN_S = 400.0
END_WITHIN_S = 20.0
LOG_BYTES = 1500


class ReplicaFailed(AntiphonError):
    """A replica did not start; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class PeerReplicas:
    """Which system serves which model, and how large."""

    system: PeerSystem
    model: str
    """A preset; its weights are synthesized within."""
    count: int
    chunk_tokens: int
    places: int
    """Sequences that one replica runs at a time."""
    longest_tokens: int
    on_gpus: bool = True

    def setup(self, folder: Path) -> Setup:
        """For a replica whose folder of the model, and of the plugin, is within ``folder``."""
        return Setup(
            model=str(folder / self.model),
            tensor_parallel=1,
            expert_parallel=False,
            longest_tokens=self.longest_tokens,
            largest_batch=self.places,
            chunk_tokens=self.chunk_tokens,
            steps=0,
            repeats=0,
            text_tokens=preset(self.model).vocab_size,
            load_format=vllm_weights.LOAD_FORMAT,
            path=str(folder / "plugin"),
            environment={"VLLM_PLUGINS": vllm_weights.PLUGIN, vllm_weights.MODEL_VARIABLE: self.model},
        )

    @asynccontextmanager
    async def started(self, ports: list[int]) -> AsyncIterator[str]:
        """Their URLs with ``+`` between them, once all are ready.

        Raises:
            ReplicaFailed: one is not.
        """
        with tempfile.TemporaryDirectory(prefix="antiphon-replicas-") as temporary:
            folder = Path(temporary)
            write_config(folder / self.model, preset(self.model))
            vllm_weights.lay_plugin(folder / "plugin")
            line = json.dumps(asdict(self.setup(folder))).encode() + b"\n"
            async with AsyncExitStack() as stack:
                processes = []
                for number, port in enumerate(ports):
                    with (folder / f"{port}.log").open("wb") as log:
                        process = await asyncio.create_subprocess_exec(
                            *(self.system.python, PROGRAM, str(port)),
                            stdin=asyncio.subprocess.PIPE,
                            stdout=asyncio.subprocess.PIPE,
                            stderr=log,
                            env=os.environ | MEASURED_ENVIRONMENT | self._visible(number),
                            start_new_session=True,
                        )
                    stack.push_async_callback(_end, process)
                    processes.append(process)
                await asyncio.gather(
                    *(
                        _ready(process, line, folder / f"{port}.log")
                        for process, port in zip(processes, ports, strict=True)
                    )
                )
                yield "+".join(f"http://127.0.0.1:{port}" for port in ports)

    def _visible(self, number: int) -> dict[str, str]:
        return {VISIBLE: visible_devices([number])} if self.on_gpus else {}


async def _ready(process: asyncio.subprocess.Process, line: bytes, log: Path) -> None:
    asked, answers = process.stdin, process.stdout
    if asked is None or answers is None:
        raise RuntimeError("a replica was started without pipes")
    answer = b""
    with suppress(ConnectionError, TimeoutError):  # it ended or hangs: its log says why
        asked.write(line)
        await asked.drain()
        answer = await asyncio.wait_for(answers.readline(), READY_WITHIN_S)
    document = json.loads(answer) if answer else {"error": "it ended, or was not ready in time"}
    if "error" in document:
        raise ReplicaFailed(f"a replica did not start: {document['error']}: {_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_bytes()[-LOG_BYTES:].decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close its input, which ends it; what is left of its session is killed."""
    if process.stdin is not None:
        process.stdin.close()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
