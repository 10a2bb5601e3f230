"""What a pipeline of diffusers may rely on with every discrete scheduler: the contract of its PR #14741, restated."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers import scheduling_utils
from diffusers.schedulers.scheduling_block_refinement import BlockRefinementScheduler
from diffusers.utils.outputs import BaseOutput
from torch import Tensor

from dllm_sampler import config
from dllm_sampler.core import naming
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.guides import Temperature, TopK, TopP
from dllm_sampler.integrations.diffusers import DllmScheduler, DllmSchedulerOutput
from dllm_sampler.schedulers.eoser import Eoser
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.localleap import LocalLeap
from tests import toys
from tests.integrations.pipelines import quiet
from tests.refusals import refused

ROWS, LENGTH, VOCAB, STEPS = 2, 8, 16, 4
MASK = VOCAB - 1
UNIFORM = ("block_refine", "discrete_ddim", "entropy_renoise")


def names() -> list[str]:
    """Those that are not refused."""
    refused = ("learn2pd",)  # without a file it cannot be made
    found = [name for name in config.names("scheduler") if name not in refused]
    return [name for name in found if name not in ("apd", "svdd", "discrete_ddim") and scope(name) != "model"]


def scope(name: str) -> str:
    return config.build("scheduler", name).traits.scope


FORM = {"tokenizer": toys.tokenizer(), "max_new_tokens": 12}
CASES = [*((name, MASK) for name in names()), *((name, None) for name in UNIFORM)]


def opened(name: Any, mask_id: int | None = MASK, steps: int = STEPS) -> DllmScheduler:
    made = quiet(name, mask_token_id=mask_id, eos_token_id=3)
    made.set_timesteps(steps)
    return made


def block(mask_id: int | None = MASK) -> Tensor:
    return torch.full((ROWS, LENGTH), MASK) if mask_id is not None else torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)


def logits(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, LENGTH, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_times_fall_from_one_to_a_step_above_zero() -> None:
    times = opened("threshold").timesteps
    assert times.dtype == torch.float32 and times.tolist() == [1.0, 0.75, 0.5, 0.25]


def test_both_methods_have_the_names_that_all_have() -> None:
    def kinds(method: Any) -> dict[Any, list[str]]:
        found = list(inspect.signature(method).parameters.values())[1:]
        return {kind: [one.name for one in found if one.kind is kind] for kind in {one.kind for one in found}}

    step, clock = kinds(DllmScheduler.step), kinds(DllmScheduler.set_timesteps)
    assert step[inspect.Parameter.POSITIONAL_OR_KEYWORD] == ["model_output", "timestep", "sample"]
    assert step[inspect.Parameter.KEYWORD_ONLY] == ["generator", "return_dict"]
    assert clock[inspect.Parameter.POSITIONAL_OR_KEYWORD] == ["num_inference_steps", "device"]


@pytest.mark.parametrize(("name", "mask_id"), CASES)
@pytest.mark.filterwarnings("ignore:scheduler=.* was not through")
def test_one_loop_serves_every_scheduler(name: str, mask_id: int | None) -> None:
    made, sample, draws = opened(name, mask_id), block(mask_id), torch.Generator().manual_seed(0)
    assert made.step_index is None and made.begin_index is None
    for index, time in enumerate(made.timesteps):
        assert made.index_for_timestep(time) == index
        given = logits(index)
        output = made.step(given, time, sample, generator=draws)
        assert isinstance(output, DllmSchedulerOutput)
        assert made.step_index == index + 1
        for tokens in (output.prev_sample, output.pred_original_sample):
            assert tokens.shape == sample.shape and tokens.dtype == torch.long
        for one in (output.committed_mask, output.edited_mask):
            assert one.shape == sample.shape and one.dtype == torch.bool
        assert output.pred_logits.shape == given.shape
        assert torch.equal(given, logits(index)), "the caller's logits have been written to"
        assert not (output.pred_original_sample == MASK).any() or mask_id is None
        raw = given.softmax(-1).gather(-1, output.pred_original_sample[..., None])[..., 0]
        torch.testing.assert_close(output.sampled_probs, raw)
        touched = output.committed_mask | output.edited_mask
        if mask_id is not None:
            assert torch.equal(touched, output.prev_sample != sample)
            assert not (output.committed_mask & (sample != MASK)).any()
            assert not (output.edited_mask & (sample == MASK)).any()
        sample = output.prev_sample
    assert ((sample >= 0) & (sample < VOCAB)).all()
    assert mask_id is None or not (sample == MASK).any()


@pytest.mark.parametrize(("name", "mask_id"), [("threshold", MASK), ("remdm", MASK), ("block_refine", None)])
def test_a_tuple_has_the_same_six(name: str, mask_id: int | None) -> None:
    given: dict[str, Any] = {"sample": block(mask_id), "timestep": torch.tensor(1.0)}
    made = opened(name, mask_id)
    plain = made.step(logits(), **given, generator=torch.Generator().manual_seed(0), return_dict=False)
    made.set_timesteps(STEPS)
    output = made.step(logits(), **given, generator=torch.Generator().manual_seed(0))
    assert isinstance(plain, tuple) and isinstance(output, DllmSchedulerOutput)
    assert len(plain) == 6 and all(map(torch.equal, plain, output.to_tuple()))
    assert torch.equal(plain[0], output.prev_sample) and torch.equal(plain[4], output.committed_mask)


def test_tokens_are_drawn_from_the_logits_in_the_output() -> None:
    """After the scheduler's own temperature and truncation. The probabilities are of the logits before."""
    made = quiet("threshold", mask_token_id=MASK, temperature=0.5, top_k=3, top_p=0.9)
    made.set_timesteps(STEPS)
    sample = block()
    sample[:, :2] = 5  # the end of a prompt
    output = made.step(logits(), made.timesteps[0], sample, generator=torch.Generator().manual_seed(0))
    assert isinstance(output, DllmSchedulerOutput)
    kept = output.pred_logits.isfinite()
    assert ((kept.sum(-1) >= 1) & (kept.sum(-1) <= 3)).all()
    torch.testing.assert_close(output.pred_logits[kept], (logits() / 0.5)[kept])
    assert kept.gather(-1, output.pred_original_sample[..., None])[:, 2:].all()
    greedy = opened("threshold").step(logits(), torch.tensor(1.0), block())
    assert isinstance(greedy, DllmSchedulerOutput)
    assert torch.equal(greedy.pred_logits, logits())


