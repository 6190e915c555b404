"""One network namespace per process of a deployment, joined by a bridge, with links that can be cut.

The run itself lives in a namespace of its own (``isolate``), so nothing of this is seen outside and all of it
is gone when the run ends. What workers and routers tell each other, and the KV, crosses the bridge; Ray, and
with it the supervisor, is on the run's loopback. Both can be cut: a cut loses every packet, both ways, and
tells nobody.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ADDRESSES = "ANTIPHON_CHAOS_NETWORK"
"""Environment variable of the processes: worker id -> [file of its namespace, its address]."""
DEVICE = "eth0"
_INSIDE = "ANTIPHON_CHAOS_INSIDE"
_CLONE_NEWNET = 0x40000000
_LOCAL_PREFERENCE = 100
"""Of the rule that keeps loopback working; cuts of the control plane come before it."""


def isolate() -> None:
    """Run this program again inside a network namespace of its own; returns when it already is.

    Raises:
        SystemExit: this machine does not allow namespaces.
    """
    if os.environ.get(_INSIDE) == "1":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    options = (
        ["--net", "--kill-child"]
        if os.geteuid() == 0
        else ["--net", "--user", "--map-root-user", "--kill-child"]
    )
    command = ["unshare", *options, "--fork"]
    if subprocess.run([*command, "true"], check=False).returncode != 0:
        sys.exit("network namespaces are not allowed here: links cannot be cut")
    os.environ[_INSIDE] = "1"
    os.execvp(command[0], [*command, sys.executable, *sys.argv])


def enter(worker_id: str) -> str:
    """Move the calling thread, and the threads that it starts, to a worker's namespace; its address there."""
    file, address = json.loads(os.environ[ADDRESSES])[worker_id]
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"setns of {worker_id}: {os.strerror(error)}")
    finally:
        os.close(descriptor)
    return str(address)


class Network:
    """The bridge and the namespaces. Use as a context manager."""

    def __init__(self, worker_ids: Iterable[str]) -> None:
        self._address = {name: f"10.77.0.{index + 2}" for index, name in enumerate(worker_ids)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self._control_cuts = 0

    def __enter__(self) -> Network:
        _ip("rule", "add", "pref", str(_LOCAL_PREFERENCE), "lookup", "local")
        _ip("rule", "delete", "pref", "0", "lookup", "local")
        _ip("link", "add", "br0", "type", "bridge")
        _ip("address", "add", "10.77.0.1/24", "dev", "br0")
        _ip("link", "set", "br0", "up")
        for index, (name, address) in enumerate(self._address.items()):
            # Nothing but a process keeps an unnamed namespace alive.
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
            )
            self._holders[name] = holder
            assert holder.stdout is not None
            holder.stdout.readline()
            _ip("link", "add", f"v{index}", "type", "veth", "peer", "name", DEVICE, "netns", str(holder.pid))
            _ip("link", "set", f"v{index}", "master", "br0", "up")
            self._inside(name, "address", "add", f"{address}/24", "dev", DEVICE)
            self._inside(name, "link", "set", DEVICE, "up")
            self._inside(name, "link", "set", "lo", "up")
        os.environ[ADDRESSES] = json.dumps(
            {
                name: [f"/proc/{holder.pid}/ns/net", self._address[name]]
                for name, holder in self._holders.items()
            }
        )
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()
        Path("/sys/class/net/br0").exists() and _ip("link", "delete", "br0")

    def cut(self, one: str, other: str) -> None:
        """Lose every packet between two processes from now on. Cuts of one link count."""
        pair = (min(one, other), max(one, other))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1
        if self._cuts[pair] == 1:
            self._inside(one, "route", "add", "blackhole", self._address[other])
            self._inside(other, "route", "add", "blackhole", self._address[one])

    def mend(self, one: str, other: str) -> None:
        """Take one cut back."""
        pair = (min(one, other), max(one, other))
        self._cuts[pair] -= 1
        if self._cuts[pair] == 0:
            self._inside(one, "route", "delete", "blackhole", self._address[other])
            self._inside(other, "route", "delete", "blackhole", self._address[one])

    @contextmanager
    def control_cut(self, pid: int) -> Iterator[Callable[[], None]]:
        """Lose every packet of a process on the run's loopback, where Ray is.

        What is yielded has to be called often: it also cuts the connections that the process made since.
        """
        self._control_cuts = self._control_cuts % (_LOCAL_PREFERENCE - 2) + 1
        preference, cut = str(self._control_cuts), set[int]()

        def refresh() -> None:
            try:
                sockets = psutil.Process(pid).net_connections("tcp")
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it is gone
                return
            new = {one.laddr.port for one in sockets if one.laddr} - cut
            cut.update(new)
            _ip_batch(
                f"rule add pref {preference} ipproto tcp {end} {port} blackhole"
                for port in sorted(new)
                for end in ("sport", "dport")
            )

        refresh()
        try:
            yield refresh
        finally:
            _ip_batch([f"rule delete pref {preference}"] * (2 * len(cut)))

    def _inside(self, name: str, *arguments: str) -> None:
        network = f"--net=/proc/{self._holders[name].pid}/ns/net"
        subprocess.run(["nsenter", network, "ip", *arguments], check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _ip_batch(commands: Iterable[str]) -> None:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("".join(f"{command}\n" for command in commands))
        file.flush()
        subprocess.run(["ip", "-batch", file.name], check=True)
