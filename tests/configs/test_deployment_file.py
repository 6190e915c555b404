"""Reading a deployment file: every mistake is one error that names the file, the key and the value."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.configs.deployment_file import load_deployment
from antiphon.protocol.errors import ConfigError

MODEL = "model: {path: somewhere/gpt-oss-tiny}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


def test_the_shipped_deployments_load() -> None:
    files = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert files
    for path in files:
        assert load_deployment(path).model.path


def test_overrides_reach_nested_keys(tmp_path: Path) -> None:
    config = load_deployment(write(tmp_path, MODEL), {"router.port": 0, "decode.kv_cache.full_pages": 7})
    assert (config.router.port, config.decode.kv_cache.full_pages) == (0, 7)
    assert config.model.name == "gpt-oss-tiny"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (MODEL + "router: {prot: 1}\n", "router.prot: unknown key"),
        (MODEL + "decode: {max_batch_size: 0}\n", "decode.max_batch_size"),
        (MODEL + "router: {port: eighty}\n", "eighty"),
        ("router: {port: 1}\n", "model"),
        (MODEL + "prefill: {kv_cache: {page_size_tokens: 32}}\n", "prefill 32, decode 64"),
        (MODEL + "prefill: {chunk_tokens: 100}\n", "prefill.chunk_tokens 100"),
        (MODEL + "prefill: {chunk_graph_tokens: [64]}\n", "on device cpu"),
        (MODEL + "prefill: {fp8_projections: true}\n", "fp8_projections on device cpu"),
        (MODEL + "prefill: {chunk_graph_tokens: standard}\n", "on device cpu"),
        ("model: {path: m, kv_dtype: fp8}\n", "model.kv_dtype: Input should be 'same' or 'fp8_e4m3'"),
        (
            "model: {path: m, kv_dtype: fp8_e4m3}\n"
            "prefill: {chunk_tokens: 480, kv_cache: {page_size_tokens: 24}}\n"
            "decode: {chunk_tokens: 480, kv_cache: {page_size_tokens: 24}}\n",
            "page_size_tokens 24: not a multiple of 16",
        ),
        (MODEL + "prefill: {device: cuda, chunk_graph_tokens: [128, 64]}\n", "do not ascend"),
        (MODEL + "prefill: {device: cuda, chunk_graph_tokens: [64, 1024]}\n", "chunk_tokens 512"),
        (
            MODEL + "prefill: {device: cuda}\ntransfer: {same_host: required}\n",
            "transfer.same_host required with decode.device cpu",
        ),
        (
            MODEL + "decode: {device: cuda}\ntransfer: {same_host: required}\n",
            "transfer.same_host required with prefill.device cpu",
        ),
        (MODEL + "prefill: {replicas: 0}\n", "prefill.replicas 0 with decode.local_prefill never"),
        (MODEL + "decode: {local_prefill: always}\n", "prefill.replicas 1 with decode.local_prefill always"),
        (MODEL + "decode: {replicas: 0}\n", "at least one decode worker"),
        (MODEL + "prefill: {local_prefill: short}\n", "only decode workers have a choice"),
        (
            MODEL + "router: {drain_timeout_s: .inf}\n",
            "router.drain_timeout_s: Input should be a finite number",
        ),
        ("- a list\n", "expected a mapping"),
        ("model: {path: [\n", "not valid YAML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_deployment(path)
    assert str(path) in str(error.value)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_colocated_deployment_has_no_prefill_workers(tmp_path: Path) -> None:
    text = (
        MODEL + "prefill: {replicas: 0}\ndecode: {local_prefill: always, kv_cache: {page_size_tokens: 32}}\n"
    )
    config = load_deployment(write(tmp_path, text))
    assert config.decode.local_prefill_limit_tokens == float("inf")
    short = load_deployment(write(tmp_path, MODEL + "decode: {local_prefill: short}\n")).decode
    assert short.local_prefill_limit_tokens == short.local_prefill_max_tokens
    assert load_deployment(write(tmp_path, MODEL)).decode.local_prefill_limit_tokens == 0


def test_slots_are_for_gpus_that_are_not_written_directly(tmp_path: Path) -> None:
    gpus = MODEL + "prefill: {device: cuda}\ndecode: {device: cuda}\n"
    for text, expected in (
        (MODEL, (0, 0)),
        (gpus, (4, 8)),
        (gpus + "transfer: {same_host: never}\n", (4, 8)),
        (gpus + "transfer: {same_host: required}\n", (0, 0)),
        (gpus + "transfer: {same_host: required, staging_slots: 1}\n", (1, 2)),
    ):
        config = load_deployment(write(tmp_path, text))
        assert (config.staging_slots("prefill"), config.staging_slots("decode")) == expected


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_deployment(tmp_path / "nowhere.yaml")


def test_a_password_in_a_url_is_not_repeated(tmp_path: Path) -> None:
    text = MODEL + "router: {response_store: {redis_url: 'http://user:hunter2@somewhere/0'}}\n"
    with pytest.raises(ConfigError, match="redis_url") as error:
        load_deployment(write(tmp_path, text))
    assert "hunter2" not in str(error.value)


def test_chunks_are_captured_on_gpus_unless_told_otherwise(tmp_path: Path) -> None:
    def sizes(worker: str) -> tuple[int, ...]:
        text = MODEL + f"prefill: {{{worker}}}\n"
        return load_deployment(write(tmp_path, text)).prefill.graphed_chunk_tokens

    assert sizes("device: cpu") == ()
    assert sizes("device: cuda, tensor_parallel: 2") == sizes("device: cuda")
    assert sizes("device: cuda, chunk_graph_tokens: []") == ()
    assert sizes("device: cuda, chunk_tokens: 256") == (64, 128, 192, 256)
    assert sizes("device: cuda, tensor_parallel: 2, chunk_graph_tokens: [64]") == (64,)
    assert sizes("device: cuda, chunk_graph_tokens: [100, 200]") == (100, 200)
    standard = "device: cuda, chunk_graph_tokens: standard"
    assert sizes(f"{standard}, chunk_tokens: 256") == (64, 128, 192, 256)
    assert sizes(f"{standard}, chunk_tokens: 8192")[-3:] == (1792, 2048, 8192)
    assert sizes(f"{standard}, chunk_tokens: 16384")[-1] == 2048


@pytest.mark.parametrize(
    "text", ["model: {path: a}\nmodel: {path: b}\n", "model: {path: a}\nrouter: {port: 1, port: 2}\n"]
)
def test_a_key_given_twice_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"twice\.yaml.*(model|port) twice.*line 2"):
        load_deployment(file)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"model: {path: \xe9}\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8 at byte 14"):
        load_deployment(file)
