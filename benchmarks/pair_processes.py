"""A prefill and a decode worker in a process each, and a stand-in for the router in front of them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.identity import Role, Topology, WorkerAddress
from antiphon.protocol.link import LinkNode, LinkSettings, Peer
from antiphon.protocol.link_thread import LinkThread
from antiphon.protocol.messages import (
    GenerateRequest,
    PrefillFailed,
    PrefillFinished,
    PrefillRequest,
    RequestRefused,
    Reserved,
    SamplingParams,
    TokenBatch,
    TokensAck,
)

TOKEN = "a token for measurements"
READY_S = 120.0


def deployment(model: str, device: str, colocated: bool, context_tokens: int, batch: int) -> DeploymentConfig:
    """One prefill and one decode worker, or one decode worker that computes prompts itself."""
    pages = batch * (context_tokens // 64 + 16)
    pool = {
        "device": device,
        "chunk_tokens": 8192,
        "max_batch_size": batch,
        "max_reservations_waiting": batch,
        "kv_cache": {"full_pages": pages, "sliding_pages": max(512, 8 * batch), "prefix_cache": False},
    }
    local = {"local_prefill": "always"} if colocated else {}
    return DeploymentConfig.model_validate(
        {
            "model": {"path": model},
            "prefill": {
                **pool,
                "replicas": 0 if colocated else 1,
                "chunk_graph_tokens": "standard" if device == "cuda" else (),
            },
            "decode": pool | local,
            "transfer": {
                "layer_groups": 4 if device == "cuda" else 2,
                "same_host": "required" if device == "cuda" else "never",
            },
        }
    )


def serve(role: Role, config: DeploymentConfig, model: str, pipe: Connection) -> None:
    """One worker's process: start, tell where, take topologies until told to end."""
    import torch

    from antiphon.decode_worker.worker import DecodeWorker
    from antiphon.engine.loop import EngineLoop
    from antiphon.engine.settings import EngineSettings
    from antiphon.model.checkpoint.synthesize import synthesize_parameters
    from antiphon.model.config import preset
    from antiphon.prefill_worker.worker import PrefillWorker

    mine = config.prefill if role is Role.PREFILL else config.decode
    shape, samples = preset(model), role is Role.DECODE
    fast = mine.device == "cuda"
    network: Any
    if fast:
        from antiphon.model.cuda_transformer import CudaTransformer

        network = CudaTransformer(shape, synthesize_parameters(shape, 0, "cuda"), with_unembedding=samples)
    else:
        from antiphon.model.checkpoint.load import fill
        from antiphon.model.transformer import Transformer

        network = Transformer(shape, torch.bfloat16)
        fill(network, synthesize_parameters(shape, 0))
    settings = EngineSettings.resolve(
        mine,
        shape,
        layer_groups=config.transfer.layer_groups,
        decode_graphs=fast and samples,
        chunk_graphs=role is Role.PREFILL or config.decode.local_prefill != "never",
    )
    kind = PrefillWorker if role is Role.PREFILL else DecodeWorker
    worker = kind(
        f"{role}-0",
        config,
        lambda on_scheduled, on_kv_written: EngineLoop(
            network,
            settings,
            device=mine.device,
            kv_dtype=torch.bfloat16,
            on_scheduled=on_scheduled,
            on_kv_written=on_kv_written,
        ),
        bind_host="127.0.0.1",
        cluster_token=TOKEN,
    )
    pipe.send(worker.start())
    while (said := pipe.recv()) is not None:
        if isinstance(said, Topology):
            worker.set_topology(said)
        pipe.send(worker.status())
    worker.stop()


@dataclass(slots=True)
class Stream:
    """What came of one request, and when."""

    prompt: list[int]
    sent: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False
    refused: str = ""


