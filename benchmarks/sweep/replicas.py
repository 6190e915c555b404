"""Data parallelism as whole replicas: each in a process with devices of its own, all measuring at once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from antiphon.benchmarks.records import Layout, Record
from antiphon.benchmarks.sweep.meter import DeviceType, Effort, Meter, NotMeasurable, engine_opener
from antiphon.benchmarks.sweep.points import Point
from antiphon.protocol.errors import AntiphonError

END_TIMEOUT_S = 60.0


class ReplicaMeter:
    """Gives every replica the same point at once; the figure is that of the slowest."""

    def __init__(self, layout: Layout, replicas: Sequence[Connection]) -> None:
        self._layout, self._replicas = layout, replicas

    def measure(self, point: Point) -> Record:
        """See ``Meter``; the point's batch is that of one replica.

        Raises:
            NotMeasurable: a replica failed or died; the message is its own.
        """
        one = replace(point, layout=replace(self._layout, dp=1))
        for replica in self._replicas:
            with suppress(OSError):  # one that died says so below
                replica.send(one)
        records: list[Record] = []
        failures: list[str] = []
        for index, replica in enumerate(self._replicas):
            try:
                answer = replica.recv()
            except (EOFError, OSError):
                answer = f"replica {index} died"
            if isinstance(answer, Record):
                records.append(answer)
            else:
                failures.append(str(answer))
        if failures:
            raise NotMeasurable(f"{point.name}: {failures[0]}")
        slowest = max(records, key=lambda record: record.value)
        values = [record.value for record in records]
        return replace(slowest, layout=self._layout.name, extra=slowest.extra | {"replicas_ms": values})


@contextmanager
def open_replicas(
    model: str, layout: Layout, points: Sequence[Point], device: DeviceType, effort: Effort
) -> Iterator[Meter]:
    """Start a process for each replica and end them with the block."""
    spawn = multiprocessing.get_context("spawn")
    one = replace(layout, dp=1)
    mine = [replace(point, layout=one) for point in points]
    with ExitStack() as stack:
        connections = []
        for index in range(layout.dp):
            here, there = spawn.Pipe()
            with _visible_devices(device, index * one.tp, one.tp):
                process = spawn.Process(target=serve_replica, args=(there, model, one, mine, device, effort))
                process.start()
            there.close()
            stack.callback(_end, process, here)
            connections.append(here)
        yield ReplicaMeter(layout, connections)


def serve_replica(
    parent: Connection,
    model: str,
    layout: Layout,
    points: Sequence[Point],
    device: DeviceType,
    effort: Effort,
) -> None:
    """A replica's process: measures what it is sent until the other end closes."""
    if device == "cpu":
        import torch

        torch.set_num_threads(1)
    try:
        with engine_opener(device, effort)(model, layout, points) as meter:
            while True:
                point = parent.recv()
                try:
                    parent.send(meter.measure(point))
                except AntiphonError as error:
                    parent.send(str(error) or type(error).__name__)
    except EOFError:
        return  # the sweep is done


@contextmanager
def _visible_devices(device: DeviceType, first: int, count: int) -> Iterator[None]:
    """What a process started within sees of the GPUs: ``count`` of them from ``first``."""
    if device == "cpu":
        yield
        return
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    known = before.split(",") if before else [str(index) for index in range(first + count)]
    os.environ[name] = ",".join(known[first : first + count])
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _end(process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
    connection.close()
    process.join(END_TIMEOUT_S)
    if process.is_alive():
        process.kill()
