"""Every implementation of who sees whom in torch against the brute force of `tests.visibility`."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from dllm_sampler.core.visibility import block_causal, clean_and_noisy
from dllm_sampler.models.diffusion_gemma import DiffusionGemmaDenoiser
from dllm_sampler.models.packed import PackedAttention
from tests.sampling import each, few
from tests.visibility import KINDS, LENGTH, situation

SEEDS = range(40)


@few("kind", KINDS)
def test_attention_of_a_pack(kind: str) -> None:
    forms = set[bool]()
    for seed in SEEDS:
        case = situation(seed, kind)
        if case.canvas.done.all():
            continue
        q, k, v, slots = case.inputs()
        heads = [one.transpose(0, 1)[None] for one in (q, k, v)]
        attention, wanted = PackedAttention(case.pack), case.wanted()
        for run in (attention, attention._padded):  # pyright: ignore[reportPrivateUsage]
            assert case.read(run(heads[0], heads[1], heads[2], slots)[0].transpose(0, 1)) == wanted, seed
        forms.add(case.pack.until is None)
    assert (False in forms) or kind == "bidirectional"


@few("kind", KINDS)
def test_the_padded_form(kind: str) -> None:
    for seed in SEEDS:
        case = situation(seed, kind)
        rows, columns = range(len(case.canvas.ids)), range(LENGTH)
        positions = torch.arange(LENGTH).expand(len(rows), -1)
        keys = case.visible.keys(case.canvas, case.query, positions)
        keys = torch.ones(len(rows), LENGTH, dtype=torch.bool) if keys is None else keys
        keys = keys if keys.dim() == 3 else keys[:, None].expand(-1, LENGTH, -1)
        for row, column, key in product(rows, columns, columns):
            if column < case.canvas.end[row]:
                assert keys[row, column, key] == case.sees(row, column, key), (seed, row, column, key)


def test_whole_rows_on_the_grid() -> None:
    for seed in SEEDS:
        case, at = situation(seed, "block_causal"), torch.arange(LENGTH)[None]
        seen = block_causal(at, at, case.block)[0]
        for column, key in product(range(LENGTH), repeat=2):
            assert seen[column, key] == (key // case.block <= column // case.block)


@each("causal", [False, True])
def test_a_clean_and_a_noisy_copy(causal: bool) -> None:
    block = torch.tensor([[0, 0, 0, 1, 1, 2]])
    clean, noisy = torch.tensor([[True] * 6]), torch.tensor([[True, True, True, False, True, True]])
    seen, size = clean_and_noisy(block, clean, noisy, causal=causal)[0], block.shape[1]
    for (its, column), (other, key) in product(product(range(2), range(size)), repeat=2):
        own, theirs = block[0, column], block[0, key]
        if its == other == 0:
            wanted = key <= column if causal else theirs <= own
        elif its == 1 and other == 0:
            wanted = theirs < own
        else:
            wanted = its == other and theirs == own and noisy[0, key]
        assert seen[its * size + column, other * size + key] == wanted


def test_diffusion_gemma() -> None:
    window = 3
    model: Any = SimpleNamespace(
        text=SimpleNamespace(sliding_window=window), model=SimpleNamespace(dtype=torch.float32)
    )
    for seed in SEEDS:
        case = situation(seed, "bidirectional")
        case = replace(case, query=replace(case.query, causal=None))
        canvas, query = case.canvas, case.query
        columns = canvas.window(LENGTH)
        masks = DiffusionGemmaDenoiser._reads(model, canvas, query, columns)  # pyright: ignore[reportPrivateUsage]
        for (_, mask), near in zip(masks, (LENGTH, window), strict=True):
            for row, start in enumerate(canvas.start.tolist()):
                seen = (mask[row, 0, 0] == 0).tolist()
                text = [case.sees(row, start, key) and start - near < key < start for key in range(LENGTH)]
                block = [at < LENGTH and case.sees(row, start, at) for at in columns[row].tolist()]
                assert seen == [*text, False, *block]
