"""Plug-ins put together: shortcuts, steps under a stop that cuts, unfinished rows."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dllm_sampler import Query, Sampler
from dllm_sampler.blocks.adablock import AdaBlock
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.engine.readout import Rule, read
from dllm_sampler.guides import EndTokens, Temperature, TopK, TopP
from dllm_sampler.models import autoregressive
from dllm_sampler.schedulers import learn2pd
from dllm_sampler.schedulers.freedave import FreeDave
from dllm_sampler.schedulers.klass import Klass
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.stops.end_tokens import PrefixStop
from tests import toys
from tests.refusals import refused
from tests.sampling import each


def kinds(**options: Any) -> list[object]:
    return list(Sampler(toys.denoiser(), **options).plugins.guides)


def test_shortcuts_set_the_guide_that_is_there_or_join_in_order() -> None:
    assert kinds(top_p=0.9, temperature=0.5, top_k=3) == [Temperature(0.5), TopK(3), TopP(0.9)]
    assert kinds(guide=["temperature", "top_p"], temperature=0.5) == [Temperature(0.5), TopP(0.95)]
    assert kinds(guide=["top_p", "temperature"], temperature=0.5) == [TopP(0.95), Temperature(0.5)]
    assert kinds(guide="top_p", temperature=1, top_k=5) == [Temperature(1), TopP(0.95), TopK(5)]
    assert kinds(guide=["temperature", "top_p"]) == [Temperature(1.0), TopP(0.95)]


def test_lists_from_yaml_are_tuples() -> None:
    assert kinds(guide={"name": "end_tokens", "ids": [3, 4]}) == [EndTokens(ids=(3, 4))]


@each("table", [(0, 4), (False, 4), (-3, 4), ("nan", 4), ("inf", 4), (10, -1), (10, "nan")])
def test_counts_of_tokens_are_numbers(tmp_path: Path, table: tuple[Any, Any]) -> None:
    file = tmp_path / "frequency.json"
    file.write_text(json.dumps({"num_token": table[0], "p_baseline_dict": {"3": table[1]}}))
    with refused("file-invalid: scheduler.frequency, frequency.json"):
        toys.sampler(scheduler={"name": "pc", "frequency": str(file)})


def test_a_missing_table_of_counts_is_not_called_invalid(tmp_path: Path) -> None:
    with refused("file-unreadable: scheduler.frequency, gone.json"):
        toys.sampler(scheduler={"name": "pc", "frequency": str(tmp_path / "gone.json")})


@each(
    "wrong",
    [
        ("step", None, "options-conflict: scheduler.progress=step needs, Set scheduler.steps"),
        ("committed", 4, "options-conflict: scheduler.steps=4, scheduler.progress=committed, Remove it"),
        ("step", 0, "option-range: scheduler.steps"),
    ],
)
def test_the_progress_of_eoser_and_its_steps_fit(wrong: tuple[str, int | None, str]) -> None:
    progress, steps, error = wrong
    with refused(error):
        toys.sampler(scheduler={"name": "eoser", "progress": progress, "steps": steps})


@pytest.mark.slow
def test_other_blocks_read_no_file_again_and_lose_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "frequency.json"
    table.write_text('{"num_token": 10, "p_baseline_dict": {"3": 4}}')
    rules: list[Any] = [
        {"name": "learn2pd", "filter": toys.FILTER},
        {"name": "apd", "verifier": toys.verifier()},
        {"name": "pc", "frequency": str(table)},
        {"name": "freedave", "inner": {"name": "pc", "frequency": str(table)}, "draft": "auto"},
    ]
    made = [toys.sampler(scheduler=rule) for rule in rules]
    table.unlink()
    monkeypatch.delattr(learn2pd, "load")
    monkeypatch.delattr(autoregressive, "fit")
    first = [it.generate(toys.PROMPTS, max_new_tokens=12) for it in made]
    measured = made[-1].plugins.scheduler
    assert isinstance(measured, FreeDave) and measured.measured.tables
    again = [it.generate(toys.PROMPTS, max_new_tokens=12, block_length=6) for it in made]
    assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(first, again, strict=True))
    told = made[-1].plugins.with_blocks(FixedBlocks(3)).scheduler
    assert isinstance(told, FreeDave) and told.measured is measured.measured


def test_other_blocks_are_told_to_everybody() -> None:
    it = toys.sampler(scheduler={"name": "freedave", "eager": True}, blocks={"name": "fixed", "length": 6})
    told = it.plugins.with_blocks(FixedBlocks(4))
    assert isinstance(told.scheduler, FreeDave) and (told.scheduler.lookahead, told.blocks.lookahead(99)) == (4, 4)
    assert told.with_blocks(FixedBlocks(6)) == it.plugins
    with refused("scheduler-incompatible: scheduler.eager"):
        it.plugins.with_blocks(AdaBlock())


def test_a_bare_module_is_no_denoiser() -> None:
    with refused("model-invalid"):
        Sampler(cast(Any, toys.transformer()))


def test_a_readout_without_such_a_field_is_refused() -> None:
    class Curious(Threshold):
        @property
        def needs(self) -> frozenset[str]:
            return frozenset({"entropi", "margin"})

    class Nosy(PrefixStop):
        @property
        def needs(self) -> frozenset[str]:
            return frozenset({"Margin"})

    with refused("plugin-needs"):
        Sampler(toys.denoiser(), scheduler=Curious())
    with refused("plugin-needs"):
        Sampler(toys.denoiser(), stop=Nosy())


def test_ranked_divergences_are_precise() -> None:
    assert "probabilities" in Klass(take="steadiest").needs and "predictions" in Klass().needs


def test_a_cut_canvas_keeps_the_pace_of_its_steps() -> None:
    prompts, length = [[2, 3, 4], [5, 6]], 24
    for block in (8, 24):
        sampler = Sampler(toys.denoiser(), scheduler={"name": "fixed", "steps": 8}, stop="truncate")
        trace = sampler.generate(prompts, max_new_tokens=length, block_length=block).trace
        for row in range(2):
            sizes = [len(step) for step in trace.steps(row)]
            assert all(size >= 1 for size in sizes)
            assert len(sizes) <= 8


def test_an_unfinished_row_ends_before_its_first_hole() -> None:
    sampler = Sampler(
        toys.denoiser(), scheduler={"name": "fixed", "score": "random"}, blocks="full", stop="none", max_steps=5
    )
    result = sampler.generate([[2, 3, 4]], max_new_tokens=16)
    assert not result.complete.any()
    committed = result.trace.generated[0] >= 0
    hole = int((~committed).long().argmax())
    assert int(committed.sum()) == 5 and int(result.lengths[0]) <= hole


@each("dtype", [torch.float32, torch.bfloat16])
def test_sampling_does_not_favour_low_ids_in_half_precision(dtype: torch.dtype) -> None:
    rows, width = 512, 16
    canvas = toys.canvas(torch.ones(rows, width, dtype=torch.bool), seeds=torch.arange(rows))
    head_rows = HeadRows.every(Query.masks(canvas))
    spec = toys.denoiser().spec
    logits = torch.full((rows * width, spec.vocab_size), -torch.inf, dtype=dtype)
    logits[:, 5:7] = 40.0
    token = read(logits, canvas, head_rows, Rule(spec, (Temperature(1.0),), frozenset())).token
    share = float((token == 5).double().mean())
    assert share == pytest.approx(0.5, abs=4 * 0.5 / (rows * width) ** 0.5)
