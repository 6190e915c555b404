"""Futures of which the end is known, or follows from another's."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, TypeVar

from antiphon.protocol.errors import TransferError

T = TypeVar("T")


def done() -> Future[None]:
    """One that has ended well."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def failed(error: TransferError) -> Future[T]:
    """One that has ended with an error."""
    future: Future[T] = Future()
    future.set_exception(error)
    return future


def with_result(future: Future[Any], result: T) -> Future[T]:
    """The same end, with another result."""
    ended: Future[T] = Future()

    def end(inner: Future[None]) -> None:
        error = inner.exception()
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)

    future.add_done_callback(end)
    return ended


def without_result(future: Future[Any]) -> Future[None]:
    """The same end, without the result."""
    return with_result(future, None)
