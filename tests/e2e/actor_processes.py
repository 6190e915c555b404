"""The processes of a deployment's actors, by the titles that Ray gives them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil


def actor_processes(actor: str, family: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of one class of actors. While one runs a method, Ray adds the method's name to its title."""
    found = []
    for process in family:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if process.cmdline()[:1] and process.cmdline()[0].split(".")[0] == f"ray::{actor}":
                found.append(process)
    return found


def pid_of_one(actor: str, family: Callable[[], Iterable[psutil.Process]], seconds: float = 120.0) -> int:
    """The process of the only actor of a class, which may be starting still."""
    deadline = time.monotonic() + seconds
    while len(found := actor_processes(actor, family())) != 1:
        assert time.monotonic() < deadline, f"{actor}: {found}"
        time.sleep(0.05)
    return found[0].pid
