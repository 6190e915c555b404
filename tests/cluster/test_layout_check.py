"""What a deployment takes is known, and what cannot be had is refused with both values, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch

from antiphon.cluster import layout_check
from antiphon.cluster.cli_config import check_file
from antiphon.cluster.deployment import check_gpus_are_here
from antiphon.cluster.layout_check import GIB, check_memory, gpus_of, rank_needs
from antiphon.cluster.process_plan import plan_processes
from antiphon.configs.deployment_file import load_deployment
from antiphon.configs.schema import DeploymentConfig
from antiphon.demo.shape import MODEL_NAME, TINY
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.model.config import PRESETS
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.reduce_limits import ReduceLimits
from antiphon.model.parallel.sizes import rank_bytes
from antiphon.model.transformer import Transformer
from antiphon.protocol.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
LAYOUTS_PAGE = Path(__file__).parents[2] / "docs" / "operations" / "layouts.md"
SHIPPED = {
    "local-cpu": 0,
    "local-cpu-ranks": 0,
    "one-gpu-20b": 1,
    "two-gpus-20b": 2,
    "two-gpus-120b": 2,
    "eight-gpus-120b": 8,
    "eight-gpus-120b-many-prompts": 8,
    "several-nodes-120b": 16,
}


def config(model: str | dict[str, str] = "openai/gpt-oss-120b", **sections: Any) -> DeploymentConfig:
    pools = {"prefill": {"device": "cuda"}, "decode": {"device": "cuda"}}
    for name, pool in pools.items():
        pool.update(sections.pop(name, {}))
    named = {"path": model} if isinstance(model, str) else model
    return DeploymentConfig.model_validate({"model": named, **pools, **sections})


def test_every_deployment_that_comes_with_the_project_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(SHIPPED)
    shapes = {**PRESETS, MODEL_NAME: TINY}
    for name, gpus in SHIPPED.items():
        path = CONFIGS / f"{name}.yaml"
        deployment = load_deployment(path)
        needs = rank_needs(deployment, shapes[deployment.model.path.rpartition("/")[2]])
        check_memory(needs)
        assert gpus_of(needs) == gpus
    check_file(CONFIGS / "eight-gpus-120b.yaml", 139, 8)
    check_file(CONFIGS / "local-cpu.yaml", 139, 8)
    printed = capsys.readouterr().out
    assert "gpt-oss-tiny (ships with the project)" in printed
    assert "decode   EP4 TP4      4" in printed
    assert "8 GPUs of 139 GiB: prefill-0 (4 ranks), decode-0 (4 ranks), router-0" in printed


def test_the_page_of_layouts_shows_what_is_printed_now(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = LAYOUTS_PAGE.read_text()
    shipped = CONFIGS / "eight-gpus-120b.yaml"
    check_file(shipped, 139, 8)
    printed = capsys.readouterr().out.splitlines()
    for line in printed[:-1]:  # the last one names the file as it was given
        assert f"\n{line.rstrip()}\n" in page
    narrow = tmp_path / shipped.name
    narrow.write_text(shipped.read_text().replace("model:\n", "model:\n  kv_dtype: fp8_e4m3\n"))
    check_file(narrow, 139, 8)
    narrower = capsys.readouterr().out.splitlines()
    (prefill, decode), (narrow_prefill, narrow_decode) = (
        [line.split() for line in lines if "EP4 TP4 " in line] for lines in (printed, narrower)
    )
    prose = " ".join(page.split())
    assert f"{decode[5]} GiB of decode above become {narrow_decode[5]}" in prose
    assert f"workspace of prefill grows from {prefill[6]} to {narrow_prefill[6]}" in prose


def test_what_a_cpu_rank_takes_is_what_it_then_holds() -> None:
    cache = {"full_pages": 7, "sliding_pages": 5, "page_size_tokens": 16}
    pool = {"device": "cpu", "kv_cache": cache, "chunk_tokens": 16}
    deployment = config(model="tiny", prefill=pool, decode=pool)
    deployment = deployment.model_copy(
        update={"model": deployment.model.model_copy(update={"dtype": "float32"})}
    )
    _, decode = rank_needs(deployment, PRESETS["tiny"])
    model = Transformer(PRESETS["tiny"], torch.float32)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert decode.weights == pytest.approx(held, rel=0.001)
    pages = PagedKvCache(PRESETS["tiny"], full_pages=7, sliding_pages=5, page_size=16, dtype=torch.float32)
    assert decode.pages == sum(region.pages * region.page_bytes for region in pages.memory_regions())


def test_a_gpu_that_is_too_small_is_named_with_what_would_be_on_it() -> None:
    resident = config(prefill={"fp8_experts": "resident"})
    with pytest.raises(ConfigError, match=r"1\d\d\.\d GiB on one GPU of 139\.0 GiB \(1 x prefill TP1: 1"):
        check_memory(rank_needs(resident, PRESETS["gpt-oss-120b"]))
    spread = config(prefill={"fp8_experts": "resident", "tensor_parallel": 2, "expert_parallel": True})
    check_memory(rank_needs(spread, PRESETS["gpt-oss-120b"]))
    shared = {"gpu_share": 0.5}
    twice = rank_needs(config(prefill=shared, decode=shared), PRESETS["gpt-oss-120b"])
    assert gpus_of(twice) == 1
    with pytest.raises(ConfigError, match=r"1 x decode TP1: .*; 1 x prefill TP1: "):
        check_memory(twice, 120 * GIB)
    check_memory(twice, 300 * GIB)
    crowd = rank_needs(config(decode=shared | {"replicas": 2}), PRESETS["gpt-oss-20b"])
    assert gpus_of(crowd) == 2
    with pytest.raises(ConfigError, match="2 x decode TP1"):
        check_memory(crowd, 30 * GIB)


def test_split_experts_are_held_in_one_form_whatever_is_asked_for() -> None:
    model = PRESETS["gpt-oss-120b"]
    widened, resident = (
        rank_needs(config(prefill={"fp8_experts": form, "tensor_parallel": 8}), model)[0].weights
        for form in ("widened", "resident")
    )
    stored = rank_bytes(model, ParallelLayout(8), with_unembedding=False)
    exponents = model.num_hidden_layers * model.num_experts * (2 * 384 + model.hidden_size)
    assert widened == resident == sum(stored.values()) + exponents


def test_captured_chunks_are_counted_where_prompts_are_computed() -> None:
    """By their largest size: what is set apart for a token of a chunk, and nothing where none is computed."""
    shape = PRESETS["gpt-oss-20b"]
    sizes = {"none": [], "small": [64, 256], "large": [2048]}
    needs = {}
    for name, each in sizes.items():
        pool = {"chunk_graph_tokens": each, "chunk_tokens": 2048}
        needs[name] = rank_needs(config(prefill=pool, decode=pool), shape)
    prefill, decode = ({name: pair[i].workspace for name, pair in needs.items()} for i in range(2))
    token = (prefill["small"] - prefill["none"]) // 256
    assert token == 2 * (4 * shape.hidden_size + 2 * 80 * shape.head_dim)
    assert prefill["large"] - prefill["none"] == 2048 * token
    assert len(set(decode.values())) == 1


def test_what_ranks_share_for_their_sums_is_counted_for_either_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places of 8,192 bf16 rows, and a word for each row and rank; nothing on one GPU alone."""
    shape = PRESETS["gpt-oss-20b"]

    def workspaces(ranks: int) -> list[int]:
        pool = {"tensor_parallel": ranks}
        return [each.workspace for each in rank_needs(config(prefill=pool, decode=pool), shape)]

    alone, spread = workspaces(1), workspaces(2)
    monkeypatch.setattr(layout_check, "limits_of", lambda ranks: ReduceLimits(0))
    shared = 2 * 8192 * 2880 * 2 + 8192 * 2 * 4
    assert [size + shared for size in workspaces(2)] == spread
    assert workspaces(1) == alone


