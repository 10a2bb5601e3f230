"""Streaming-dLLM: a block sees the next masks after it, and the end of the answer."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.suffix import SuffixCache
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.values import Canvas


@dataclass
class StreamingCache(SuffixCache):
    """A wrapper that shows a block the first `window` masks after it and the last masks of the canvas.

    Source: Streaming-dLLM, arXiv 2601.17917, where the inner cache is `prefix`. Its threshold is `scheduler=streaming`,
    its early exit `stop=block`. Its `window` is 96 to 192 for LLaDA-1.5 and 32 for Dream.

    Args:
        inner: the cache for the columns that stay. The same caches as in `cache=dpad` are possible.
        window: columns right after the block that stay. 0 keeps none.
        tail: last columns of the canvas that stay, too. They show the model how long the answer may be.
    """

    window: int = 96
    tail: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("cache.window", self.window, 0)
        check_count("cache.tail", self.tail, 0)

    @override
    def keeps(self, canvas: Canvas) -> Tensor:
        column = canvas.columns()
        return (column < canvas.stop[:, None] + self.window) | (column >= canvas.end[:, None] - self.tail)
