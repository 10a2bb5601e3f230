"""Fine-tuning a model without a mask token (DiffusionGemma)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from dllm_sampler import Sampler
from dllm_sampler.cli import main as sample
from dllm_sampler.training import cli, sharding
from dllm_sampler.training.masking import Rows, collate
from dllm_sampler.training.trained import Trained
from dllm_sampler.training.uniform import Noise, UniformLoss
from tests import tiny
from tests.sampling import crossed

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"), reason="this transformers has no DiffusionGemma"
)
FACTS = Path(__file__).parents[2] / "examples" / "facts.jsonl"
END = 285
LORA: dict[str, float] = {"r": 2, "alpha": 4, "dropout": 0}
# More than the 16 tokens of a sliding window before a canvas of 16, answers of several canvases, and one of one token.
ROWS: Rows = collate([([5, 6, 7] * 7, [8, 9] * 19 + [END]), ([9] * 3, [3, 4, END]), ([1], [END])], END)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("diffusion-gemma", tmp_path_factory.mktemp("gemma") / "m")


def trained(folder: Path, lora: dict[str, float] | None = None) -> Trained:
    return Trained.load(str(folder), torch.device("cpu"), "float64", lora, 0, uniform=True)


def by_hand(model: Any, rows: Rows, noise: Noise, encoder: float) -> Tensor:
    """Transformers' own forward, one for each canvas of each row."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(rows.ids)):
        prompt, end = int(rows.prompt[row]), int(rows.length[row])
        clean = rows.ids[row, :end][None]
        tokens = torch.zeros((), dtype=torch.float64)
        for first in range(prompt, end, model.config.canvas_length):
            last = min(first + model.config.canvas_length, end)
            given = {"input_ids": clean[:, :first], "decoder_input_ids": noise.ids[row, first:last][None]}
            if noise.again[row]:
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


