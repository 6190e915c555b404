"""A Python program in a process of its own that is told lines, and says lines."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

PATIENCE_S = 120.0
"""For a line: longer than a busy machine takes to start a process and to load NIXL."""


class TalkingProcess:
    """Runs a program that lies beside this file."""

    def __init__(self, program: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(program)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._said: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line.strip())
        self._said.put(None)

    def hear_line(self) -> str:
        """What it says next."""
        try:
            line = self._said.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"{self.process.args} said nothing for {PATIENCE_S:g} s") from None
        assert line is not None, f"{self.process.args} ended with {self.process.wait()}"
        return line

    def say(self, line: str) -> None:
        """Tell it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def wait_stopped(self) -> None:
        """Until a SIGSTOP has taken effect."""
        deadline = time.monotonic() + PATIENCE_S
        stat = Path(f"/proc/{self.process.pid}/stat")
        while (state := stat.read_text().rpartition(")")[2].split()[0]) != "T":
            assert time.monotonic() < deadline, f"it is in state {state}"
            time.sleep(0.001)

    def end(self, *, kill: bool = True) -> None:
        """Kill it, or tell it to end by closing what it reads; it may have ended already."""
        if kill:
            self.process.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(PATIENCE_S)
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
