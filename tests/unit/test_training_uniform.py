"""Fine-tuning a model without a mask token (DiffusionGemma)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from dllm_sampler.training import cli
from dllm_sampler.training.masked import Dice, Rows, collate
from dllm_sampler.training.model import Trainable
from dllm_sampler.training.uniform import UniformLoss
from tests import tiny
from tests.sampling import crossed
from tests.unit.test_training_families import gradients

peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"), reason="this transformers has no DiffusionGemma"
)
END = 285
LORA: dict[str, float] = {"r": 2, "lora_alpha": 4}
# More than the 16 tokens of a sliding window before a canvas of 16, answers of several canvases, and one of one token.
ROWS: Rows = collate([([5, 6, 7] * 7, [8, 9] * 19 + [END]), ([9] * 3, [3, 4, END]), ([1], [END])], END)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("diffusion-gemma", tmp_path_factory.mktemp("gemma") / "m")


def trained(folder: Path, lora: dict[str, float] | None = None) -> Trainable:
    adapters = None if lora is None else peft.LoraConfig(**lora)
    return Trainable.load(folder, "float64", adapters, uniform=True).eval()


def by_hand(model: Any, rows: Rows, noise: tuple[Tensor, Tensor], encoder: float) -> Tensor:
    """Transformers' own forward, one for each canvas of each row."""
    noisy, again = noise
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(rows.ids)):
        prompt, end = int(rows.prompt[row]), int(rows.length[row])
        clean = rows.ids[row, :end][None]
        tokens = torch.zeros((), dtype=torch.float64)
        for first in range(prompt, end, model.config.canvas_length):
            last = min(first + model.config.canvas_length, end)
            given = {"input_ids": clean[:, :first], "decoder_input_ids": noisy[row, first:last][None]}
            if again[row]:
                with torch.no_grad():
                    given["self_conditioning_logits"] = model(**given).logits
            found = model(**given).logits[0]
            tokens = tokens + F.cross_entropy(found.double(), clean[0, first:last], reduction="sum")
        states = model.model.encoder.language_model(input_ids=clean).last_hidden_state[0]
        cap = model.config.text_config.final_logit_softcapping
        logits = cap * torch.tanh(model.lm_head(states) / cap)
        tokens = tokens + encoder * F.cross_entropy(logits[prompt - 1 : -1], clean[0, prompt:], reduction="sum")
        total = total + tokens / ((end - prompt) * len(rows.ids))
    return total


@pytest.mark.parametrize(("lora", "encoder"), crossed([None, LORA], [0.0, 0.7], together=0))
def test_the_loss_and_its_gradient(lora: dict[str, float] | None, encoder: float, folder: Path) -> None:
    """Of ragged rows and all of their canvases in one forward, against transformers' forward of each canvas."""
    it = trained(folder, lora)
    for name, weight in it.network.named_parameters():
        if "lora_B" in name:  # it begins with zeros
            torch.nn.init.normal_(weight, std=0.1)
    loss = UniformLoss(it.denoiser.spec, 0.5, encoder)
    noisy, again = loss.draw(ROWS, Dice([7, 8, 9]))
    hidden = noisy != ROWS.ids
    assert hidden.any(1)[:2].all() and again.any() and not again.all() and not (hidden & ~ROWS.answer).any()
    found, right = loss(it.network, ROWS, Dice([7, 8, 9])), by_hand(it.inner, ROWS, (noisy, again), encoder)
    # The model's logits are float32, whatever its weights.
    assert float(found.detach()) == pytest.approx(float(right.detach()), rel=1e-6)
    mine, theirs = gradients(it, found), gradients(it, right)
    assert mine.keys() == theirs.keys() and len(mine) > 10
    for key, gradient in mine.items():
        assert float((gradient - theirs[key]).norm()) < 2e-5 * (float(theirs[key].norm()) + 1e-2), key


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA])
def test_layers_that_run_twice_change_nothing(lora: dict[str, float] | None, folder: Path) -> None:
    """`train.gradient_checkpointing`: the same bits, and less is kept for the backward pass."""
    found, kept = [], []
    for recompute in (False, True):
        it, bytes_kept = trained(folder, lora), 0
        for name, weight in it.network.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        if recompute:
            it.gradient_checkpointing_enable()
        loss = UniformLoss(it.denoiser.spec, 0.5, 0.7)
        weights = {weight.untyped_storage().data_ptr() for weight in it.network.parameters()}

        def keep(tensor: Tensor, weights: set[int] = weights) -> Tensor:
            nonlocal bytes_kept
            bytes_kept += 0 if tensor.untyped_storage().data_ptr() in weights else tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            total = loss(it.network, ROWS, Dice([7, 8, 9]))
        found.append({"loss": total.detach(), **gradients(it, total)})
        kept.append(bytes_kept)
    once, twice = found
    assert once.keys() == twice.keys() and all(torch.equal(twice[name], value) for name, value in once.items())
    assert kept[1] < kept[0] / 2


