"""Rendered documents, held against the schemas of Kubernetes and of the custom resources."""

from __future__ import annotations

import functools
import json

import jsonschema
import kubernetes_validate
from rendered_chart import Document, crd_schema

CUSTOM = ("RayCluster", "ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute")
KUBERNETES = ("1.28", "1.37")
"""The oldest that Chart.yaml allows, and the newest whose schemas are at hand."""


def validate(document: Document) -> None:
    _validate(json.dumps(document, sort_keys=True))


@functools.cache
def _validate(text: str) -> None:
    """Most documents are the same in many renderings, and reading a schema takes a while."""
    document = json.loads(text)
    if document["kind"] in CUSTOM:
        jsonschema.validate(document, crd_schema(document["kind"]))
    else:
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)
