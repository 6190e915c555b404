"""Every fault of a checkpoint is one error that names the file and the tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.model.checkpoint.index import INDEX_NAME
from antiphon.model.checkpoint.inspect import inspect
from antiphon.model.checkpoint.load import load_model
from antiphon.model.checkpoint.safetensors_file import read_header
from antiphon.protocol.errors import CheckpointError

Write = Callable[..., Path]
FILE = "model.safetensors"
OUT = "model.layers.1.self_attn.o_proj.weight"
BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object], file: str = FILE) -> None:
    """Change the tensors of one file."""
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / file).items()}
    change(tensors)
    save_file(tensors, directory / file, metadata={"format": "pt"})


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def edit_header(path: Path, change: Callable[[Any], None]) -> None:
    """Change a file's header, leaving its data as they are."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tree = json.loads(data[8 : 8 + length])
    change(tree)
    header = json.dumps(tree).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def refusal(directory: Path) -> str:
    """The error of loading, which inspecting reports as well."""
    with pytest.raises(CheckpointError) as caught:
        load_model(directory, torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    assert inspect(directory).problems[0] in message
    return message


# ------------------------------------------------------------------------------------------ tensors


def test_missing_tensor(write_mini: Write) -> None:
    directory = write_mini()
    rewrite(directory, lambda tensors: tensors.pop(OUT))
    assert refusal(directory) == f"{directory}: {OUT}: missing, expected BF16 [64, 128]"


def test_surplus_tensor(write_mini: Write) -> None:
    directory = write_mini()
    rewrite(directory, lambda tensors: tensors.update({"model.layers.2.extra": torch.zeros(2, 3)}))
    message = refusal(directory)
    assert message.startswith(f"{directory / FILE}: model.layers.2.extra: surplus")
    assert "F32 [2, 3]" in message


def test_more_layers_in_the_file_than_in_the_config(write_mini: Write) -> None:
    directory = write_mini()
    edit_json(
        directory / "config.json",
        lambda tree: tree.update(num_hidden_layers=1, layer_types=["sliding_attention"]),
    )
    message = refusal(directory)
    assert "model.layers.1." in message
    assert "surplus" in message
    assert "more problems" in message


def test_misshapen_tensor_names_both_shapes(write_mini: Write) -> None:
    directory = write_mini()
    rewrite(directory, lambda tensors: tensors.update({OUT: tensors[OUT].T.contiguous()}))
    assert refusal(directory) == f"{directory / FILE}: {OUT}: shape [128, 64], expected [64, 128]"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_wrong_dtype(dtype: torch.dtype, write_mini: Write) -> None:
    directory = write_mini()
    rewrite(directory, lambda tensors: tensors.update({OUT: tensors[OUT].to(dtype)}))
    code = {torch.float16: "F16", torch.float32: "F32"}[dtype]
    assert refusal(directory) == f"{directory / FILE}: {OUT}: dtype {code}, expected BF16"


def test_unquantised_experts_are_refused(write_mini: Write) -> None:
    directory = write_mini()
    rewrite(directory, lambda tensors: tensors.update({BLOCKS: tensors[BLOCKS].to(torch.bfloat16)}))
    assert refusal(directory) == f"{directory / FILE}: {BLOCKS}: dtype BF16, expected U8"


def test_norms_and_sinks_may_be_float32(write_mini: Write) -> None:
    directory = write_mini()
    expected = load_model(directory, torch.float32).state_dict()

    def widen(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if "norm" in name or "sinks" in name:
                tensors[name] = tensors[name].float()

    rewrite(directory, widen)
    for name, tensor in load_model(directory, torch.float32).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_scale_that_is_not_a_number(write_mini: Write) -> None:
    directory = write_mini()
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    rewrite(directory, lambda tensors: tensors[name].view(-1)[5:6].fill_(255))
    with pytest.raises(CheckpointError, match="block scale of 255") as caught:
        load_model(directory, torch.float32)
    assert f"{FILE}: {name}" in str(caught.value)


# -------------------------------------------------------------------------------------------- files


def test_truncated_file_names_the_tensor_that_is_cut(write_mini: Write) -> None:
    directory = write_mini()
    path = directory / FILE
    last = read_header(path)[-1]
    with path.open("r+b") as file:
        file.truncate(last.end - 1)
    message = refusal(directory)
    assert (
        message
        == f"{path}: {last.name}: truncated: the tensor ends at byte {last.end}, the file at {last.end - 1}"
    )


@pytest.mark.parametrize(
    ("size", "text"), [(0, "not even a safetensors header"), (5, "5 bytes"), (40, "inside its header")]
)
def test_file_truncated_in_its_header(size: int, text: str, write_mini: Write) -> None:
    directory = write_mini()
    with (directory / FILE).open("r+b") as file:
        file.truncate(size)
    message = refusal(directory)
    assert message.startswith(f"{directory / FILE}: truncated")
    assert text in message


def test_surplus_bytes(write_mini: Write) -> None:
    directory = write_mini()
    with (directory / FILE).open("ab") as file:
        file.write(b"12345")
    assert refusal(directory) == f"{directory / FILE}: 5 surplus bytes after the last tensor"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"PK\x03\x04" + b"\xff" * 100, "not a safetensors file: header of"),
        (struct.pack("<Q", 16) + b"{" * 16, "header is not JSON"),
        (struct.pack("<Q", 16) + b"[1, 2, 3]       ", "header is not a JSON object"),
        (b"version https://git-lfs.invalid/spec/v1\noid sha256:00\nsize 1\n", "git-lfs pointer"),
    ],
    ids=["zip", "bad-json", "json-list", "lfs"],
)
def test_file_of_another_kind(content: bytes, text: str, write_mini: Write) -> None:
    directory = write_mini()
    (directory / FILE).write_bytes(content)
    message = refusal(directory)
    assert message.startswith(f"{directory / FILE}: ")
    assert text in message


