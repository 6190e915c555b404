"""The fast model against the plain one in float32, teacher-forced, on a real GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.dense import fp8_projection
from antiphon.kernels.dense.fp8_projection import Fp8Projection
from antiphon.kernels.moe.chunk_route import FASTER_TOKENS
from antiphon.kernels.reference import ExpertMatrix, PagedSequences, dequantize_mxfp4
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig, preset
from antiphon.model.cuda_roads import ChunkChoices, Road
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.forward import ForwardBatch, LanguageModel
from antiphon.model.transformer import Transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE = 64


class Cache:
    """A paged cache of both groups for a few sequences, every page shuffled, poisoned with large values."""

    def __init__(self, config: GptOssConfig, sequences: int, tokens: int, dtype: torch.dtype) -> None:
        pages = -(-tokens // PAGE)
        shape = (sequences * pages, config.num_key_value_heads, 2, PAGE, config.head_dim)
        self._layers = [
            torch.full(shape, 50.0, dtype=dtype, device="cuda") for _ in range(config.num_hidden_layers)
        ]
        order = torch.randperm(sequences * pages, device="cuda")
        self.table = order.reshape(sequences, pages).int()

    def layer(self, index: int) -> Tensor:
        return self._layers[index]


def batch_of(cache: Cache, rows: list[int], token_ids: list[list[int]], start: int) -> ForwardBatch:
    """Tokens ``start ..`` of the sequences ``rows`` of a cache."""
    counts = [len(ids) for ids in token_ids]
    table = cache.table[rows]
    query_start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32).cuda()
    positions = torch.cat([torch.arange(start, start + count) for count in counts]).cuda()
    row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).cuda()
    slot = table[row, positions // PAGE].long() * PAGE + positions % PAGE
    kv_len = torch.tensor([start + count for count in counts], dtype=torch.int32).cuda()
    pages = PagedSequences(table, query_start, kv_len, slot)
    flat = torch.tensor([token for ids in token_ids for token in ids]).cuda()
    return ForwardBatch(flat, positions, pages, pages)


def teacher_forced(
    model: LanguageModel, prompts: list[list[int]], chunk: int, decode_from: int, dtype: torch.dtype
) -> list[Tensor]:
    """Logits of every position: chunks one sequence at a time up to ``decode_from``, then steps of all."""
    cache = Cache(model.config, len(prompts), len(prompts[0]), dtype)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for row, prompt in enumerate(prompts):
        for start in range(0, decode_from, chunk):
            part = prompt[start : min(start + chunk, decode_from)]
            logits[row].append(model.logits(model.forward(batch_of(cache, [row], [part], start), cache)))
    rows = list(range(len(prompts)))
    for step in range(decode_from, len(prompts[0])):
        batch = batch_of(cache, rows, [[prompt[step]] for prompt in prompts], step)
        for row, out in enumerate(model.logits(model.forward(batch, cache)).split(1)):
            logits[row].append(out)
    return [torch.cat(parts) for parts in logits]


def plain(config: GptOssConfig, dtype: torch.dtype) -> Transformer:
    model = Transformer(config, dtype, "cuda")
    fill(model, synthesize_parameters(config, 0, "cuda"))
    return model


def fast(config: GptOssConfig, road: Road | None = None) -> CudaTransformer:
    return CudaTransformer(config, synthesize_parameters(config, 0, "cuda"), road=road)


def tokens(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 199_998, (count, length), generator=generator).tolist()


def agreement(got: list[Tensor], expected: list[Tensor]) -> tuple[float, float]:
    """(share of equal argmaxes, relative error of logits)."""
    a, b = torch.cat(got), torch.cat(expected)
    same = (a.argmax(-1) == b.argmax(-1)).float().mean().item()
    return same, ((a - b).norm() / b.norm()).item()


def four_layers(like: str) -> GptOssConfig:
    return replace(preset(like), num_hidden_layers=4)


@pytest.mark.parametrize("sequences", [3, 20])
@pytest.mark.parametrize(
    ("shape", "road"),
    [("tiny", Road.PORTABLE), ("gpt-oss-20b", Road.PORTABLE), ("gpt-oss-20b", Road.HOPPER)],
)
def test_teacher_forced_logits_follow_float32(shape: str, road: Road, sequences: int) -> None:
    config = preset("tiny") if shape == "tiny" else four_layers(shape)
    prompts = tokens(sequences, 330)
    expected = teacher_forced(plain(config, torch.float32), prompts, 330, 320, torch.float32)
    got = teacher_forced(
        fast(config, road), prompts, 64, 320, torch.bfloat16
    )  # chunks read 4 bits as steps do
    same, error = agreement(got, expected)
    yardstick = teacher_forced(plain(config, torch.bfloat16), prompts[:3], 330, 320, torch.bfloat16)
    same_plain, error_plain = agreement(yardstick, expected[:3])
    print(f"{shape} {road} x{sequences}: argmax equal at {same:.4f}, error {error:.4f}")
    print(f"  plain bf16: {same_plain:.4f}, {error_plain:.4f}")
    assert error <= max(0.02, 1.2 * error_plain)
    positions = sum(len(prompt) for prompt in prompts)
    chance = 3 * (same_plain * (1 - same_plain) / positions) ** 0.5  # near ties fall either way
    assert same >= min(0.99, same_plain - max(0.01, chance))


def rounded(values: Tensor, factor: Tensor | float) -> Tensor:
    """Values as e4m3 of so many times them."""
    return ((values.float() * factor).to(torch.float8_e4m3fn).float() / factor).to(values.dtype)


def rounded_activations(x: Tensor, columns: int) -> Tensor:
    """[T, H] as e4m3 with one scale for so many columns of a token."""
    groups = x.split(columns, dim=-1)
    return torch.cat([rounded(part, 448 / part.float().abs().amax(-1, keepdim=True)) for part in groups], -1)


def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The attention's projections with both operands rounded; the router's and the logits' as they are."""
    if bias is None or weight.shape[0] not in (5120, 2880):
        return torch.nn.functional.linear(x, weight, bias)
    matrix = Fp8Projection.from_weight(weight, bias).widen()
    return torch.nn.functional.linear(rounded_activations(x, 128), matrix.to(x.dtype), bias)


