"""Another system's replicas behind HTTP, against a stand-in of it, and load that takes turns among them."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import httpx
import pytest

from antiphon.benchmarks.peers.meter import PeerSystem
from antiphon.benchmarks.peers.replicas import PeerReplicas, ReplicaFailed
from antiphon.benchmarks.split import host
from antiphon.benchmarks.split.arrangements import Arrangement
from antiphon.benchmarks.split.command import arrangements_of
from antiphon.benchmarks.split.host import free_ports, start_server
from antiphon.benchmarks.split.ladder import Ladder
from antiphon.benchmarks.split.loads import FixedLoads
from antiphon.benchmarks.split.mixes import Mix
from antiphon.benchmarks.split.run import HttpLoad
from antiphon.configs.schema import DeploymentConfig

ENGINE = """
import asyncio, json, os
from importlib.metadata import entry_points

class AsyncLLM:
    @classmethod
    def from_engine_args(cls, arguments):
        os.stat(os.path.join(arguments.model, "config.json"))
        (plugin,) = entry_points(group="vllm.general_plugins")
        assert plugin.name == os.environ["VLLM_PLUGINS"] and arguments.load_format == "antiphon-synthesized"
        if arguments.max_num_batched_tokens == 9: raise RuntimeError("nine is too few")
        return cls()
    async def generate(self, prompt, parameters, request_id):
        saw, tokens = os.environ["STAND_IN_SAW"], 0
        try:
            for tokens in range(1, parameters.max_tokens + 1):
                await asyncio.sleep(0.005)
                yield type("Output", (), {"outputs": [type("One", (), {"token_ids": [1]})()]})()
        finally:
            with open(saw, "a") as file:
                file.write(f"{os.getpid()} {len(prompt['prompt_token_ids'])} {tokens}\\n")
"""


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerSystem:
    """A vLLM that answers a token every 5 ms, and writes down what it was asked."""
    site = tmp_path / "site"
    for folder in ("vllm/engine", "vllm/v1/engine"):
        (site / folder).mkdir(parents=True)
    plain = "class {}:\n    def __init__(self, **all): vars(self).update(all)\n"
    (site / "vllm" / "__init__.py").write_text("__version__ = '9.9'\n" + plain.format("SamplingParams"))
    (site / "vllm" / "sampling_params.py").write_text("class RequestOutputKind: DELTA = 1")
    (site / "vllm" / "engine" / "arg_utils.py").write_text(plain.format("AsyncEngineArgs"))
    (site / "vllm" / "v1" / "engine" / "async_llm.py").write_text(ENGINE)
    (site / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("STAND_IN_SAW", str(tmp_path / "saw"))
    return PeerSystem("vllm", str(wrapper), "9.9")


def replicas(system: PeerSystem, chunk: int = 2048) -> PeerReplicas:
    return PeerReplicas(system, "tiny", 2, chunk, 8, 4096, on_gpus=False)


async def test_sessions_take_turns_among_replicas_and_leave_when_their_client_does(
    system: PeerSystem, tmp_path: Path
) -> None:
    ladder = Ladder(20.0, 2.0, 20.0, 1.0, 0.2, 2000.0, 500.0, 0.9, refine=0)
    load = HttpLoad(FixedLoads(ladder, {}).ladders, "CPU", "m", drain_s=60.0)

    def saw() -> list[list[str]]:
        return [line.split() for line in (tmp_path / "saw").read_text().splitlines()]

    async def tokens_of(asked: str) -> list[int]:
        async with asyncio.timeout(60):
            while True:
                if found := [int(tokens) for _, length, tokens in saw() if length == asked]:
                    return found
                await asyncio.sleep(0.01)

    arrangement = Arrangement("vllm 9.9 replicas", 2, 2048, replicas=replicas(system))
    async with start_server(arrangement) as url:
        assert url.count("+") == 1
        run = await load(url, arrangement, Mix("mine", 12, 6), 20.0)
        first = url.split("+")[0]
        async with httpx.AsyncClient(base_url=first, trust_env=False) as http:
            assert (await http.get("/v1/models")).json()["data"][0]["id"]
            assert (await http.get("/metrics")).status_code == 404
            refused = await http.post("/v1/completions", json={"prompt": "text"})
            assert (refused.status_code, "token ids" in refused.text) == (400, True)
            whole = await http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3})
            assert whole.json()["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
            asked = {"prompt": [1, 2, 3], "max_tokens": 1_000_000, "stream": True}
            async with http.stream("POST", "/v1/completions", json=asked) as answer:
                async for _ in answer.aiter_lines():
                    break  # the client has seen enough
            left = await tokens_of("3")
            answered = {"prompt": [1], "max_tokens": 1}
            assert (await http.post("/v1/completions", json=answered)).is_success
    assert run.peer
    assert run.requests >= 8
    assert not run.failed
    assert run.chunk_tokens == 2048
    assert len({pid for pid, length, _ in saw() if length == "12"}) == 2
    assert len(left) == 1
    assert left[0] < 1_000_000


async def test_a_replica_that_does_not_start_says_why(system: PeerSystem) -> None:
    with pytest.raises(ReplicaFailed, match="nine is too few"):
        async with replicas(system, 9).started(free_ports(1)):
            pass


def test_ports_are_different_ones_that_nobody_has_or_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    first_given = int(host.ANY_PORT_RANGE.read_text().split()[0])
    (port,) = free_ports(1)
    assert host.FIRST_PORT <= port < max(first_given, host.FIRST_PORT + 1000)
    monkeypatch.setattr(host, "FIRST_PORT", max(port, first_given))
    few = range(host.FIRST_PORT, host.FIRST_PORT + 1000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", next(iter(free_ports(1)))))
        found = free_ports(1000)
        assert len(found) == len(set(found)) < 1000
        assert set(found) <= set(few) - {taken.getsockname()[1]}


def test_replicas_stand_beside_the_split(system: PeerSystem) -> None:
    config = DeploymentConfig.model_validate(
        {"model": {"path": "x/tiny"}, "decode": {"max_batch_size": 48}, "prefill": {"chunk_tokens": 64}}
    )
    *_, last = arrangements_of(config, [64], [], (system, [2048, 8192]))
    assert (last.name, last.gpus, last.chunk_tokens) == ("vllm 9.9 replicas", 2, 8192)
    assert last.replicas is not None
    assert (last.replicas.count, last.replicas.places, last.replicas.on_gpus) == (2, 48, False)
    setup = last.replicas.setup(Path("/f"))
    assert (setup.model, setup.path, setup.chunk_tokens) == ("/f/tiny", "/f/plugin", 8192)