def test_noise(folder: Path) -> None:
    """Any token in place of a share of each canvas; the same however rows are put together."""
    loss = UniformLoss(trained(folder).denoiser.spec, 0.5, 1.0)
    rows: Rows = collate([([5], [8] * 32)] * 2000, END)
    noisy, again = loss.draw(rows, Dice(range(2000)))
    hidden = noisy != rows.ids  # all but one in 288 of the replaced tokens
    share = hidden[:, 1:].view(2000, 2, 16).double().mean(2)  # t of each canvas, uniform
    assert float(share.mean()) == pytest.approx(0.5, abs=0.02) and float(share.std()) == pytest.approx(0.31, abs=0.02)
    assert abs(float(torch.corrcoef(share.T)[0, 1])) < 0.1, "canvases have levels of their own"
    assert len(noisy[hidden].unique()) == 287 and float(again.double().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
def test_adapters_are_merged_and_saved(folder: Path, tmp_path: Path) -> None:
    """Encoder and decoder share them: merging adds them once, and peft reads them around transformers' model."""
    it = trained(folder, LORA)
    for name, weight in it.network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    assert len(it.learned()) == 2 * 3 * 7 - 2, "one pair for each projection of a layer; the last has no values"
    given = {"input_ids": ROWS.ids[:1, :21], "decoder_input_ids": ROWS.ids[:1, 21:37]}
    with torch.no_grad():
        learnt = it.inner(**given).logits
        it.save(tmp_path / "out")
        merged = trained(tmp_path / "out").inner(**given).logits
        around = peft.PeftModel.from_pretrained(trained(folder).inner, tmp_path / "out" / "adapter")(**given).logits
        before = trained(folder).inner(**given).logits
    torch.testing.assert_close(merged, learnt, atol=1e-4, rtol=1e-4)  # stored in float32
    torch.testing.assert_close(around, learnt, atol=1e-4, rtol=1e-4)
    assert float((before - learnt).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train=cjgrpo"], "has no mask token. Use train=sft."),
        (["train=grpo"], "has no mask token. Use train=sft."),
        (["train=distill"], "has no mask token. Use train=sft."),
        (["train=deer", "train.target=gone"], "has no mask token. Use train=sft."),
        (["train=filter"], "has no mask token. Use train=sft."),
        (["train=sft", "train.complementary=true"], "train.complementary=true needs a mask token"),
        (["train=sft", "train.self_conditioning=1.5"], "self_conditioning"),
        (["train=sft", "train.encoder=-1"], "encoder"),
    ],
)
def test_what_is_refused(
    words: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [
        f"train.model={folder}",
        f"train.data={tiny.FACTS}",
        f"train.output_dir={tmp_path}/run",
        "train.use_cpu=true",
    ]
    more += ["train.held_out=2"] if words[0] in ("train=sft", "train=distill") else []
    assert cli.main([*words, *more]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
