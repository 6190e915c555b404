"""Every document of every example: valid, unique, and everything it refers to is there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml
from document_schemas import validate
from rendered_chart import CHART, EXAMPLES, Document, Release, Renderer, example

from antiphon.cluster.process_plan import plan_processes
from antiphon.cluster.ray_cluster import bundle_of
from antiphon.configs.schema import DeploymentConfig

VARIATIONS: tuple[dict[str, object], ...] = (
    {},
    {"fullnameOverride": "a-name-of-exactly-forty-characters-long1"},
    {"nameOverride": "chant", "commonLabels": {"team": "serving"}},
    {"image.registry": "registry.example.com/ml/", "image.tag": "1.2.3", "image.pullSecrets": ["pull"]},
    {"auth.enabled": False},
    {"auth.keys": ["sk-0123456789abcdef"]},
    {"serviceAccount.name": "mine"},
    {"router.replicas": 3, "router.podDisruptionBudget.minAvailable": 2},
    {"router.tls.secretName": "certificate"},
    {"router.service.type": "LoadBalancer", "router.service.annotations": {"a": "b"}},
    {"ray.upgradeStrategy": "None"},
    {"ray.gcsFaultToleranceOptions": {"backend": "rocksdb", "storage": {"size": "2Gi"}}},
    {"ray.auth.existingSecret": "ray-token"},
    {"networkPolicy.enabled": False},
    {"networkPolicy.restrictEgress": True},
    {"metrics.dashboards.enabled": False, "metrics.rules.enabled": False},
    {"metrics.serviceMonitor.enabled": "auto", "metrics.podMonitor.enabled": "auto"},
    {"tests.enabled": False},
    {"model.maxContextTokens": 8192},
    {"prefill.maxReplicas": 4, "decode.maxReplicas": 6, "autoscaling.config": {"shrink_after_s": 300}},
    {"metrics.compat": "vllm", "tracing.otlpEndpoint": "http://collector:4318", "tracing.sampleRatio": 1},
    {"extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more"}}]},
    {"router.nodeSelector": {"pool": "cpu"}, "router.priorityClassName": "high"},
    {"ray.head.tolerations": [{"key": "x", "operator": "Exists"}]},
    {
        "router.env": [{"name": "A", "value": "b"}],
        "router.extraVolumes": [{"name": "v", "emptyDir": {}}],
        "router.extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
    },
)


def pods_of(release: Release) -> Iterator[tuple[str, Document]]:
    yield from release.pods().items()


def containers_of(pod: Document) -> list[Document]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def selects(selector: dict[str, str], pod: Document) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("name", EXAMPLES)
def test_lint_is_clean(name: str) -> None:
    report = helm_python.lint(CHART, example(name), strict=True, namespace="prod")
    assert report["errors"] == []
    # An icon is a recommendation that a chart outside of catalogues has no use for.
    assert [m for m in report["messages"] if "icon is recommended" not in m["error"]] == []


@pytest.mark.parametrize("changes", VARIATIONS, ids=lambda changes: ",".join(changes) or "as-it-is")
@pytest.mark.parametrize("name", ["cpu-demo-values.yaml", "h200-two-nodes-values.yaml"])
def test_every_combination_is_valid(name: str, changes: dict[str, object], render: Renderer) -> None:
    if "auth.keys" in changes:
        changes = {**changes, "auth.existingSecret": {"name": "", "key": "api-keys"}}
    rendered = render(name, changes)
    for document in rendered.documents:
        validate(document)
    names = [(d["kind"], d["metadata"]["name"]) for d in rendered.documents]
    assert len(names) == len(set(names))


def test_every_document_is_valid_and_has_the_labels(release: Release) -> None:
    for document in release.documents:
        validate(document)
        assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo", document
    for component, pod in pods_of(release):
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": component}, "spec": pod["spec"]})


def test_names_are_unique(release: Release) -> None:
    names = [(d["kind"], d["metadata"]["name"]) for d in release.documents]
    assert len(names) == len(set(names))
    for _, pod in pods_of(release):
        for part in (containers_of(pod), pod["spec"].get("volumes", [])):
            inside = [item["name"] for item in part]
            assert len(inside) == len(set(inside))


def test_every_selector_selects_the_pods_it_is_for(release: Release) -> None:
    pods = release.pods()
    services = {s["metadata"]["name"]: s for s in release.of_kind("Service")}
    assert services
    for service in services.values():
        chosen = [c for c, pod in pods.items() if selects(service["spec"]["selector"], pod)]
        assert chosen == ["router"]
    for budget in release.of_kind("PodDisruptionBudget"):
        labels = budget["spec"]["selector"]["matchLabels"]
        (component,) = (c for c, pod in pods.items() if selects(labels, pod))
        assert budget["metadata"]["name"].endswith(f"-{component}")
        # Kubernetes cannot count pods that a custom resource owns: only a whole number works.
        assert isinstance(budget["spec"]["minAvailable"], int)
        assert budget["spec"]["minAvailable"] < release.groups()[component]["replicas"]
    for policy in release.of_kind("NetworkPolicy"):
        assert any(selects(policy["spec"]["podSelector"]["matchLabels"], pod) for pod in pods.values())
    for monitor in release.of_kind("ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (s for s in services.values() if labels.items() <= s["metadata"]["labels"].items())
        assert service["spec"]["publishNotReadyAddresses"] is True
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports
    for monitor in release.of_kind("PodMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        chosen = {c for c, pod in pods.items() if selects(labels, pod)}
        assert set(release.groups()) <= chosen
        offered = {name for component in chosen for name in _ports(pods[component])}
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= offered
    for _, pod in pods_of(release):
        for spread in pod["spec"].get("topologySpreadConstraints", []):
            assert selects(spread["labelSelector"]["matchLabels"], pod)


def test_every_port_name_exists(release: Release) -> None:
    pods = release.pods()
    known = {c: _ports(pod) for c, pod in pods.items()}
    for service in release.of_kind("Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(known["router"])
    for component, pod in pods_of(release):
        numbers = list(known[component].values())
        assert len(numbers) == len(set(numbers))
        for container in pod["spec"]["containers"]:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if "httpGet" in container.get(probe, {}):
                    assert container[probe]["httpGet"]["port"] in _ports(
                        {"spec": {"containers": [container]}}
                    )
    for policy in release.of_kind("NetworkPolicy"):
        chosen = [c for c, p in pods.items() if selects(policy["spec"]["podSelector"]["matchLabels"], p)]
        for rule in policy["spec"].get("ingress", []):
            for port in rule.get("ports", []):
                assert any(port["port"] in known[component] for component in chosen), port
    ingress_ports = {p["name"] for s in release.of_kind("Service") for p in s["spec"]["ports"]}
    for ingress in release.of_kind("Ingress"):
        for rule in ingress["spec"]["rules"]:
            assert {p["backend"]["service"]["port"]["name"] for p in rule["http"]["paths"]} <= ingress_ports


def _ports(pod: Document) -> dict[str, int]:
    return {p["name"]: p["containerPort"] for c in pod["spec"]["containers"] for p in c.get("ports", [])}


def test_everything_that_is_mounted_or_read_exists(release: Release) -> None:
    outside = {"hub-token", "team-keys", "redis", "api-certificate", "llm-certificate", "models"}
    have = {(d["kind"], d["metadata"]["name"]) for d in release.documents}
    for _, pod in pods_of(release):
        volumes = {v["name"]: v for v in pod["spec"].get("volumes", [])}
        for container in containers_of(pod):
            mounts = [m["mountPath"] for m in container.get("volumeMounts", [])]
            assert len(mounts) == len(set(mounts))
            assert {m["name"] for m in container.get("volumeMounts", [])} <= set(volumes)
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference is not None:
                    assert ("Secret", reference["name"]) in have or reference["name"] in outside
                    secret = _data(release, "Secret", reference["name"])
                    assert secret is None or reference["key"] in secret
        for volume in volumes.values():
            for kind, key in (("ConfigMap", "configMap"), ("Secret", "secret")):
                if key in volume:
                    name = volume[key].get("name", volume[key].get("secretName"))
                    assert (kind, name) in have or name in outside
                    data = _data(release, kind, name)
                    wanted = {item["key"] for item in volume[key].get("items", [])}
                    assert data is None or wanted <= set(data)
        account = pod["spec"].get("serviceAccountName")
        assert account is None or ("ServiceAccount", account) in have


def _data(release: Release, kind: str, name: str) -> dict[str, Any] | None:
    for document in release.of_kind(kind):
        if document["metadata"]["name"] == name:
            return dict(document["data"])
    return None


def test_pods_are_confined(release: Release) -> None:
    for component, pod in pods_of(release):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in containers_of(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            added = context["capabilities"].get("add", [])
            assert added == (["IPC_LOCK"] if "rdma/ib" in container["resources"]["limits"] else []), component
            assert container["resources"]["limits"]["memory"]
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            for name in ("nvidia.com/gpu", "rdma/ib"):
                assert requests.get(name) == limits.get(name)


def test_shared_memory_is_memory(release: Release) -> None:
    for component in release.groups():
        volumes = {v["name"]: v for v in release.pods()[component]["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert volumes["shm"]["emptyDir"]["sizeLimit"]


LAYOUTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("h200-one-node", {"prefill.replicas": 1, "decode.replicas": 1, "prefill.tensorParallel": 4,
                       "decode.tensorParallel": 4, "decode.expertParallel": True}),
    ("h200-one-node", {"prefill.replicas": 4, "decode.replicas": 1, "decode.tensorParallel": 4}),
    ("h200-two-nodes", {"prefill.tensorParallel": 2, "decode.tensorParallel": 8, "decode.cpuThreads": 3}),
    ("cpu-demo", {"prefill.tensorParallel": 2, "decode.tensorParallel": 2, "decode.expertParallel": True}),
    ("two-gpus", {"prefill.config.gpu_share": 0.4, "decode.config.gpu_share": 0.6}),
    ("h200-one-node", {"prefill.replicas": 2, "decode.replicas": 2, "prefill.config.gpu_share": 0.5}),
)  # fmt: skip
"""Workers of several ranks and of shares of a GPU, which no example has."""


def test_the_cluster_has_room_for_exactly_the_plan(release: Release) -> None:
    check_room(release)


@pytest.mark.parametrize(("name", "changes"), LAYOUTS)
def test_every_rank_of_every_worker_has_room(name: str, changes: dict[str, object], render: Renderer) -> None:
    check_room(render(f"{name}-values.yaml", changes))


def test_a_share_that_no_other_fits_beside_takes_a_gpu(render: Renderer) -> None:
    changes = {"prefill.replicas": 3, "decode.replicas": 2, "prefill.config.gpu_share": 0.6,
               "decode.config.gpu_share": 0.4}  # fmt: skip
    group = render("h200-one-node-values.yaml", changes).groups()["workers"]
    assert group["rayStartParams"]["num-gpus"] == "3"  # 2.6 GPUs are reserved


def check_room(release: Release) -> None:
    """Ray's nodes offer each role's resource as often as it is reserved, with the CPUs and GPUs to match."""
    config = DeploymentConfig.model_validate(yaml.safe_load(release.deployment_file()))
    assert config.ray.role_resources
    plan = plan_processes(config)
    head = release.groups()["head"]["rayStartParams"]
    assert (head["num-cpus"], head["num-gpus"]) == ("0", "0")
    offered: dict[str, int] = {}
    for name, group in release.groups().items():
        if name == "head":
            continue
        start = group["rayStartParams"]
        # KubeRay puts the value into a shell command, so it is quoted once more.
        per_pod = json.loads(json.loads(start["resources"]))
        needs = {"num-cpus": 0.0, "num-gpus": 0.0}
        for resource, count in per_pod.items():
            offered[resource] = offered.get(resource, 0) + count * group["replicas"]
            spec = next(s for s in plan if f"antiphon_{s.role}" == resource)
            for rank in range(spec.ranks):
                reserved = bundle_of(spec, rank, role_resources=True)
                needs["num-cpus"] += reserved["CPU"] * count
                needs["num-gpus"] += reserved.get("GPU", 0) * count
        needs["num-gpus"] = math.ceil(needs["num-gpus"])
        assert {key: int(start[key]) for key in needs} == needs
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", 0) == needs["num-gpus"]
    wanted: dict[str, int] = {}
    for spec in plan:
        wanted[f"antiphon_{spec.role}"] = wanted.get(f"antiphon_{spec.role}", 0) + 1
    assert offered == wanted


def test_processes_listen_where_scrapers_look(release: Release) -> None:
    config = DeploymentConfig.model_validate(yaml.safe_load(release.deployment_file()))
    assert config.metrics.host == "0.0.0.0"
    assert _ports(release.pods()["head"])["supervisor"] == config.metrics.supervisor_port
    for name, group in release.groups().items():
        if name in ("head", "router"):
            continue
        per_pod = json.loads(json.loads(group["rayStartParams"]["resources"]))
        workers = sum(per_pod.values())
        ports = [number for port, number in _ports(group["template"]).items() if port.startswith("worker-")]
        # Workers of one pod take the first port that is free, one after the other.
        first = config.metrics.worker_port
        assert ports == list(range(first, first + workers))


def test_a_pool_that_may_grow_has_room_and_an_autoscaler(render: Renderer) -> None:
    release = render("cpu-demo-values.yaml", {"prefill.maxReplicas": 4})
    cluster = release.one("RayCluster")["spec"]
    assert cluster["enableInTreeAutoscaling"] is True
    bounds = {n: (g["minReplicas"], g["maxReplicas"]) for n, g in release.groups().items() if n != "head"}
    assert bounds == {"prefill": (1, 4), "decode": (1, 1), "router": (1, 1)}
    config = DeploymentConfig.model_validate(yaml.safe_load(release.deployment_file()))
    assert (config.prefill.max_replicas, config.decode.max_replicas) == (4, None)
    assert release.pods()["head"]["spec"]["automountServiceAccountToken"] is True
    assert "enableInTreeAutoscaling" not in render("cpu-demo-values.yaml").one("RayCluster")["spec"]


def test_converted_weights_are_kept_where_a_folder_is_given(render: Renderer) -> None:
    for directory, limit_gib in (("", 100), ("/weights", 100.5)):
        changes = {"weightCache.directory": directory, "weightCache.limitGib": limit_gib}
        written = yaml.safe_load(render("h200-two-nodes-values.yaml", changes).deployment_file())
        kept = DeploymentConfig.model_validate(written).weight_cache
        expected = ("/weights", 100.5) if directory else (None, 256.0)
        assert (kept.directory, kept.limit_gib) == expected


def test_the_end_is_long_enough(release: Release) -> None:
    drain_s = yaml.safe_load(release.deployment_file())["router"]["drain_timeout_s"]
    for component in release.groups():
        spec = release.pods()[component]["spec"]
        command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        waits_s = int(command[1] if component == "head" else command[2].removeprefix("--limit-s="))
        assert drain_s <= waits_s < spec["terminationGracePeriodSeconds"]


def test_notes_name_what_exists(release: Release) -> None:
    assert "svc/demo-antiphon " in release.notes
    services = {s["metadata"]["name"] for s in release.of_kind("Service")}
    assert "demo-antiphon" in services
    assert "curl" in release.notes
