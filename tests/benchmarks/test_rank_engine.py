"""The real engine over two ranks of this machine, each way timed; a peer's figure only of the same point."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from antiphon.benchmarks.expert_spread import recorded_routing
from antiphon.benchmarks.rank_engine import main, peer_beside
from antiphon.benchmarks.records import BENCH_DECODE, BENCH_PREFILL, Record, load_records
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.cuda_weights import collect_parameters, layer_experts
from antiphon.model.parallel.cuda_experts import PortableRankExperts
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.sharding import shard_parameters

SMALL = ("--model", "tiny", "--device", "cpu", "--prompts", "130", "--batches", "1,2", "--context", "140")
QUICK = (*SMALL, "--steps", "3", "--repeats", "1", "--chunk", "128")


def test_prompts_and_steps_of_either_way_are_figures_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "records.json"
    code = main([*QUICK, "--out", str(out)])
    found = {
        (each.bench, each.input_tokens, each.batch, each.extra.get("choices")): each
        for each in load_records(out)
    }
    even = [each.extra.get("ok") is not False for each in found.values()]
    assert code == (0 if all(even) else 1), "experts of so small a model may be used too unevenly"
    prompts = {(BENCH_PREFILL, 130, 1, choices) for choices in (None, "launched")}
    steps = {(BENCH_DECODE, None, batch, choices) for batch in (1, 2) for choices in (None, "launched")}
    assert found.keys() == prompts | steps, "all is replayed by default"
    for record in found.values():
        assert (record.layout, record.extra["ranks"]) == ("TP2 EP2", "plain torch")
        assert record.floor is not None
        assert 0 < record.floor < record.value
    replayed = found[BENCH_PREFILL, 130, 1, None]
    assert replayed.extra["graphed_chunk_tokens"] == 128
    assert found[BENCH_PREFILL, 130, 1, "launched"].extra["graphed_chunk_tokens"] == 0
    assert "no time is left" not in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter only")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_what_a_rank_routes_is_seen_by_ids_of_the_whole_model(expert_parallel: bool) -> None:
    """A step over ranks would otherwise seem to touch no expert."""
    config = GptOssConfig(
        num_hidden_layers=1, num_experts=4, vocab_size=64, hidden_size=64, intermediate_size=64
    )
    layout = ParallelLayout(2, expert_parallel, rank=1)
    shard = shard_parameters(config, layout, synthesize_parameters(config))
    experts = PortableRankExperts(config, layout.shape(config).experts)
    experts.add_layer(layer_experts(collect_parameters(shard, torch.device("cpu"), False, torch.float32), 0))
    x = torch.randn(3, config.hidden_size)
    with recorded_routing() as seen:
        experts.delta(0, x, torch.tensor([3], dtype=torch.int32))
    (ids,) = seen
    assert sorted(ids.flatten().unique().tolist()) == [0, 1, 2, 3], "four of four experts a token"


def test_what_has_no_time_left_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records.json"
    assert main([*QUICK, "--ways", "launched", "--seconds", "0", "--out", str(out)]) == 1
    assert capsys.readouterr().out.count("no time is left") == 3
    assert not out.exists()


def test_one_gpu_and_unknown_ways_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (("--layout", "TP1"), ("--layout", "TP2 DP2"), ("--ways", "replayed,guessed")):
        with pytest.raises(SystemExit):
            main([*QUICK, *wrong, "--out", "nowhere.json"])
        assert wrong[1].rpartition(",")[2] in capsys.readouterr().err


def test_a_peer_is_of_the_same_point_on_as_many_gpus() -> None:
    ours = Record(BENCH_PREFILL, "m", "TP2 EP2", "d", "c", "t", 5.0, "ms", batch=1, input_tokens=1024)
    theirs = replace(ours, layout="TP2", peer="other 1.0", value=9.0)
    faster = replace(theirs, value=7.0)
    others = [
        replace(theirs, layout="TP1", value=1.0),
        replace(theirs, input_tokens=8192, value=1.0),
        replace(theirs, peer=None, value=1.0),
    ]
    assert peer_beside(ours, [*others, theirs, faster]) == faster
    assert peer_beside(ours, others) is None
