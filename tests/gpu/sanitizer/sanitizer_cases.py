"""Every kernel once or more on small shapes, with all inputs made on the host: what the sanitizer watches.

Nothing is compared here (that is what the other tests are for), so weights may be any bits and outputs any
numbers; indices are real. Shapes are chosen for paths through a kernel: another number of tokens than a tile
has, an expert without tokens, a padded token, keys that end inside a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from antiphon.kernels import portable_moe, router
from antiphon.kernels.attention.decode import DecodeAttention
from antiphon.kernels.attention.prefill import prefill_attention
from antiphon.kernels.attention.prefill_hopper import chunk_rope_and_write, hopper_prefill_attention
from antiphon.kernels.collectives.one_shot import OneShotReduce, peer_bytes
from antiphon.kernels.collectives.two_shot import TwoShotReduce, two_shot_bytes
from antiphon.kernels.cuda_library import check_launch
from antiphon.kernels.dense import fp8_projection, norm, rope, skinny
from antiphon.kernels.ipc.library import library
from antiphon.kernels.moe import chunk_norm, decode, mixed, prefill
from antiphon.kernels.moe.chunk_route import RouteScratch, route_ranked
from antiphon.kernels.moe.fp8_weights import TILE, TILES_K, Fp8Experts, Fp8Matrix
from antiphon.kernels.moe.streamed import (
    DIM,
    SPLIT_COLUMNS,
    STAGE_BYTES,
    STAGE_WEIGHT_BYTES,
    STAGES,
    TILE_ROWS,
    StreamedExperts,
)
from antiphon.kernels.page_copy import copy_pages
from antiphon.kernels.rank_sampling import best_tokens, block_sums, drawn_tokens
from antiphon.kernels.reference import ExpertMatrix, PagedSequences
from antiphon.kernels.sampling import best_of_parts, choose_tokens

EXPERTS, ALL_EXPERTS, FIRST_EXPERT = 4, 8, 2
"""A rank that holds four of eight experts: some pairs are another's."""
PAGE, HEAD_DIM, WINDOW = 64, 64, 128
_BF16, _F32 = torch.bfloat16, torch.float32
_SCALE_BYTE = 118


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the kernels run.

    Attributes:
        triton_dtype: of Triton kernels' inputs: bfloat16, or float32 in the interpreter.
        pdl: programmatic dependent launch of Triton kernels, which the interpreter does not know.
    """

    device: torch.device
    triton_dtype: torch.dtype = _BF16
    pdl: bool = True

    def random(self, *shape: int, dtype: torch.dtype = _BF16) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape).to(dtype).to(self.device)

    def integers(self, below: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Uniform integers."""
        return torch.randint(0, below, shape, dtype=dtype).to(self.device)

    def put(self, values: object, dtype: torch.dtype) -> Tensor:
        """These values."""
        return torch.tensor(values, dtype=dtype).to(self.device)


Run = Callable[[Machine], object]
CASES: dict[str, Run] = {}


def case(name: str) -> Callable[[Run], Run]:
    """Adds a case."""

    def add(run: Run) -> Run:
        CASES[name] = run
        return run

    return add


