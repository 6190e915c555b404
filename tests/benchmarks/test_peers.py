"""The runner of other systems, against stand-ins of theirs whose times are known."""

from __future__ import annotations

import hashlib
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from antiphon.benchmarks.peers import beside, command
from antiphon.benchmarks.peers.beside import Comparison
from antiphon.benchmarks.peers.beside import run_command as run_beside
from antiphon.benchmarks.peers.command import run_command
from antiphon.benchmarks.peers.meter import PeerMissing, find_peer, setup_for
from antiphon.benchmarks.peers.pairs import joined, load_pairs
from antiphon.benchmarks.peers.program import WARM_STEPS, Setup, Steps, measure, prompt_of, steps_of
from antiphon.benchmarks.records import Layout, PeerFigure, Record, append_records, load_records
from antiphon.benchmarks.sweep.command import Sizes, SweepIncomplete
from antiphon.benchmarks.sweep.meter import Effort
from antiphon.benchmarks.sweep.points import Point
from antiphon.cluster.cli_bench import bench_app
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.checkpoint.write import stored_tensors
from antiphon.model.config import preset
from antiphon.protocol.errors import ConfigError

VLLM = '''
import time
from dataclasses import dataclass, field
__version__ = "9.9"
print("banner of a foreign system")

class SamplingParams:
    def __init__(self, max_tokens, **more): self.max_tokens = max_tokens

class _Out:
    def __init__(self, request_id, token_ids):
        self.request_id, self.outputs = request_id, [type("C", (), {"token_ids": token_ids})()]

class Engine:
    """A prompt takes 1 us a token and a step of its own; then each sequence gets one token in 4 ms."""
    def __init__(self): self.waiting, self.running = [], {}
    def add_request(self, rid, prompt, params):
        if len(prompt["prompt_token_ids"]) == 77: raise ValueError("77 is refused")
        self.waiting.append((rid, len(prompt["prompt_token_ids"]), params.max_tokens))
    def has_unfinished_requests(self): return bool(self.waiting or self.running)
    def step(self):
        if self.waiting:
            rid, length, left = self.waiting.pop(0)
            time.sleep(length * 1e-6 + 2e-3)
            got = {rid: left}
            self.running.update(got)
        else:
            time.sleep(4e-3)
            got = dict(self.running)
        outs = []
        for rid in got:
            self.running[rid] -= 1
            outs.append(_Out(rid, [1]))
            if not self.running[rid]: del self.running[rid]
        return outs
    def abort_request(self, ids):
        self.waiting, self.running = [], {}

class LLM:
    def __init__(self, model, tensor_parallel_size, load_format, **more):
        import os, sys
        assert os.path.exists(os.path.join(model, "config.json")), model
        if tensor_parallel_size > 1: raise RuntimeError("one GPU only")
        print("Using STAND_IN attention backend", file=sys.stderr)
        if load_format.startswith("antiphon"): self.load(load_format)
        self.llm_engine = Engine()

    def load(self, load_format):
        """As vLLM does: plugins by name, then the loader of that name, under its model's default dtype."""
        import hashlib, os, torch
        from importlib.metadata import entry_points
        from vllm.model_executor.model_loader import LOADERS
        for found in entry_points(group="vllm.general_plugins"):
            if found.name in os.environ["VLLM_PLUGINS"].split(","): found.load()()
        class Model:
            def parameters(self): return iter([torch.zeros(1)])
            def load_weights(self, weights):
                with open(os.environ["STAND_IN_SAW"], "w") as file:
                    for name, tensor in weights:
                        flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                        print(name, list(tensor.shape), hashlib.sha256(flat).hexdigest(), file=file)
        torch.set_default_dtype(torch.bfloat16)
        LOADERS[load_format]().load_weights(Model(), None)
        assert torch.get_default_dtype() is torch.bfloat16
'''
LOADER = """
LOADERS = {}
def register_model_loader(name):
    def keep(kind): LOADERS[name] = kind; return kind
    return keep
"""
SGLANG = """
import time
__version__ = "8.8"

class Engine:
    def __init__(self, **arguments): assert arguments["disable_radix_cache"]
    def generate(self, input_ids, sampling_params):
        time.sleep(0.01 * len(input_ids) + 0.01 * sampling_params["max_new_tokens"])
"""
SETUP = Setup("m", 1, False, 1000, 4, 512, 20, 1, 1000)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that has both stand-ins, and no GPU."""
    site = tmp_path / "site"
    for name, text in (("vllm", VLLM), ("sglang", SGLANG)):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(text)
    (site / "vllm" / "sampling_params.py").write_text("class RequestOutputKind: DELTA = 1")
    (site / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.fixture
def loading_python(tmp_path: Path) -> str:
    """An interpreter with a vLLM that loads weights, beside a real torch."""
    site = tmp_path / "loading"
    loaders = site / "vllm" / "model_executor" / "model_loader"
    loaders.mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(VLLM)
    (site / "vllm" / "sampling_params.py").write_text("class RequestOutputKind: DELTA = 1")
    (site / "vllm" / "model_executor" / "__init__.py").touch()
    (loaders / "__init__.py").write_text(LOADER)
    (loaders / "dummy_loader.py").write_text("class DummyModelLoader: pass")
    wrapper = tmp_path / "loading-python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def run(output: Path, peers: list[tuple[str, str]], layouts: list[str], sizes: Sizes, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    effort = Effort(steps=16, repeats=1, chunk_tokens=512)
    run_command(
        peers, ["tiny"], output, layouts=layouts, sizes=sizes, effort=effort, checkpoints={"tiny": folder}
    )


def test_peers_are_measured_and_labelled(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, peers = tmp_path / "peers.json", [("vllm", python), ("sglang", python)]
    run(output, peers, ["TP1"], Sizes((64,), (3,), (100,)), tmp_path)
    records = {(each.peer, each.bench): each for each in load_records(output)}
    assert set(records) == {
        (peer, bench)
        for peer in ("vllm unknown version", "sglang unknown version")
        for bench in ("prefill", "decode_step")
    }
    # The stand-ins sleep so long; sleeping longer than asked for is the machine's doing, but a thousand times
    # as much would be another unit.
    assert 4.0 <= records["vllm unknown version", "decode_step"].value < 1000
    assert 2.0 <= records["vllm unknown version", "prefill"].value < 1000
    assert 5.0 <= records["sglang unknown version", "decode_step"].value < 1000
    assert 20 <= records["sglang unknown version", "prefill"].value < 10_000
    for record in records.values():
        assert record.device == "CPU"
        assert record.floor is not None
        assert record.extra["weights"] == "synthesized"
        assert record.commit == record.peer
    capsys.readouterr()
    run(output, peers, ["TP1"], Sizes((64,), (3,), (100,)), tmp_path)
    assert capsys.readouterr().err.count("known") >= 4


def test_the_peer_computes_with_the_weights_of_this_project_s_own_benchmark(
    loading_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of a config alone is enough: what a plugin hands to the model is what files would hold."""
    output, saw = tmp_path / "peers.json", tmp_path / "saw"
    monkeypatch.setenv("STAND_IN_SAW", str(saw))
    effort, sizes = Effort(steps=16, repeats=1, chunk_tokens=512), Sizes((64,), (), ())
    run_command(
        [("vllm", loading_python)],
        ["tiny"],
        output,
        layouts=["TP1"],
        sizes=sizes,
        effort=effort,
        checkpoints={},
    )
    (record,) = load_records(output)
    assert record.extra["weights"] == "synthesized"
    assert record.extra["chosen"] == ["Using STAND_IN attention backend"]
    parameters = synthesize_parameters(preset("tiny"), 0)
    expected = [
        f"{name} {list(tensor.shape)} "
        + hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in stored_tensors(preset("tiny"), parameters)
    ]
    assert saw.read_text().splitlines() == expected
    with saw.open("w"):
        pass
    run_command(
        [("vllm", loading_python)],
        ["tiny"],
        output,
        layouts=["TP1"],
        sizes=sizes,
        effort=effort,
        checkpoints={},
        weights="own",
        again=True,
    )
    (record,) = load_records(output)
    assert "own" in str(record.extra["weights"])
    assert not saw.read_text()


