"""Which writes the gauge says to be under way: those that move bytes, or could."""

from __future__ import annotations

import numpy as np
import pytest
from mapped_ends import Pair

from antiphon.kv_transfer.measured_transport import MeasuredTransport, TransferMetrics
from antiphon.kv_transfer.transport import Copies, WriteId, WriteState
from antiphon.telemetry.registry import ProcessRegistry


class Layers:
    """Implements ``DeviceEvent``."""

    handle = 77
    computed = False

    def __call__(self) -> bool:
        return self.computed


class Scene:
    """A mapped pair whose copies the test lets go, seen through the gauge."""

    def __init__(self) -> None:
        self.registry = ProcessRegistry({})
        self.pair, self.layers = Pair(), Layers()
        self.transport = MeasuredTransport(self.pair.writer, TransferMetrics(self.registry))
        self.transport.connect(self.pair.receiver.metadata())
        self.pair.device.holds = True

    def post(self, after: Layers | None) -> WriteId:
        row = np.array([(0, 0, 16)], dtype=np.int64)
        copies = Copies(self.pair.mine, self.pair.theirs[0], row)
        return self.transport.post_write("d/1", [copies], b"", after)

    def under_way(self) -> float:
        (family,) = (
            each for each in self.registry.collect() if each.name == "antiphon_kv_transfers_in_flight"
        )
        return family.samples[0].value

    def end_all(self) -> None:
        for copy in self.pair.device.copies:
            copy.let_go()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_copy_is_under_way_from_when_its_layers_are_computed(scene: Scene) -> None:
    write = scene.post(scene.layers)
    assert scene.transport.state(write) is WriteState.IN_PROGRESS
    assert scene.under_way() == 0, "it waits for its layers"
    scene.layers.computed = True
    for _ in range(2):
        assert scene.transport.state(write) is WriteState.IN_PROGRESS
        assert scene.under_way() == 1
    scene.end_all()
    assert scene.transport.state(write) is WriteState.DONE
    assert scene.transport.release(write)
    assert scene.under_way() == 0


def test_a_write_of_what_is_computed_is_under_way_at_once(scene: Scene) -> None:
    write = scene.post(None)
    assert scene.under_way() == 1
    assert not scene.transport.release(write)
    assert scene.under_way() == 1
    scene.end_all()
    assert scene.transport.release(write)
    assert scene.under_way() == 0


def test_a_copy_that_fails_before_its_layers_are_computed_never_was_under_way(scene: Scene) -> None:
    other = scene.post(None)
    scene.pair.device.refuses["done"] = "CUDA error 700"
    write = scene.post(scene.layers)
    assert scene.transport.state(write) is WriteState.FAILED
    assert scene.transport.release(write)
    assert scene.under_way() == 1, "the other one"
    scene.end_all()
    assert scene.transport.release(other)
    assert scene.under_way() == 0
