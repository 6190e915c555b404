"""Packing, expanding and generating: what ships is what was trained, and transformers agrees."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.demo.cached_checkpoint import default_cache_dir, ensure_demo_checkpoint
from antiphon.demo.expand import expand
from antiphon.demo.generate import generate
from antiphon.demo.network import Packing, TinyGptOss, placement
from antiphon.demo.packed import load_weights, read_packed, shipped_weights, start_from, write_packed
from antiphon.demo.shape import TINY
from antiphon.demo.vocabulary import Vocabulary
from antiphon.demo.words import WordSource
from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.inspect import inspect
from antiphon.model.checkpoint.load import load_model
from antiphon.model.forward import ForwardBatch
from antiphon.protocol.errors import CheckpointError

SMALL = dataclasses.replace(
    TINY, num_hidden_layers=2, hidden_size=128, intermediate_size=128, vocab_size=201_088
)
TOKEN_IDS = (*range(0, 600, 3), 199_999, 200_002, 200_006, 200_012)


@pytest.fixture(scope="module")
def model() -> TinyGptOss:
    """A random model, sharp enough for its greedy choice to be clear."""
    torch.manual_seed(0)
    built = TinyGptOss(SMALL, len(TOKEN_IDS), SMALL.vocab_size - len(TOKEN_IDS))
    with torch.no_grad():
        built.embedding.mul_(6)
        built.unseen_input.mul_(6)
        built.unseen_output.normal_(std=0.02)
        for block in built.blocks:
            for name, parameter in block.named_parameters():
                if "bias" in name or "sinks" in name:
                    parameter.normal_(std=0.3)
    return built


@pytest.fixture(scope="module")
def packed(model: TinyGptOss, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "model.bin.xz"
    write_packed(shipped_weights(model), SMALL, TOKEN_IDS, path)
    return path


@pytest.fixture(scope="module")
def checkpoint(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expanded") / "model"
    expand(read_packed(packed), folder)
    return folder


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_packed_file_reads_back_to_the_bit(model: TinyGptOss, packed: Path) -> None:
    read = read_packed(packed)
    assert read.config == SMALL
    assert read.token_ids == TOKEN_IDS
    written = shipped_weights(model)
    assert read.weights.keys() == written.keys()
    for name, tensor in written.items():
        assert tensor.dtype == read.weights[name].dtype
        assert torch.equal(tensor, read.weights[name]), name


def test_packing_a_packed_model_changes_nothing(model: TinyGptOss, packed: Path) -> None:
    again = TinyGptOss(SMALL, len(TOKEN_IDS), SMALL.vocab_size - len(TOKEN_IDS))
    load_weights(again, read_packed(packed).weights)
    for name, tensor in shipped_weights(again).items():
        if not name.endswith(("blocks", "scales")):
            assert torch.equal(tensor, read_packed(packed).weights[name]), name


def test_training_goes_on_from_a_packed_model_with_more_rows(model: TinyGptOss, packed: Path) -> None:
    more = tuple(sorted({*TOKEN_IDS, *range(1000, 4000)}))
    torch.manual_seed(1)
    wider = TinyGptOss(SMALL, len(more), SMALL.vocab_size - len(more))
    assert start_from(wider, read_packed(packed), more) == len(TOKEN_IDS)
    known = torch.tensor([more.index(token) for token in TOKEN_IDS])
    trained = model.embedding.detach().bfloat16().float()
    assert torch.equal(wider.embedding[known], trained)
    others = torch.ones(len(more), dtype=torch.bool)
    others[known] = False
    drawn = wider.embedding.detach()[others]
    assert len(drawn.unique(dim=0)) == len(drawn) == 3000
    # As the trained rows are distributed: mean, and covariance.
    spread = trained.std(0).mean()
    assert (drawn.mean(0) - trained.mean(0)).abs().max() < 0.15 * spread
    assert (drawn.T.cov() - trained.T.cov()).abs().max() < 0.2 * spread**2
    assert all(parameter.requires_grad for parameter in wider.parameters())
    written = shipped_weights(wider)
    for name, tensor in read_packed(packed).weights.items():
        if name != "embedding.weight" and not name.endswith(("blocks", "scales")):
            assert torch.equal(tensor, written[name]), name


def test_going_on_with_fewer_rows_or_another_shape_is_refused(packed: Path) -> None:
    fewer = TinyGptOss(SMALL, len(TOKEN_IDS) - 1, SMALL.vocab_size - len(TOKEN_IDS) + 1)
    with pytest.raises(CheckpointError, match="1 tokens of the packed model are not kept"):
        start_from(fewer, read_packed(packed), TOKEN_IDS[1:])
    shape = dataclasses.replace(SMALL, num_experts=4)
    with pytest.raises(CheckpointError, match="another shape"):
        start_from(TinyGptOss(shape, len(TOKEN_IDS), 1), read_packed(packed), TOKEN_IDS)


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_file_is_refused_by_name(packed: Path, tmp_path: Path, damage: str) -> None:
    data = bytearray(packed.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
    else:
        data = bytearray(b"no packed model")
    broken = tmp_path / "broken.bin.xz"
    broken.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"broken\.bin\.xz"):
        read_packed(broken)


def test_the_expanded_folder_is_a_whole_checkpoint(checkpoint: Path) -> None:
    summary = inspect(checkpoint)
    assert summary.ok
    assert (checkpoint / "generation_config.json").exists()


def twin_logits(model: TinyGptOss, tokens: list[int]) -> torch.Tensor:
    """[T, vocab] by the trainable model: kept rows, and the unseen row's logit for every other token."""
    rows = torch.tensor([[TOKEN_IDS.index(t) if t in TOKEN_IDS else len(TOKEN_IDS) for t in tokens]])
    packing = Packing.of_documents(torch.ones_like(rows))
    with torch.no_grad():
        hidden, _ = model(rows, placement(SMALL, packing, False, torch.float32))
        scores = model.logits(hidden[0])
        unseen = hidden[0] @ model.unseen_output.bfloat16().float().squeeze(0)
    full = unseen[:, None].repeat(1, SMALL.vocab_size)
    full[:, list(TOKEN_IDS)] = scores[:, :-1]
    return full


