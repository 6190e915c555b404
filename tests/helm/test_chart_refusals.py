"""Values that cannot work are refused when the chart is rendered, with what to change."""

from __future__ import annotations

import json
from collections.abc import Iterator

import helm_python
import pytest
import yaml
from rendered_chart import CHART, Document, Renderer, dotted, merged

from antiphon.model.config import PRESETS
from antiphon.router.api_keys import MIN_KEY_CHARS
from antiphon.telemetry.buckets import ITL_S, LATENCY_S

RULES: tuple[tuple[str, dict[str, object], str], ...] = (
    ("two-gpus", {"prefill.tensorParallel": 3}, "does not divide the 64 query heads"),
    ("two-gpus", {"decode.tensorParallel": 16}, "does not divide the 8 key/value heads"),
    ("two-gpus", {"decode.expertParallel": True}, "needs more than one rank"),
    (
        "h200-one-node",
        {"decode.expertParallel": True, "decode.tensorParallel": 8, "model.shape.experts": 36},
        "8 ranks do not divide the 36 experts",
    ),
    ("h200-two-nodes", {"decode.gpu.count": 2}, "leave it null or make it 1"),
    ("cpu-demo", {"prefill.gpu.count": 1}, "leave it null or make it 0"),
    ("h200-one-node", {"placement.pod.gpu.count": 4}, "need 8"),
    ("h200-two-nodes", {"decode.config.gpu_share": 0.5}, "a worker in a pod of its own has a GPU to itself"),
    (
        "h200-one-node",
        {"prefill.replicas": 1, "prefill.tensorParallel": 4, "prefill.config.gpu_share": 0.5},
        "only a worker of one rank can share its GPU; prefill.tensorParallel is 4",
    ),
    ("h200-one-node", {"placement.pods": 2}, "cannot be dealt out evenly"),
    ("cpu-demo", {"transfer.path": "cuda_ipc"}, "needs prefill.device and decode.device cuda"),
    ("h200-two-nodes", {"transfer.path": "cuda_ipc"}, "needs placement.mode samePod, or"),
    ("h200-two-nodes", {"decode.rdma.count": 0}, "needs decode.rdma.count of at least 1"),
    ("two-gpus", {"transfer.path": "rdma"}, "needs placement.pod.rdma.count"),
    ("cpu-demo", {"router.config.host": "127.0.0.1"}, "nothing else could reach localhost"),
    ("cpu-demo", {"router.config.host": "localhost"}, "nothing else could reach localhost"),
    ("cpu-demo", {"router.config.port": 9000}, "is the chart's to set"),
    ("cpu-demo", {"prefill.config.replicas": 2}, r"set prefill\.replicas of the chart"),
    ("cpu-demo", {"decode.config.tensor_parallel": 2}, r"set decode\.tensorParallel of the chart"),
    ("cpu-demo", {"decode.config.kv_cache.page_size_tokens": 32}, "prefill has 64 and decode 32"),
    ("cpu-demo", {"router.drainTimeoutSeconds": 10}, "shorter than transfer.leaseSeconds"),
    ("cpu-demo", {"router.preStopSeconds": 19}, "router.preStopSeconds: 19 is shorter"),
    ("cpu-demo", {"decode.preStopSeconds": 5}, "decode.preStopSeconds: 5 is shorter"),
    ("two-gpus", {"placement.pod.preStopSeconds": 5}, "placement.pod.preStopSeconds: 5 is shorter"),
    ("cpu-demo", {"prefill.terminationGracePeriodSeconds": 25}, "preStopSeconds \\+ 10 = 30"),
    ("cpu-demo", {"ray.head.terminationGracePeriodSeconds": 30}, "drainTimeoutSeconds \\+ 15 = 35"),
    ("cpu-demo", {"model.source.type": "pvc"}, "name the claim that holds the checkpoint"),
    ("cpu-demo", {"model.source.type": "hostPath"}, "name the folder that holds the checkpoint"),
    ("cpu-demo", {"model.source.type": "huggingface"}, "name a ReadWriteMany claim"),
    ("two-gpus", {"model.source.huggingface.cache.path": ""}, "name the folder on every node"),
    ("two-gpus", {"model.dtype": "float32"}, "float32 is for CPUs"),
    ("h200-two-nodes", {"auth.keys": ["sk-0123456789abcdef"]}, "two places for the keys"),
    ("cpu-demo", {"fullnameOverride": "2nd"}, "must begin with a letter"),
    (
        "cpu-demo",
        {"commonLabels": {"app.kubernetes.io/name": "x"}},
        "commonLabels: the label .*/name is the chart's",
    ),
    (
        "cpu-demo",
        {"ray.head.podLabels": {"antiphon-revision": "x"}},
        "ray.head.podLabels: the label antiphon-rev",
    ),
    (
        "cpu-demo",
        {"router.podAnnotations": {"checksum/deployment": "x"}},
        "checksum/deployment is the chart's",
    ),
    (
        "cpu-demo",
        {"prefill.extraVolumes": [{"name": "models"}]},
        '"models" is there twice, or is a volume of',
    ),
    ("cpu-demo", {"router.extraVolumeMounts": [{"name": "v", "mountPath": "/v"}]}, 'no volume is called "v"'),
    (
        "two-gpus",
        {"decode.env": [{"name": "A", "value": "b"}]},
        r"decode.env: has no effect .* set placement.pod.env",
    ),
    ("cpu-demo", {"placement.pod.hostIPC": True}, r"no effect .* set prefill.hostIPC or decode.hostIPC"),
    ("cpu-demo", {"decode.config.local_prefill": "always"}, "choose never or short"),
    ("cpu-demo", {"transfer.config.lease_s": 3}, "set transfer.leaseSeconds of the chart"),
    ("cpu-demo", {"decode.podDisruptionBudget.minAvailable": 2}, "minAvailable: 2 of at most 1 pods"),
    (
        "cpu-demo",
        {"networkPolicy.restrictEgress": True, "prefill.maxReplicas": 2},
        "autoscaler must reach the API server",
    ),
    ("two-gpus", {"router.ingress.host": ""}, "a certificate needs router.ingress.host"),
    ("h200-two-nodes", {"router.httpRoute.parentRefs": []}, "name the gateway"),
    ("two-gpus", {"decode.maxReplicas": 2}, "a shared pod has room for its workers only"),
    ("cpu-demo", {"prefill.replicas": 3, "prefill.maxReplicas": 2}, "2 is less than prefill.replicas: 3"),
    ("cpu-demo", {"decode.config.max_replicas": 2}, r"set decode\.maxReplicas of the chart"),
    ("cpu-demo", {"previousRevisions": [{"name": "a", "tag": "1"}]}, "revision: name the one that takes"),
    ("cpu-demo", {"revision": "b"}, "ray.upgradeStrategy: Recreate ends every pod"),
    (
        "cpu-demo",
        {
            "revision": "b",
            "ray.upgradeStrategy": "None",
            "previousRevisions": [{"name": "b", "tag": "1"}],
        },
        '"b" is there twice, or is the revision itself',
    ),
    (
        "two-gpus",
        {
            "revision": "b",
            "ray.upgradeStrategy": "None",
            "placement.pods": 2,
            "prefill.replicas": 2,
            "decode.replicas": 2,
            "previousRevisions": [{"name": "a", "tag": "1", "decode": {"replicas": 3}}],
        },
        '3 decode workers of "a" cannot be dealt out',
    ),
)


