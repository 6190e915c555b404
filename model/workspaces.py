"""Buffers of kernels, kept from step to step and found again by graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Buffers(Protocol):
    """What a step of up to so many tokens computes in."""

    max_tokens: int


W = TypeVar("W", bound=Buffers)


class Workspaces(Generic[W]):
    """The buffers of steps of any size; steps of one size, the usual case, allocate once."""

    def __init__(self, make: Callable[[int], W]) -> None:
        self._make = make
        self._largest: W | None = None
        self._reserved: list[W] = []
        """What captured graphs may hold: never freed, even when something larger has taken its place."""

    def of(self, tokens: int) -> W:
        """Buffers for a step of so many tokens, and for the largest seen."""
        if self._largest is None or self._largest.max_tokens < tokens:
            self._largest = self._make(tokens)
        return self._largest

    def reserve(self, tokens: int) -> None:
        """Have buffers for so many tokens that stay where they are."""
        workspace = self.of(tokens)
        if not any(workspace is held for held in self._reserved):
            self._reserved.append(workspace)