def set_offsets(name: str, shift_begin: int, shift_end: int) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        begin, end = tree[name]["data_offsets"]
        tree[name]["data_offsets"] = [begin + shift_begin, end + shift_end]

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_offsets(OUT, 0, -2), "bytes, but BF16 [64, 128] takes 16384"),
        (set_offsets(OUT, -2, -2), "overlaps the tensor before it"),
        (set_offsets(OUT, 2, 2), "leaves a gap before it"),
        (lambda tree: tree[OUT].update(dtype="F5"), "unknown dtype 'F5'"),
        (lambda tree: tree[OUT].update(shape=[64, -128]), "malformed header entry"),
        (lambda tree: tree[OUT].pop("data_offsets"), "malformed header entry"),
        (lambda tree: tree.update({OUT: 7}), "malformed header entry"),
    ],
    ids=["size", "overlap", "gap", "dtype", "negative", "no-offsets", "number"],
)
def test_header_that_contradicts_itself(change: Callable[[Any], None], text: str, write_mini: Write) -> None:
    directory = write_mini()
    edit_header(directory / FILE, change)
    message = refusal(directory)
    assert message.startswith(f"{directory / FILE}: {OUT}: ")
    assert text in message


def test_name_twice_in_one_header(write_mini: Write) -> None:
    directory = write_mini()
    path = directory / FILE
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].rstrip()
    entry = json.dumps({OUT: json.loads(header)[OUT]}).encode()[1:-1]
    doubled = header[:-1] + b"," + entry + b"}"
    path.write_bytes(struct.pack("<Q", len(doubled)) + doubled + data[8 + length :])
    assert refusal(directory) == f"{path}: {OUT}: twice in the header"


def test_folder_without_weights(write_mini: Write) -> None:
    directory = write_mini()
    (directory / FILE).unlink()
    assert refusal(directory) == f"{directory}: no safetensors files"


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"absent/config\.json: cannot be read"):
        load_model(tmp_path / "absent", torch.float32)


# -------------------------------------------------------------------------------------------- index


def sharded(write_mini: Write) -> tuple[Path, dict[str, str]]:
    directory = write_mini(max_shard_bytes=40_000)
    weight_map = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    return directory, weight_map


def test_index_names_a_file_that_is_not_there(write_mini: Write) -> None:
    directory, weight_map = sharded(write_mini)
    (directory / weight_map[OUT]).unlink()
    assert refusal(directory) == f"{directory / weight_map[OUT]}: cannot be read: No such file or directory"


def test_index_puts_a_tensor_into_another_file(write_mini: Write) -> None:
    directory, weight_map = sharded(write_mini)
    other = next(file for file in weight_map.values() if file != weight_map[OUT])
    edit_json(directory / INDEX_NAME, lambda tree: tree["weight_map"].update({OUT: other}))
    assert (
        refusal(directory)
        == f"{directory / INDEX_NAME}: {OUT}: said to be in {other}, found in {weight_map[OUT]}"
    )


def test_index_forgets_a_tensor(write_mini: Write) -> None:
    directory, weight_map = sharded(write_mini)
    edit_json(directory / INDEX_NAME, lambda tree: tree["weight_map"].pop(OUT))
    assert refusal(directory) == (
        f"{directory / INDEX_NAME}: {OUT}: not listed, but found in {weight_map[OUT]}"
    )


def test_index_lists_a_tensor_that_its_file_does_not_hold(write_mini: Write) -> None:
    directory, weight_map = sharded(write_mini)
    rewrite(directory, lambda tensors: tensors.pop(OUT), file=weight_map[OUT])
    message = refusal(directory)
    assert f"{OUT}: said to be in {weight_map[OUT]}, which does not hold it" in message


def test_file_beside_the_index(write_mini: Write) -> None:
    directory, _ = sharded(write_mini)
    save_file({"x": torch.zeros(1)}, directory / "stray.safetensors")
    assert refusal(directory) == f"{directory / 'stray.safetensors'}: not named in {INDEX_NAME}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "weight_map: missing"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "a: not a safetensors file of this folder"),
        ('{"weight_map": {"a": 3}}', "a: not a safetensors file of this folder"),
    ],
)
def test_unusable_index(content: str, text: str, write_mini: Write) -> None:
    directory, _ = sharded(write_mini)
    (directory / INDEX_NAME).write_text(content)
    message = refusal(directory)
    assert message.startswith(f"{directory / INDEX_NAME}: ")
    assert text in message


def test_same_tensor_in_two_files(write_mini: Write) -> None:
    directory, weight_map = sharded(write_mini)
    (directory / INDEX_NAME).unlink()  # the files alone are enough, and checked alone
    load_model(directory, torch.float32)
    other = sorted(file for file in set(weight_map.values()) if file > weight_map[OUT])[0]
    saved = load_file(directory / weight_map[OUT])[OUT].clone()
    rewrite(directory, lambda tensors: tensors.update({OUT: saved}), file=other)
    assert refusal(directory) == f"{directory / other}: {OUT}: also in {weight_map[OUT]}"


def test_inspect_of_a_folder_without_config(write_mini: Write) -> None:
    directory = write_mini()
    (directory / "config.json").unlink()
    summary = inspect(directory)
    assert summary.config is None
    assert summary.tensors == len(read_header(directory / FILE))
    assert any("config.json" in problem for problem in summary.problems)