@pytest.mark.parametrize(("name", "changes", "message"), RULES, ids=[",".join(rule[1]) for rule in RULES])
def test_a_contradiction_is_named(name: str, changes: Document, message: str, render: Renderer) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        render(f"{name}-values.yaml", changes)


def test_every_rule_is_triggered() -> None:
    """Each ``fail`` of the chart has a case above; counted, so that a new one is not forgotten."""
    rules = (CHART / "templates/validate.yaml").read_text().count("{{- fail ")
    # The two rules on heads and on keys of the chart have one `fail` each for both pools.
    distinct = {message for _, _, message in RULES}
    assert (
        rules
        == len(distinct)
        - len(
            {
                "nothing else could reach localhost",  # its other half: any other address
                "leave it null or make it 0",
                r"set decode\.tensorParallel of the chart",
                "needs placement.pod.rdma.count",
                "ray.head.podLabels: the label antiphon-rev",
                "no effect .* set prefill.hostIPC or decode.hostIPC",
                "decode.preStopSeconds: 5 is shorter",
                "placement.pod.preStopSeconds: 5 is shorter",
            }
        )
        + 1
    )


def paths_of(values: Document, prefix: str = "") -> Iterator[str]:
    """Every map of the values, dotted."""
    yield prefix
    for key, value in values.items():
        if isinstance(value, dict):
            yield from paths_of(value, f"{prefix}.{key}" if prefix else key)


FREE = {
    "commonLabels", "podSecurityContext", "containerSecurityContext", "config", "kv_cache", "nodeSelector",
    "affinity", "podAnnotations", "podLabels", "annotations", "labels", "requests", "limits", "capabilities",
    "seccompProfile", "gcsFaultToleranceOptions",
}  # fmt: skip
"""Maps whose keys are Kubernetes' or the deployment file's."""

