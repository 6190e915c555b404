"""The life of one generation as one table of legal moves, and the ways in which it can end."""

from __future__ import annotations

from enum import StrEnum

from antiphon.protocol.errors import IllegalTransition


class GenerationState(StrEnum):
    """Where a generation stands. One generation is one sequence: a request with ``n`` choices has n."""

    QUEUED = "queued"
    """Waits for admission."""
    PLACING = "placing"
    """Admitted; has no decode worker (yet, or any more)."""
    RESERVING = "reserving"
    """Sent to a decode worker, which has not said that it holds pages."""
    PREFILLING = "prefilling"
    """Pages are held; a prefill worker computes and ships, or is being chosen."""
    DECODING = "decoding"
    """Runnable at the decode worker: its next event is tokens."""
    ENDED = "ended"


_S = GenerationState
LEGAL_MOVES: dict[GenerationState, frozenset[GenerationState]] = {
    _S.QUEUED: frozenset({_S.PLACING, _S.ENDED}),
    _S.PLACING: frozenset({_S.RESERVING, _S.ENDED}),
    # Back to PLACING: the worker refused or died.
    _S.RESERVING: frozenset({_S.PREFILLING, _S.DECODING, _S.PLACING, _S.ENDED}),
    # PREFILLING again: decode preempted the sequence before its first token and reserved anew.
    _S.PREFILLING: frozenset({_S.PREFILLING, _S.DECODING, _S.PLACING, _S.ENDED}),
    # Back to PREFILLING: decode preempted the sequence and needs its KV again.
    _S.DECODING: frozenset({_S.PREFILLING, _S.DECODING, _S.PLACING, _S.ENDED}),
    _S.ENDED: frozenset(),
}


def check_move(current: GenerationState, to: GenerationState) -> None:
    """Raise when the table has no edge.

    Raises:
        IllegalTransition: names both states.
    """
    if to not in LEGAL_MOVES[current]:
        raise IllegalTransition(f"a generation cannot move from {current} to {to}")


class EndKind(StrEnum):
    """Why a generation ended; exactly one per generation."""

    STOP = "stop"
    """A stop token, or a stop string found by the router."""
    LENGTH = "length"
    DEADLINE = "deadline"
    CLIENT_GONE = "client_gone"
    SLOW_CLIENT = "slow_client"
    """The client read so slowly that the bound of held tokens was passed."""
    OVERLOADED = "overloaded"
    """Every worker that could have taken it was full."""
    NO_WORKER = "no_worker"
    """No ready pair of prefill and decode worker."""
    TOO_LARGE = "too_large"
    """A worker said that no amount of waiting makes the request fit."""
    GRAMMAR = "grammar"
    """The output could not be kept to its grammar, and would not be in another attempt."""
    FAILED = "failed"
    """The attempts were used up."""
    SHUTDOWN = "shutdown"
    """The router stopped before the generation did."""
