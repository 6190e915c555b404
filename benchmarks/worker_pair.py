"""A prefill and a decode worker on two GPUs, without Ray and HTTP: what a split costs and what it spares.

The workers are the real ones with random weights, each in a process with a GPU of its own; a stand-in for the
router in this process hands requests in and notes when tokens come back. Measured: time to first token of a
prompt against one GPU that does both parts, and the time between tokens of running streams while prompts
arrive.

    python -m antiphon.benchmarks.worker_pair --model gpt-oss-20b --out results.json
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from antiphon.benchmarks.records import Record, append_records, checkout_commit, now
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
            "prefill": {**pool, "replicas": 0 if colocated else 1},
            "decode": pool | local,
            "transfer": {"layer_groups": 4 if device == "cuda" else 2},
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

        network = CudaTransformer(
            shape, synthesize_parameters(shape, 0, "cuda"), with_unembedding=samples, resident_fp8=not samples
        )
    else:
        from antiphon.model.checkpoint.load import fill
        from antiphon.model.transformer import Transformer

        network = Transformer(shape, torch.bfloat16)
        fill(network, synthesize_parameters(shape, 0))
    settings = EngineSettings.resolve(
        mine, shape, layer_groups=config.transfer.layer_groups, decode_graphs=fast and samples
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


class Prompts:
    """Random token ids, so that no two prompts share a beginning."""

    def __init__(self, vocabulary: int = 199_000) -> None:
        self._random = random.Random(3)
        self._vocabulary = vocabulary

    def of(self, tokens: int) -> list[int]:
        """A new prompt."""
        return self._random.choices(range(self._vocabulary), k=tokens)


def first_tokens(router: StandInRouter, prompts: Prompts, tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds to the first and to the second token of a lone prompt, medians; tail of its transfer."""
    firsts, seconds, tails = [], [], []
    for _ in range(repeats + 1):
        stream = router.generate(prompts.of(tokens), 4)
        router.wait([stream], 60)
        firsts.append((stream.times[0] - stream.sent) * 1e3)
        seconds.append((stream.times[1] - stream.sent) * 1e3)
        if router.finished:
            tails.append(router.finished[-1].transfer_tail_s * 1e3)
    found = {"ttft_ms": statistics.median(firsts[1:]), "second_token_ms": statistics.median(seconds[1:])}
    return found | ({"transfer_tail_ms": statistics.median(tails[1:])} if tails else {})


def interference(
    router: StandInRouter, prompts: Prompts, streams: int, tokens: int, every_s: float, seconds: float
) -> dict[str, float]:
    """Milliseconds between tokens of running streams while a prompt arrives every so often."""
    longest = int(seconds / 0.004)
    running_streams = [router.generate(prompts.of(tokens), longest) for _ in range(streams)]
    until(lambda: all(stream.tokens > 4 for stream in running_streams) or bool(router.trouble), "streams")
    begin = time.perf_counter()
    arrivals = []
    while time.perf_counter() - begin < seconds:
        arrivals.append(router.generate(prompts.of(tokens), 4))
        time.sleep(every_s)
    end = time.perf_counter()
    if router.trouble:
        raise RuntimeError("; ".join(router.trouble))
    gaps = sorted(
        (later - earlier) * 1e3
        for stream in running_streams
        for earlier, later in itertools.pairwise([at for at in stream.times if begin <= at <= end])
    )
    waits = [(stream.times[0] - stream.sent) * 1e3 for stream in arrivals if stream.times]
    return {
        "itl_p50_ms": gaps[len(gaps) // 2],
        "itl_p99_ms": gaps[int(len(gaps) * 0.99)],
        "itl_max_ms": gaps[-1],
        "arrivals_ttft_p50_ms": statistics.median(waits),
        "arrivals": len(arrivals),
        "tokens_per_s": len(gaps) / (end - begin),
    }


def main() -> None:
    """Measure the split, then one GPU that does both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", default="1024,8192,32768")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lengths = [int(tokens) for tokens in options.tokens.split(",")]
    longest = max(*lengths, options.context) + 4096
    device = "NVIDIA H200" if options.device == "cuda" else "CPU"
    for colocated in (False, True):
        records: list[Record] = []
        where = "1 GPU" if colocated else "prefill TP1 + decode TP1"

        def note(
            bench: str,
            tokens: int,
            value: float,
            extra: dict[str, object],
            where: str = where,
            records: list[Record] = records,
        ) -> None:
            print(f"{bench}, {where}, {tokens} tokens: {value:.2f} ms {extra}", flush=True)
            stamp = "TP1", device, checkout_commit(), now()
            record = Record(
                bench,
                options.model,
                *stamp,
                value,
                "ms",
                input_tokens=tokens,
                extra={**extra, "shape": where},
            )
            records.append(record)

        with running(options.model, options.device, colocated, longest, options.streams + 8) as router:
            prompts = Prompts()
            for tokens in lengths:
                found = first_tokens(router, prompts, tokens, options.repeats)
                note("ttft", tokens, found.pop("ttft_ms"), dict(found))
            if options.streams:
                shape = options.streams, options.context, 0.5, options.seconds
                found = interference(router, prompts, *shape)
                note("interference", options.context, found.pop("itl_p99_ms"), dict(found))
        if options.out:
            append_records(options.out, records)


if __name__ == "__main__":
    main()
