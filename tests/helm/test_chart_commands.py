"""What the chart hands to the code: the deployment file, command lines, and scripts that run in pods."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from command_line import parse_with_the_cli
from rendered_chart import CHART, ROOT, Release, Renderer

from antiphon.cluster.cli_config import check_file
from antiphon.cluster.process_plan import plan_processes
from antiphon.configs.deployment_file import load_deployment

SCRIPTS = CHART / "files/scripts"


def test_the_parser_refuses_what_the_command_does_not_have() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse_with_the_cli(["serve", "--configuration", "x"])


def commands_in(release: Release) -> Iterator[list[str]]:
    for pod in release.pods().values():
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            text = " ".join([*container.get("command", []), *container.get("args", [])])
            for found in re.findall(r"\bantiphon (?:serve|checkpoint|config)[^;|&]*", text):
                yield shlex.split(found)[1:]


def test_every_command_line_parses(release: Release) -> None:
    commands = list(commands_in(release))
    assert ["serve", "--config", "/etc/antiphon/deployment/deployment.yaml"] in commands
    for command in commands:
        parse_with_the_cli(command)


def test_a_synthetic_model_is_made_in_every_pod_that_reads_it(render: Renderer) -> None:
    release = render("cpu-demo-values.yaml")
    assert len([c for c in commands_in(release) if c[0] == "checkpoint"]) == 3
    assert "/models/tiny" in release.deployment_file()


def test_a_download_lands_where_the_deployment_looks(render: Renderer) -> None:
    release = render("h200-two-nodes-values.yaml", {"model.source.huggingface.revision": "refs/pr/1"})
    folder = "/models/openai--gpt-oss-20b/refs--pr--1"
    assert yaml.safe_load(release.deployment_file())["model"]["path"] == folder
    for component in ("head", "prefill", "decode"):
        (init,) = release.pods()[component]["spec"]["initContainers"]
        assert f"--local-dir={folder}" in init["args"]
        assert "--revision=refs/pr/1" in init["args"]
    assert "initContainers" not in release.pods()["router"]["spec"]


def test_the_deployment_file_is_one(release: Release, tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(release.deployment_file())
    config = load_deployment(file)
    assert config.router.host == "0.0.0.0"
    assert config.ray.address == "auto"
    groups = release.groups()
    assert groups["router"]["replicas"] == config.router.replicas
    assert len(plan_processes(config)) == (
        config.prefill.replicas + config.decode.replicas + config.router.replicas
    )
    router = release.pods()["router"]["spec"]["containers"][0]
    (http_port,) = (p["containerPort"] for p in router["ports"] if p["name"] == "http")
    assert config.router.port == http_port
    mounts = [m["mountPath"] for m in router["volumeMounts"]]
    for path in (config.router.api_key_file, config.router.tls_certificate_file):
        assert path is None or str(Path(path).parent) in mounts
    scheme = "HTTPS" if config.router.tls_certificate_file else "HTTP"
    assert router["readinessProbe"]["httpGet"]["scheme"] == scheme


@pytest.mark.parametrize("name", ["two-gpus", "h200-two-nodes"])
def test_the_file_can_be_checked_before_anything_is_installed(
    name: str, render: Renderer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs/operations/kubernetes.md says, with the pipe's first command having been run already."""
    page = (ROOT / "docs/operations/kubernetes.md").read_text()
    (block,) = (b for b in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "antiphon config check" in b)
    template, rest = block.split("|", maxsplit=1)
    assert template.split()[-2:] == ["--show-only", "templates/configmaps.yaml"]
    pipe, check = rest.strip().rsplit("\n", maxsplit=1)
    release = render(f"{name}-values.yaml")
    manifests = yaml.safe_dump_all(release.of_kind("ConfigMap"), sort_keys=False)
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # its python3 has yaml
    subprocess.run(["bash", "-c", pipe], input=manifests, text=True, cwd=tmp_path, env=ours, check=True)
    parse_with_the_cli(shlex.split(check)[1:])
    check_file(tmp_path / shlex.split(check)[-1], gpu_memory_gib=139, node_gpus=8)
    offered = (
        int(group["rayStartParams"]["num-gpus"]) * group.get("replicas", 1)
        for group in release.groups().values()
    )
    assert f", {sum(offered)} GPUs of 139 GiB" in capsys.readouterr().out


def test_the_config_of_a_pool_reaches_the_file(render: Renderer, tmp_path: Path) -> None:
    changes = {"decode.config.max_batch_size": 7, "transfer.config.layer_groups": 3, "log.level": "debug"}
    file = tmp_path / "deployment.yaml"
    file.write_text(render("cpu-demo-values.yaml", changes).deployment_file())
    config = load_deployment(file)
    assert (config.decode.max_batch_size, config.transfer.layer_groups) == (7, 3)
    assert config.log.level == "debug"
    assert config.prefill.max_batch_size != 7