def sequences_of(machine: Machine, lengths: list[int], queries: list[int]) -> tuple[PagedSequences, int]:
    """Sequences in shuffled pages, the last query token of all not stored, and how many pages there are."""
    each = -(-max(lengths) // PAGE)
    pages = each * len(lengths) + 1
    table = torch.randperm(pages)[: pages - 1].view(len(lengths), each)
    slots = [
        int(table[row, position // PAGE]) * PAGE + position % PAGE
        for row, (length, count) in enumerate(zip(lengths, queries, strict=True))
        for position in range(length - count, length)
    ]
    slots[-1] = -1
    starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
    return PagedSequences(
        table.int().to(machine.device),
        machine.put(starts, torch.int32),
        machine.put(lengths, torch.int32),
        machine.put(slots, torch.int64),
    ), pages


def _routing(machine: Machine, tokens: int) -> tuple[Tensor, Tensor]:
    """Ids and weights; the last token is padding, and expert 3 is never chosen."""
    choices = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    ids = torch.stack([choices[torch.randperm(len(choices))[:4]] for _ in range(tokens)])
    if tokens > 1:
        ids[-1] = -1
    return ids.to(machine.device), torch.rand(tokens, 4).to(_BF16).to(machine.device)


def _streamed(machine: Machine, columns: int = DIM) -> StreamedExperts:
    """Experts, or so many columns of each."""

    def matrix(rows: int, columns: int) -> Tensor:
        stages = columns * STAGES // DIM
        packed = torch.randint(0, 256, (EXPERTS, rows // TILE_ROWS, stages, STAGE_BYTES), dtype=torch.uint8)
        packed[..., STAGE_WEIGHT_BYTES:] = _SCALE_BYTE
        return packed.to(machine.device)

    return StreamedExperts(
        *(matrix(2 * columns, DIM), machine.random(EXPERTS, 2 * columns)),
        *(matrix(DIM, columns), machine.random(EXPERTS, DIM)),
    )


def _fp8(machine: Machine) -> Fp8Experts:
    def matrix(rows: int) -> Fp8Matrix:
        grid = (EXPERTS, -(-rows // TILE), TILES_K)
        return Fp8Matrix(machine.integers(64, *grid, TILE * TILE), machine.random(*grid, dtype=_F32), 0)

    return Fp8Experts(
        *(matrix(2 * DIM), machine.random(EXPERTS, 2 * DIM), matrix(DIM), machine.random(EXPERTS, DIM))
    )


@case("qkv_rope")
def _qkv_rope(machine: Machine) -> None:
    heads, kv_heads = 64, 8
    rows = (heads + 2 * kv_heads) * HEAD_DIM
    weight, bias = machine.random(rows, skinny.HIDDEN), machine.random(rows)
    cache = machine.random(3, 2, kv_heads, 2, PAGE, HEAD_DIM)
    table = machine.random(40, HEAD_DIM // 2, 2, dtype=_F32)
    for tokens, pdl in ((1, True), (8, False), (9, True), (16, True)):
        slot = torch.randperm(3 * PAGE)[:tokens]
        slot[tokens // 2] = -1
        skinny.qkv_rope(
            *(machine.random(tokens, skinny.HIDDEN), weight, bias),
            *(machine.integers(40, tokens, dtype=torch.int64), slot.to(machine.device), table),
            *(cache[:, 1], machine.random(tokens, heads, HEAD_DIM)),
            pdl=pdl,
        )


@case("output_projection")
def _output_projection(machine: Machine) -> None:
    weight, bias = machine.random(skinny.HIDDEN, skinny.QUERY_WIDTH), machine.random(skinny.HIDDEN)
    for tokens, pdl in ((3, True), (16, False)):
        x, residual = machine.random(tokens, skinny.QUERY_WIDTH), machine.random(tokens, skinny.HIDDEN)
        skinny.output_projection_(x, weight, bias, residual, pdl=pdl)


@case("partial_projection")
def _partial_projection(machine: Machine) -> None:
    for width in skinny.PART_WIDTHS:
        weight, bias = machine.random(skinny.HIDDEN, width), machine.random(skinny.HIDDEN)
        for tokens, pdl in ((1, False), (9, True)):
            skinny.partial_projection(machine.random(tokens, width), weight, bias, pdl=pdl)


@case("logits")
def _logits(machine: Machine) -> None:
    weight = machine.random(1048, skinny.HIDDEN)
    for tokens, pdl in ((1, True), (9, False)):
        out = machine.random(tokens, weight.shape[0], dtype=_F32)
        skinny.logits(machine.random(tokens, skinny.HIDDEN), weight, out, pdl=pdl)


@case("route_grouped")
def _route_grouped(machine: Machine) -> None:
    weight, bias = machine.random(ALL_EXPERTS, DIM), machine.random(ALL_EXPERTS)
    workspace = decode.MoeWorkspace(40, ALL_EXPERTS, machine.device, FIRST_EXPERT, EXPERTS)
    for tokens, norm_weight in ((1, None), (5, machine.random(DIM)), (40, None)):
        for overlap in (True, False):
            plan = decode.LaunchPlan(decode.plan_launch(tokens, ALL_EXPERTS).token_tile, overlap)
            decode.route_grouped(
                *(machine.random(tokens, DIM), weight, bias, workspace, plan, norm_weight), eps=1e-5
            )


@case("chunk_route")
def _chunk_route(machine: Machine) -> None:
    """Several groups of tokens, the last one not full, for few experts and many."""
    scratch, live = RouteScratch(70, EXPERTS, machine.device), machine.put([60], torch.int32)
    for experts, padding in ((ALL_EXPERTS, live), (40, None)):
        workspace = mixed.MixedWorkspace(70, experts, machine.device, FIRST_EXPERT, EXPERTS)
        router_of = machine.random(experts, DIM), machine.random(experts)
        for tokens in (70, 1):
            x = machine.random(tokens, DIM)
            route_ranked(x, *router_of, workspace, scratch, mixed.TILES[0], padding)


def _moe_streamed(tile: int, tokens: int, machine: Machine) -> None:
    """Both projections in one launch whose blocks wait for one another."""
    experts = _streamed(machine)
    workspace = decode.MoeWorkspace(40, ALL_EXPERTS, machine.device, FIRST_EXPERT, EXPERTS)
    for columns in SPLIT_COLUMNS:
        x, (ids, weights) = machine.random(tokens, DIM), _routing(machine, tokens)
        routing = decode.group(x, ids, weights, workspace, decode.LaunchPlan(tile))
        decode.moe_streamed(routing, _streamed(machine, columns), workspace)
    x, residual = machine.random(tokens, DIM), machine.random(tokens, DIM)
    ids, weights = _routing(machine, tokens)
    for overlap in (True, False):
        plan = decode.LaunchPlan(tile, overlap)
        decode.moe_streamed(decode.group(x, ids, weights, workspace, plan), experts, workspace)
    routing = decode.group(x, ids, weights, workspace, decode.LaunchPlan(tile))
    decode.moe_add_rms_norm(routing, experts, workspace, residual, machine.random(DIM), 1e-5)


for _tile, _tokens in zip(
    decode.TOKEN_TILES, (1, 7, 16, 40), strict=True
):  # each takes the tool a minute or more
    CASES[f"moe_streamed_{_tile}"] = partial(_moe_streamed, _tile, _tokens)


@case("moe_mixed")
def _moe_mixed(machine: Machine) -> None:
    experts = _streamed(machine)
    tops = [
        torch.full((EXPERTS, rows), _SCALE_BYTE, dtype=torch.uint8).to(machine.device)
        for rows in (2 * DIM, DIM)
    ]
    exponents = mixed.RowExponents(*tops, inexact_blocks=0, blocks=1)
    workspace = mixed.MixedWorkspace(45, ALL_EXPERTS, machine.device, FIRST_EXPERT, EXPERTS)
    for tile, columns in zip(mixed.TILES, SPLIT_COLUMNS * 2, strict=True):
        x, (ids, weights) = machine.random(45, DIM), _routing(machine, 45)
        part = mixed.RowExponents(tops[0][:, : 2 * columns].contiguous(), tops[1], 0, 1)
        mixed.moe_mixed(x, ids, weights, _streamed(machine, columns), part, workspace, tile=tile)
        mixed.moe_mixed(x, ids, weights, experts, exponents, workspace, tile=tile)
    mixed.moe_add_rms_norm_(
        *(x, ids, weights, experts, exponents, workspace, machine.random(45, DIM), machine.random(DIM), 1e-5)
    )


@case("moe_fp8")
def _moe_fp8(machine: Machine) -> None:
    experts = _fp8(machine)
    x, (ids, weights) = machine.random(45, DIM), _routing(machine, 45)
    for tile in prefill.TILES:
        sizes = (45, ALL_EXPERTS, machine.device, FIRST_EXPERT, EXPERTS)
        workspace = prefill.Fp8Workspace(*sizes, tile=tile)
        prefill.moe_fp8(x, ids, weights, experts, workspace)
        prefill.moe_add_rms_norm_(
            *(x, ids, weights, experts, workspace, machine.random(45, DIM), machine.random(DIM), 1e-5)
        )


@case("fp8_project")
def _fp8_project(machine: Machine) -> None:
    workspace = fp8_projection.ProjectionWorkspace(300, machine.device)
    for columns, tokens in zip(fp8_projection.COLUMNS, (37, 300), strict=True):
        grid = (3, -(-columns // TILE))
        values, scales = machine.integers(64, *grid, TILE * TILE), machine.random(*grid, dtype=_F32)
        matrix = fp8_projection.Fp8Projection(values, scales, machine.random(320), columns)
        for tile in fp8_projection.TILES:
            fp8_projection.project(machine.random(tokens, columns), matrix, workspace, tile=tile)


@case("chunk_add_norm")
def _chunk_add_norm(machine: Machine) -> None:
    for tokens in (1, 37):
        delta, residual = machine.random(tokens, DIM), machine.random(tokens, DIM)
        chunk_norm.add_rms_norm_(delta, residual, machine.random(DIM), 1e-5)


@case("chunk_rope")
def _chunk_rope(machine: Machine) -> None:
    sequences, pages = sequences_of(machine, [70], [37])
    for kv_heads in (8, 2):
        cache = machine.random(pages, 2, kv_heads, 2, PAGE, HEAD_DIM)
        chunk_rope_and_write(
            *(machine.random(37, 10 * kv_heads * HEAD_DIM), machine.integers(70, 37, dtype=torch.int64)),
            *(sequences.slot, machine.random(70, HEAD_DIM // 2, 2, dtype=_F32), cache[:, 1]),
            machine.random(37, 8 * kv_heads, HEAD_DIM),
        )


@case("prefill_attention_hopper")
def _prefill_attention_hopper(machine: Machine) -> None:
    lengths, queries = [200, 65, 130], [90, 65, 1]
    sequences, pages = sequences_of(machine, lengths, queries)
    cache = machine.random(pages, 2, 2, 2, PAGE, HEAD_DIM)[:, 1]
    query, sinks = machine.random(sum(queries), 16, HEAD_DIM), machine.random(16, dtype=_F32)
    for window in (None, WINDOW):
        for ordered in (True, False):
            hopper_prefill_attention(
                *(query, cache, sequences, sinks, window, 0.125, max(queries)), ordered=ordered
            )


@case("page_copy")
def _page_copy(machine: Machine) -> None:
    pages = machine.integers(256, 7, 4, 8, 1040)
    for heads in (range(8), range(3, 5)):  # a page's part in one run, and in several
        chosen = pages[:, 1:3, heads.start : heads.stop]
        staged = torch.zeros(3 * chosen[0].numel(), dtype=torch.uint8).to(machine.device)
        for gather in (True, False):
            copy_pages(chosen, [5, 0, 6], staged, 0, gather=gather)


@case("run_copy")
def _run_copy(machine: Machine) -> None:
    source, target = machine.integers(256, 400_000), machine.integers(256, 400_000)
    for lengths, blocks in (
        ([16], 3),
        ([65_552, 48, 16], 2),
        ([16 * (1 + run % 5) for run in range(200)], 4),
    ):
        places = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        rows = torch.stack((source.data_ptr() + places, target.data_ptr() + places, torch.tensor(lengths)), 1)
        check_launch(library().antiphon_run_copy(rows.data_ptr(), len(rows), blocks, 0), "run_copy")


@case("reduce_add_norm")
def _reduce_add_norm(machine: Machine) -> None:
    """Of one rank, which waits for itself; what several say to each other is beyond these tools."""
    ways = (OneShotReduce, peer_bytes), (TwoShotReduce, two_shot_bytes)
    sizes = {kind: bytes_of(3, DIM, 1) for kind, bytes_of in ways}
    for kind, size_bytes in sizes.items():
        memory = torch.zeros(size_bytes, dtype=torch.uint8).to(machine.device)
        reduce = kind([memory.data_ptr()], 0, 3, DIM, machine.device)
        for rows in (1, 3):
            x, residual = machine.random(rows, DIM), machine.random(rows, DIM)
            reduce.add_norm_(x, residual, machine.random(DIM), 1e-5)
            if isinstance(reduce, OneShotReduce):
                reduce.add_norm_(x, residual, machine.random(DIM), 1e-5, overlap=True)


@case("rms_norm")
def _rms_norm(machine: Machine) -> None:
    x, delta, weight = (
        machine.random(*shape, dtype=machine.triton_dtype) for shape in ((3, 200),) * 2 + ((200,),)
    )
    norm.rms_norm(x, weight, 1e-5, pdl=machine.pdl)
    norm.add_rms_norm_(delta, x, weight, 1e-5)


@case("rope_and_write")
def _rope_and_write(machine: Machine) -> None:
    sequences, pages = sequences_of(machine, [70], [5])
    dtype = machine.triton_dtype
    rope.rope_and_write(
        *(machine.random(5, 12 * HEAD_DIM, dtype=dtype), machine.integers(70, 5, dtype=torch.int64)),
        *(sequences.slot, machine.random(70, HEAD_DIM // 2, 2, dtype=_F32)),
        *(machine.random(pages, 2, 2, 2, PAGE, HEAD_DIM, dtype=dtype)[:, 1], 8),
        machine.random(5, 8, HEAD_DIM, dtype=dtype),
    )


@case("route")
def _route(machine: Machine) -> None:
    dtype = machine.triton_dtype
    weight, bias = machine.random(20, 192, dtype=dtype), machine.random(20, dtype=dtype)
    for live in (None, machine.put([15], torch.int32)):
        router.route(machine.random(17, 192, dtype=dtype), weight, bias, 4, live)


@case("decode_attention")
def _decode_attention(machine: Machine) -> None:
    lengths = [1, 64, 130]
    sequences, pages = sequences_of(machine, lengths, [1] * len(lengths))
    dtype = machine.triton_dtype
    cache = machine.random(pages, 2, 2, 2, PAGE, HEAD_DIM, dtype=dtype)[:, 1]
    query, sinks = machine.random(3, 16, HEAD_DIM, dtype=dtype), machine.random(16, dtype=_F32)
    for splits in (1, 3):
        kernel = DecodeAttention(3, 16, 2, HEAD_DIM, machine.device, splits=splits, pdl=machine.pdl)
        kernel.full(query, cache, sequences, sinks, 0.125, torch.empty_like(query))
        kernel.sliding(query, cache, sequences, sinks, WINDOW, 0.125, torch.empty_like(query))


@case("prefill_attention")
def _prefill_attention(machine: Machine) -> None:
    lengths, queries = [70, 130], [20, 1]
    sequences, pages = sequences_of(machine, lengths, queries)
    dtype = machine.triton_dtype
    cache = machine.random(pages, 2, 2, 2, PAGE, HEAD_DIM, dtype=dtype)[:, 1]
    query, sinks = machine.random(21, 16, HEAD_DIM, dtype=dtype), machine.random(16, dtype=_F32)
    for window in (None, WINDOW):
        prefill_attention(query, cache, sequences, sinks, window, 0.125, max(queries))


@case("choose_tokens")
def _choose_tokens(machine: Machine) -> None:
    logits = machine.random(3, 3008, dtype=_F32)
    sampled = machine.integers(2, 3, dtype=torch.int64)
    choose_tokens(logits, sampled, pdl=machine.pdl)
    draws = torch.rand(2, 3, dtype=torch.float64).to(machine.device)
    choose_tokens(logits, sampled, draws[0] + 0.5, draws[1], pdl=machine.pdl)


@case("rank_sampling")
def _rank_sampling(machine: Machine) -> None:
    """Two ranks in turn, whose last blocks are short; of some rows each holds the draw."""
    logits = [machine.random(9, 1504, dtype=_F32) for _ in range(2)]
    inverse, uniforms = (torch.rand(2, 9, dtype=torch.float64) + 0.01).clamp_max(0.99).to(machine.device)
    parts = torch.stack([best_of_parts(mine, 1504 * rank) for rank, mine in enumerate(logits)])
    best_tokens(parts)
    sums = torch.stack([block_sums(mine, parts, inverse) for mine in logits])
    for rank, mine in enumerate(logits):
        drawn_tokens(mine, 1504 * rank, rank, parts, sums, inverse, uniforms)


@case("moe_portable")
def _moe_portable(machine: Machine) -> None:
    hidden, inner, dtype = 128, 64, machine.triton_dtype

    def matrix(rows: int, columns: int) -> ExpertMatrix:
        scales = torch.full((ALL_EXPERTS, rows, columns // 32), _SCALE_BYTE, dtype=torch.uint8)
        blocks = machine.integers(256, ALL_EXPERTS, rows, columns // 32, 16)
        return ExpertMatrix(blocks, scales.to(machine.device))

    for tokens in (5, 70):
        ids, weights = _routing(machine, tokens)
        portable_moe.moe(
            *(machine.random(tokens, hidden, dtype=dtype), ids.clamp(min=0), weights.to(dtype)),
            *(matrix(2 * inner, hidden), machine.random(ALL_EXPERTS, 2 * inner, dtype=dtype)),
            *(matrix(hidden, inner), machine.random(ALL_EXPERTS, hidden, dtype=dtype)),
            residual=machine.random(tokens, hidden, dtype=dtype),
        )