def test_a_swap_takes_over_the_schedulers_own_settings() -> None:
    """Those that PR #14741 gives to every discrete scheduler."""
    theirs = {"mask_token_id": 7, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "threshold": 0.8}
    made = DllmScheduler.from_config(theirs, scheduler="klass")
    assert isinstance(made, DllmScheduler) and made.config["mask_token_id"] == 7
    assert made._rule.plugins.guides == (Temperature(0.7), TopK(5), TopP(0.9))


def test_the_output_is_the_one_that_all_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a diffusers that has it. The module is made anew, since it looks for it when it is imported."""

    @dataclass
    class DiscreteSchedulerOutput(BaseOutput):
        prev_sample: Tensor
        pred_original_sample: Tensor
        sampled_probs: Tensor
        pred_logits: Tensor
        committed_mask: Tensor
        edited_mask: Tensor | None = None

    monkeypatch.setattr(scheduling_utils, "DiscreteSchedulerOutput", DiscreteSchedulerOutput, raising=False)
    spec = importlib.util.find_spec(DllmScheduler.__module__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    made = module.DllmScheduler("threshold", mask_token_id=MASK)
    made.set_timesteps(STEPS)
    output = made.step(logits(), made.timesteps[0], block())
    assert isinstance(output, DiscreteSchedulerOutput) and len(output.to_tuple()) == 6
    assert torch.equal(output.to_tuple()[4], output.committed_mask)


def test_a_block_may_be_entered_later() -> None:
    made = opened("threshold")
    made.step(logits(), made.timesteps[1], block())
    assert made.step_index == 2
    made.set_timesteps(STEPS)
    assert made.step_index is None
    made.set_begin_index(3)
    with pytest.warns(UserWarning, match="scheduler=threshold needs more steps for a block than num_inference_steps=4"):
        # What a pipeline says is not read from the timestep.
        assert (made.step(logits(), made.timesteps[0], block(), return_dict=False)[0] != MASK).all()
    assert made.step_index == STEPS


@pytest.mark.parametrize(
    ("rule", "mask_id"),
    [({"name": "editing", "threshold": 0.9, "edit": 0.0}, MASK), ({"name": "block_refine", "threshold": 1.0}, None)],
)
@pytest.mark.filterwarnings("ignore:scheduler=.* was not through")
def test_nothing_changes_behind_the_last_step(rule: dict[str, Any], mask_id: int | None) -> None:
    made = opened(rule, mask_id, steps=2)
    sample, draws = block(mask_id), torch.Generator().manual_seed(0)
    for index in range(2):
        sample = made.step(logits(index), index, sample, generator=draws, return_dict=False)[0]
    assert torch.equal(made.step(logits(5), 2, sample, generator=draws, return_dict=False)[0], sample)


@pytest.mark.filterwarnings("ignore:scheduler=.* was not through")
def test_a_mask_token_of_the_prompt_stays() -> None:
    made, prompt = opened("threshold", None), torch.arange(LENGTH) < 3
    given = {"mask_token_id": MASK, "prompt_mask": prompt, "return_dict": False}
    assert (made.step(logits(), STEPS - 1, block(), **given)[0] == MASK).eq(prompt).all()


def test_blocks_follow_one_another() -> None:
    """What stands in a block when it opens is a prompt's; its noise differs from that of the block before."""
    made, draws = quiet("fixed", mask_token_id=MASK, temperature=1.0), torch.Generator().manual_seed(0)
    blocks = []
    for _ in range(2):
        made.set_timesteps(LENGTH)
        sample = block()
        sample[:, :2] = 5
        for time in made.timesteps:
            sample = made.step(torch.zeros(ROWS, LENGTH, VOCAB), time, sample, generator=draws)[0]
        assert (sample[:, :2] == 5).all()
        blocks.append(sample)
    assert not torch.equal(*blocks)


