"""Our transformer against logits of the published implementations (`forward.safetensors` of each checkpoint)."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Cache
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.engine import layout
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.huggingface import MaskedLMDenoiser
from dllm_sampler.models.loading import load
from dllm_sampler.published import PublishedDualCache, PublishedPrefixCache
from tests import toys

DATA = Path(__file__).parent / "data"
close = partial(torch.testing.assert_close, atol=1e-4, rtol=0.0)
LLADA = ("tiny-llada", "tiny-llada-gqa")
MASKS = {"tiny-illada": 5, "tiny-a2d-qwen3": 197}  # where the config does not say it
CASES = ("a", "b", "c", "d", "e", "f")  # batches of 1 to 3, 7 to 300 tokens, none to all of them masks


@cache
def denoiser(name: str) -> TransformerDenoiser:
    loaded = load(DATA / name, device="cpu", mask_id=MASKS.get(name)).denoiser
    assert isinstance(loaded, TransformerDenoiser)
    return loaded


@cache
def reference(name: str) -> dict[str, Tensor]:
    return load_file(DATA / name / "forward.safetensors")


def laid_out(model: TransformerDenoiser, ids: Tensor, real: Tensor) -> Canvas:
    """Padded rows `[B, L]` as a canvas; the last token of each counts as the generated one."""
    rows = [row[there] for row, there in zip(ids, real, strict=True)]
    prompts = [row[:-1].tolist() for row in rows]
    canvas = layout.canvas(prompts, 1, [0] * len(rows), model.spec, FixedBlocks(1), CounterNoise(), False)
    last = torch.stack([row[-1:] for row in rows])
    return replace(canvas, ids=canvas.ids.scatter(1, canvas.layout.first[:, None], last))


def ask(model: TransformerDenoiser, live: Cache, canvas: Canvas, first: int, last: int) -> Tensor:
    """Logits that predict the columns `first` to `last`, exclusive."""
    query = Query.at(canvas, torch.arange(first, last).expand(canvas.ids.shape[0], -1))
    plan = toys.planned(canvas, query, model.spec, live)
    hidden, _ = model(canvas, query, plan)
    return plan.head_rows.spread(model.head(hidden))[:, 0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LLADA)
def test_plain_forward(name: str, case: str):
    model, data = denoiser(name).transformer, reference(name)
    with torch.no_grad():
        logits = model(data[f"{case}.input_ids"])
    close(logits, data[f"{case}.logits"])


@pytest.mark.parametrize("name", LLADA)
def test_hidden_states_after_each_layer(name: str):
    model, data = denoiser(name).transformer, reference(name)
    seen = [data["b.hidden.0"]]

    def drive(index, layer, hidden, rope, rows):
        close(hidden, data[f"b.hidden.{index}"])
        seen.append(layer(hidden, rope))
        return seen[-1]

    with torch.no_grad():
        final = model(data["b.input_ids"], drive=drive)
    close(final, data[f"b.hidden.{len(seen) - 1}"])
    assert len(seen) == model.config.num_layers + 1


@pytest.mark.parametrize("name", LLADA)
def test_left_padding(name: str):
    model, data = denoiser(name), reference(name)
    real = data["p.attention_mask"].bool()
    with torch.no_grad():
        logits = model.transformer(data["p.input_ids"], keys=real)
    close(logits[real], data["p.logits"][real])
    # The loop counts positions from each row's first token; rotary positions are relative, so nothing changes.
    canvas = laid_out(model, data["p.input_ids"], real)
    logits = ask(model, NoCache().init(canvas, model.spec), canvas, 0, canvas.length)
    close(logits[canvas.seen()[:, :-1]], data["p.logits"][real])


@pytest.mark.parametrize("name", ["tiny-illada", "tiny-a2d-qwen3"])
def test_a_row_and_a_padded_batch(name: str):
    model, data = denoiser(name), reference(name)
    real = data["batch.attention_mask"].bool()
    with torch.no_grad():
        close(model.transformer(data["input_ids"]), data["logits"])
        close(model.transformer(data["batch.input_ids"], keys=real)[real], data["batch.logits"][real])
    canvas = laid_out(model, data["batch.input_ids"], real)
    logits = ask(model, NoCache().init(canvas, model.spec), canvas, 0, canvas.length)
    close(logits[canvas.seen()[:, :-1]], data["batch.logits"][real])


@pytest.mark.parametrize(("name", "case"), [("tiny-dream", "full."), ("tiny-rnd1", "")])
def test_a_shifted_forward(name: str, case: str):
    model, data = denoiser(name), reference(name)
    with torch.no_grad():
        logits = model.transformer(data[f"{case}input_ids"])
    close(logits, data[f"{case}logits"])
    assert model.spec.shift and model.spec.attention == "bidirectional"


def test_modernbert_forward():
    loaded, data = load(DATA / "tiny-modernbert-chat", device="cpu").denoiser, reference("tiny-modernbert-chat")
    assert isinstance(loaded, MaskedLMDenoiser)
    with torch.no_grad():
        close(loaded.logits(data["input_ids"], torch.ones_like(data["input_ids"], dtype=torch.bool)), data["logits"])
        real = data["batch.attention_mask"].bool()
        close(loaded.logits(data["batch.input_ids"], real)[real], data["batch.logits"][real])


def test_dream_left_padding():
    model, data = denoiser("tiny-dream"), reference("tiny-dream")
    keys, valid = data["pad.attention_mask"].bool(), data["pad.valid_rows"].bool()
    with torch.no_grad():
        logits = model.transformer(data["pad.input_ids"], positions=data["pad.position_ids"], keys=keys)
    close(logits[valid], data["pad.logits"][valid])
    # Through the denoiser each answer is the raw row before it, and the row's first token answers for itself.
    canvas = laid_out(model, data["pad.input_ids"], keys)
    logits = ask(model, NoCache().init(canvas, model.spec), canvas, 0, canvas.length)
    for row, first in enumerate((~keys).sum(1).tolist()):
        raw = data["pad.logits"][row, first:]
        close(logits[row, : len(raw)], torch.cat((raw[:1], raw[:-1])))


@pytest.mark.parametrize(
    ("cached", "case", "last"), [(PublishedPrefixCache(), "prefix", 48), (PublishedDualCache(), "dual", 32)]
)
def test_dream_cached_forward(cached: Cache, case: str, last: int):
    model, data = denoiser("tiny-dream"), reference("tiny-dream")
    canvas = laid_out(model, data["full.input_ids"], torch.ones_like(data["full.input_ids"], dtype=torch.bool))
    start, stop = torch.tensor([20]), torch.tensor([32])
    live = cached.init(canvas, model.spec)
    canvas = replace(canvas, start=start, stop=stop)
    ask(model, live, canvas, 20, 32)  # the forward that opens the block fills the slots

    inner = torch.cat((data["prefix.new_ids"], canvas.ids[:, -1:]), 1)
    canvas = replace(canvas, ids=inner, age=torch.ones_like(start))
    # In the published window nothing answers for position 20.
    logits = ask(model, live, canvas, 20, last)
    close(logits[:, 1:], data[f"{case}.logits"][:, :-1])
