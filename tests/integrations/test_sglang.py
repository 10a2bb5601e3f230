"""Our schedulers run in SGLang's loops, and decide there what `Sampler` decides."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dllm_sampler import config
from dllm_sampler.check.reads import _Operations
from dllm_sampler.integrations import serving, sglang
from dllm_sampler.integrations.settings import Sampling
from tests import toys
from tests.contract.cases import Settings, one_of_each_kind, toy_for
from tests.integrations.engine import LENGTH, PER_BLOCK, whole_steps
from tests.integrations.sglang_stubs import Request, Server, algorithm
from tests.integrations.test_block import PROMPTS, causal
from tests.sampling import crossed, sampled

LOCAL = [one for one in one_of_each_kind() if config.build("scheduler", one.values[0]).traits.scope == "block"]
LOCAL = [one for one in LOCAL if toy_for(one.values[0]) != "uniform"]


def requests(**options: Any) -> list[Request]:
    return [Request(prompt, tokens, rid=str(row), **options) for row, (prompt, tokens) in enumerate(PROMPTS)]


def server(settings: Settings, fdfo: bool = True, name: str = sglang.NAME, **options: Any) -> Server:
    return Server(algorithm(name, settings, fdfo), causal(), **options)


def answers(found: list[Request]) -> list[tuple[list[int], int]]:
    return [(one.answer, one.forwards) for one in found]


@pytest.mark.parametrize("scheduler", LOCAL)
@pytest.mark.parametrize("fdfo", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_served_requests_equal_sampler(registered: str, scheduler: Settings, fdfo: bool) -> None:
    """Requests arrive at different times in the first mode; in the second a batch waits for its slowest block."""
    mine = {**scheduler, "steps": PER_BLOCK} if "steps" in scheduler else scheduler
    engine = server({"scheduler": mine}, fdfo)
    found = engine.serve(requests(), arrivals=[0, 2, 3, 0] if fdfo else None)
    for (prompt, tokens), one in zip(PROMPTS, found, strict=True):
        whole = {**mine, "steps": whole_steps(mine, len(prompt), tokens)} if "steps" in mine else mine
        sampler = toys.sampler("causal", scheduler=whole)
        alone = sampler.generate([prompt], max_new_tokens=tokens, seed=[sglang._seed(one.rid)])
        assert one.answer == alone.trace.decoded[0, -tokens:].tolist()
        blocks = -(-(len(prompt) + tokens) // LENGTH) - len(prompt) // LENGTH
        if fdfo:  # a forward per block that sees the final tokens, unless the last one changed nothing
            assert int(alone.nfe[0]) <= one.forwards <= int(alone.nfe[0]) + blocks


@pytest.mark.parametrize("scheduler", sampled(["threshold", "klass", "editing", "localleap"]))
def test_batches_that_wait_for_their_slowest_block(registered: str, scheduler: str) -> None:
    """The synchronous mode: the same tokens, of which `test_served_requests_equal_sampler` knows more schedulers."""
    found = server({"scheduler": scheduler}, fdfo=False).serve(requests())
    assert [one.answer for one in found] == [one.answer for one in server({"scheduler": scheduler}).serve(requests())]


@pytest.mark.parametrize("fdfo", sampled([True, False]))
def test_rows_of_one_batch_have_temperatures_of_their_own(registered: str, fdfo: bool) -> None:
    """Tokens are those of the request alone, and those of `Sampler` at that temperature."""
    wanted: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_k": 2**30},
        {"temperature": 1.0, "top_k": 1},  # SGLang's greedy
        {"temperature": 3.0, "top_k": 20},
        {"temperature": 0.7, "top_k": 2**30, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 2**30},
    ]
    every = [
        Request([5, 11, 3, *[7, 1, 30, 22, 9, 14] * (row // 2)], 3 + LENGTH * (row % 2), rid=f"request {row}", **one)
        for row, one in enumerate(wanted)
    ]
    settings = {"scheduler": {"name": "threshold", "threshold": 0.6}}
    server(settings, fdfo).serve(every, arrivals=[0, 1, 1, 2, 0] if fdfo else None)
    for one, options in zip(every, wanted, strict=True):
        alone = Request(one.prompt, one.tokens, rid=one.rid, **options)
        assert server(settings, fdfo).serve([alone])[0].answer == one.answer
        greedy = options["top_k"] == 1
        sampler = toys.sampler(
            "causal",
            scheduler=settings["scheduler"],
            temperature=None if greedy else options["temperature"],
            top_k=options["top_k"] if 1 < options["top_k"] < 2**30 else None,
            top_p=options.get("top_p"),
        )
        found = sampler.generate([one.prompt], max_new_tokens=one.tokens, seed=[sglang._seed(one.rid)])
        assert one.answer == found.trace.decoded[0, -one.tokens :].tolist()
    other = server(settings, fdfo).serve([Request(every[0].prompt, 3, rid="another", **wanted[0])])
    assert every[0].answer != other[0].answer, "draws of two requests differ"
    seeded = server(settings, fdfo).serve(
        [Request(every[0].prompt, 3, rid=rid, seed=seed, **wanted[2]) for rid, seed in (("a", 7), ("b", 7), ("c", 0))]
    )
    first, again, zero = (one.answer for one in seeded)
    found = toys.sampler("causal", scheduler=settings["scheduler"], temperature=3.0, top_k=20).generate(
        [every[0].prompt] * 2, max_new_tokens=3, seed=[7, 0]
    )
    assert [first, zero] == found.trace.decoded[:, -3:].tolist() and again == first != zero


def test_settings_may_fix_how_all_tokens_are_chosen(registered: str) -> None:
    plain = answers(server({"scheduler": "threshold", "temperature": 0}).serve(requests(top_k=2**30)))
    assert plain == answers(server({"scheduler": "threshold"}).serve(requests()))
    warm = answers(server({"scheduler": "threshold", "temperature": 1.5}).serve(requests(temperature=0.1)))
    assert warm == answers(server({"scheduler": "threshold"}).serve(requests(temperature=1.5, top_k=2**30)))
    hot = {"scheduler": "threshold", "guide": [{"name": "temperature", "value": 1.0}, {"name": "top_k", "k": 5}]}
    assert answers(server(hot).serve(requests())) == answers(server(hot).serve(requests(temperature=0.1)))
    assert answers(server(hot).serve(requests())) != plain


def test_ranks_decide_alike(registered: str) -> None:
    """Two instances on equal batches, in one of which draws of another kind were made: noise has no other source."""
    settings = {"scheduler": {"name": "fixed", "steps": 3, "score": "random"}}
    one = server(settings).serve(requests(top_k=2**30), arrivals=[0, 1, 0, 3])
    torch.manual_seed(5)
    torch.rand(3)
    assert answers(one) == answers(server(settings).serve(requests(top_k=2**30), arrivals=[0, 1, 0, 3]))
    assert sglang._seed("chat-1") == 6559370723690537637, "a number of the name alone, not of the process"


def test_numbers_of_a_request_are_those_that_were_typed() -> None:
    kept = torch.tensor([0.7, 0.9])  # SGLang's, in float32
    assert sglang._sampling(float(kept[0]), 2**30, float(kept[1])) == Sampling(0.7, None, 0.9)
    assert sglang._sampling(0.7, 20, 1.0) == Sampling(0.7, 20)
    assert sglang._sampling(1.0, 1, 0.5) == sglang._sampling(0.0, 2**30, 1.0) == Sampling()


@pytest.mark.parametrize("fdfo", [True, False])
def test_a_prompt_may_hold_the_mask(registered: str, fdfo: bool) -> None:
    """SGLang then says which positions are the prompt's; in a block of it there is nothing to decode."""
    prompt = [5, toys.MASK, 3, 9, 2, toys.MASK, toys.MASK, 8]
    (found,) = server({"scheduler": "threshold"}, fdfo).serve([Request(prompt, 10)])
    assert found.ids[:8] == prompt
    (other,) = server({"scheduler": "localleap"}, fdfo).serve([Request(prompt[:LENGTH], 6)])
    assert other.ids[:LENGTH] == prompt[:LENGTH] and toys.MASK not in [*found.answer, *other.answer]


