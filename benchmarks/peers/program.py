"""Measures another serving system in its own interpreter; needs nothing of this project.

    python program.py vllm|sglang

Lines of JSON on standard input and output. The first line in says what the engine is for (``Setup``), the
first line out is ``{"version": ..., "device": ...}``. Then each line in is a point, ``{"input_tokens": N}``
or ``{"batch": B, "context": C}``, and each line out ``{"ms": ..., ...}`` or ``{"error": ...}``. Whatever the
system itself prints goes to standard error.

A prompt's time runs from handing it over to its token; a decode step's is that of steps in which every
sequence gets one token and no prompt is computed.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any, Protocol, TextIO

WARM_STEPS = 8
FEWEST_STEPS = 8


@dataclass(frozen=True)
class Setup:
    """What an engine must be able to take."""

    model: str
    """Folder of a checkpoint."""
    tensor_parallel: int
    expert_parallel: bool
    longest_tokens: int
    """Prompt and answer of the longest sequence."""
    largest_batch: int
    chunk_tokens: int
    """Prompt tokens of one step."""
    steps: int
    repeats: int
    text_tokens: int
    """Prompts are random ids below this."""
    graph_sizes: tuple[int, ...] = ()
    """Tokens of the steps that are measured, which get a graph of exactly that size; the system's own choice
    where there are none."""
    load_format: str = "auto"
    """Where weights come from: files of the folder, or as the system calls another way."""
    path: str = ""
    """Folder that must be importable in every process of the system."""
    environment: dict[str, str] = field(default_factory=dict)
    """More variables for every process of the system."""


@dataclass(frozen=True)
class Steps:
    """Decode steps that were timed, seconds each."""

    median_s: float
    mean_s: float
    count: int


class Peer(Protocol):
    """A running engine of another system."""

    version: str

    def first_token_s(self, prompt: list[int]) -> float:
        """Seconds from a prompt to its token."""
        ...

    def decode_step_s(self, prompts: list[list[int]], steps: int) -> Steps:
        """Steps in which every sequence gets one token."""
        ...


class Vllm:
    """vLLM's engine, stepped by hand in this process's view of it; no prefix cache, no tokenizer."""

    def __init__(self, setup: Setup) -> None:
        vllm = import_module("vllm")
        self.version = str(vllm.__version__)
        self._parameters = vllm.SamplingParams
        kinds = import_module("vllm.sampling_params").RequestOutputKind
        self._delta = kinds.DELTA
        sizes = {"cudagraph_capture_sizes": list(setup.graph_sizes)}
        graphs = {"compilation_config": sizes} if setup.graph_sizes else {}
        self._llm = vllm.LLM(
            model=setup.model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            tensor_parallel_size=setup.tensor_parallel,
            enable_expert_parallel=setup.expert_parallel,
            max_model_len=setup.longest_tokens,
            max_num_seqs=max(setup.largest_batch, 1),
            max_num_batched_tokens=max(setup.chunk_tokens, setup.largest_batch),
            enable_prefix_caching=False,
            load_format=setup.load_format,
            seed=0,
            **graphs,
        )
        self._engine = self._llm.llm_engine
        self._next_id = 0

    def first_token_s(self, prompt: list[int]) -> float:
        """See ``Peer``."""
        begin = time.perf_counter()
        self._add(prompt, 1)
        self._drain()
        return time.perf_counter() - begin

    def decode_step_s(self, prompts: list[list[int]], steps: int) -> Steps:
        """See ``Peer``: from the step at which all have their first token, so that no prompt is left."""
        wanted = WARM_STEPS + steps
        # Until the last prompt is computed the first sequences decode on, one token a chunk.
        spare = sum(map(len, prompts))
        for prompt in prompts:
            self._add(prompt, wanted + 2 + min(spare, 4096))
        started: set[str] = set()
        stamps: list[float] = []
        while self._engine.has_unfinished_requests() and len(stamps) <= wanted:
            tokens = self._step()
            now = time.perf_counter()
            if len(started) < len(prompts):
                started |= tokens.keys()
            elif len(tokens) == len(prompts) and set(tokens.values()) == {1}:
                stamps.append(now)
            else:
                stamps.clear()  # a step in which not every sequence got its one token: begin anew
        self._abort()
        return steps_of(stamps)

    def _add(self, prompt: list[int], tokens: int) -> None:
        self._next_id += 1
        parameters = self._parameters(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        self._engine.add_request(str(self._next_id), {"prompt_token_ids": prompt}, parameters)

    def _step(self) -> Counter[str]:
        """One engine step; tokens by request."""
        tokens: Counter[str] = Counter()
        for output in self._engine.step():
            tokens[output.request_id] += len(output.outputs[0].token_ids)
        return +tokens

    def _drain(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _abort(self) -> None:
        self._engine.abort_request([str(each) for each in range(1, self._next_id + 1)])
        self._drain()


class Sglang:
    """SGLang's offline engine; no radix cache, no tokenizer. A step is the difference of two whole runs."""

    SHORT_TOKENS = 16
    PAIRS = 3

    def __init__(self, setup: Setup) -> None:
        sglang = import_module("sglang")
        self.version = str(sglang.__version__)
        self._engine = sglang.Engine(
            model_path=setup.model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            tp_size=setup.tensor_parallel,
            ep_size=setup.tensor_parallel if setup.expert_parallel else 1,
            context_length=setup.longest_tokens,
            max_running_requests=max(setup.largest_batch, 1),
            chunked_prefill_size=setup.chunk_tokens,
            disable_radix_cache=True,
            random_seed=0,
        )

    def first_token_s(self, prompt: list[int]) -> float:
        """See ``Peer``."""
        return self._run_s([prompt], 1)

    def decode_step_s(self, prompts: list[list[int]], steps: int) -> Steps:
        """See ``Peer``: prompts cancel out of the difference; the median of a few, after a warm run."""
        self._run_s(prompts, self.SHORT_TOKENS)
        differences = []
        for _ in range(self.PAIRS):
            short_s = self._run_s(prompts, self.SHORT_TOKENS)
            differences.append(self._run_s(prompts, self.SHORT_TOKENS + steps) - short_s)
        return Steps(statistics.median(differences) / steps, statistics.mean(differences) / steps, steps)

    def _run_s(self, prompts: list[list[int]], tokens: int) -> float:
        parameters = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
        begin = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=parameters)
        return time.perf_counter() - begin


