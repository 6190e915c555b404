"""The ``antiphon`` command: errors of one line, a service that Ctrl-C ends without a trace."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from left_behind import assert_nothing_left, environment_of, private_home, shared_memory_of

from antiphon.benchmarks.split.host import free_ports
from antiphon.cluster.cli import main
from antiphon.configs.schema import DeploymentConfig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a crowded machine starts processes slowly

ANTIPHON = [sys.executable, "-m", "antiphon.cluster.cli"]
READY = re.compile(r"Ready in [\d.]+ s: gpt-oss-tiny at (http://[\d.]+:\d+)/v1")


@pytest.fixture
def home() -> Iterator[Path]:
    with private_home() as folder:
        yield folder


@pytest.fixture
def config_file(local_deployment: DeploymentConfig, tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump(local_deployment.model_dump(mode="json")))
    return path


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ANTIPHON, *arguments], input=stdin, capture_output=True, text=True, timeout=300, check=False
    )


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The same in this process: of commands that start nothing."""

    def called(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["antiphon", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(sys.argv, int(ended.value.code or 0), out, err)

    return called


def assert_one_line_error(result: subprocess.CompletedProcess[str], *says: str) -> None:
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("antiphon: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for text in says:
        assert text in lines[0]


def change(config_file: Path, dotted: str, value: object) -> Path:
    tree = yaml.safe_load(config_file.read_text())
    *parents, leaf = dotted.split(".")
    node = tree
    for key in parents:
        node = node[key]
    node[leaf] = value
    config_file.write_text(yaml.safe_dump(tree))
    return config_file


def test_unknown_key_is_named(config_file: Path, run_here: Run) -> None:
    change(config_file, "decode.max_batch", 4)
    commands = ((run, "serve", "--config"), (run_here, "config", "check"), (run_here, "config", "show"))
    for asked, *command in commands:
        assert_one_line_error(
            asked(*command, str(config_file)), str(config_file), "decode.max_batch", "unknown key"
        )


def test_unusable_layout_is_named(config_file: Path, run_here: Run) -> None:
    change(config_file, "decode.tensor_parallel", 3)
    for asked, *command in ((run_here, "config", "check"), (run, "serve", "--config")):
        assert_one_line_error(
            asked(*command, str(config_file)),
            "decode.tensor_parallel: 3",
            "does not divide num_attention_heads 8",
        )


def test_missing_model_is_named(config_file: Path, tmp_path: Path) -> None:
    change(config_file, "model.path", str(tmp_path / "nowhere"))
    assert_one_line_error(run("serve", "--config", str(config_file)), "nowhere", "no such folder")


def test_truncated_checkpoint_is_named(
    config_file: Path, checkpoint: Path, tmp_path: Path, run_here: Run
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    os.truncate(broken / "model.safetensors", 40_000_000)
    says = ("model.safetensors", "truncated")
    assert_one_line_error(run("serve", str(broken), "--config", str(config_file)), *says)
    assert_one_line_error(run_here("checkpoint", "inspect", str(broken)), *says)


def test_port_in_use_is_named(config_file: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--config", str(config_file), "--port", str(port))
    assert_one_line_error(result, "router.port", str(port), "in use")


def test_context_beyond_the_cache_is_named(config_file: Path) -> None:
    change(config_file, "model.max_context_tokens", 12_000)
    assert_one_line_error(
        run("serve", "--config", str(config_file)), "model.max_context_tokens", "12000", "full_pages"
    )


def test_chat_without_a_server_is_one_line() -> None:
    assert_one_line_error(run("chat", "hi", "--url", "http://127.0.0.1:9"), "http://127.0.0.1:9")


def test_harmony_round_trip(run_here: Run) -> None:
    request = '{"messages": [{"role": "user", "content": "hi"}]}'
    rendered = run("harmony", "render", "--date", "2025-01-01", stdin=request)
    assert rendered.returncode == 0
    assert rendered.stdout.endswith("<|start|>user<|message|>hi<|end|><|start|>assistant\n")
    parsed = run_here("harmony", "parse", stdin="<|channel|>final<|message|>ok<|return|>")
    assert yaml.safe_load(parsed.stdout)["message"]["content"] == "ok"
    assert_one_line_error(run_here("harmony", "render", stdin="{"), "not JSON")


def test_synthesized_checkpoint_can_be_inspected(tmp_path: Path, run_here: Run) -> None:
    made = run("checkpoint", "synthesize", "--like", "tiny", "--seed", "3", str(tmp_path / "made"))
    assert made.returncode == 0, made.stderr
    seen = run_here("checkpoint", "inspect", str(tmp_path / "made"))
    assert seen.returncode == 0
    assert "MXFP4" in seen.stdout
    assert_one_line_error(
        run_here("checkpoint", "synthesize", "--like", "gpt-oss-1t", str(tmp_path / "no")), "gpt-oss-1t"
    )
    assert_one_line_error(
        run_here("checkpoint", "synthesize", "--device", "tpu", str(tmp_path / "no")), "tpu"
    )
    assert not (tmp_path / "no").exists()


class Service:
    """``antiphon serve`` in a session of its own, as a terminal would run it."""

    def __init__(self, config_file: Path, home: Path) -> None:
        self.process = subprocess.Popen(
            [*ANTIPHON, "serve", "--config", str(config_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment_of(home),
            start_new_session=True,
        )

    def wait_ready(self) -> str:
        """The URL that it prints; fails when it ends instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := READY.search(line):
                return found.group(1)
        raise AssertionError(f"it ended: {self.process.stderr and self.process.stderr.read()}")

    def family(self) -> list[psutil.Process]:
        """It and everything that it started."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def close(self) -> None:
        """Whatever a failed test left."""
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid:
                    process.kill()
            except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
                continue
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def service(config_file: Path, home: Path) -> Iterator[Service]:
    running = Service(config_file, home)
    yield running
    running.close()


def title(process: psutil.Process) -> str:
    """A process's name and the first word of its command; nothing of one that has just ended."""
    try:
        return " ".join([process.name(), *process.cmdline()[:1]])
    except psutil.NoSuchProcess:
        return ""


def test_sigterm_while_it_starts_leaves_nothing_behind(service: Service, home: Path) -> None:
    deadline = time.monotonic() + 90
    while not any("raylet" in title(p) for p in service.family()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = service.family()
    service.process.terminate()
    assert service.process.wait(timeout=180) == 0
    assert_nothing_left(family, set(), home)


def test_killing_the_supervisor_ends_all_workers_and_ctrl_c_after_the_next_start_leaves_nothing_behind(
    config_file: Path, home: Path
) -> None:
    first = Service(config_file, home)
    try:
        first.wait_ready()
        # Ray's two agents notice by themselves, but report to a dead cluster for a minute before they exit.
        family = [p for p in first.family() if not title(p).endswith("Agent")]
        assert len(family) >= 6
        first.process.kill()
        _, alive = psutil.wait_procs(family, timeout=90)
        assert not alive, [" ".join(p.cmdline()) for p in alive]
    finally:
        first.close()
    second = Service(config_file, home)
    try:
        url = second.wait_ready()
        answer = run("chat", "Hello!", "--url", url, "--max-tokens", "8", "--temperature", "0")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.strip()
        family = second.family()
        assert len(family) >= 6
        shared = shared_memory_of(family)
        os.killpg(second.process.pid, signal.SIGINT)  # a terminal sends it to all of the foreground
        assert second.process.wait(timeout=180) == 0
        assert_nothing_left(family, shared, home)
    finally:
        second.close()


@pytest.fixture
def running_ray(home: Path) -> Iterator[str]:
    """A Ray cluster that somebody else runs, with a token of its own in the environment."""
    (port,) = free_ports(1)
    head = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--port", str(port), "--temp-dir", str(home / "ray"), "--num-cpus", "4"),
            *("--include-dashboard", "false", "--disable-usage-stats", "--object-store-memory", "80000000"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while head.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.2)
    assert head.returncode is None, f"Ray ended: {head.returncode}"
    yield f"127.0.0.1:{port}"
    family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
    head.terminate()
    head.wait(timeout=90)
    for process in psutil.wait_procs(family, timeout=5)[1]:
        process.kill()


def ray_status(address: str) -> str:
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_deployment_joins_a_running_cluster_and_leaves_it_as_it_was(
    config_file: Path, home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token-of-the-operator-" + "0" * 16)
    address = request.getfixturevalue("running_ray")
    service = Service(change(config_file, "ray.address", address), home)
    try:
        url = service.wait_ready()
        answer = run("chat", "Hello!", "--url", url, "--max-tokens", "4")
        assert answer.returncode == 0, answer.stderr
        service.process.terminate()
        assert service.process.wait(timeout=180) == 0
        deadline = time.monotonic() + 90  # what Ray reports lags behind by some seconds
        while "0.0/4.0 CPU" not in (status := ray_status(address)):
            assert time.monotonic() < deadline, status
            time.sleep(1.0)
    finally:
        service.close()
