"""Data parallelism as whole replicas: each in a process with devices of its own, all measuring at once."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from antiphon.benchmarks.records import Layout, Record
from antiphon.benchmarks.sweep.meter import DeviceType, Effort, Meter, NotMeasurable, engine_opener
from antiphon.benchmarks.sweep.points import Point
from antiphon.protocol.errors import AntiphonError

END_TIMEOUT_S = 60.0
AT_ONCE = "at_once"
"""Key of a record that was taken while the rest of the layout it names measured the same point."""
VISIBLE = "CUDAVISIBLE_DEVICES"
_ENVIRONMENT = threading.Lock()
"""Held while this process's environment is that of a process which starts."""


class ReplicaMeter:
    """Gives every replica the same point at once; the figure is that of the slowest.

    What the first of several replicas took is a figure of the layout of one replica, and comes along.
    """

    def __init__(self, layout: Layout, replicas: Sequence[Connection]) -> None:
        self._layout, self._replicas = layout, replicas
        self._first: Record | None = None

    def measure(self, point: Point) -> Record:
        """See ``Meter``; the point's batch is that of one replica.

        Raises:
            NotMeasurable: a replica failed or died; the message is its own.
        """
        self._first = None
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
        if len(records) == 1:
            return records[0]
        first = records[0]
        self._first = replace(first, extra=first.extra | {AT_ONCE: self._layout.name})
        slowest = max(records, key=lambda record: record.value)
        values = [record.value for record in records]
        return replace(slowest, layout=self._layout.name, extra=slowest.extra | {"replicas_ms": values})

    def came_along(self) -> Sequence[Record]:
        """See ``MeasuresMore``."""
        return [] if self._first is None else [self._first]


@contextmanager
def open_replicas(
    model: str,
    layout: Layout,
    points: Sequence[Point],
    device: DeviceType,
    effort: Effort,
    devices: Sequence[int] | None = None,
) -> Iterator[Meter]:
    """Start a process for each replica, one too where there is one, and end them with the block.

    Args:
        devices: numbers of the GPUs that they may take; the first ones when absent.
    """
    numbers = range(layout.gpus) if devices is None else devices
    spawn = multiprocessing.get_context("spawn")
    one = replace(layout, dp=1)
    mine = [replace(point, layout=one) for point in points]
    with ExitStack() as stack:
        connections = []
        for index in range(layout.dp):
            here, there = spawn.Pipe()
            with _visible_devices(device, numbers[index * one.tp : (index + 1) * one.tp]):
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


def visible_devices(numbers: Sequence[int]) -> str:
    """``CUDAVISIBLE_DEVICES`` of a process that may take these of the GPUs that this one sees."""
    before = os.environ.get(VISIBLE)
    known = before.split(",") if before else [str(index) for index in range(max(numbers) + 1)]
    return ",".join(known[number] for number in numbers)


@contextmanager
def _visible_devices(device: DeviceType, numbers: Sequence[int]) -> Iterator[None]:
    """What a process started within sees of the GPUs."""
    if device == "cpu":
        yield
        return
    with _ENVIRONMENT:
        before = os.environ.get(VISIBLE)
        os.environ[VISIBLE] = visible_devices(numbers)
        try:
            yield
        finally:
            if before is None:
                del os.environ[VISIBLE]
            else:
                os.environ[VISIBLE] = before


def _end(process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
    connection.close()
    process.join(END_TIMEOUT_S)
    if process.is_alive():
        process.kill()