PEERS: dict[str, Callable[[Setup], Peer]] = {"vllm": Vllm, "sglang": Sglang}


def steps_of(stamps: list[float]) -> Steps:
    """Steps between these ends of steps, the first ones left out.

    Raises:
        RuntimeError: there are too few.
    """
    kept = stamps[WARM_STEPS:]
    if len(kept) <= FEWEST_STEPS:
        raise RuntimeError(f"only {len(stamps)} steps in which every sequence got one token")
    gaps = [later - earlier for earlier, later in pairwise(kept)]
    return Steps(statistics.median(gaps), statistics.mean(gaps), len(gaps))


def prompt_of(tokens: int, seed: int, text_tokens: int) -> list[int]:
    """Random text, the same as this project's own benchmark of its engine draws."""
    return random.Random(seed).choices(range(text_tokens), k=tokens)


def measure(peer: Peer, setup: Setup, point: dict[str, Any]) -> dict[str, Any]:
    """One point's answer."""
    if "input_tokens" in point:
        prompts = [
            prompt_of(int(point["input_tokens"]), number, setup.text_tokens)
            for number in range(setup.repeats + 1)
        ]
        times = [peer.first_token_s(prompt) for prompt in prompts][1:]  # the first one warms up
        return {"ms": statistics.median(times) * 1e3, "repeats": setup.repeats}
    batch, context = int(point["batch"]), int(point["context"])
    prompts = [prompt_of(context + 1, number, setup.text_tokens) for number in range(batch)]
    steps = peer.decode_step_s(prompts, setup.steps)
    if not (steps.median_s > 0 and math.isfinite(steps.median_s)):
        raise RuntimeError(f"a step of {steps.median_s} s")
    return {"ms": steps.median_s * 1e3, "mean": round(steps.mean_s * 1e3, 4), "steps": steps.count}


def device_name() -> str:
    """The GPU that the peer sees."""
    torch = import_module("torch")
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "CPU"


def serve(name: str, asked: TextIO, answers: TextIO) -> None:
    """Answer points until the input ends."""

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    setup = Setup(**json.loads(asked.readline()))
    os.environ.update(setup.environment)
    if setup.path:  # for this process, and for those that it starts
        sys.path.insert(0, setup.path)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (setup.path, os.environ.get("PYTHONPATH"))))
    try:
        peer = PEERS[name](setup)
        say({"version": peer.version, "device": device_name()})
    except Exception as error:  # whatever a foreign system raises is its answer
        say({"error": f"{type(error).__name__}: {error}"})
        return
    for line in asked:
        try:
            say(measure(peer, setup, json.loads(line)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Keep the real output for answers; everything else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)


if __name__ == "__main__":
    main()