def test_a_peer_that_hangs_is_killed_at_the_end_of_the_time(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "GRACE_S", 0.0)
    (tmp_path / "config.json").write_text("{}")
    stuck = tmp_path / "site" / "vllm" / "__init__.py"
    stuck.write_text(stuck.read_text() + "\nimport time; time.sleep(300)\n")
    with pytest.raises(SweepIncomplete, match="vllm ended"):
        run_command(
            [("vllm", python)],
            ["tiny"],
            tmp_path / "peers.json",
            layouts=["TP1"],
            sizes=Sizes((64,), (), ()),
            effort=Effort(steps=16, repeats=1),
            checkpoints={"tiny": tmp_path},
            seconds=2.0,
        )
    with pytest.raises(SweepIncomplete, match="1 points are left"):
        run_command(
            [("vllm", python)],
            ["tiny"],
            tmp_path / "peers.json",
            layouts=["TP1"],
            sizes=Sizes((64,), (), ()),
            effort=Effort(steps=16, repeats=1),
            checkpoints={"tiny": tmp_path},
            seconds=-1.0,
        )


def test_what_a_peer_cannot_do_is_its_own_message(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "peers.json"
    with pytest.raises(SweepIncomplete, match="77 is refused"):
        run(output, [("vllm", python)], ["TP1"], Sizes((77, 64), (), ()), tmp_path)
    assert [each.input_tokens for each in load_records(output)] == [64]
    with pytest.raises(SweepIncomplete, match="one GPU only"):
        run(output, [("vllm", python)], ["TP2"], Sizes((64,), (), ()), tmp_path)


def test_a_peer_that_is_not_installed_is_skipped_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "peers.json", [("vllm", sys.executable)], ["TP1"], Sizes((64,), (), ()), tmp_path)
    assert "vllm: not installed" in capsys.readouterr().err
    assert not (tmp_path / "peers.json").exists()
    with pytest.raises(PeerMissing, match="No such file"):
        find_peer("vllm", "/nowhere/python")
    with pytest.raises(PeerMissing, match="no such peer"):
        find_peer("other", sys.executable)