@pytest.mark.parametrize(
    ("resident", "chunk", "choices"),
    [
        (True, 384, ChunkChoices()),
        (True, 384, ChunkChoices(expert_tile=128)),
        (True, 384, ChunkChoices(fp8_projections=True)),
        (False, 96, ChunkChoices()),
        (False, 384, ChunkChoices()),
        (False, 696, ChunkChoices()),
        (False, 696, ChunkChoices(expert_tile=288)),
        (False, FASTER_TOKENS + 1, ChunkChoices()),
    ],
)
def test_long_chunks_lose_what_e4m3_operands_lose(
    resident: bool, chunk: int, choices: ChunkChoices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model amplifies any rounding: the yardstick is the plain one with the same roundings."""
    config = four_layers("gpt-oss-20b")
    length = max(chunk, 696)
    prompts = tokens(1, length)
    exact = teacher_forced(plain(config, torch.float32), prompts, length, length, torch.float32)
    parameters = synthesize_parameters(config, 0, "cuda")
    monkeypatch.setattr(fp8_projection, "MIN_TOKENS", chunk // 2)
    model = CudaTransformer(config, parameters, road=Road.HOPPER, resident_fp8=resident, chunks=choices)
    same, error = agreement(teacher_forced(model, prompts, chunk, length, torch.bfloat16), exact)
    plain_moe, plain_swiglu = reference.moe, reference.swiglu
    columns = 128 if resident else config.hidden_size

    def moe(x: Tensor, *others: Tensor) -> Tensor:
        return plain_moe(rounded_activations(x, columns), *others)

    def swiglu(x: Tensor, limit: float) -> Tensor:
        return rounded(plain_swiglu(x, limit=limit), 8.0)

    monkeypatch.setattr(reference, "moe", moe)
    monkeypatch.setattr(reference, "swiglu", swiglu)
    if choices.fp8_projections:
        monkeypatch.setattr(reference, "linear", rounded_linear)
    yardstick = teacher_forced(plain(config, torch.bfloat16), prompts, length, length, torch.bfloat16)
    same_plain, error_plain = agreement(yardstick, exact)
    print(f"FP8 {resident=} {chunk=} {choices}: argmax equal at {same:.4f}, error {error:.4f}")
    print(f"  plain bf16 with e4m3 operands: {same_plain:.4f}, {error_plain:.4f}")
    assert error <= 1.2 * error_plain
    assert same >= same_plain - 0.05


def test_a_model_that_never_samples_fills_the_same_pages() -> None:
    config = four_layers("gpt-oss-20b")
    prompt = tokens(1, 100)
    caches = []
    for sampling in (True, False):
        torch.manual_seed(0)
        cache = Cache(config, 1, 100, torch.bfloat16)
        parameters = synthesize_parameters(config, 0, "cuda")
        model = CudaTransformer(config, parameters, with_unembedding=sampling)
        model.forward(batch_of(cache, [0], prompt, 0), cache)
        caches.append(cache)
    for layer in range(config.num_hidden_layers):
        assert torch.equal(caches[0].layer(layer), caches[1].layer(layer))


@pytest.mark.parametrize("sequences", [2, 96], ids=["streamed", "in e4m3"])
def test_a_decode_step_in_a_graph_equals_the_eager_one(sequences: int) -> None:
    model = fast(four_layers("gpt-oss-20b"))
    cache = Cache(model.config, sequences, 200, torch.bfloat16)
    for layer in range(model.config.num_hidden_layers):
        cache.layer(layer).normal_()
    batch = batch_of(cache, list(range(sequences)), [[11 + row] for row in range(sequences)], 150)
    eager = model.logits(model.forward(batch, cache)).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model.logits(model.forward(batch, cache))
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, eager)


REFERENCE_TOKENS = 96
"""OpenAI's model gathers the weights of four experts for each: 398 MB in float32, beside its own 56 GB."""


def openais_logits(config: GptOssConfig, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, V] of OpenAI's own torch implementation (PyPI ``gpt-oss``) with the same parameters."""
    reference: Any = pytest.importorskip("gpt_oss.torch.model")
    shape = reference.ModelConfig(
        num_hidden_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        initial_context_length=config.rope_original_context,
    )
    model = reference.Transformer(shape, torch.device("cuda"))
    left, blocks = dict(model.named_parameters()), {}
    for name, tensor in synthesize_parameters(config, 0, "cuda"):
        kind = name.rpartition(".")[2]
        if kind == "blocks":
            blocks[name.removesuffix(".blocks")] = tensor
            continue
        name = name.removesuffix(".scales")
        if kind == "scales":
            tensor = dequantize_mxfp4(ExpertMatrix(blocks.pop(name), tensor), torch.bfloat16)
        left.pop(name).data.copy_(tensor)
    assert not left, f"nothing for {sorted(left)}"
    logits: Tensor = model.to(dtype)(token_ids).float()
    del model
    torch.cuda.empty_cache()  # tests of other processes run beside these
    return logits


@torch.no_grad()
def test_four_layers_of_the_120b_shape_follow_openais() -> None:
    config = replace(preset("gpt-oss-120b"), num_hidden_layers=4)
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(0, 199_998, (REFERENCE_TOKENS,), generator=generator)
    exact = openais_logits(config, token_ids.cuda(), torch.float32)
    rounded = openais_logits(config, token_ids.cuda(), torch.bfloat16)
    model = CudaTransformer(config, synthesize_parameters(config, 0, "cuda"))
    (ours,) = teacher_forced(model, [token_ids.tolist()], 64, REFERENCE_TOKENS - 8, torch.bfloat16)

    def error(logits: Tensor) -> float:
        return ((logits.float() - exact).norm() / exact.norm()).item()

    print(f"relative error: {error(ours):.4f}, OpenAI's in bfloat16 {error(rounded):.4f}")
    assert error(ours) <= max(0.02, 1.2 * error(rounded))
