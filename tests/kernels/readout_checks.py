"""What a kernel must do on any device: the interpreter's tests and those on a GPU call the same functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dllm_sampler.core import noise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.values import Query, Readout
from dllm_sampler.guides import Temperature
from dllm_sampler.kernels import partial
from dllm_sampler.kernels.sampling import Sampling
from tests import toys

INF = float("inf")
STATISTICS = ("confidence", "margin", "gap", "entropy", "logsumexp", "current")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def keys_of(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**62), 2**62, (rows,), generator=seeded(seed))


def exact(logits: Tensor, token: Tensor, current: Tensor | None) -> dict[str, Tensor]:
    """The statistics of `logits [N, V]` by their definitions, in float64; NaN where a logit is +inf."""
    x = logits.double()
    p = x.softmax(-1)
    two = x.topk(2, -1).values if x.shape[1] > 1 else torch.cat([x, torch.full_like(x, -INF)], 1)
    total = x.logsumexp(-1)
    others = p.scatter(1, token[:, None], 0).sum(-1)
    own = p.gather(1, token[:, None])[:, 0]
    found = {
        "confidence": own / (own + others),
        "margin": two[:, 0].sub(total).exp() - two[:, 1].sub(total).exp(),
        "gap": two[:, 0] - two[:, 1],
        "entropy": torch.special.entr(p).sum(-1),
        "logsumexp": total,
    }
    if current is not None:
        found["current"] = x.gather(1, current[:, None])[:, 0] - total
    void = torch.where(total == INF, torch.nan, 0.0)
    return {name: value + void for name, value in found.items()}


def compare(found: Readout, expected: dict[str, Tensor], size: float = 1.0) -> None:
    """Equal up to float32's rounding: `size` is that of the logits, whose sums and differences it limits."""
    for name, value in expected.items():
        got = getattr(found, name)
        assert got.dtype == torch.float64, name
        absolute = {"gap": 2e-7 * size, "entropy": 5e-6}.get(name, 1e-6 * size)
        relative = {"gap": 1e-6}.get(name, 5e-6)
        torch.testing.assert_close(
            got.cpu(), value, rtol=relative, atol=absolute, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@contextmanager
def surrounded() -> Iterator[None]:
    """Kernels write to the middle of larger buffers of NaN (or -7): all of the middle, and nothing around it."""
    buffers: list[Tensor] = []
    empty = partial.empty

    def middle(*given: Any) -> Readout:
        plain = {name: value for name, value in vars(empty(*given)).items() if value is not None}
        inner: dict[str, Any] = {}
        for name, value in plain.items():
            fill = torch.nan if value.is_floating_point() else -7
            buffers.append(torch.full((len(value) + 4,), fill, dtype=value.dtype, device=value.device))
            inner[name] = buffers[-1][2:-2]
        return Readout(**inner)

    with patch.object(partial, "empty", middle):
        yield
    for buffer in buffers:
        edge, inner = torch.cat([buffer[:2], buffer[-2:]]), buffer[2:-2]
        if buffer.is_floating_point():
            assert edge.isnan().all() and not inner.isnan().any()
        else:
            assert (edge == -7).all() and (inner != -7).all()


def readout_against_float64(kernel: Any, device: str, dtype: torch.dtype, rows: int, vocab: int) -> None:
    """Every statistic, with rows in a wider buffer of NaN; temperature, mask token and a named token at once."""
    generator = seeded(vocab + rows)
    wide = torch.full((rows, vocab + 5), torch.nan).to(dtype)
    wide[:, :vocab] = (torch.randn(rows, vocab, generator=generator) * 5).to(dtype)
    logits = wide[:, :vocab]
    mask = vocab // 2 if vocab > 1 else None
    named = torch.randint(vocab, (rows,), generator=generator)
    for temperature, measured in ((0.0, False), (0.7, False), (1.3, True)):

        def seen(x: Tensor, scale: float) -> Tensor:
            x = x.clone()
            if mask is not None:
                x[:, mask] = -INF
            return x.float() / scale if scale else x

        now = seen(logits, temperature if measured else 0.0)
        keys = keys_of(rows)
        sampling = Sampling(mask, temperature, measured, keys.to(device) if temperature else None, named.to(device))
        with surrounded():
            found = kernel(wide.to(device)[:, :vocab], sampling)
        choice = seen(logits, temperature)
        token = (choice.float() + noise.token_noise(keys, vocab) if temperature else choice).argmax(-1)
        assert torch.equal(found.token.cpu(), token)
        compare(found, exact(now, token, named), size=float(now[now.isfinite()].abs().max()) + 1)


def like_the_sampler(kernel: Any, device: str, dtype: torch.dtype, temperature: float) -> None:
    """The tokens and statistics of `readout.read` with its guide and noise, for a batch of canvases."""
    from dllm_sampler.engine import readout

    canvas = toys.canvas(torch.ones(3, 7, dtype=torch.bool), seeds=torch.tensor([5, -9, 2**40]))
    canvas = replace(canvas, step=torch.tensor([0, 3, 11]))
    query = Query.masks(canvas)
    head_rows = HeadRows.every(query)
    logits = (torch.randn(3, 1, 7, toys.VOCAB, generator=seeded(3)) * 3).to(dtype)
    guides = (Temperature(temperature),) if temperature else ()
    needs = frozenset({"margin", "gap", "entropy", "logsumexp", "current"})
    spec = toys.denoiser().spec
    expected = readout.read(logits.flatten(0, 2).clone(), canvas, head_rows, readout.Rule(spec, guides, needs))
    keys = noise.key(canvas, query.positions, noise.TOKENS).flatten()
    asked = query.ids.flatten().to(device)
    sampling = Sampling(spec.mask_id, temperature, keys=keys.to(device), current=asked)
    found = kernel(logits.flatten(0, 2).to(device), sampling)
    found = readout.spread(found, head_rows)
    assert torch.equal(found.token.cpu(), expected.token)
    for name in (*needs, "confidence"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=1e-5, atol=1e-5)


def rows_that_are_not_finite(kernel: Any, device: str, vocab: int) -> None:
    """They are NaN, and their neighbours as if alone; a part of theirs may have no number at all."""
    logits = torch.randn(8, vocab, generator=seeded(1))
    logits[1] = -INF
    logits[2, 7] = torch.nan
    logits[4, 9] = INF
    logits[5] = torch.tensor([1e4, -1e4, *([-INF] * (vocab - 3)), 1e4])
    logits[6] = torch.nan
    logits[7, : vocab // 2] = torch.nan
    named, keys = torch.full((8,), 3), keys_of(8)
    for temperature in (0.0, 0.5):
        sampling = Sampling(temperature=temperature, keys=keys.to(device), current=named.to(device))
        found = kernel(logits.to(device), sampling)
        for name in STATISTICS:
            expected = [False, True, True, False, True, False, True, True]
            got = getattr(found, name).isnan().tolist()
            assert got == expected, name
        assert int(found.token[1]) == 0
        assert ((found.token >= 0) & (found.token < vocab)).all()
    assert float(found.confidence[5]) == 0.5  # of two
    assert float(found.current[5]) == -INF


def close_to_one(kernel: Any, device: str, exact_entropy: bool) -> None:
    """1e-9, 1e-12 and 1e-15 below one: float32 would call them all 1."""
    for gap in (20.0, 28.0, 34.0):
        logits = torch.tensor([[0.0, gap, -4.0]], device=device)
        found = kernel(logits)
        rest = math.exp(-gap) + math.exp(-gap - 4)
        below = 1 - float(found.confidence)
        assert below > 0 and abs(below - rest) < 2.3e-16 + 1e-6 * rest
        expected = math.log1p(rest) + (gap * math.exp(-gap) + (gap + 4) * math.exp(-gap - 4)) / (1 + rest)
        assert abs(float(found.entropy) - expected) < (1e-6 if exact_entropy else 5e-3) * expected


def head_against_float64(kernel: Any, device: str, dtype: torch.dtype, rows: int, vocab: int, width: int) -> None:
    """Rows of a wider buffer; the product rounded as a stored one, so that the statistics can be exact."""
    generator = seeded(rows)
    wide = torch.full((rows, width + 3), torch.nan).to(dtype)
    # Small whole numbers: their products and sums are exact in any order.
    wide[:, :width] = torch.randint(-3, 4, (rows, width), generator=generator).to(dtype)
    weight = (torch.randint(-4, 5, (vocab, width), generator=generator) / 8).to(dtype)
    hidden = wide[:, :width]
    named, keys, mask = torch.randint(vocab, (rows,), generator=generator), keys_of(rows, 1), vocab - 1
    now = (hidden.double() @ weight.double().T).to(dtype)
    now[:, mask] = -INF
    for temperature in (0.0, 0.8):
        with surrounded():
            sampling = Sampling(mask, temperature, keys=keys.to(device), current=named.to(device))
            found = kernel(wide.to(device)[:, :width], weight.to(device), sampling)
        choice = now.float() / temperature if temperature else now
        token = (choice.float() + noise.token_noise(keys, vocab) if temperature else choice).argmax(-1)
        assert torch.equal(found.token.cpu(), token)
        compare(found, exact(now, token, named), size=float(now[now.isfinite()].abs().max()) + 1)