@pytest.mark.parametrize(("scheduler", "fdfo"), crossed(["threshold", "klass", "editing"], [True, False], together=0))
def test_a_row_that_fails_ends_alone(
    registered: str, scheduler: str, fdfo: bool, logged: list[logging.LogRecord]
) -> None:
    well = answers(server({"scheduler": scheduler}, fdfo).serve(requests(), [0, 0, 2, 1] if fdfo else None))
    found = server({"scheduler": scheduler}, fdfo, broken="1").serve(requests(), [0, 0, 2, 1] if fdfo else None)
    assert [one.failed for one in found] == [False, True, False, False]
    assert [one.answer for one in found[2:]] == [answer for answer, _ in well[2:]] and found[0].answer == well[0][0]
    (line,) = logged
    assert "request 1 ends here: the model returned NaN or infinite logits" in line.getMessage()


@pytest.mark.parametrize("fdfo", [True, False])
def test_a_block_without_an_end_is_given_up(registered: str, fdfo: bool, logged: list[logging.LogRecord]) -> None:
    """Under `compat` the mask may be the model's choice for ever."""
    found = server({"scheduler": "threshold", "compat": True}, fdfo, mask=50.0).serve([Request([5, 11], 9)])
    assert found[0].failed and found[0].forwards == LENGTH + 1
    assert "request 0 ends here: its block is not decoded after the most forwards" in logged[0].getMessage()