def test_steps_of_a_window_by_hand() -> None:
    stamps = [0.01 * step for step in range(WARM_STEPS + 20)]
    stamps[-1] += 1.9  # one slow step moves the mean
    steps = steps_of(stamps)
    assert (round(steps.median_s, 6), round(steps.mean_s, 6), steps.count) == (0.01, 0.11, 19)
    with pytest.raises(RuntimeError, match="only 9 steps"):
        steps_of(stamps[:9])


def test_prompts_are_those_of_this_project_s_own_benchmark() -> None:
    from antiphon.benchmarks.engine_model import Bench

    class Shape:
        config = preset("tiny")

    bench = Bench("tiny", Shape(), torch.device("cpu"), torch.float32, False)  # type: ignore[arg-type]
    assert tuple(prompt_of(50, 3, 199_998)) == bench.prompt(50, 3)


def test_the_engine_is_as_large_as_its_points() -> None:
    points = [
        Point("prefill", "tiny", Layout(), input_tokens=4000),
        Point("decode_step", "tiny", Layout(), batch=16, context=9000),
    ]
    setup = setup_for(preset("tiny"), Path("m"), Layout(2, 2), points, Effort(steps=100))
    assert (setup.tensor_parallel, setup.expert_parallel, setup.largest_batch) == (2, True, 16)
    assert setup.longest_tokens > 9100
    assert setup.graph_sizes == (1, 16)
    points.append(Point("prefill", "tiny", Layout(), input_tokens=1024))
    assert setup_for(preset("tiny"), Path("m"), Layout(), points, Effort()).graph_sizes == (1, 16, 1024)


def test_a_time_that_is_none_is_no_figure() -> None:
    class Backwards:
        version = "0"

        def first_token_s(self, prompt: list[int]) -> float:
            return 0.5

        def decode_step_s(self, prompts: list[list[int]], steps: int) -> Steps:
            return Steps(-0.1, -0.1, steps)

    assert measure(Backwards(), SETUP, {"input_tokens": 5}) == {"ms": 500.0, "repeats": 1}
    with pytest.raises(RuntimeError, match=r"-0\.1"):
        measure(Backwards(), SETUP, {"batch": 2, "context": 5})


