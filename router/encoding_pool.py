"""Work on long requests away from the event loop, which the streams of everybody else run on.

The tokenizer takes 0.2 ms a kilobyte and keeps Python's interpreter lock meanwhile, so a thread would hold up
the loop as much as doing it there. A few processes do it, each with a thread here that waits for it. What is
short is done at once, on the loop: a trip to a process takes longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, cast

import structlog

from antiphon.protocol.errors import AntiphonError
from antiphon.router.encoding_process import Outcome, main
from antiphon.router.formatter import ChatFormatter
from antiphon.router.openai.errors import rate_limited

log = structlog.get_logger("antiphon.router.encoding")

INLINE_CHARACTERS = 16 * 1024
"""What is not longer is encoded on the loop, in at most three or four milliseconds."""
PARSED_PER_ENCODED = 32
"""So many bytes of JSON are parsed in the time in which one character is encoded."""
GIVES_WAY_S = 2e-6
"""For so long per character a job lets those that come after it go first: ten times what it takes. So a
conversation does not wait for megabytes that came before it, and these do not wait for ever."""
MAX_WAITING_JOBS = 64
"""Jobs that wait for a process; each holds its request's body."""
MAX_WAITING_BYTES = 64 * 1024 * 1024

Args = TypeVarTuple("Args")
Result = TypeVar("Result")


class EncodingCrashed(RuntimeError):
    """A job failed as no job should, or its process died."""


class EncodingPool:
    """Runs functions of a formatter, on the loop or in one of so many processes, what came first or is short
    before the rest.

    Processes start when they are first needed, and again after they died. With 0 everything runs on the loop.
    """

    def __init__(
        self, formatter: ChatFormatter, processes: int, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        """``max_waiting_bytes``: what jobs may hold that wait for a process; one of them may hold more.

        Raises what pickling raises when there are processes that the formatter cannot go to.
        """
        self._formatter = formatter
        self._pickled_formatter = pickle.dumps(formatter) if processes else b""
        self._processes = processes
        self._threads = ThreadPoolExecutor(max(processes, 1), thread_name_prefix="encoding")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._running: set[_EncodingProcess] = set()
        self._closed = False
        self._free = processes
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []
        """A heap of (when it is due, its number, the bytes that it holds, its turn)."""
        self._waiting_bytes = 0
        self._numbers = itertools.count()

    async def run(
        self,
        size: int,
        function: Callable[[ChatFormatter, *Args], Result],
        *args: *Args,
        held_bytes: int | None = None,
    ) -> Result:
        """``function(formatter, *args)``, pickled like what it returns, the function by its name.

        Args:
            size: how many characters it has to encode.
            held_bytes: of ``args``, where that is not about as much.

        Raises:
            ApiError: 429 when too much waits already; any that the function raises.
            EncodingCrashed: it raised anything else in a process, or that died twice.
        """
        if size <= INLINE_CHARACTERS or not self._processes:
            return function(self._formatter, *args)
        await self._turn(size, size if held_bytes is None else held_bytes)
        outcome, result = await self._begin((function, args))
        if outcome is Outcome.REFUSED and isinstance(result, AntiphonError):
            raise result
        if outcome is not Outcome.RESULT:
            raise EncodingCrashed(str(result))
        return cast(Result, result)

    def warm(self) -> None:
        """Start a process, and let it load all that it will use, before it is needed."""
        if self._processes:
            self._threads.submit(self._call, (_encode_a_word, ()))

    def close(self) -> None:
        """End the processes and what they work on; blocks until they are gone."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._running:
            process.reap()

    async def _turn(self, size: int, held_bytes: int) -> None:
        """Wait for a process; whoever returns from here begins a job, or passes it on."""
        if self._free:
            self._free -= 1
            return
        too_many = self._waiting_bytes + held_bytes > self._max_waiting_bytes and self._waiting_bytes > 0
        if too_many or len(self._waiting) >= MAX_WAITING_JOBS:
            raise rate_limited("Too many long requests wait to be encoded.", 1)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        entry = loop.time() + size * GIVES_WAY_S, next(self._numbers), held_bytes, turn
        heapq.heappush(self._waiting, entry)
        self._waiting_bytes += held_bytes
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()
            elif entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
                self._waiting_bytes -= held_bytes
            raise

    def _begin(self, job: object) -> asyncio.Future[tuple[Outcome, object]]:
        """Hand a job to the process whose turn this is; it is passed on when that has answered.

        Not when the caller ends: a client may leave, and the process works on all the same.
        """
        loop = asyncio.get_running_loop()
        try:
            answer = self._threads.submit(self._call, job)
        except RuntimeError as error:  # they were shut down
            self._pass_on()
            raise EncodingCrashed("the router stops") from error

        def pass_on(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._pass_on)

        answer.add_done_callback(pass_on)
        return asyncio.wrap_future(answer)

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, held_bytes, turn = heapq.heappop(self._waiting)
            self._waiting_bytes -= held_bytes
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _call(self, job: object) -> tuple[Outcome, object]:
        """In a thread: the answer of its process, at a second try that of a new one."""
        payload = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        for _ in range(2):
            process = self._process()
            try:
                return process.answer(payload)
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                # Nobody but the kernel, for memory, and the end of the router kills it.
                self._own.process = None
                code = process.reap()
                with self._lock:
                    self._running.discard(process)
                if self._closed:
                    break
                log.warning("encoding_process_died", exit_code=code, error=type(error).__name__)
        return Outcome.CRASHED, "the process that was to encode died"

    def _process(self) -> _EncodingProcess:
        """In a thread: its process, started if there is none."""
        process: _EncodingProcess | None = getattr(self._own, "process", None)
        if process is None:
            with self._lock:
                if self._closed:
                    raise EncodingCrashed("the router stops")
                process = self._own.process = _EncodingProcess(self._pickled_formatter)
                self._running.add(process)
        return process


def _encode_a_word(formatter: ChatFormatter) -> None:
    formatter.encode("word")


class _EncodingProcess:
    """One process and the pipes to it; used by one thread at a time."""

    def __init__(self, pickled_formatter: bytes) -> None:
        # What can be imported here can be there, however it came to be so.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            (sys.executable, "-c", f"from {main.__module__} import main; main()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs, self._answers = self._process.stdin, self._process.stdout
        self._hello: bytes | None = pickled_formatter

    def answer(self, job: bytes) -> tuple[Outcome, object]:
        """What comes back of a pickled job.

        Raises:
            EOFError, OSError, pickle.UnpicklingError: the process died.
        """
        if self._hello is not None:
            self._jobs.write(self._hello)
            self._hello = None
        self._jobs.write(job)
        self._jobs.flush()
        outcome, result = pickle.load(self._answers)
        return Outcome(outcome), result

    def kill(self) -> None:
        """End the process now; from any thread."""
        self._process.kill()

    def reap(self) -> int:
        """End the process if it still lives, and forget it; its exit status."""
        self._process.kill()
        for pipe in (self._jobs, self._answers):
            with contextlib.suppress(OSError):  # what is still to be written goes nowhere
                pipe.close()
        return self._process.wait()
