"""What the time to first token of a choice was made of.

The router reads one clock, its own, at the moments that it sees: these split the whole without a gap. What
happens at workers between two of those moments is told apart by durations that the workers measured; no
clock is compared across processes. What no worker accounts for between the prompt's way to the prefill
worker and the first token's way back is ``transfer``: the tail of the transfer that computing did not hide,
and the messages around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Timings:
    """Moments are readings of ``time.monotonic``; durations are seconds. None has not happened (yet).

    Attributes:
        rendered_at: the prompt is token ids.
        admitted_at: an admission slot is held.
        attempt_at: the attempt that gave the first token was begun; so was everything below.
        asked_at, reserved_at: a decode worker was asked for pages, and has reserved them.
        prefill_asked_at: a prefill worker was asked; stays None when nothing had to be computed there.
        computed_by_decode: the decode worker computed the prompt itself.
        prefill_queue_s, prefill_s, first_step_s: what the workers measured.
        first_token_at: the first token arrived; moments do not change after it.
        detokenize_s: what it took to turn the first token into a part of the answer.
    """

    rendered_at: float | None = None
    admitted_at: float | None = None
    attempt_at: float | None = None
    asked_at: float | None = None
    reserved_at: float | None = None
    prefill_asked_at: float | None = None
    computed_by_decode: bool = False
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    first_step_s: float | None = None
    first_token_at: float | None = None
    detokenize_s: float | None = None

    def attempt_began(self, now: float) -> None:
        """A decode worker is about to be chosen; what an earlier attempt took is lost time."""
        if self.first_token_at is None:
            self.attempt_at = now
            self.asked_at = self.reserved_at = self.prefill_asked_at = None
            self.prefill_queue_s = self.prefill_s = self.first_step_s = None

    def decode_asked(self, now: float) -> None:
        """Pages were asked for."""
        if self.first_token_at is None:
            self.asked_at = now

    def pages_reserved(self, now: float, *, computed_by_decode: bool = False) -> None:
        """Pages are held; held anew, it is the last time that counts."""
        if self.first_token_at is None:
            self.reserved_at, self.computed_by_decode = now, computed_by_decode

    def prefill_asked(self, now: float) -> None:
        """The prompt was sent to a prefill worker."""
        if self.first_token_at is None:
            self.prefill_asked_at = now

    def prefill_done(self, queue_s: float, compute_s: float) -> None:
        """A prefill worker's report, which may come after the first token."""
        if self.prefill_s is None:
            self.prefill_queue_s, self.prefill_s = queue_s, compute_s

    def parts(self, received_at: float) -> Mapping[str, float]:
        """Stage -> seconds, in the order of ``metrics.TTFT_STAGES``, of what has happened.

        Without a first token, the parts that it got through.
        """
        marks = (
            ("tokenize", received_at, self.rendered_at),
            ("queue", self.rendered_at, self.admitted_at),
            ("retry", self.admitted_at, self.attempt_at),
            ("route", self.attempt_at, self.asked_at),
            ("reserve", self.asked_at, self.reserved_at),
        )
        found = {name: end - begin for name, begin, end in marks if begin is not None and end is not None}
        if self.reserved_at is None:
            return found
        if self.prefill_asked_at is not None:
            found["route"] += self.prefill_asked_at - self.reserved_at
        if self.first_token_at is not None:
            found |= self._leg(self.first_token_at - (self.prefill_asked_at or self.reserved_at))
        return found

    def _leg(self, leg_s: float) -> dict[str, float]:
        """From the prompt's way to whoever computes it to the first token's arrival."""
        computed = "prefill" if self.computed_by_decode else "transfer"
        measured = {
            "prefill_queue": self.prefill_queue_s,
            "prefill": self.prefill_s,
            computed: None,
            "first_decode": self.first_step_s,
        }
        found: dict[str, float] = {}
        left_s = leg_s
        for name, seconds in measured.items():
            if seconds is not None:
                # Clocks of two machines tick differently enough to make the parts exceed the whole.
                found[name] = min(seconds, left_s)
                left_s -= found[name]
        found[computed] = left_s
        return {name: found[name] for name in measured if name in found}


def server_timing(parts: Mapping[str, float]) -> str:
    """The value of a ``Server-Timing`` header, in milliseconds."""
    return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in parts.items())
