"""Token counts of one request."""

from __future__ import annotations

from dataclasses import dataclass

Usage = dict[str, int | dict[str, int]]


@dataclass(slots=True)
class TokenCounts:
    """Tokens of one request over all its choices; the prompt counts once."""

    prompt: int
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def chat_usage(self) -> Usage:
        """The ``usage`` object of chat and text completions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def running_usage(self) -> Usage:
        """The ``usage`` of a chunk amid an answer: what is not known before its end is left out."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
