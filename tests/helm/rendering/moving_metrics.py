"""Moves every metric that a router declares, with every label, and says what it then exports."""

from __future__ import annotations

import itertools
import random
from functools import cache

from prometheus_client.parser import text_string_to_metric_families

from antiphon.router.metrics import STAGES, RouterMetrics

VALUES = {
    "role": ("prefill", "decode"),
    "stage": STAGES,
    "status_code": ("200", "503"),
    "reason": ("queue_full", "died"),
}
"""Values of labels that expressions ask for; any other label has one of its own."""


def turn(metrics: RouterMetrics, chance: random.Random) -> None:
    """Move every metric, with every combination of its labels."""
    for metric in vars(metrics).values():
        names = getattr(metric, "_labelnames", ())
        for values in itertools.product(*(VALUES.get(name, ("some",)) for name in names)):
            child = metric.labels(*values) if names else metric
            if hasattr(child, "observe"):
                child.observe(10 ** chance.uniform(-3.5, 0.5))  # within the buckets of every histogram
            elif hasattr(child, "set"):
                child.set(chance.random())
            elif hasattr(child, "inc"):
                child.inc(chance.randint(1, 5))


@cache
def exported() -> dict[str, frozenset[str]]:
    """Sample name -> its labels, of everything that a router exports."""
    metrics = RouterMetrics("m")
    turn(metrics, random.Random(0))
    names: dict[str, frozenset[str]] = {}
    for family in text_string_to_metric_families(metrics.exposition()[0].decode()):
        for sample in family.samples:
            names[sample.name] = names.get(sample.name, frozenset()) | frozenset(sample.labels)
        # Without a sample there was a label whose values this module does not know how to make.
        assert family.samples, family.name
    return names