def gradients(it: Trained, loss: Tensor) -> dict[str, Tensor]:
    it.network.zero_grad()
    loss.backward()
    return {key: weight.grad.clone() for key, weight in it.network.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(("lora", "encoder"), crossed([None, LORA], [0.0, 0.7], together=0))
def test_the_loss_and_its_gradient(lora: dict[str, float] | None, encoder: float, folder: Path) -> None:
    """Of ragged rows and all of their canvases in one forward, against transformers' forward of each canvas."""
    it = trained(folder, lora)
    for name, weight in it.network.named_parameters():
        if "lora_B" in name:  # it begins with zeros
            torch.nn.init.normal_(weight, std=0.1)
    loss = UniformLoss(it.denoiser.spec, 0.5, encoder)
    (noise,) = loss.draw(ROWS, torch.Generator().manual_seed(7))
    assert noise.hidden.any(1)[:2].all() and noise.again.any() and not noise.again.all()
    assert not (noise.hidden & ~ROWS.answer).any() and torch.equal(
        noise.ids == ROWS.ids, ~noise.hidden | (noise.ids == ROWS.ids)
    )
    found, right = loss.of(it.network, ROWS, noise), by_hand(it.inner, ROWS, noise, encoder)
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
            it.recompute()
        loss = UniformLoss(it.denoiser.spec, 0.5, 0.7)
        (noise,) = loss.draw(ROWS, torch.Generator().manual_seed(7))
        weights = {weight.untyped_storage().data_ptr() for weight in it.network.parameters()}

        def keep(tensor: Tensor, weights: set[int] = weights) -> Tensor:
            nonlocal bytes_kept
            bytes_kept += 0 if tensor.untyped_storage().data_ptr() in weights else tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            total = loss.of(it.network, ROWS, noise)
        found.append({"loss": total.detach(), **gradients(it, total)})
        kept.append(bytes_kept)
    once, twice = found
    assert once.keys() == twice.keys() and all(torch.equal(twice[name], value) for name, value in once.items())
    assert kept[1] < kept[0] / 2


def test_noise(folder: Path) -> None:
    """Any token in place of a share of each canvas; the same however rows are put together."""
    loss = UniformLoss(trained(folder).denoiser.spec, 0.5, 1.0)
    rows: Rows = collate([([5], [8] * 32)] * 2000, END)
    (noise,) = loss.draw(rows, torch.Generator().manual_seed(0))
    share = noise.hidden[:, 1:].view(2000, 2, 16).double().mean(2)  # t of each canvas, uniform
    assert float(share.mean()) == pytest.approx(0.5, abs=0.02) and float(share.std()) == pytest.approx(0.31, abs=0.02)
    assert abs(float(torch.corrcoef(share.T)[0, 1])) < 0.1, "canvases have levels of their own"
    drawn = noise.ids[noise.hidden]
    assert len(drawn.unique()) == 288 and float(noise.again.double().mean()) == pytest.approx(0.5, abs=0.05)
    assert noise.weight.sum().item() == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_run(lora: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command: it learns, is cut off and goes on to the same weights, and what it saves answers."""
    words = [f"model={folder}", f"data={FACTS}", "batch=4", "held_out=2", "new_tokens=16", "warmup=0", "device=cpu"]
    words += ["learning_rate=1e-2", "steps=4", "checkpoint_every=1", "evaluate_every=4", "data.metric=contains"]
    words += ["lora={r: 2, alpha: 4, dropout: 0}"] if lora else []
    words = ["train=sft", *(f"train.{word}" for word in words)]
    assert cli.main([*words, f"train.output={tmp_path / 'whole'}"]) == 0, capsys.readouterr().err
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["held_out_loss"] < log[0]["held_out_loss"] and all(line["gradient"] > 0 for line in log[1:])
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "whole"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed and not any("router" in key or "vision" in key for key in changed)
    if lora:
        assert all(".self_attn." in key or ".mlp." in key for key in changed)

    saved, real = [0], Trained.together

    def cut(self: Trained, items: Any) -> Any:
        saved[0] += 1
        if saved[0] == 4:  # a measurement, and two steps
            raise RuntimeError("power cut")
        return real(self, items)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trained, "together", cut)
        with pytest.raises(RuntimeError, match="power cut"):
            cli.main([*words, f"train.output={tmp_path / 'parts'}"])
    assert (tmp_path / "parts" / "checkpoint.safetensors").exists()
    assert cli.main([*words, f"train.output={tmp_path / 'parts'}"]) == 0
    again = load_file(tmp_path / "parts" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in after.items())
    capsys.readouterr()
    rule = ["scheduler=entropy_renoise", "max_new_tokens=8", "device=cpu"]
    assert sample.main([f"model={tmp_path / 'whole'}", "What is the capital of France?", *rule]) == 0
    assert re.search(r" tokens? in ", capsys.readouterr().err)


@pytest.mark.slow
def test_adapters_are_merged_and_saved(folder: Path, tmp_path: Path) -> None:
    """Encoder and decoder share them: merging adds them once, and peft reads them around transformers' model."""
    peft = pytest.importorskip("peft")
    it = trained(folder, LORA)
    for name, weight in it.network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    assert len(it.learning()) == 2 * 3 * 7 - 2, "one pair for each projection of a layer; the last has no values"
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
        (["train=deer"], "has no mask token. Use train=sft."),
        (["train=filter"], "has no mask token. Use train=sft."),
        (["train=sft", "train.complementary=true"], "train.complementary needs a mask token"),
        (["train=sft", "train.self_conditioning=1.5"], "train.self_conditioning"),
        (["train=sft", "train.encoder=-1"], "train.encoder"),
    ],
)
def test_what_is_refused(
    words: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"train.model={folder}", f"train.data={FACTS}", f"train.output={tmp_path / 'run'}", "train.device=cpu"]
    more += ["train.held_out=2"] if words != ["train=filter"] else []
    assert cli.main([*words, *more]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_spread_weights_are_the_same_weights(folder: Path, tmp_path: Path) -> None:
    """FSDP2 among one process: loss, gradients and answers. Two processes: `test_training_processes.py`."""
    it: Any = trained(folder)
    loss, question = UniformLoss(it.denoiser.spec, 0.5, 0.7), [[5, 6, 7]]
    (noise,) = loss.draw(ROWS, torch.Generator().manual_seed(7))
    answer = Sampler(it.denoiser, scheduler="entropy_renoise").generate(question, max_new_tokens=20)
    total = loss.of(it.network, ROWS, noise)
    whole, names = gradients(it, total), it.network.state_dict().keys()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        sharding.shard(it.network, torch.device("cpu"), 1, it.network.units())
        found = loss.of(it.network, ROWS, noise)
        assert torch.equal(found, total) and it.network.state_dict().keys() == names
        for name, gradient in gradients(it, found).items():
            torch.testing.assert_close(sharding.whole(gradient), whole[name], msg=name)
        it.sharded = True
        with it.sampling():
            again = Sampler(it.denoiser, scheduler="entropy_renoise").generate(question, max_new_tokens=20)
        assert torch.equal(again.tokens, answer.tokens)
        assert all(isinstance(weight, DTensor) for weight in it.network.parameters())
    finally:
        torch.distributed.destroy_process_group()
