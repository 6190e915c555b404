"""Values at the edges: null, texts that look like numbers, names that no object can have, duplicates."""

from __future__ import annotations

from collections.abc import Iterator

import helm_python
import pytest
import yaml
from document_schemas import validate
from rendered_chart import CHART, Document, Release, Renderer

from antiphon.configs.schema import DeploymentConfig

VALUES: Document = yaml.safe_load((CHART / "values.yaml").read_text())
DIGEST = "sha256:" + "0123456789abcdef" * 4
REVISIONS: Document = {"ray.upgradeStrategy": "None", "revision": "2"}


FOREIGN = {"config", "resources", "supervisorResources", "labels", "podSecurityContext"}


def owned(values: Document, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every key that is the chart's own, dotted, and its default; not those of Kubernetes or of the file."""
    for key, value in values.items():
        if key not in FOREIGN:
            yield f"{prefix}{key}", value
            if isinstance(value, dict) and key != "containerSecurityContext":
                yield from owned(value, f"{prefix}{key}.")


def check(release: Release) -> None:
    for document in release.documents:
        validate(document)
    for component, pod in release.pods().items():
        metadata = {"name": component, "labels": pod["metadata"]["labels"]}
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]})
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            variables = [variable["name"] for variable in container.get("env", [])]
            assert len(variables) == len(set(variables))
    DeploymentConfig.model_validate(yaml.safe_load(release.deployment_file()))


@pytest.mark.parametrize(("path", "default"), list(owned(VALUES)), ids=lambda value: str(value)[:40])
def test_null_is_refused_or_means_nothing(path: str, default: object, render: Renderer) -> None:
    """Helm takes the default of a null away: so that the API, say, would no longer ask for a key."""
    name = "two-gpus-values.yaml" if path.startswith("placement.pod") else "cpu-demo-values.yaml"
    if refused(path, render, name):
        return
    release = render(name, {path: None})
    check(release)
    nothing = None if default is None else type(default)()
    assert _without_secrets(release) == _without_secrets(render(name, {path: nothing}))


def refused(path: str, render: Renderer, name: str) -> bool:
    """Whether a null is refused, by its name."""
    try:
        render(name, {path: None})
    except helm_python.HelmError as error:
        return f"'{path.rsplit('.', 1)[-1]}'" in str(error)
    return False


def test_null_is_refused_where_it_would_open_a_door(render: Renderer) -> None:
    for path in ("auth.enabled", "networkPolicy.enabled", "networkPolicy.operator", "router.tls.secretName"):
        assert refused(path, render, "cpu-demo-values.yaml"), path


