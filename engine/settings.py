"""The sizes and bounds of one engine, resolved once from the deployment's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.configs.workers import WorkerConfig
from antiphon.model.config import GptOssConfig
from antiphon.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything an engine needs to know besides its model.

    Raises:
        ConfigError: the numbers contradict each other; names the key and the values.
    """

    page_size_tokens: int
    full_pages: int
    sliding_pages: int
    window_tokens: int
    """Keys that a query of a sliding layer sees, itself included."""
    max_context_tokens: int
    """Prompt + output limit asked for; what really holds is ``max_sequence_tokens``."""
    vocab_size: int
    prefix_cache: bool = True
    chunk_tokens: int = 512
    """Prompt tokens computed per step; a multiple of the page size."""
    max_batch_size: int = 32
    max_queued_requests: int = 256
    max_reservations_waiting: int = 8
    """REMOTE_KV reservations that may wait for their KV at one time."""
    headroom_tokens: int = 64
    """Output positions reserved together with a REMOTE_KV prompt."""
    layer_groups: int = 1
    """Parts in which a chunk's layers are announced while later layers compute."""
    overlap: bool = False
    """Plan and launch a step while the one before it computes; steps and sampling then stay on the device."""
    decode_graphs: bool = False
    """Replay captured CUDA graphs for steps that only decode; the model must allow it. Needs ``overlap``."""
    chunk_graph_tokens: tuple[int, ...] = ()
    """Padded sizes for which a prompt's chunk is captured in CUDA graphs, ascending; a step that is one chunk
    of at most the largest replays them. The model must allow it. Needs ``overlap``."""

    def __post_init__(self) -> None:
        page = self.page_size_tokens
        if self.decode_graphs and not self.overlap:
            raise ConfigError("decode_graphs is set without overlap, whose executor replays them")
        if self.chunk_tokens < page or self.chunk_tokens % page:
            raise ConfigError(f"chunk_tokens {self.chunk_tokens} is not a multiple of the page size {page}")
        self._check_chunk_graphs()
        needed = self.sliding_pages_at_peak
        if self.sliding_pages < needed:
            raise ConfigError(
                f"kv_cache.sliding_pages {self.sliding_pages} is too small: a chunk of {self.chunk_tokens} "
                f"tokens behind a window of {self.window_tokens} needs {needed} pages of {page} tokens"
            )

    def _check_chunk_graphs(self) -> None:
        sizes = self.chunk_graph_tokens
        if sizes and not self.overlap:
            raise ConfigError("chunk_graph_tokens is set without overlap, whose executor replays them")
        if list(sizes) != sorted(set(sizes)):
            raise ConfigError(f"chunk_graph_tokens {sizes} do not ascend")
        if sizes and not 1 < sizes[0] <= sizes[-1] <= self.chunk_tokens:
            raise ConfigError(
                f"chunk_graph_tokens {sizes} are not within 2 .. chunk_tokens {self.chunk_tokens}"
            )

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt + output that this engine can hold: the context limit, or the whole cache."""
        return min(self.max_context_tokens, self.full_pages * self.page_size_tokens)

    @property
    def sliding_pages_at_peak(self) -> int:
        """Sliding pages that one sequence holds at most: a window, a chunk and both unaligned ends."""
        span = self.window_tokens + max(self.chunk_tokens, self.headroom_tokens)
        return -(-min(span, self.max_sequence_tokens) // self.page_size_tokens) + 1

    @classmethod
    def resolve(
        cls,
        worker: WorkerConfig,
        model: GptOssConfig,
        *,
        max_context_tokens: int | None = None,
        layer_groups: int = 1,
        overlap: bool | None = None,
        decode_graphs: bool = False,
        chunk_graphs: bool = False,
    ) -> EngineSettings:
        """Settings of one worker's engine.

        Args:
            max_context_tokens: narrows the model's own limit.
            overlap: absent, it is on where the worker's device is a GPU.
            decode_graphs: the model's decode step never waits for the host, so that it can be captured.
            chunk_graphs: neither do its chunks of prompts, and this engine computes some: the sizes are
                ``worker.graphed_chunk_tokens``.
        """
        cache = worker.kv_cache
        return cls(
            page_size_tokens=cache.page_size_tokens,
            full_pages=cache.full_pages,
            sliding_pages=cache.sliding_pages,
            window_tokens=model.sliding_window,
            max_context_tokens=min(max_context_tokens or model.max_context_tokens, model.max_context_tokens),
            vocab_size=model.vocab_size,
            prefix_cache=cache.prefix_cache,
            chunk_tokens=worker.chunk_tokens,
            max_batch_size=worker.max_batch_size,
            max_queued_requests=worker.max_queued_requests,
            max_reservations_waiting=worker.max_reservations_waiting,
            headroom_tokens=cache.page_size_tokens,
            layer_groups=layer_groups,
            overlap=worker.device == "cuda" if overlap is None else overlap,
            decode_graphs=decode_graphs,
            chunk_graph_tokens=worker.graphed_chunk_tokens if chunk_graphs else (),
        )
