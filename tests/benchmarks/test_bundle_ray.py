"""Ray without the folders that a bundle leaves out starts, and runs actors in placement groups."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from antiphon.benchmarks.bundle.kinds import LEFT_OUT

PROGRAM = """
import sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

options = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 * 1024 * 1024, "include_dashboard": False}
ray.init(_temp_dir=sys.argv[1], **options)
group = placement_group([{"CPU": 1.0}], strategy="STRICT_PACK")
ray.get(group.ready(), timeout=60)

class Counter:
    def __init__(self):
        self.count = 0
    async def add(self, by):
        self.count += by
        return self.count, ray.__file__

options = {
    "num_cpus": 1,
    "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
    "runtime_env": {"env_vars": {"ANY": "1"}},
}
counter = ray.remote(Counter).options(**options).remote()
print(*ray.get(counter.add.remote(3), timeout=60), sep="\\n")
ray.kill(counter)
ray.shutdown()
"""


def lay_without(site: Path) -> None:
    """Links to all of the installed Ray but what is left out."""
    left_out = {folder.strip("/") for folder in LEFT_OUT["ray"]}
    distribution = metadata.distribution("ray")
    installed = Path(str(distribution.locate_file("")))

    def lay(inside: str) -> None:
        source, copy = installed / inside, site / inside
        if inside in left_out:
            return
        if not any(folder.startswith(f"{inside}/") for folder in left_out):
            copy.symlink_to(source)
            return
        copy.mkdir()
        for child in source.iterdir():
            lay(f"{inside}/{child.name}")

    for folder in left_out:
        assert (installed / folder).is_dir(), "what is left out is there otherwise"
    lay("ray")
    (site / f"ray-{distribution.version}.dist-info").symlink_to(
        installed / f"ray-{distribution.version}.dist-info"
    )


def test_ray_runs_an_actor_without_what_is_left_out(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    lay_without(site)
    assert not (site / "ray/rllib").exists()
    variables = {
        "PYTHONPATH": str(site),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    with tempfile.TemporaryDirectory(prefix="slim-ray-") as folder:  # the paths of its sockets have a limit
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, folder],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | variables,
            timeout=180,
        )
    assert done.returncode == 0, done.stderr
    count, file = done.stdout.splitlines()[-2:]
    assert count == "3"
    assert file.startswith(str(site))
