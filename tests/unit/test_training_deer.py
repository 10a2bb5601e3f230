"""The alignment of a drafter: both losses, a run that is cut and goes on, mistakes in one sentence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dllm_sampler import Sampler
from dllm_sampler.cli import main as sample
from dllm_sampler.generation.speculative import SpeculativeSampler
from dllm_sampler.training import cli, deer
from dllm_sampler.training.deer import refine_masks, stage_loss
from dllm_sampler.training.masked import Dice, Masks, Rows, collate, draw
from tests import tiny
from tests.sampling import sampled
from tests.unit.test_training_families import gradients, same, sees, trained

COUNTS = ["answers=8", "new_tokens=12", "draft_length=4", "per_device_train_batch_size=2", "use_cpu=true"]
COUNTS += ["distill_steps=2", "refine_steps=2", "warmup_steps=0", "learning_rate=1e-2", "separator='<unk>'"]


def words(output: Path, model: Path, *more: str) -> list[str]:
    given = [
        *COUNTS,
        f"model={model}",
        f"output_dir={output}",
        f"data={tiny.FACTS}",
        f"target={tiny.target_of(model)}",
        *more,
    ]
    return ["train=deer", *(f"train.{word}" for word in given)]


@pytest.mark.slow
def test_a_run_that_was_cut_ends_where_an_uninterrupted_one_does(
    llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, resume = ["distill_steps=8", "refine_steps=6", "save_steps=2"], "resume=true"
    assert cli.main(words(tmp_path / "whole", llada, *given)) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'whole' / 'drafter'}\n"
    for at, more in ((7, []), (3, [resume])):  # in stage I; then it goes on into stage II
        with monkeypatch.context() as patch:
            calls = list[int]()

            def loss(*given: Any, calls: list[int] = calls, at: int = at) -> Tensor:
                if calls.append(0) or len(calls) == at:
                    raise KeyboardInterrupt
                return stage_loss(*given)

            patch.setattr(deer, "stage_loss", loss)
            assert cli.main(words(tmp_path / "parts", llada, *given, *more)) == 130
    assert cli.main(words(tmp_path / "parts", llada, *given)) == 2
    assert cli.main(words(tmp_path / "parts", llada, *given, resume)) == 0
    for name in ("distilled", "drafter"):
        whole, parts = (load_file(tmp_path / run / name / "model.safetensors") for run in ("whole", "parts"))
        assert all(torch.equal(whole[key], parts[key]) for key in whole | parts)
    assert cli.main(words(tmp_path / "whole", llada, *given)) == 2
    assert "has a finished run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "more", "sentence"),
    [
        ("", ["target=null"], "train.target is missing"),
        ("", ["distill_steps=0"], "distill_steps=0 is invalid. Set a number greater than or equal to 1"),
        ("", ["least_t=0"], "least_t=0 is invalid. Set a number greater than 0"),
        ("", ["alpha=-1"], "alpha=-1 is invalid. Set a number greater than 0"),
        ("", ["separator=none"], "unknown train.separator 'none'"),
        ("", ["data.path=null"], "need mini's tokenizer"),
        (f'{{"prompt": "{"b" * 95}"}}', [], "data.jsonl line 3 has 95 tokens"),
    ],
)
def test_mistakes(
    line: str, more: list[str], sentence: str, llada: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is one sentence before the first step."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "c", "answer": "d"}\n{"prompt": "e", "answer": "f"}\n' + line + "\n")
    given = words(tmp_path / "run", llada, f"data={data}", *more)
    capsys.readouterr()
    assert cli.main(given) == 2
    error = capsys.readouterr().err.splitlines()
    assert sentence in error[-1] and sum("dllm-train" in line for line in error) == 1, error
    assert not (tmp_path / "run").exists()


def stage_one(rows: Rows, dice: Dice, least: float) -> Masks:
    return draw(rows, None, dice, complementary=False, inverse=True, floor=least)[0]


def test_stage_two_masks_the_last_tokens_and_weighs_the_first_of_them_most() -> None:
    rows, seen = collate([([1], [2] * 3), ([1] * 2, [2] * 4)], 0), set()
    for seed in range(40):
        masks = refine_masks(rows, Dice([seed, -1 - seed]), 3, 2.0)
        for row, last, answer in zip(range(2), (4, 6), (3, 4), strict=True):
            count = int(masks.hidden[row].sum())
            assert masks.hidden[row].tolist() == [last - count <= place < last for place in range(6)]
            weights = masks.weight[row, last - count : last] * answer * 2
            assert weights.tolist() == pytest.approx([2.0**power for power in reversed(range(count))])
            seen.add(count)
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("name", sampled([name for name in tiny.EVERY if name != "nemotron-labs-diffusion"]))
def test_the_loss_of_every_family(name: str, tmp_path: Path) -> None:
    """Loss and gradients of both stages, against each row by itself."""
    it = trained(name, tmp_path / name)
    spec = it.denoiser.spec
    assert spec.mask_id is not None
    rows = collate([([7, 9, 30], [41, 5, 5, 6, 12, 3, 8, 2, 9, 50]), ([3] * 6, [11, 13, 50])], spec.eos_id)
    learned = replace(rows, length=rows.length - 1)
    for corrupt in (partial(stage_one, least=0.05), partial(refine_masks, longest=5, alpha=1.5)):
        masks = corrupt(learned, Dice([2, 3]))
        loss = stage_loss(it.network, rows, masks, spec)
        found, expected = gradients(it, loss), torch.zeros((), dtype=torch.float64)
        for row in range(2):
            end = int(rows.length[row])
            ids = rows.ids[row, :end].masked_fill(masks.hidden[row, :end], spec.mask_id)
            logits = it.network(ids[None], keys=sees(it, end))[0].log_softmax(-1)
            logits = logits.roll(1, 0) if spec.shift else logits
            for at in masks.hidden[row].nonzero()[:, 0].tolist():
                expected = expected - masks.weight[row, at] * logits[at, rows.ids[row, at]]
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
        same(found, gradients(it, expected))


@pytest.mark.parametrize("name", sampled(["sdar", "dream", "llada"], lambda name: [name == "sdar"]))
def test_what_is_learnt_is_what_is_drafted(name: str, tmp_path: Path) -> None:
    """The logits of a draft of several blocks are those whose loss stage II takes, for a text behind the prompt."""
    it = trained(name, tmp_path / name)
    spec, new = it.denoiser.spec, 7
    drafter = Sampler(it.denoiser, temperature=1.0)
    target = LlamaForCausalLM(LlamaConfig(vocab_size=spec.vocab_size, eos_token_id=1, **tiny.TARGET))
    speculative = SpeculativeSampler(drafter, target, draft_length=new - 1, separator=50)
    run, _ = speculative._begin([[7, 9, 30, 4, 4]], new, 0, ())
    logits = speculative._draft(run.text, [new - 1], run).logits
    assert logits is not None
    rows = collate([([7, 9, 30, 4, 4], [*range(10, 9 + new), 50])], spec.eos_id)
    masked = replace(rows, length=rows.length - 1).answer
    weights = [(torch.arange(12) == at)[None].double() / (new - 1) for at in range(5, 11)]
    each = torch.stack([stage_loss(it.network, rows, Masks(masked, weight), spec) for weight in weights])
    log = logits[0].log_softmax(-1)
    expected = torch.stack([-log[at, 10 + at] for at in range(new - 1)]) / (new - 1)
    assert spec.mask_id is not None
    # The sampler never writes a mask, which the loss takes for a word like any other.
    plain = it.network(rows.ids.masked_fill(masked, spec.mask_id), keys=sees(it, 12))[0]
    plain = (plain.roll(1, 0) if spec.shift else plain)[5:11].softmax(-1)[:, spec.mask_id]
    torch.testing.assert_close(each.detach(), expected - (1 - plain).log() / (new - 1), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", sampled(tiny.EVERY, lambda name: [name == "nemotron-labs-diffusion"]))
def test_every_family_on_a_users_data(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drafter is saved in its family's format, and drafts."""
    model, output = tiny.write(name, tmp_path / "m"), tmp_path / "run"
    status = cli.main(words(output, model, "data.chat=true"))
    said = " ".join(capsys.readouterr().err.split())
    if name == "nemotron-labs-diffusion":
        assert status == 2 and "has a causal context" in said
        return
    assert status == 0, said
    before, after = (load_file(folder / "model.safetensors") for folder in (model, output / "drafter"))
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[key], after[key]) for key in before) > len(before) / 2
    given = [f"model={output / 'drafter'}", f"target={model.with_name('target')}", "separator=<unk>"]
    assert sample.main([*given, "max_new_tokens=8", "device=cpu", "Is it?"]) == 0


@pytest.mark.slow
def test_adapters_of_a_drafter(llada: Path, tmp_path: Path) -> None:
    """They alone learn, in both stages."""
    pytest.importorskip("peft")
    more = ["lora={r: 2, lora_alpha: 4, lora_dropout: 0.1}", "bf16=true", "gradient_checkpointing=true"]
    assert cli.main(words(tmp_path / "run", llada, *more)) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (llada, tmp_path / "run" / "drafter"))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and not any("wte" in key or "norm" in key for key in changed)
