"""The images and the compose file, as far as they can be checked without a container engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from antiphon.cluster.process_plan import plan_processes
from antiphon.configs.deployment_file import load_deployment
from antiphon.demo.shape import MODEL_NAME

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
IMAGES = ("router", "worker")


def dockerfile(image: str) -> str:
    return (DOCKER / f"{image}.Dockerfile").read_text()


def stages(image: str) -> list[str]:
    """The text of each build stage; the last one is what is shipped."""
    return re.split(r"^FROM ", dockerfile(image), flags=re.M)[1:]


def lock(image: str) -> dict[str, tuple[str, str]]:
    """Package -> (version, sha256)."""
    found = {}
    for line in (ROOT / f"requirements/image-{image}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})", line)
            assert match, line
            found[canonicalize_name(match[1])] = (match[2], match[3])
    return found


@pytest.mark.parametrize("image", IMAGES)
def test_the_linter_has_nothing_to_say(image: str) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint is one of the development packages"
    done = subprocess.run(
        [hadolint, "--failure-threshold=style", str(DOCKER / f"{image}.Dockerfile")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_shipped_is_confined_and_watched(image: str) -> None:
    last = stages(image)[-1]
    assert re.search(r"^USER 10001:10001$", last, re.M)
    assert "HEALTHCHECK" in last
    assert "/health" in last
    for tool in ("g++", "gcc", "nvcc", "build-essential", "/usr/local/cuda", "pip install"):
        assert tool not in last, tool
    for stage in stages(image):
        for install in re.findall(r"pip install[^&]*", stage):
            assert "--require-hashes" in install or "--no-deps" in install, install
            assert "--no-cache-dir" in install


def test_kernels_are_compiled_in_a_stage_of_their_own() -> None:
    *_, kernels, last = stages("worker")
    assert "RUN antiphon kernels build\n" in kernels
    assert "COPY --from=kernels /opt/antiphon/kernels" in last
    assert "ANTIPHON_KERNEL_LIBRARY_DIR=/opt/antiphon/kernels" in last


def test_every_kernel_library_is_built() -> None:
    code = (
        "from antiphon.cluster.cli_kernels import LIBRARIES;"
        "print(*sorted(library.name for library in LIBRARIES))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    declared = [
        name
        for path in (ROOT / "kernels").rglob("*.py")
        for name in re.findall(r'CudaLibrary\(\s*"(\w+)"', path.read_text())
    ]
    assert done.stdout.split() == sorted(declared)
    assert declared


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_is_there_and_not_ignored(image: str) -> None:
    rules = [r for r in (ROOT / ".dockerignore").read_text().splitlines() if r and not r.startswith("#")]
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert rules[0] == "*"
    for path in kept:
        assert list(ROOT.glob(path)), path
    links = {path.name for path in (ROOT / "src/antiphon").iterdir() if path.is_symlink()}
    assert links <= set(kept)
    for source in re.findall(r"^COPY (?!--from)(\S+) ", dockerfile(image), re.M):
        assert source == "." or any(fnmatch(source, rule) for rule in kept), source
    for script in re.findall(r"python (docker/\S+)", dockerfile(image)):
        assert script in kept


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_has_everything_at_the_tested_version(image: str) -> None:
    packages = lock(image)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    if image == "worker":
        wanted += project["project"]["optional-dependencies"]["worker"]
    for text in wanted:
        requirement = Requirement(text)
        version, _ = packages[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), text
    tested = dict(
        line.split("==")
        for line in (ROOT / "requirements/lock.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    for name, version in tested.items():
        if (canonical := canonicalize_name(name)) in packages:
            assert packages[canonical][0] == version, name


def test_the_router_has_no_torch() -> None:
    packages = set(lock("router"))
    assert "ray" in packages
    assert "aiohttp" in packages, "Ray's agent answers health checks only with its optional packages"
    heavy = ("torch", "triton", "numpy", "nixl", "nvidia-", "transformers")
    assert not [name for name in packages if name.startswith(heavy)]


NOT_HERE_BYTES = 6e6
"""What a package counts as that the tested environment lacks: one of Ray's extras, of a few MB at most."""


