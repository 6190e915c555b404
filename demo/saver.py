"""Keeps weights in training, so that a run that is cut short leaves something to go on from."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from antiphon.demo.network import TinyGptOss
from antiphon.demo.packed import shipped_weights, write_packed
from antiphon.model.config import GptOssConfig


class Saver:
    """Packs weights on a thread of its own while training goes on; a saving under way makes the next wait."""

    def __init__(self, path: Path, config: GptOssConfig, token_ids: tuple[int, ...]) -> None:
        self.path, self._config, self._token_ids = path, config, token_ids
        self._thread = ThreadPoolExecutor(1, "saver")
        self._pending: Future[None] | None = None

    def save(self, model: TinyGptOss) -> None:
        """Keep the weights as they are now.

        Raises:
            OSError: the ones before could not be written.
        """
        self.wait()
        weights = shipped_weights(model)
        self._pending = self._thread.submit(
            write_packed, weights, self._config, self._token_ids, self.path, preset=0
        )

    def wait(self) -> None:
        """Until the last weights are kept; raises what kept them from it."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