@dataclass(frozen=True)
class First(Scheduler):
    """A class of a user's own."""

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        noise = canvas.eligible(query.positions)
        return Edit(readout.token[:, 0], noise & (noise.cumsum(1) == 1)), carry


@pytest.mark.parametrize(
    ("scheduler", "options", "saved"),
    [
        ("localleap", {}, "localleap"),
        ({"name": "threshold", "threshold": 0.8}, {"temperature": 0.7}, {"name": "threshold", "threshold": 0.8}),
        (LocalLeap(radius=3), {"mask_token_id": 7}, {"name": "localleap", "radius": 3}),
        (Eoser(inner=FixedSteps(steps=2)), {"eos_token_id": 3}, {"name": "eoser", "low": 0.4}),
        (First(), {}, None),
        ({"_target_": f"{__name__}.First"}, {}, {"_target_": f"{__name__}.First"}),
        ("fixed", {"guide": [Temperature(0.5), "end_tokens"], "eos_token_id": 3, "block_length": 8}, "fixed"),
    ],
)
@pytest.mark.filterwarnings("ignore:scheduler=eoser counts over an answer")
def test_settings_are_saved_and_loaded(scheduler: Any, options: dict[str, Any], saved: Any, tmp_path: Path) -> None:
    made = DllmScheduler(scheduler, **options)
    again = [DllmScheduler.from_config(made.config)]
    if saved is None:
        with refused("plugin-not-saved: scheduler=First, _target_"):
            made.save_pretrained(tmp_path)
    else:
        made.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "scheduler_config.json").read_text())
        whole = written["scheduler"]
        assert whole == saved if isinstance(saved, str) else saved.items() <= whole.items()
        assert written["_class_name"] == "DllmScheduler"
        again.append(DllmScheduler.from_pretrained(tmp_path))
    for one in again:
        assert isinstance(one, DllmScheduler)
        assert repr(one) == repr(made)
        assert one._rule.plugins.scheduler == made._rule.plugins.scheduler
        assert one._rule.plugins.guides == made._rule.plugins.guides
        assert one.config["block_length"] == made.config["block_length"]
        assert one.config["mask_token_id"] == made.config["mask_token_id"]


def test_a_class_under_a_name_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(naming._TYPED, First, "threshold")
    assert DllmScheduler(First()).config["scheduler"] == First()