def test_fp8_projections_are_counted_with_what_quantises_their_inputs() -> None:
    shape = PRESETS["gpt-oss-20b"]
    without, with_them = (
        rank_needs(config(prefill={"fp8_projections": fp8, "chunk_tokens": 1024}), shape)[0]
        for fp8 in (False, True)
    )
    # 5120 x 2880 and 2880 x 4096 in blocks of 128 x 128, a byte a value and a scale a block
    assert with_them.weights - without.weights == 24 * (40 * 23 + 23 * 32) * (128 * 128 + 4)
    assert with_them.workspace - without.workspace == (1024 + 256) * 32 * (128 + 4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_pages_are_counted_as_the_cache_makes_them(ranks: int) -> None:
    """A full layer's page takes 132 bytes a token and head, not 256; prompts widen one layer of all pages."""
    shape = PRESETS["gpt-oss-20b"]
    pools = {"tensor_parallel": ranks, "kv_cache": {"full_pages": 999, "sliding_pages": 99}}
    bf16, fp8 = (
        rank_needs(config({"path": "m", "kv_dtype": kind}, prefill=pools, decode=pools), shape)
        for kind in ("same", "fp8_e4m3")
    )
    slots = 1000 * 64 * 8 // ranks
    for before, after in zip(bf16, fp8, strict=True):
        assert before.pages - after.pages == 12 * slots * (256 - 132)
    assert [after.workspace - before.workspace for before, after in zip(bf16, fp8, strict=True)] == [
        slots * 256,
        0,
    ]
    cache = PagedKvCache(
        TINY, full_pages=9, sliding_pages=5, page_size=64, dtype=torch.bfloat16, full_fp8=True
    )
    small = {"kv_cache": {"full_pages": 9, "sliding_pages": 5}}
    needs = rank_needs(config({"path": "m", "kv_dtype": "fp8_e4m3"}, prefill=small, decode=small), TINY)
    assert needs[0].pages == sum(region.pages * region.page_bytes for region in cache.memory_regions())


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"decode": {"tensor_parallel": 3}}, r"decode\.tensor_parallel: 3: .* num_attention_heads 64"),
        ({"prefill": {"tensor_parallel": 16}}, r"prefill\.tensor_parallel: 16: .* num_key_value_heads 8"),
        ({"transfer": {"layer_groups": 13}}, r"transfer\.layer_groups 13 is not within 1 \.\. 12"),
    ],
)
def test_layouts_that_do_not_fit_the_model_are_named_with_both_values(
    sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        rank_needs(config(**sections), PRESETS["gpt-oss-20b"])


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        ({"expert_parallel": True}, "tensor_parallel 1"),
        ({"gpu_share": 0.5, "tensor_parallel": 2}, r"gpu_share 0\.5 with tensor_parallel 2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(pool: dict[str, Any], says: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=says):
        config(decode=pool)


def test_more_ranks_than_gpus_are_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"prefill\.tensor_parallel: 4 ranks asked for, a machine has 2"):
        check_file(CONFIGS / "eight-gpus-120b.yaml", 139, 2)
    deployment = config(decode={"tensor_parallel": 4})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="takes 5 GPUs, this machine has 2"):
        check_gpus_are_here(deployment, plan_processes(deployment))
    unknown = tmp_path / "unknown.yaml"
    unknown.write_text("model: {path: somebody/else}\n")
    with pytest.raises(ConfigError, match=r"model\.path: somebody/else: .* its layout cannot be checked"):
        check_file(unknown, 139, 8)
