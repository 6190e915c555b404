"""Token counts of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Usage = dict[str, int | dict[str, int] | dict[str, float]]


@dataclass(slots=True)
class TokenCounts:
    """Tokens of one request over all its choices; the prompt counts once."""

    prompt: int
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    timing: Mapping[str, float] | None = None
    """Stage -> seconds, where the client asked for it."""

    def take_timing(self, timing: Mapping[str, float]) -> None:
        """Report this with the usage."""
        self.timing = timing

    def chat_usage(self) -> Usage:
        """The ``usage`` object of chat and text completions."""
        usage: Usage = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }
        if self.timing is not None:
            usage["timing"] = {f"{name}_seconds": seconds for name, seconds in self.timing.items()}
        return usage

    def running_usage(self) -> Usage:
        """The ``usage`` of a chunk amid an answer: what is not known before its end is left out."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
