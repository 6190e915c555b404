"""Which machine this is, so that two processes know whether they share one."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """The same in every process and container of one boot of one kernel; empty where it cannot be told."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
