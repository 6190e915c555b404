"""What ranks say to each other while a model computes: a seam of three collectives.

Every rank calls the same collectives in the same order with tensors of the same shape and dtype.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """The ranks of one worker."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def size(self) -> int:
        """All of them."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in x's dtype; x is used up.

        Every rank gets the same bits. That is part of the contract: ranks route tokens to experts each for
        itself, and with sums that differ in the last place two ranks could disagree about a near tie, so that
        an expert's share is left out or counted twice.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...], rank by rank."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, written into everyone's x, which is returned."""


class SingleRank:
    """A worker of one rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [1, ...], a view."""
        return x[None]

    def broadcast(self, x: Tensor) -> Tensor:
        """x itself."""
        return x