def test_a_state_is_kept_whole_while_the_batch_is_the_same(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, original = [], serving.taken

    def taken(*given: Any) -> Any:
        moved.append(given)
        return original(*given)

    monkeypatch.setattr(serving, "taken", taken)
    engine = server({"scheduler": {"name": "klass", "steps": 6}})
    some = [Request([5, 11, 3, 2, 8, 1], LENGTH, rid=str(row)) for row in range(3)]
    engine.serve(some)
    assert some[0].forwards > 2 and not moved
    engine.serve([Request([5, 11], LENGTH, rid="x"), Request([5, 11, 3], 2, rid="y")])
    assert moved, "one of two is over"


def test_a_batch_may_change_its_order(registered: str) -> None:
    settings = {"scheduler": {"name": "klass", "steps": 6}}
    found, engine = requests(top_k=2**30), server(settings)
    while not all(one.over for one in found):
        engine.batch = [one for one in reversed(found) if not one.over]
        engine.round()
        engine.batch = [one for one in found[2:] + found[:2] if not one.over]
        if engine.batch:
            engine.round()
    assert answers(found) == answers(server(settings).serve(requests(top_k=2**30)))


def test_what_a_scheduler_keeps_lies_nowhere_else() -> None:
    logits, other = torch.randn(2, 3), torch.randn(2, 3)
    kept = serving._apart((logits[:1], logits.view(3, 2), other), logits)
    assert all(torch.equal(one, own) for one, own in zip(kept, (logits[:1], logits.view(3, 2), other), strict=True))
    assert {one.untyped_storage().data_ptr() for one in kept[:2]}.isdisjoint({logits.data_ptr()})
    assert kept[2] is other


class _Reads(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (Tensor.tolist, Tensor.cpu, Tensor.numpy)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheduler", ["threshold", "klass", "editing", "localleap", "entropy_bound"])
def test_a_step_reads_the_device_once(registered: str, scheduler: str) -> None:
    engine = server({"scheduler": scheduler})
    engine.batch = [Request([5, 11], LENGTH), Request([7], LENGTH, rid="1")]
    for one in engine.batch:
        one.block = [*one.prompt, *[toys.MASK] * (LENGTH - len(one.prompt))]
    batch = engine.described()
    states = engine.algorithm.init_step_state(batch)
    for _ in range(2):
        logits = engine.forward(batch).logits_output.full_logits
        with _Reads() as reads, _Operations():
            engine.algorithm.step(batch, logits, states)
        assert reads.count == 1


def test_end_tokens_may_be_named(registered: str) -> None:
    token = server({"scheduler": "threshold"}).serve(requests())[0].answer[0]
    banned = server({"scheduler": "threshold", "guide": {"name": "end_tokens", "ids": [token]}}).serve(requests())
    assert all(token not in one.answer for one in banned)


@pytest.mark.slow
def test_registering_imports_little() -> None:
    code = """
import json, sys, time, types
import torch
class Base: pass
for name in ("sglang", "sglang.srt", "sglang.srt.dllm", "sglang.srt.dllm.algorithm", "sglang.srt.dllm.algorithm.base"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["sglang.srt.dllm.algorithm"].algo_name_to_cls = {}
sys.modules["sglang.srt.dllm.algorithm.base"].DllmAlgorithm = Base
before, began = set(sys.modules), time.process_time()
from dllm_sampler.integrations.sglang import register
register()
spent = time.process_time() - began
found = sys.modules["sglang.srt.dllm.algorithm"].algo_name_to_cls["DllmSampler"]
print(json.dumps([spent, sorted(set(sys.modules) - before), issubclass(found, Base)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    spent, modules, ours = json.loads(done.stdout)
    assert ours and spent < 0.5
    assert {name.partition(".")[0] for name in modules}.isdisjoint({"hydra", "omegaconf", "pydantic", "transformers"})
    assert "dllm_sampler.integrations.serving" not in modules and len(modules) < 40


def entry_point(folder: Path) -> None:
    """What installing the package leaves behind, as far as plug-ins go."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    info = folder / "dllm_sampler_entry-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dllm-sampler-entry\nVersion: 0\n")
    named = project["entry-points"]["sglang.srt.plugins"]
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
    )


def test_its_own_loader_finds_the_plug_in(released: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    algorithms = import_module("sglang.srt.dllm.algorithm").algo_name_to_cls
    assert sglang.NAME not in algorithms and "LowConfidence" in algorithms
    import_module("sglang.srt.plugins").load_plugins()
    found = algorithms[sglang.NAME]
    assert issubclass(found, sglang.BlockAlgorithm)
    assert issubclass(found, import_module("sglang.srt.dllm.algorithm.base").DllmAlgorithm)


@pytest.mark.parametrize("fdfo", [True, False])
@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9, 1.5])
def test_low_confidence_is_threshold(released: None, fdfo: bool, threshold: float) -> None:
    """Theirs compares by > and ours by >=, which differ at a tie only."""
    sglang.register()
    arrivals = [0, 2, 3, 0] if fdfo else None
    theirs = server({"threshold": threshold}, fdfo, "LowConfidence", mask=-50.0).serve(requests(), arrivals)
    settings = {"scheduler": {"name": "threshold", "threshold": threshold}}
    assert answers(server(settings, fdfo, mask=-50.0).serve(requests(), arrivals)) == answers(theirs)


