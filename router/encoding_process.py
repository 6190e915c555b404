"""A process that parses, renders and encodes for a router; ``EncodingPool`` starts it and talks to its pipes.

It takes a pickled ``ChatFormatter`` and then one job after the other, each a function and its arguments, and
ends when its input does, so with the router however that ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from enum import Enum, auto

from antiphon.protocol.errors import AntiphonError


class Outcome(Enum):
    """What the second part of an answer is."""

    RESULT = auto()
    REFUSED = auto()
    """An ``AntiphonError`` that the job raised: the client's fault."""
    CRASHED = auto()
    """Class and frames of anything else as text, without its message, which may hold a client's text."""


def main() -> None:
    """Serve jobs from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the router, which ends this
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not write between answers
    jobs = sys.stdin.buffer
    try:
        formatter = pickle.load(jobs)
        while True:
            function, arguments = pickle.load(jobs)
            outcome: tuple[Outcome, object]
            try:
                outcome = Outcome.RESULT, function(formatter, *arguments)
            except AntiphonError as error:
                outcome = Outcome.REFUSED, error
            except Exception as error:
                frames = "".join(traceback.format_tb(error.__traceback__))
                outcome = Outcome.CRASHED, f"{type(error).__name__}\n{frames}"
            answers.write(pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL))
            answers.flush()
    except (EOFError, BrokenPipeError):
        pass  # the router is gone
