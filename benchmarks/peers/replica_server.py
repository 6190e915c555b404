"""One replica of vLLM behind the least of an HTTP server; needs nothing of this project.

    python replica_server.py PORT

The first line on standard input is a ``program.Setup`` as JSON; once the engine is there, ``{"version": ...,
"device": ...}`` or ``{"error": ...}`` is printed. Then ``/v1/completions`` takes token ids and streams, one
event for what each step brought, until standard input ends. Nothing is tokenized and nothing detokenized: an
event's text stands for its tokens, one sign each, so the engine is shown at its best.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol

MAX_BODY_BYTES = 32 * 1024 * 1024
SIGN = "."
"""Stands for a token."""


class Engine(Protocol):
    """What answers."""

    version: str

    def tokens(self, prompt: list[int], wanted: int) -> AsyncIterator[int]:
        """How many tokens each step brought."""
        ...


class VllmEngine:
    """vLLM's asynchronous engine with its own scheduling, prefix cache and graphs."""

    def __init__(self, setup: dict[str, Any]) -> None:
        vllm = import_module("vllm")
        self.version = str(vllm.__version__)
        self._parameters = vllm.SamplingParams
        self._delta = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs(
            model=setup["model"],
            skip_tokenizer_init=True,
            dtype="bfloat16",
            tensor_parallel_size=setup["tensor_parallel"],
            enable_expert_parallel=setup["expert_parallel"],
            max_model_len=setup["longest_tokens"],
            max_num_seqs=setup["largest_batch"],
            max_num_batched_tokens=max(setup["chunk_tokens"], setup["largest_batch"]),
            load_format=setup["load_format"],
            disable_log_stats=True,
            seed=0,
        )
        self._engine = import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(arguments)
        self._requests = 0

    async def tokens(self, prompt: list[int], wanted: int) -> AsyncIterator[int]:
        """See ``Engine``; a caller that goes away aborts the request."""
        self._requests += 1
        parameters = self._parameters(
            temperature=1.0, max_tokens=wanted, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        outputs = self._engine.generate({"prompt_token_ids": prompt}, parameters, str(self._requests))
        try:
            async for output in outputs:
                if brought := len(output.outputs[0].token_ids):
                    yield brought
        finally:
            await outputs.aclose()


class Answers:
    """Answers one connection after the other of any number at a time."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request; the connection is closed afterwards."""
        answering: asyncio.Task[None] | None = None
        try:
            path, body = await _request(reader)
            answering = asyncio.ensure_future(self._answer(path, body, writer))
            gone = asyncio.ensure_future(reader.read(1))  # a client that leaves needs no answer
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if answering.done():
                answering.result()
        except (ConnectionError, asyncio.IncompleteReadError, ValueError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            if answering is not None and not answering.done():
                answering.cancel()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path.endswith("/models"):
            return _whole(writer, 200, {"object": "list", "data": [{"id": self._model, "object": "model"}]})
        if not path.endswith("/completions"):
            return _whole(writer, 404, {"error": {"message": f"{path}: only /v1/completions"}})
        asked = json.loads(body)
        prompt, wanted = asked.get("prompt"), int(asked.get("max_tokens", 16))
        if not (isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt)):
            return _whole(writer, 400, {"error": {"message": "prompt: token ids are expected"}})
        if asked.get("stream"):
            await self._stream(prompt, wanted, writer)
            return None
        count = sum([brought async for brought in self._engine.tokens(prompt, wanted)])
        choice = {"index": 0, "text": SIGN * count, "finish_reason": "length"}
        return _whole(writer, 200, {"choices": [choice], "usage": _usage(prompt, count)})

    async def _stream(self, prompt: list[int], wanted: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        count = 0
        async for brought in self._engine.tokens(prompt, wanted):
            count += brought
            _event(writer, {"choices": [{"index": 0, "text": SIGN * brought, "finish_reason": None}]})
            await writer.drain()
        _event(writer, {"choices": [], "usage": _usage(prompt, count)})
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()


async def _request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(":", 1) for line in head[1:] if ":" in line)
    length = int(fields.get("content-length", "0"))
    if length > MAX_BODY_BYTES:
        raise ValueError(f"a body of {length} bytes")
    return head[0].split(" ")[1], await reader.readexactly(length)


def _whole(writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(document).encode() + b"\n\n")


def _usage(prompt: list[int], count: int) -> dict[str, int]:
    return {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}


def _device() -> str:
    torch = import_module("torch")
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "CPU"


async def serve(setup: dict[str, Any], port: int, say: Any) -> None:
    """Answer until standard input ends."""
    engine = VllmEngine(setup)
    server = await asyncio.start_server(Answers(engine, setup["model"]).connection, "127.0.0.1", port)
    say({"version": engine.version, "device": _device()})
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Keep the real output for the one line; everything else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    setup = json.loads(sys.stdin.readline())
    os.environ.update(setup["environment"])
    if setup["path"]:  # for this process, and for those that it starts
        sys.path.insert(0, setup["path"])
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (setup["path"], os.environ.get("PYTHONPATH")))
        )
    try:
        asyncio.run(serve(setup, int(sys.argv[1]), say))
    except Exception as error:  # whatever a foreign system raises is its answer
        say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