def test_low_confidence_may_choose_the_mask_as_compat_does(released: None) -> None:
    """Such a step changes nothing, so that the next one has equal logits: here they differ."""
    sglang.register()
    generator = torch.Generator().manual_seed(0)
    settings = {"scheduler": {"name": "threshold", "threshold": 0.3}, "compat": True}
    engines = [server({"threshold": 0.3}, True, "LowConfidence"), server(settings)]
    for one in engines:
        one.batch = [Request([], LENGTH, rid=str(row), block=[toys.MASK] * LENGTH) for row in range(8)]
    batches = [one.described() for one in engines]
    states = [one.algorithm.init_step_state(batch) for one, batch in zip(engines, batches, strict=True)]
    chosen = 0
    for _ in range(LENGTH):
        logits = 4 * torch.randn(8 * LENGTH, toys.VOCAB, generator=generator)
        logits[:, toys.MASK] += 6
        chosen += int((logits.argmax(1) == toys.MASK).sum())
        done = [
            one.algorithm.step(batch, logits.clone(), state)
            for one, batch, state in zip(engines, batches, states, strict=True)
        ]
        assert torch.equal(batches[0].input_ids, batches[1].input_ids) and done[0] == done[1]
    assert chosen > 20 and (batches[0].input_ids != toys.MASK).any()


@pytest.mark.parametrize("fdfo", [True, False])
@pytest.mark.parametrize(("threshold", "edit", "extra"), [(0.5, 0.3, 3), (0.7, 0.5, 16), (0.3, 0.2, 1), (0.9, 0.1, 0)])
def test_joint_threshold_is_editing(released: None, fdfo: bool, threshold: float, edit: float, extra: int) -> None:
    sglang.register()
    arrivals = [0, 2, 3, 0] if fdfo else None
    given = {"threshold": threshold, "edit_threshold": edit, "max_post_edit_steps": extra}
    theirs = server(given, fdfo, "JointThreshold", mask=-50.0).serve(requests(), arrivals)
    mine = {"scheduler": {"name": "editing", "threshold": threshold, "edit": edit, "extra": extra}}
    found = server(mine, fdfo, mask=-50.0).serve(requests(), arrivals)
    assert answers(found) == answers(theirs)
