"""What the chart renders, run: nodes as its groups offer them, its deployment file, its scripts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rendered_chart import CHART, Release, Renderer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a crowded machine starts processes slowly

SCRIPTS = CHART / "files/scripts"
KEY = "sk-0123456789abcdef"
ANTIPHON = (sys.executable, "-m", "antiphon.cluster.cli")
READY_S = 240.0
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a-token-of-the-operator-" + "0" * 16,
    "RAY_worker_niceness": "0",
}


@pytest.fixture(scope="module")
def rendered(render: Renderer) -> Release:
    return render("cpu-demo-values.yaml", {"auth.keys": [KEY]})


@pytest.fixture(scope="module")
def deployment_file(rendered: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rendered file, with the paths of volumes and the port of pods replaced by this machine's."""
    folder = tmp_path_factory.mktemp("pod")
    keys = folder / "api-keys"
    keys.write_text(f"{KEY}\n")
    model = folder / "tiny"
    make = ["checkpoint", "synthesize", str(model), "--like", "tiny", "--seed", "0"]
    subprocess.run([*ANTIPHON, *make], check=True, capture_output=True)
    tree = yaml.safe_load(rendered.deployment_file())
    tree["model"]["path"] = str(model)
    tree["router"] |= {"api_key_file": str(keys), "port": 0, "drain_timeout_s": 5}
    tree["ray"]["placement_timeout_s"] = 30
    tree["metrics"] |= {"supervisor_port": 0, "worker_port": 0}  # not those of another run on this machine
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture(scope="module")
def ray_nodes(rendered: Release) -> Iterator[tuple[str, psutil.Process]]:
    """A Ray cluster whose nodes offer what the chart's groups do; yields its address and its process."""
    offers: list[dict[str, Any]] = [{"num_cpus": 0, "num_gpus": 0}]
    for name, group in rendered.groups().items():
        if name != "head":
            start = group["rayStartParams"]
            offer = {
                "num_cpus": int(start["num-cpus"]),
                "num_gpus": int(start["num-gpus"]),
                "resources": json.loads(json.loads(start["resources"])),
            }
            offers += [offer] * group["replicas"]
    nodes = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "rendering/ray_nodes.py"), json.dumps(offers)],
        env={**os.environ, **RAY_ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert nodes.stdout is not None
        yield _first_match(nodes, r"^(\S+:\d+)$"), psutil.Process(nodes.pid)
    finally:
        nodes.communicate(timeout=60)


def _first_match(process: subprocess.Popen[str], pattern: str) -> str:
    """What a process says in the line that it is ready with; it is killed when that takes too long."""
    assert process.stdout is not None
    timer = threading.Timer(READY_S, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            if found := re.search(pattern, line.rstrip()):
                return found[1]
    finally:
        timer.cancel()
    pytest.fail(f"{process.args} ended with {process.wait()} before it was ready")


@pytest.fixture(scope="module")
def service(
    ray_nodes: tuple[str, psutil.Process], deployment_file: Path
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The supervisor as the pod starts it; yields the API's URL once it says that it is ready."""
    process = subprocess.Popen(
        [*ANTIPHON, "serve", "--config", str(deployment_file)],
        # What `ray.address: auto` reads first; in a pod it is the cluster of the node.
        env={**os.environ, **RAY_ENVIRONMENT, "RAY_ADDRESS": ray_nodes[0]},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield _first_match(process, r"at (http://\S+)/v1"), process
    finally:
        process.kill()
        process.communicate()


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", str(SCRIPTS / name), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def test_the_service_answers_as_helm_test_asks(service: tuple[str, subprocess.Popen[str]]) -> None:
    url, _ = service
    # Routers listen everywhere; what is announced is an address that other nodes can call.
    assert "0.0.0.0" not in url
    done = script("check_service.py", url, ANTIPHON_API_KEYS=KEY)
    assert done.returncode == 0, done.stderr
    assert '"completion_tokens": 8' in done.stdout
    assert "401" in script("check_service.py", url).stderr


def test_pods_wait_for_their_processes_until_the_supervisor_has_drained(
    service: tuple[str, subprocess.Popen[str]], ray_nodes: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    url, supervisor = service
    titles: dict[int, str] = {}
    for process in ray_nodes[1].children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            # While an actor runs a method, its title ends with the method's name.
            titles[process.pid] = (process.cmdline() or [""])[0].split(".")[0]
    names = {"ray::PrefillActor", "ray::DecodeActor", "ray::RouterActor"}
    assert names <= set(titles.values())
    # A pod sees its own processes only.
    for pid in (pid for pid, title in titles.items() if title == "ray::DecodeActor"):
        (tmp_path / str(pid)).symlink_to(f"/proc/{pid}")
    began = time.monotonic()
    assert script("wait_drained.py", "--limit-s=1", f"--proc={tmp_path}").returncode == 0
    assert time.monotonic() - began >= 1
    idle = script("wait_drained.py", "--limit-s=1000", f"--proc={tmp_path}", f"--metrics-url={url}/metrics")
    assert idle.returncode == 0
    assert time.monotonic() - began < 300
    supervisor.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert script("wait_drained.py", "--limit-s=1000", f"--proc={tmp_path}").returncode == 0
    assert time.monotonic() - began < 300
    assert supervisor.wait(timeout=240) == 0