def sample_tokens(count: int) -> list[int]:
    """Kept tokens, with one unseen among them."""
    chosen = torch.randint(len(TOKEN_IDS), (count,), generator=torch.Generator().manual_seed(3))
    tokens = [TOKEN_IDS[i] for i in chosen.tolist()]
    tokens[count // 2] = 1
    return tokens


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_transformers_computes_the_logits_that_were_trained(model: TinyGptOss, checkpoint: Path) -> None:
    from transformers import GptOssForCausalLM, Mxfp4Config

    theirs: Any = GptOssForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()
    tokens = sample_tokens(200)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(twin_logits(model, tokens), expected, rtol=1e-3, atol=2e-3)


class _OneSequence:
    """Paged keys and values of one sequence: pages in order."""

    def __init__(self, capacity: int) -> None:
        shape = (-(-capacity // 16), SMALL.num_key_value_heads, 2, 16, SMALL.head_dim)
        self._layers = [torch.zeros(shape) for _ in range(SMALL.num_hidden_layers)]

    def layer(self, index: int) -> torch.Tensor:
        return self._layers[index]


def test_the_served_model_computes_the_logits_that_were_trained(model: TinyGptOss, checkpoint: Path) -> None:
    served = load_model(checkpoint, dtype=torch.float32)
    tokens = sample_tokens(150)
    count = len(tokens)
    pages = torch.arange(-(-count // 16), dtype=torch.int32)[None]
    start, length = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    sequences = PagedSequences(pages, start, length, torch.arange(count))
    batch = ForwardBatch(torch.tensor(tokens), torch.arange(count), sequences, sequences)
    with torch.no_grad():
        logits = served.logits(served.forward(batch, _OneSequence(count)))
    torch.testing.assert_close(twin_logits(model, tokens), logits, rtol=1e-3, atol=2e-3)


def test_generation_with_a_cache_equals_recomputing_every_step(model: TinyGptOss) -> None:
    vocabulary = Vocabulary(TOKEN_IDS, WordSource(()))
    plain = Vocabulary(TOKEN_IDS, WordSource(()))
    prompts = [sample_tokens(140), sample_tokens(30), sample_tokens(9)]
    outputs = generate(model, vocabulary, prompts, max_tokens=12)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        for token in output:
            scores = twin_logits(model, tokens)[-1, list(plain.token_ids)]
            best = scores.max()
            assert scores[TOKEN_IDS.index(token)] > best - 1e-3
            tokens.append(token)
        assert len(output) == 12 or output[-1] in (199_999, 200_002, 200_012)


def test_the_cache_is_filled_once_and_repaired_when_damaged(packed: Path, tmp_path: Path) -> None:
    folder = ensure_demo_checkpoint(tmp_path, packed, digest(packed))
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert ensure_demo_checkpoint(tmp_path, packed, digest(packed)) == folder
    assert weights.stat().st_mtime_ns == before
    with weights.open("r+b") as file:
        file.truncate(100)
    assert ensure_demo_checkpoint(tmp_path, packed, digest(packed)) == folder
    assert inspect(folder).ok
    with weights.open("r+b") as file:  # one bit, and no other size
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert ensure_demo_checkpoint(tmp_path, packed, digest(packed)) == folder
    assert weights.read_bytes()[-1] == last
    left = sorted(entry.name for entry in folder.parent.iterdir())
    assert left == [folder.name, "lock"]  # nothing half-written


def test_a_start_that_was_killed_leaves_nothing_for_long(packed: Path, tmp_path: Path) -> None:
    parent = tmp_path / f"gpt-oss-tiny-{digest(packed)[:16]}"
    (parent / ".gpt-oss-tiny.abcd" / "gpt-oss-tiny").mkdir(parents=True)
    (parent / "gpt-oss-tiny").mkdir()
    assert inspect(ensure_demo_checkpoint(tmp_path, packed, digest(packed))).ok
    assert not list(parent.glob(".*"))


def test_two_starts_at_once_share_one_folder(packed: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from antiphon.demo.cached_checkpoint import ensure_demo_checkpoint as ensure;"
        "print(ensure(*map(pathlib.Path, sys.argv[1:3]), sys.argv[3]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(packed), digest(packed)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {start.communicate(timeout=120)[0].strip() for start in starts}
    assert [start.returncode for start in starts] == [0, 0]
    (folder,) = folders
    assert inspect(Path(folder)).ok
    assert sorted(entry.name for entry in Path(folder).parent.iterdir()) == ["gpt-oss-tiny", "lock"]


@pytest.fixture
def no_room() -> Iterator[None]:
    """No file of this process may grow beyond a megabyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("no_room")
def test_a_cache_without_room_is_an_error_that_names_it(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*File too large.*ANTIPHON_CACHE_DIR"):
        ensure_demo_checkpoint(tmp_path, packed, digest(packed))
    assert [entry.name for entry in next(tmp_path.iterdir()).iterdir()] == ["lock"]


def test_a_cache_that_is_no_folder_is_an_error_that_names_it(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: gpt-oss-tiny cannot be unpacked there"):
        ensure_demo_checkpoint(tmp_path / "file", packed, digest(packed))


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("ANTIPHON_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path("/home/someone/.cache/antiphon")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert default_cache_dir() == Path("/var/cache/antiphon")
    monkeypatch.setenv("ANTIPHON_CACHE_DIR", "~/models")
    assert default_cache_dir() == Path("/home/someone/models")


def test_a_file_that_was_not_shipped_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="sha256"):
        ensure_demo_checkpoint(tmp_path, packed, "0" * 64)
    with pytest.raises(CheckpointError, match="absent"):
        ensure_demo_checkpoint(tmp_path, tmp_path / "absent", "0" * 64)