def installed_bytes(name: str, version: str) -> float:
    """What a package of exactly this version takes, without what Python compiles by itself."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return NOT_HERE_BYTES
    assert distribution.version == version, name
    assert distribution.files, name
    files = (Path(str(file.locate())) for file in distribution.files if file.suffix != ".pyc")
    return sum(file.stat().st_size for file in files if file.exists())


def test_what_the_router_image_installs_is_small() -> None:
    """``docker/check_router_install.py`` measures a real installation; this needs no network."""
    sizes = {name: installed_bytes(name, version) for name, (version, _) in lock("router").items()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sizes["ray"] > 50e6, "nothing was measured"
    assert list(sizes.values()).count(NOT_HERE_BYTES) < 20
    assert sum(sizes.values()) <= 450e6, largest


def test_ray_and_python_are_the_same_everywhere() -> None:
    router, worker = lock("router"), lock("worker")
    shared = set(router) & set(worker)
    assert {name: router[name] for name in shared} == {name: worker[name] for name in shared}
    values = yaml.safe_load((ROOT / "helm/antiphon/values.yaml").read_text())
    assert values["ray"]["version"] == router["ray"][0]
    bases = {re.search(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile(i), re.M)[1] for i in IMAGES}  # type: ignore[index]
    assert len(bases) == 1
    chart = yaml.safe_load((ROOT / "helm/antiphon/Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]


def test_users_of_images_and_pods_are_the_same() -> None:
    values = yaml.safe_load((ROOT / "helm/antiphon/values.yaml").read_text())
    assert values["podSecurityContext"]["runAsUser"] == 10001
    assert values["image"]["routerRepository"] == "antiphon-router"
    assert values["image"]["workerRepository"] == "antiphon-worker"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return document


def test_compose_mounts_what_exists(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in compose["volumes"]
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
        for other in service.get("depends_on", {}):
            assert other in compose["services"]


def test_compose_runs_a_deployment_that_is_scraped(compose: dict[str, Any]) -> None:
    config = load_deployment(DOCKER / "compose/deployment.yaml")
    assert plan_processes(config)
    assert compose["services"]["antiphon"]["ports"] == [f"127.0.0.1:8000:{config.router.port}"]
    assert config.router.host == "0.0.0.0"
    prometheus = yaml.safe_load((DOCKER / "prometheus/prometheus.yaml").read_text())
    first = config.metrics.worker_port
    workers = config.prefill.replicas + config.decode.replicas
    ports = {
        "antiphon-router": [config.router.port],
        "antiphon-supervisor": [config.metrics.supervisor_port],
        "antiphon-workers": list(range(first, first + workers)),
    }
    assert config.metrics.host == "0.0.0.0"
    scraped = {job["job_name"]: job["static_configs"] for job in prometheus["scrape_configs"]}
    assert scraped == {
        job: [{"targets": [f"antiphon:{port}" for port in found]}] for job, found in ports.items()
    }
    for file in prometheus["rule_files"]:
        assert (DOCKER / "prometheus" / file).is_file()
    grace_s = int(compose["services"]["antiphon"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > config.router.drain_timeout_s + 5
    assert config.model.path == MODEL_NAME  # in the image, so that nothing has to be mounted


def test_grafana_reads_the_charts_dashboards(compose: dict[str, Any]) -> None:
    mounts = dict(v.split(":")[:2] for v in compose["services"]["grafana"]["volumes"])
    (provider,) = yaml.safe_load((DOCKER / "grafana/dashboards.yaml").read_text())["providers"]
    assert provider["options"]["path"] == mounts["../helm/antiphon/files/dashboards"]
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "helm/antiphon/files/dashboards" / Path(home).name).is_file()
    (source,) = yaml.safe_load((DOCKER / "grafana/datasources.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    port = compose["services"]["prometheus"]["ports"][0].split(":")[-1]
    assert source["url"] == f"http://prometheus:{port}"