def test_a_tokenizer_is_not_saved(tmp_path: Path) -> None:
    made = DllmScheduler(guide={"name": "regex", "pattern": "a*"}, **FORM)
    made.save_pretrained(tmp_path)
    with refused("tokenizer-missing"):
        DllmScheduler.from_pretrained(tmp_path)
    again = DllmScheduler.from_pretrained(tmp_path, tokenizer=FORM["tokenizer"])
    assert isinstance(again, DllmScheduler) and again.config["max_new_tokens"] == 12
    assert isinstance(DllmScheduler.from_config(made.config), DllmScheduler)


def test_another_scheduler_takes_the_place_of_one() -> None:
    theirs = BlockRefinementScheduler(block_length=16)
    mine = DllmScheduler.from_config(theirs.config, scheduler="klass")
    assert isinstance(mine, DllmScheduler)
    assert mine.config["block_length"] == 16 and repr(mine) == "DllmScheduler(klass)"
    other = DllmScheduler.from_config(mine.config, scheduler={"name": "threshold", "threshold": 0.5})
    assert repr(other) == "DllmScheduler(threshold(threshold=0.5))"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"scheduler": "treshold"}, "choice-unknown: 'treshold', 'threshold'"),
        ({"scheduler": {"name": "threshold", "treshold": 1.0}}, "field-unknown: scheduler=threshold, 'treshold'"),
        ({"scheduler": {"name": "threshold", "threshold": "x"}}, "option-type: scheduler.threshold='x'"),
        ({"scheduler": 3}, "option-type: scheduler"),
        ({"scheduler": "wino"}, "engine-unsupported: scheduler=wino"),
        (
            {"scheduler": {"name": "learn2pd", "filter": toys.FILTER}},
            "plugins-incompatible: scheduler=learn2pd, block_length=6",
        ),
        ({"scheduler": "eoser"}, "end-token-missing: scheduler=eoser"),
        ({"guide": "end_tokens"}, "end-token-missing: guide=end_tokens"),
        ({"block_length": 0}, "option-range: block_length"),
        ({"mask_token_id": -1}, "option-range: mask_token_id"),
        ({"guide": {"name": "regex", "pattern": "a"}}, "tokenizer-missing: guide=regex"),
        ({"guide": {"name": "regex", "pattern": "a"}, "tokenizer": toys.tokenizer()}, "option-missing: max_new_tokens"),
        ({"top_k": 3}, "plugins-incompatible: top_k"),
    ],
)
@pytest.mark.filterwarnings("ignore:scheduler=eoser counts over an answer")
def test_mistakes_show_when_the_object_is_made(arguments: dict[str, Any], said: str) -> None:
    with refused(said) as error:
        DllmScheduler(**arguments)
    assert "\n" not in str(error.value)


def test_mistakes_in_a_step() -> None:
    made = opened("threshold", None)
    with refused("mask-token-missing: scheduler=threshold, mask_token_id"):
        made.step(logits(), made.timesteps[0], block())
    with refused("option-range: num_inference_steps"):
        made.set_timesteps(0)
    with refused("timesteps-missing: set_timesteps"):
        DllmScheduler(mask_token_id=MASK).step(logits(), torch.tensor(1.0), block())
    made = opened("threshold")
    with refused(f"nothing-to-generate: token {MASK}"):
        made.step(logits(), made.timesteps[0], torch.zeros_like(block()))
    with refused("shape-mismatch: model_output"):
        made.step(logits()[:, :5], made.timesteps[0], block())
    made.step(logits(), made.timesteps[0], block())
    with refused("shape-mismatch"):
        made.step(logits()[:, :6], made.timesteps[1], block()[:, :6])
    form = quiet("threshold", mask_token_id=toys.MASK, guide={"name": "regex", "pattern": "a*"}, **FORM)
    form.set_timesteps(STEPS)
    with refused("guide-incompatible: guide=regex"):
        form.step(torch.zeros(1, LENGTH, toys.VOCAB), form.timesteps[0], torch.full((1, LENGTH), toys.MASK))
    made.set_timesteps(STEPS, block_length=6)
    with refused("shape-mismatch"):
        made.step(logits(), 0, block())


def test_nothing_else_imports_diffusers() -> None:
    package = Path(config.__file__).parent
    users = [path.name for path in package.rglob("*.py") if "import diffusers" in (text := path.read_text())
             or "from diffusers" in text]  # fmt: skip
    assert users == ["diffusers.py"]