def test_both_are_measured_in_one_run_and_ours_holds_their_figure(
    loading_python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "beside.json"
    monkeypatch.setenv("STAND_IN_SAW", str(tmp_path / "saw"))
    comparison = Comparison(
        ("vllm", loading_python),
        {"tiny": [Sizes((64,), (), ()), Sizes((), (2,), (100,))]},
        effort=Effort(steps=16, repeats=1, chunk_tokens=128),
        device="cpu",
        devices=2,
        logs=tmp_path / "logs",
    )
    run_beside(comparison, output)
    records = load_records(output)
    ours = {each.bench: each for each in records if each.beside is not None}
    theirs = {each.bench: each for each in records if each.peer is not None}
    assert set(ours) == set(theirs) == {"prefill", "decode_step"}
    assert len(records) == 4
    for bench, each in ours.items():
        assert each.peer is None
        assert each.beside is not None
        assert (each.beside.system, each.beside.value) == (theirs[bench].peer, theirs[bench].value)
    assert "vllm unknown version" in capsys.readouterr().out
    assert load_pairs(tmp_path) == list(ours.values())
    assert "STAND_IN attention" in (tmp_path / "logs" / "vllm-tiny-TP1.log").read_text()
    run_beside(comparison, output)  # nothing is left to measure
    assert load_records(output) == records


def test_a_pair_is_of_one_run_alone(loading_python: str, tmp_path: Path) -> None:
    """What was measured of ours in another run gets no figure of theirs."""
    point = Point("prefill", "tiny", Layout(), input_tokens=64)
    ours = Record("prefill", "tiny", "TP1", "CPU", "c", "2020-01-01", 5.0, "ms", input_tokens=64)
    theirs = replace(ours, peer="other 1", value=7.0)
    (pair,) = joined([ours, theirs], "other 1", point)
    assert pair.beside == PeerFigure("other 1", 7.0, "2020-01-01", "TP1")
    wide = replace(point, layout=Layout(2, 2))
    both = [replace(ours, layout="TP2 EP2"), replace(theirs, layout="TP2")]
    assert not joined(both, "other 1", wide)
    (pair,) = joined(both, "other 1", wide, Layout(2))
    assert (pair.layout, pair.beside) == ("TP2 EP2", PeerFigure("other 1", 7.0, "2020-01-01", "TP2"))
    assert not joined([ours, replace(theirs, device="another")], "other 1", point)
    assert not joined([ours, theirs], "other 2", point)
    output = tmp_path / "beside.json"
    append_records(output, [ours])
    sizes = {"tiny": [Sizes((64,), (), ())]}
    comparison = Comparison(("vllm", loading_python), sizes, device="cpu", devices=1, seconds=-1.0)
    with pytest.raises(SweepIncomplete, match="2 points are left"):
        run_beside(comparison, output)
    assert load_records(output) == [ours]
    with pytest.raises(PeerMissing):
        run_beside(replace(comparison, system=("vllm", sys.executable)), output)
    with pytest.raises(ConfigError, match="2 and 1 GPUs"):
        run_beside(replace(comparison, layouts=("TP2=TP1",)), output)


@pytest.mark.parametrize(("known", "left"), [("TP2", 0), ("TP2 EP2", 2)])
def test_a_pair_with_another_layout_of_theirs_is_another_pair(
    known: str, left: int, python: str, tmp_path: Path
) -> None:
    output = tmp_path / "beside.json"
    ours = Record("prefill", "tiny", "TP2 EP2", "CPU", "c", "2020-01-01", 5.0, "ms", input_tokens=64)
    figure = PeerFigure("vllm unknown version", 7.0, "2020-01-01", known)
    append_records(output, [replace(ours, beside=figure)])
    sizes = {"tiny": [Sizes((64,), (), ())]}
    comparison = Comparison(("vllm", python), sizes, ("TP2 EP2=TP2",), device="cpu", devices=2, seconds=-1.0)
    with pytest.raises(SweepIncomplete, match=f"{left} points are left") if left else nullcontext():
        run_beside(comparison, output)


def test_points_of_a_comparison_are_read_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Comparison] = []
    monkeypatch.setattr(beside, "run_command", lambda comparison, output: asked.append(comparison))
    runner = CliRunner()
    arguments = ["beside", "--model", "tiny=100:1,2;200:4", "--input-tokens", "64", "--limit", "9s"]
    assert runner.invoke(bench_app, arguments).exit_code == 0
    (comparison,) = asked
    assert comparison.sizes == {
        "tiny": [Sizes([64], (), ()), Sizes((), [1, 2], [100]), Sizes((), [4], [200])]
    }
    assert (comparison.seconds, comparison.weights) == (9.0, "synthesized")
    assert isinstance(runner.invoke(bench_app, ["beside", "--model", "tiny=100"]).exception, ConfigError)