def test_a_changed_deployment_changes_every_pod(render: Renderer) -> None:
    def checksums(release: Release) -> set[str]:
        return {
            group["template"]["metadata"]["annotations"]["checksum/deployment"]
            for group in release.groups().values()
        }

    first, second = (render("cpu-demo-values.yaml", {"log.level": level}) for level in ("info", "debug"))
    assert len(checksums(first)) == len(checksums(second)) == 1
    assert checksums(first) != checksums(second)


def run_script(
    name: str, *arguments: str, environment: dict[str, str] | None = None
) -> tuple[int, str, float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-S", str(SCRIPTS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment or {},
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def process(proc: Path, pid: int, title: str) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes(title.encode())


def test_a_pod_without_actors_may_end_at_once(tmp_path: Path) -> None:
    process(tmp_path, 7, "ray::IDLE")
    (tmp_path / "self").mkdir()
    code, output, seconds = run_script("wait_drained.py", "--limit-s=40", f"--proc={tmp_path}")
    assert (code, output) == (0, "")
    assert seconds < 40


@pytest.mark.parametrize("actor", ["PrefillActor", "DecodeActor", "RouterActor"])
def test_a_pod_with_an_actor_waits_until_the_limit(tmp_path: Path, actor: str) -> None:
    process(tmp_path, 7, f"ray::{actor}.wait_for_ever")
    code, _, seconds = run_script("wait_drained.py", "--limit-s=1.5", f"--proc={tmp_path}")
    assert code == 0
    assert seconds >= 1.5


def test_the_actors_of_the_deployment_have_the_names_that_are_looked_for() -> None:
    from antiphon.cluster.ray_cluster import ACTOR_KINDS

    text = (SCRIPTS / "wait_drained.py").read_text()
    assert all(f"ray::{kind.__name__}" in text for kind in ACTOR_KINDS.values())


class _Service(http.server.BaseHTTPRequestHandler):
    """A router as far as the scripts see one."""

    metrics: str = ""
    ready = True
    key = "sk-0123456789abcdef"

    def do_GET(self) -> None:
        models = json.dumps({"data": [{"id": "m"}]})
        body = {"/metrics": self.metrics, "/v1/models": models}.get(self.path, "{}")
        self._answer(503 if self.path == "/ready" and not self.ready else 200, body)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        allowed = self.headers["authorization"] == f"Bearer {self.key}" and request["model"] == "m"
        self._answer(200 if allowed else 401, json.dumps({"usage": {"completion_tokens": 8}}))

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def service() -> Iterator[tuple[str, type[_Service]]]:
    handler = type("Handler", (_Service,), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()
        thread.join()


def gauges(in_flight: int, queued: int) -> str:
    from antiphon.router.metrics import RouterMetrics

    metrics = RouterMetrics("m")
    metrics.requests_in_flight.set(in_flight)
    metrics.requests_queued.set(queued)
    return metrics.exposition()[0].decode()


@pytest.mark.parametrize(("in_flight", "queued", "waits"), [(0, 0, False), (1, 0, True), (0, 2, True)])
def test_a_router_pod_waits_for_its_requests(
    service: tuple[str, type[_Service]], tmp_path: Path, in_flight: int, queued: int, waits: bool
) -> None:
    url, handler = service
    handler.metrics = gauges(in_flight, queued)
    process(tmp_path, 7, "ray::RouterActor")
    limit_s = 2.0 if waits else 40.0  # starting Python alone may take seconds on a crowded machine
    arguments = (f"--limit-s={limit_s}", f"--proc={tmp_path}", f"--metrics-url={url}/metrics")
    code, _, seconds = run_script("wait_drained.py", *arguments)
    assert code == 0
    assert (seconds >= limit_s) is waits


def test_the_pods_call_the_script_as_it_is_made(release: Release) -> None:
    for component in set(release.groups()) - {"head"}:
        container = release.pods()[component]["spec"]["containers"][0]
        interpreter, script, *options = container["lifecycle"]["preStop"]["exec"]["command"]
        assert interpreter == "python3"
        assert Path(script).name in release.one("ConfigMap", "-scripts")["data"]
        assert str(Path(script).parent) in [m["mountPath"] for m in container["volumeMounts"]]
        code, output, _ = run_script(Path(script).name, *options, "--help")
        assert code == 0, output
        code, output, _ = run_script(Path(script).name, *options, "--no-such-option")
        assert code == 2, output


def test_helm_test_asks_a_question(service: tuple[str, type[_Service]]) -> None:
    url, handler = service
    code, output, _ = run_script(
        "check_service.py", url, environment={"ANTIPHON_API_KEYS": f"# a\n{handler.key}\n"}
    )
    assert code == 0, output
    assert "/v1/chat/completions" in output
    code, output, _ = run_script(
        "check_service.py", url, environment={"ANTIPHON_API_KEYS": "sk-wrong-wrong-wrong"}
    )
    assert (code, "401" in output) == (1, True)
    handler.ready = False
    code, output, _ = run_script("check_service.py", url)
    assert (code, "503" in output) == (1, True)