VALUES: Document = yaml.safe_load((CHART / "values.yaml").read_text())
OWNED = [path for path in paths_of(VALUES) if path.rsplit(".", 1)[-1] not in FREE]


@pytest.mark.parametrize("path", OWNED, ids=lambda path: path or "top")
def test_an_unknown_key_is_refused(path: str, chart: helm_python.Chart) -> None:
    change = dotted(f"{path}.noSuchKey" if path else "noSuchKey", 1)
    with pytest.raises(helm_python.HelmError, match="noSuchKey"):
        chart.validate_schema(merged({}, change))


def test_owned_objects_are_many() -> None:
    assert len(OWNED) > 35


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("prefill.replicas", 0),
        ("prefill.device", "tpu"),
        ("decode.tensorParallel", "four"),
        ("model.source.type", "s3"),
        ("model.source.huggingface.repository", "not a hub id"),
        ("transfer.path", "magic"),
        ("router.service.port", 70000),
        ("auth.keys", ["short"]),
        ("image.registry", "registry.example.com/without-slash"),
        ("image.registry", "registry example/"),
        ("image.tag", "sha256:0123456789abcdef"),
        ("image.tag", "1.0+build"),
        ("image.workerDigest", "0123456789abcdef"),
        ("image.routerRepository", "Antiphon Router"),
        ("nameOverride", "a b"),
        ("model.source.hostPath.path", "models"),
        ("metrics.rules.ttftSeconds", "2.2"),
        ("metrics.serviceMonitor.enabled", "maybe"),
        ("prefill.shmSize", "8 GB"),
        ("log.level", "loud"),
        ("revision", "B_2"),
        ("previousRevisions", [{"name": "a"}]),
        ("previousRevisions", [{"name": "a", "tag": "1", "decode": {"noSuchKey": 1}}]),
    ],
)
def test_a_wrong_value_is_refused(path: str, value: object, chart: helm_python.Chart) -> None:
    with pytest.raises(helm_python.HelmError):
        chart.validate_schema(dotted(path, value))


def test_the_schema_accepts_the_defaults_and_knows_every_key(chart: helm_python.Chart) -> None:
    chart.validate_schema({})
    schema = json.loads((CHART / "values.schema.json").read_text())

    def known(node: Document, values: Document, path: str) -> None:
        while "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        if "properties" not in node:
            return
        # What the schema allows has a default, and so a line in the reference.
        assert set(node["properties"]) - {"global"} == set(values), path
        for key, value in values.items():
            if isinstance(value, dict):
                known(node["properties"][key], value, f"{path}.{key}")

    known(schema, VALUES, "")


def test_prefill_and_decode_have_the_same_shape() -> None:
    def shape(values: object) -> object:
        if not isinstance(values, dict):
            return None
        return {key: shape(value) for key, value in values.items() if key != "config"}

    assert shape(VALUES["prefill"]) == shape(VALUES["decode"])
    pod = VALUES["placement"]["pod"]
    assert set(pod) == set(VALUES["prefill"]) - {
        *("replicas", "maxReplicas", "device", "tensorParallel", "expertParallel", "cpuThreads", "config")
    }


def test_what_the_chart_repeats_from_the_code_agrees_with_it() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    rules = schema["properties"]["metrics"]["properties"]["rules"]["properties"]
    assert rules["ttftSeconds"]["enum"] == [str(float(bound)) for bound in LATENCY_S]
    assert rules["itlSeconds"]["enum"] == [str(float(bound)) for bound in ITL_S]
    keys = schema["properties"]["auth"]["properties"]["keys"]
    assert keys["items"]["minLength"] == MIN_KEY_CHARS
    shape = VALUES["model"]["shape"]
    small = PRESETS["gpt-oss-20b"]
    assert shape == {
        "queryHeads": small.num_attention_heads,
        "kvHeads": small.num_key_value_heads,
        "experts": small.num_experts,
    }
    synthetic = schema["properties"]["model"]["properties"]["source"]["properties"]["synthetic"]
    assert set(synthetic["properties"]["like"]["enum"]) == set(PRESETS)


@pytest.mark.parametrize("name", ["cpu-demo", "h200-one-node"])
def test_the_examples_state_the_shape_of_their_model(name: str) -> None:
    values = yaml.safe_load((CHART / f"ci/{name}-values.yaml").read_text())
    preset = PRESETS[
        values["model"]["name"].removeprefix("gpt-oss-")
        if "tiny" in values["model"]["name"]
        else values["model"]["name"]
    ]
    assert values["model"]["shape"] == {
        "queryHeads": preset.num_attention_heads,
        "kvHeads": preset.num_key_value_heads,
        "experts": preset.num_experts,
    }
