"""Data parallelism as whole replicas: each in a process with devices of its own, all measuring at once.

Processes are forked from one that has loaded everything and has not touched a GPU, so that they start at
once; so are those that become further ranks of a replica.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
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
VISIBLE = "CUDA_VISIBLE_DEVICES"
PRELOADED = ["antiphon.benchmarks.sweep.loaded", "antiphon.benchmarks.sweep.ranks"]
_FORKS = multiprocessing.get_context("forkserver")
_STARTING = threading.Lock()
"""One process at a time is started, by whichever thread."""


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
    one = replace(layout, dp=1)
    mine = [replace(point, layout=one) for point in points]
    with ExitStack() as stack:
        connections = []
        for index in range(layout.dp):
            visible = None
            if device == "cuda":
                visible = visible_devices(numbers[index * one.tp : (index + 1) * one.tp])
            waiting = [_start(stack, _wait_for_plan, visible) for _ in range(one.tp - 1)]
            here = _start(stack, serve_replica, visible, waiting, model, one, mine, device, effort)
            for pipe in waiting:  # the replica's own from here on
                pipe.close()
            connections.append(here)
        yield ReplicaMeter(layout, connections)


def _start(stack: ExitStack, target: Callable[..., None], *arguments: object) -> Connection:
    """A pipe to a new process, which is given its other end first, and ends with the stack."""
    with _STARTING:
        _FORKS.set_forkserver_preload(PRELOADED)
        here, there = _FORKS.Pipe()
        process = _FORKS.Process(target=target, args=(there, *arguments))
        process.start()
        there.close()
    stack.callback(_end, process, here)
    return here


def _wait_for_plan(pipe: Connection, visible: str | None) -> None:
    from antiphon.benchmarks.sweep.ranks import wait_for_plan

    wait_for_plan(pipe, visible)


def serve_replica(
    parent: Connection,
    visible: str | None,
    waiting: list[Connection],
    model: str,
    layout: Layout,
    points: Sequence[Point],
    device: DeviceType,
    effort: Effort,
) -> None:
    """A replica's process: measures what it is sent until the other end closes."""
    if visible is not None:
        os.environ[VISIBLE] = visible
    if device == "cpu":
        import torch

        torch.set_num_threads(1)
    try:
        with engine_opener(device, effort, waiting)(model, layout, points) as meter:
            while True:
                point = parent.recv()
                try:
                    parent.send(meter.measure(point))
                except AntiphonError as error:
                    parent.send(str(error) or type(error).__name__)
    except EOFError:
        return  # the sweep is done


def visible_devices(numbers: Sequence[int]) -> str:
    """``CUDA_VISIBLE_DEVICES`` of a process that may take these of the GPUs that this one sees."""
    before = os.environ.get(VISIBLE)
    known = before.split(",") if before else [str(index) for index in range(max(numbers) + 1)]
    return ",".join(known[number] for number in numbers)


def _end(process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
    connection.close()
    process.join(END_TIMEOUT_S)
    if process.is_alive():
        process.kill()