class StandInRouter:
    """A router's part of the protocol, as simply as it goes."""

    def __init__(self, *workers: WorkerAddress) -> None:
        self.streams: dict[str, Stream] = {}
        self.trouble: list[str] = []
        self.finished: list[PrefillFinished] = []
        """What prefill said of its jobs."""
        self._names = itertools.count()
        self._thread = LinkThread("router", lambda error: self.trouble.append(repr(error)))
        self._thread.start()
        self._node = LinkNode(Peer(Role.ROUTER, "router-0", 1), TOKEN, self, LinkSettings())
        self._thread.call(self._node.start)
        self._peers = {worker.role: self._thread.call(self._node.connect, worker) for worker in workers}
        until(lambda: all(self._node.is_up(peer) for peer in self._peers.values()), "links")

    def generate(self, prompt: list[int], max_tokens: int) -> Stream:
        """Hand in a request."""
        name = f"r{next(self._names)}"
        sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True)
        stream = self.streams[name] = Stream(prompt)
        self._node.send(self._peers[Role.DECODE], GenerateRequest(name, 1, prompt, [], sampling))
        return stream

    def wait(self, streams: list[Stream], seconds: float) -> None:
        """Until all have ended.

        Raises:
            RuntimeError: one was refused or did not end in time.
        """
        until(lambda: all(stream.ended for stream in streams) or bool(self.trouble), "answers", seconds)
        if self.trouble:
            raise RuntimeError("; ".join(self.trouble))

    def close(self) -> None:
        """Hang up."""
        self._thread.call(self._node.close)
        self._thread.stop()

    def on_up(self, peer: Peer) -> None:
        """See LinkHandler."""

    def on_lost(self, peer: Peer, reason: str) -> None:
        """See LinkHandler."""
        self.trouble.append(f"{peer}: {reason}")

    def on_message(self, peer: Peer, message: object) -> None:
        """See LinkHandler."""
        at = time.perf_counter()
        if isinstance(message, TokenBatch):
            self._node.send(peer, TokensAck(message.sequence_number))
            for output in message.outputs:
                stream = self.streams[output.request_id]
                if output.token_ids:
                    stream.times.append(at)
                    stream.tokens += len(output.token_ids)
                stream.ended |= output.finish is not None
        elif isinstance(message, Reserved) and message.ticket is not None:
            prompt = self.streams[message.request_id].prompt
            request = PrefillRequest(message.request_id, message.attempt, prompt, message.ticket)
            self._node.send(self._peers[Role.PREFILL], request)
        elif isinstance(message, RequestRefused | PrefillFailed):
            self.trouble.append(f"{message.request_id}: {message.reason}")
        elif isinstance(message, PrefillFinished):
            self.finished.append(message)


def until(condition: Callable[[], bool], what: str, seconds: float = READY_S) -> None:
    """Poll.

    Raises:
        RuntimeError: it did not come in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come within {seconds:g} s")
        time.sleep(0.001)


@contextmanager
def running(
    model: str, device: str, colocated: bool, context_tokens: int, batch: int
) -> Iterator[StandInRouter]:
    """Workers that are ready, and a router in front of them."""
    config = deployment(model, device, colocated, context_tokens, batch)
    roles = (Role.DECODE,) if colocated else (Role.PREFILL, Role.DECODE)
    context = multiprocessing.get_context("spawn")
    started: list[tuple[BaseProcess, Connection]] = []
    for index, role in enumerate(roles):
        pipe, theirs = context.Pipe()
        os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
        process: BaseProcess = context.Process(target=serve, args=(role, config, model, theirs), daemon=True)
        process.start()
        started.append((process, pipe))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        addresses = tuple(_answer(process, pipe) for process, pipe in started)
        _until_ready(started, Topology(1, addresses))
        router = StandInRouter(*addresses)
        yield router
        router.close()
        for _, pipe in started:
            pipe.send(None)
        for process, _ in started:
            process.join(20)
    finally:
        for process, _ in started:
            process.kill()


def _answer(process: BaseProcess, pipe: Connection) -> Any:
    """What a worker's process says next.

    Raises:
        RuntimeError: it ended, or said nothing in time.
    """
    until(lambda: pipe.poll() or not process.is_alive(), "a worker")
    try:
        return pipe.recv()
    except EOFError as error:
        process.join(5)
        raise RuntimeError(f"a worker ended with {process.exitcode}") from error


def _until_ready(started: list[tuple[BaseProcess, Connection]], topology: Topology) -> None:
    for _, pipe in started:
        pipe.send(topology)

    def ready() -> bool:
        statuses = [_answer(process, pipe) for process, pipe in started]
        if all(status.ready for status in statuses):
            return True
        time.sleep(0.05)
        for _, pipe in started:
            pipe.send("status")
        return False

    until(ready, "readiness")