def _without_secrets(release: Release) -> list[Document]:
    return [document for document in release.documents if document["kind"] != "Secret"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("revision", {"ray.upgradeStrategy": "None"}),
        ("nameOverride", {"fullnameOverride": "true"}),
        ("serviceAccount.name", {}),
        ("auth.existingSecret.name", {}),
        ("auth.existingSecret.key", {"auth.existingSecret.name": "true"}),
        ("ray.auth.existingSecret", {}),
        ("router.tls.secretName", {}),
        ("router.priorityClassName", {}),
        ("prefill.runtimeClassName", {}),
        ("router.ingress.className", {"router.ingress.enabled": True}),
        ("router.ingress.tlsSecretName",
         {"router.ingress.enabled": True, "router.ingress.host": "*.example.com"}),
        ("model.source.pvc.claimName", {"model.source.type": "pvc", "model.source.pvc.path": "a: #b"}),
        ("model.source.huggingface.tokenSecret",
         {"model.source.type": "huggingface", "model.source.huggingface.cache.type": "emptyDir"}),
        ("model.source.huggingface.cache.claimName", {"model.source.type": "huggingface"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", ["123", "true", "0x1f"])
def test_a_name_stays_a_text(path: str, more: Document, text: str, render: Renderer) -> None:
    check(render("cpu-demo-values.yaml", {path: text, **more}))


def test_names_of_lists_and_of_the_release_stay_texts(render: Renderer) -> None:
    changes: Document = {"image.pullSecrets": ["1", "true"], "fullnameOverride": "no"}
    check(render("cpu-demo-values.yaml", {**changes, **REVISIONS}, name="20"))
    previous = [{"name": "1", "tag": "1"}, {"name": "", "tag": "0", "digest": DIGEST}]
    release = render("cpu-demo-values.yaml", {**REVISIONS, "previousRevisions": previous})
    check(release)
    assert set(release.groups()) == {
        *("head", "prefill-2", "decode-2", "prefill-1", "decode-1", "prefill", "decode", "router")
    }


def test_a_folder_may_have_any_name(render: Renderer) -> None:
    source = {"type": "hostPath", "hostPath": {"path": "/a, b: {c} #d"}}
    release = render("cpu-demo-values.yaml", {"model.source": source})
    check(release)
    (volume,) = (v for v in release.pods()["prefill"]["spec"]["volumes"] if v["name"] == "models")
    assert volume["hostPath"]["path"] == "/a, b: {c} #d"


@pytest.mark.parametrize("name", ["a.b", "2nd", "my.release.name"])
def test_a_release_whose_name_objects_cannot_have_is_refused(name: str, render: Renderer) -> None:
    with pytest.raises(helm_python.HelmError, match=f"{name}-antiphon: .* set fullnameOverride"):
        render("cpu-demo-values.yaml", name=name)
    check(render("cpu-demo-values.yaml", {"fullnameOverride": "other"}, name=name))


def test_a_name_that_is_cut_at_a_hyphen_ends_before_it(render: Renderer) -> None:
    release = render("cpu-demo-values.yaml", name=f"{'x' * 37}---{'y' * 13}")
    check(release)
    assert release.one("RayCluster")["metadata"]["name"] == "x" * 37


def test_labels_of_several_places_are_one_label(render: Renderer) -> None:
    changes = {
        "commonLabels": {"team": "a", "release": "b"},
        "prefill.podLabels": {"team": "c"},
        **{f"metrics.{kind}.enabled": True for kind in ("serviceMonitor", "podMonitor", "rules")},
        **{f"metrics.{kind}.labels": {"release": "d"} for kind in ("serviceMonitor", "podMonitor", "rules")},
        "metrics.dashboards.labels": {"team": "e"},
    }
    release = render("cpu-demo-values.yaml", changes)
    check(release)
    pods = release.pods()
    assert [pods[name]["metadata"]["labels"]["team"] for name in ("prefill", "decode")] == ["c", "a"]
    assert release.one("ServiceMonitor")["metadata"]["labels"]["release"] == "d"


def test_a_variable_takes_the_place_of_the_charts(render: Renderer) -> None:
    changes = {
        "prefill.env": [{"name": "UCX_TLS", "value": "tcp"}],
        "router.env": [{"name": "RAY_DEDUP_LOGS", "value": "1"}],
        "ray.head.env": [{"name": "RAY_COLOR_PREFIX", "value": "1"}],
    }
    release = render("cpu-demo-values.yaml", changes)
    check(release)
    for component, key in (("prefill", "prefill.env"), ("router", "router.env"), ("head", "ray.head.env")):
        for container in release.pods()[component]["spec"]["containers"]:
            (variable,) = changes[key]
            assert variable in container["env"]
            assert len(container["env"]) >= 7


def test_an_image_may_be_named_by_its_digest(render: Renderer) -> None:
    router, worker = DIGEST, DIGEST.replace("0", "f")
    changes = {"image.tag": "1.2", "image.routerDigest": router, "image.workerDigest": worker}
    previous = {
        "previousRevisions": [{"name": "1", "tag": "1.1"}, {"name": "0", "tag": "1.0", "digest": router}]
    }
    release = render("cpu-demo-values.yaml", {**changes, **REVISIONS, **previous})
    wanted = {
        "head": f"antiphon-worker:1.2@{worker}",
        "router": f"antiphon-router:1.2@{router}",
        "test": f"antiphon-router:1.2@{router}",
        "prefill-2": f"antiphon-worker:1.2@{worker}",
        "prefill-1": "antiphon-worker:1.1",
        "prefill-0": f"antiphon-worker:1.0@{router}",
    }
    for component, image in wanted.items():
        spec = release.pods()[component]["spec"]
        assert {c["image"] for c in [*spec.get("initContainers", []), *spec["containers"]]} == {image}


@pytest.mark.parametrize(("network", "policies"), [(True, True), (True, False), (False, True)])
def test_policies_that_may_not_know_the_pods_are_warned_of(
    network: bool, policies: bool, render: Renderer
) -> None:
    changes = {"decode.hostNetwork": network, "networkPolicy.enabled": policies}
    notes = render("h200-two-nodes-values.yaml", changes).notes
    assert notes.count("WARNING: hostNetwork") == (1 if network and policies else 0)


@pytest.mark.parametrize(("secret", "scheme"), [("", "http"), ("certificate", "https")])
def test_gateways_are_told_how_routers_speak(secret: str, scheme: str, render: Renderer) -> None:
    release = render("h200-two-nodes-values.yaml", {"router.tls.secretName": secret})
    ports = [port for service in release.of_kind("Service") for port in service["spec"]["ports"]]
    assert [port["appProtocol"] for port in ports] == [scheme, scheme]
    assert ("WARNING: routers speak HTTPS" in release.notes) is (scheme == "https")
    quiet = render("h200-two-nodes-values.yaml", {"router.httpRoute.enabled": False})
    assert "routers speak HTTPS" not in quiet.notes
