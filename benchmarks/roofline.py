"""Roofline of a forward: the bytes it must move and the operations it must do, part by part.

A part takes the longer of its bytes over the bandwidth and its operations over the peak; parts follow one another.
Launches, synchronisation and what a real kernel loses are left out: nothing measured is faster.

Every forward computes `window` positions per row against `slots` stored columns and answers for `asked` of them.
Counted once each: the weights touched (an even router reaches E (1 - (1 - k/E)^T) experts with T tokens), stored keys
and values read and fresh ones written, logits written and read. Tensors between launches are counted where the
widest of them does not fit into the GPU's cache: with the part that reads or writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dllm_sampler.models.moe import MoeConfig
from dllm_sampler.models.transformer import TransformerConfig


@dataclass(frozen=True)
class Gpu:
    """Figures of one GPU, published or measured."""

    name: str
    bandwidth: float  # bytes per second; where it was measured, of reading, which is most of a decoding step
    peak: float  # bfloat16 operations per second (dense)
    cache: float  # bytes
    copy: float | None = None  # bytes per second that a copy was seen to read and write


GPUS = {
    "a100": Gpu("A100 80GB SXM", 2.039e12, 312e12, 40e6),
    "h100": Gpu("H100 SXM", 3.35e12, 989e12, 50e6),
    "h200": Gpu("H200 SXM", 4.8e12, 989e12, 60e6),
    "b200": Gpu("B200", 8.0e12, 2250e12, 126e6),
    "mi300x": Gpu("MI300X", 5.3e12, 1307e12, 256e6),
}

MODELS = {
    "llada-8b": TransformerConfig(126464, 4096, 12288, 32, 32, 32, 128),
    "dream-7b": TransformerConfig(152064, 3584, 18944, 28, 28, 4, 128, qkv_bias=True),
    "sdar-8b": TransformerConfig(151936, 4096, 12288, 36, 32, 8, 128, qk_norm=True),
    "llada2-mini": TransformerConfig(
        157184, 2048, 5120, 20, 16, 4, 128, qk_norm=True, moe=MoeConfig(256, 8, 512, frozenset(range(1, 20)), 512)
    ),
}

# Bytes of a number, and how many times slower than bfloat16 matrices of it are multiplied (float32: as TF32).
DTYPES = {"bf16": (2, 1.0), "fp16": (2, 1.0), "fp32": (4, 2.0)}


@dataclass(frozen=True)
class Work:
    """One forward: `batch` rows of `window` positions, `slots` columns seen, `asked` positions answered for."""

    batch: int = 1
    window: int = 32
    slots: int = 1024
    asked: int | None = None  # default: the window
    dtype: str = "bf16"
    fused_head: bool = False  # logits never reach memory
    int8: bool = False  # the weights of the layers are 8-bit integers, with a float32 scale per output


@dataclass(frozen=True)
class Part:
    """Bytes and operations of one part of the forward, over all layers."""

    name: str
    bytes: float
    flops: float

    def seconds(self, gpu: Gpu, slower: float = 1.0) -> float:
        """The part's floor."""
        return max(self.bytes / gpu.bandwidth, self.flops * slower / gpu.peak)

    def bound(self, gpu: Gpu, slower: float = 1.0) -> str:
        """Return what sets the floor: memory or compute."""
        return "memory" if self.bytes / gpu.bandwidth >= self.flops * slower / gpu.peak else "compute"


def parts(model: TransformerConfig, work: Work, cache: float = 0.0) -> list[Part]:
    """The parts of a forward; cache: bytes in which tensors between launches stay."""
    size, _ = DTYPES[work.dtype]
    tokens, layers = work.batch * work.window, model.num_layers
    asked = work.batch * (work.window if work.asked is None else work.asked)
    width, queries, keys = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    moe = model.moe
    sparse = 0 if moe is None else len(moe.layers)
    touched = used = (layers - sparse) * 3.0 * width * model.intermediate_size
    inner = float(model.intermediate_size)
    if moe is not None:
        expert, shared = 3 * width * moe.expert_size, 3 * width * moe.shared_size
        reached = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
        every = shared + moe.num_experts * width  # and the router
        touched += sparse * (reached * expert + every)
        used += sparse * (moe.top_k * expert + every)
        inner = (moe.top_k * moe.expert_size + moe.shared_size) * sparse / layers + inner * (layers - sparse) / layers
    spills = tokens * max(2 * inner, queries + 2 * keys) * size > cache

    def ends(numbers: float) -> float:
        """Bytes of tensors between launches, numbers per token and layer."""
        return layers * tokens * numbers * size * spills

    def linear(name: str, touched: float, used: float, numbers: float, outputs: float) -> Part:
        """touched: weights read; used: weights that multiply a token; numbers: at the ends; outputs: of a layer."""
        read = touched + layers * outputs * 4 if work.int8 else touched * size
        return Part(name, read + ends(numbers), 2.0 * tokens * used)

    heads, vocabulary = queries + 2 * keys, model.vocab_size
    stored = layers * work.batch * work.slots * 2 * keys * size
    return [
        linear("qkv", layers * width * heads, layers * width * heads, width + heads, heads),
        linear("o", layers * queries * width, layers * queries * width, queries + width, width),
        linear("mlp", touched, used, 2 * width + 3 * inner, 2 * inner + width),
        Part("kv read", stored + ends(2 * queries), layers * 4.0 * tokens * queries * work.slots),
        Part("kv write", layers * tokens * 2 * keys * size, 0),
        # The embedding; norms with their sums, heads split and turned, the gated product.
        Part("activations", tokens * width * size + ends(8 * width + 2 * heads + 3 * inner), 0),
        Part("head", vocabulary * width * size, 2.0 * asked * vocabulary * width),
        Part("logits", 0 if work.fused_head else 2.0 * asked * vocabulary * size, 0),
        # Ids, three flags and the answers' token, confidence and position.
        Part("sampler", work.batch * work.slots * 11 + asked * 20.0, 0),
    ]


def floor(model: TransformerConfig, gpu: Gpu, work: Work) -> float:
    """Seconds that no forward of this work can beat."""
    slower = DTYPES[work.dtype][1]
    return sum(part.seconds(gpu, slower) for part in parts(model, work, gpu.cache))


def quotes(model: TransformerConfig, gpu: Gpu, work: Work) -> tuple[float, float | None]:
    """The floor at the GPU's bandwidth, and at that of a copy if there is one."""
    return floor(model, gpu, work), None if gpu.copy is None else floor(model, replace(gpu, bandwidth=gpu.copy), work)


def free(model: TransformerConfig, gpu: Gpu, work: Work, rise: float = 0.1, most: int = 1 << 14) -> int:
    """The widest window per row whose floor is at most `rise` above that of one position."""
    limit = floor(model, gpu, replace(work, window=1)) * (1 + rise)
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if floor(model, gpu, replace(work, window=middle)) <= limit else (low, middle - 1)
    return low


def refresh(model: TransformerConfig, gpu: Gpu, work: Work) -> float:
    """The floor of a forward that computes every slot and answers for the window."""
    return floor(model, gpu, replace(work, window=work.slots, asked=work.window))
