"""Windows that slide and their cache, against the rules typed again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Result, Sampler
from dllm_sampler.check.promises import check_row, refusal
from dllm_sampler.check.settings import Settings, settings
from dllm_sampler.cli.main import main
from dllm_sampler.core.values import FREE
from tests import toys
from tests.contract.cases import by_row, label
from tests.contract.test_in_flight import PROMPTS, assert_same
from tests.refusals import refused
from tests.sampling import crossed, each, few
from tests.tables import sliding as picture

TOKENS, MASKS = 13, 4
SLIDING: Settings = {"name": "sliding", "masks": MASKS}
RULE: Settings = {"name": "threshold", "threshold": 0.6}
ALL: Settings = {"name": "threshold", "threshold": 0.0}
PAGE = Path(__file__).parents[2] / "docs" / "sliding.md"
BOUNDED = {"greedy": None, "constant": MASKS, "between": 6, "narrow": 3}


def sampler(kind: str = "llada", **plugins: Any) -> Sampler:
    return toys.sampler(kind, **{"scheduler": RULE, "blocks": SLIDING, "stop": "none", **plugins})


def run(kind: str = "llada", tokens: int = TOKENS, **plugins: Any) -> Result:
    return sampler(kind, **plugins).generate(toys.PROMPTS, max_new_tokens=tokens, seed=toys.SEEDS)


def windows(result: Result, row: int, width: int | None, masks: int = MASKS) -> list[tuple[int, int]]:
    """The window before each forward, by the masks that the step map says are left."""
    steps, found = result.trace.generated[row].tolist(), []
    for forward in range(int(result.nfe[row])):
        left = [at for at, step in enumerate(steps) if step >= forward]
        committed = len(steps) - len(left)
        end = min(masks + committed, len(steps))  # DSB's words: it moves by one for each commit
        found.append((left[0], end if width is None else min(end, left[0] + width)))
    return found


@each("bound", BOUNDED)
@few("kind", ["llada", "dream"])
def test_each_forward_commits_inside_the_window(bound: str, kind: str) -> None:
    result, waited = run(kind, blocks=SLIDING | {"max_width": BOUNDED[bound]}), 0
    for row in range(len(toys.PROMPTS)):
        steps = result.trace.generated[row].tolist()
        for forward, (start, end) in enumerate(windows(result, row, BOUNDED[bound])):
            committed = [at for at, step in enumerate(steps) if step == forward]
            assert committed and all(start <= at < end for at in committed)
            left = sum(step >= forward for step in steps)
            if bound == "greedy":
                assert sum(step >= forward for step in steps[start:end]) == min(MASKS, left)
            elif bound == "constant":
                assert end - start == min(MASKS, TOKENS - start)
            waited += end - start > MASKS
    assert waited == 0 if bound in ("constant", "narrow") else waited > 0


def test_the_window_is_not_cut_by_a_grid() -> None:
    assert not torch.equal(run().trace.generated, run(blocks={"name": "fixed", "length": MASKS}).trace.generated)
    assert (run(scheduler=ALL).nfe == -(-TOKENS // MASKS)).all()


def test_edges_of_the_rule() -> None:
    one = run(blocks=SLIDING | {"masks": 1})
    assert torch.equal(one.trace.generated, torch.arange(TOKENS).expand_as(one.trace.generated))
    whole, full = run(blocks=SLIDING | {"masks": 99}), run(blocks="full")
    assert by_row(whole) == by_row(full)


def columns(result: Result, row: int, cache: Settings, kind: str) -> tuple[int, int]:
    """Positions that a row computes under a cache, and its refreshes, by DSB's and DCD's words."""
    prompt, shift = len(toys.PROMPTS[row]), int(kind == "dream")
    steps, last, since, computed, refreshes = result.trace.generated[row].tolist(), 0, 99, 0, 0
    for forward, (start, end) in enumerate(windows(result, row, None)):
        before, after = cache["before"], cache["after"]
        if cache["anchor"] == "both":
            first = prompt + start - max(start - last, before, shift)
        elif cache["anchor"] == "last":
            first = prompt + max(last - before, 0) - shift
        else:
            first = prompt + max(start - before, 0) - shift
        until = TOKENS if after is None else min(end + after, TOKENS)
        if since >= cache["every"]:
            first, until, since, refreshes = 0, TOKENS, 0, refreshes + 1
        computed += prompt + until - max(first, 0)
        since += steps.count(forward)
        last = start
    return computed, refreshes


CACHES: list[Settings] = [
    {"before": 0, "after": 0, "every": 4, "anchor": "both"},
    {"before": 3, "after": 1, "every": 5, "anchor": "both"},
    {"before": 2, "after": 2, "every": 3, "anchor": "last"},
    {"before": 1, "after": None, "every": 6, "anchor": "last"},
    {"before": 0, "after": 0, "every": 7, "anchor": "window"},
]


@each("cache", CACHES)
@few("kind", ["llada", "dream"])
def test_columns_that_the_cache_computes(cache: Settings, kind: str) -> None:
    result, refreshes = run(kind, cache={"name": "sliding", **cache}), 0
    for row in range(len(toys.PROMPTS)):
        computed, more = columns(result, row, cache, kind)
        assert int(result.trace.rows[row]) == computed
        refreshes += more
    assert refreshes > len(toys.PROMPTS) and not torch.equal(result.trace.logprob, run(kind).trace.logprob)


@few("kind", ["llada", "dream"])
@few("anchor", ["both", "last", "window"])
def test_a_refresh_after_each_commit_is_no_cache(kind: str, anchor: str) -> None:
    cached = run(kind, cache={"name": "sliding", "every": 1, "anchor": anchor})
    assert by_row(cached) == by_row(run(kind))


def test_with_fixed_blocks_it_refreshes_when_one_opens() -> None:
    plugins: dict[str, Any] = {"blocks": {"name": "fixed", "length": 5}, "scheduler": "fixed"}
    wide = run(**plugins, cache={"name": "sliding", "before": 0, "every": 99, "anchor": "window"})
    assert by_row(wide) == by_row(run(**plugins, cache="dual"))


ENDS: dict[str, Any] = {"blocks": SLIDING | {"masks": 9, "until_end": True}}


@each("cache", ["none", {"name": "sliding", "before": 2, "after": 2, "every": 5, "anchor": "last"}])
def test_an_end_token_ends_the_window(cache: Any) -> None:
    """As in DCD: what is after the first end token is filled with it, and the row goes on before it only."""
    whole, ended = toys.sampler(scheduler=RULE, **ENDS, stop="fill", cache=cache), 0
    for commits in whole.stream(toys.PROMPTS, max_new_tokens=17, seed=toys.SEEDS):
        assert commits.open_end is not None
        for ids, masked, end in zip(commits.tokens.tolist(), commits.masked.tolist(), commits.open_end, strict=True):
            first = next((at for at, token in enumerate(ids) if token == toys.EOS and not masked[at]), 17)
            if any(masked):
                assert end <= first and not any(masked[first:])
                ended += first < 17
    assert ended
    # Without a stop, masks after an end token stay, and the row is over.
    alone, stopped = run(**ENDS, tokens=17), run(blocks=SLIDING | {"masks": 9}, stop="prefix", tokens=17)
    assert alone.lengths.tolist() == stopped.lengths.tolist() and bool((alone.lengths < 17).any())


def test_credit_outlives_the_moves_of_the_window() -> None:
    """In blocks of a token it never has any."""
    credit = {"name": "credit", "threshold": 0.7}
    assert (run(scheduler=credit).nfe < run(scheduler={"name": "dinfer", "threshold": 0.7}).nfe).any()


def test_given_tokens_are_no_part_of_the_window() -> None:
    pinned = [FREE] * 3 + [5, 6, 7] + [FREE] * 5
    found = sampler(scheduler=ALL).generate([toys.PROMPTS[0]], max_new_tokens=len(pinned), pinned=[pinned])
    assert found.trace.generated[0].tolist() == [0, 0, 0, -1, -1, -1, 0, 1, 1, 1, 1]


def served(group: str) -> Iterator[Settings]:
    """Yield the settings of a group that run in a window."""
    return (one for one in settings(group) if refusal("llada", **{group: one}, blocks=SLIDING) is None)


def test_who_runs_in_a_window() -> None:
    judge_one_by_one = {"threshold", "factor", "dinfer", "entropy", "entropy_bound", "localleap", "klass", "credit"}
    assert judge_one_by_one <= {one["name"] for one in served("scheduler")}
    assert {one["name"] for one in served("cache")} == (
        {"none", "exact", "sliding", "trailing", "delayed_prefix", "elastic", "dkv", "dllm", "d2", "d2f"}
    )


def check_alone(**plugins: Any) -> None:
    """Check that a row of a batch is the row alone, and an answer in flight the answer alone."""
    one = sampler(**{**plugins, "blocks": SLIDING | {"masks": 3}})
    batch = one.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)
    row = (1, 3)[len(str(plugins)) % 2]  # the longest prompt, or one that is shorter than others
    check_row(batch, row, one.generate([toys.PROMPTS[row]], max_new_tokens=TOKENS, seed=toys.SEEDS[row]))
    lengths = [TOKENS, 4, 9, TOKENS]
    answers = list(one.generate_many(PROMPTS[: len(lengths)], max_new_tokens=lengths, batch_size=2, seed=5))
    assert_same(one, answers[-1:], lengths, 5)


CLOSE: list[Settings] = [one for one in settings("cache") if one["name"] == "sliding"]


@few("scheduler", served("scheduler"), 3)
def test_rows_alone_under_every_rule(scheduler: Settings) -> None:
    check_alone(scheduler=scheduler)
    if refusal("llada", scheduler=scheduler, blocks=SLIDING, cache=CLOSE[0]) is None:
        check_alone(scheduler=scheduler, cache=CLOSE[len(scheduler["name"]) % len(CLOSE)])


@few("cache", served("cache"), 3)
def test_rows_alone_under_every_cache(cache: Settings) -> None:
    check_alone(cache=cache)


@pytest.mark.parametrize(("cache", "kind"), crossed({label(one): one for one in CLOSE}, ["dream", "cfg", "gqa"]))
def test_rows_alone_on_other_models(cache: Settings, kind: str) -> None:
    check_alone(cache=cache, kind=kind, stop="fill")


REFUSED = {
    "plugins-incompatible: scheduler=fixed, blocks=sliding": {"scheduler": "fixed"},
    "plugins-incompatible: scheduler=wino, blocks=sliding": {"scheduler": "wino"},
    "plugins-incompatible: scheduler=random_order, blocks=sliding": {"scheduler": "random_order"},
    "plugins-incompatible: scheduler=daedal, blocks=sliding": {"scheduler": "daedal"},
    "plugins-incompatible: scheduler=learn2pd": {"scheduler": {"name": "learn2pd", "filter": toys.FILTER}},
    "plugins-incompatible: scheduler=freedave": {"scheduler": {"name": "freedave", "inner": "threshold"}},
    "plugins-incompatible: scheduler=klass": {"scheduler": {"name": "klass", "steps": 8}},
    "stop-incompatible: stop=block, blocks=sliding, stop=prefix": {"stop": "block"},
    "cache-incompatible: cache=dual, blocks=sliding, cache=sliding": {"cache": "dual"},
    "cache-incompatible: cache=prefix, blocks=sliding": {"cache": "prefix"},
    "cache-incompatible: cache=periodic_dual, blocks=sliding": {"cache": "periodic_dual"},
    "cache-incompatible: cache=vicinity, blocks=sliding": {"cache": "vicinity"},
    "cache-incompatible: cache=sparse, blocks=sliding": {"cache": "sparse"},
    "cache-incompatible: cache=dpad, blocks=sliding": {"cache": "dpad"},
    "cache-incompatible: cache=streaming, blocks=sliding": {"cache": "streaming"},
    "cache-incompatible: cache.attention=block_causal": {"cache": {"name": "d2f", "attention": "block_causal"}},
    "cache-incompatible: cache=sliding, scheduler=lopa": {"scheduler": "lopa", "cache": "sliding"},
    "cache-incompatible: cache=sliding, blocks=pipeline": {"blocks": "pipeline", "cache": "sliding"},
    "blocks-incompatible: blocks=sliding, blocks=fixed": {"kind": "causal", "cache": "none"},
    "option-range: blocks.masks": {"blocks": SLIDING | {"masks": 0}},
    "option-range: blocks.max_width": {"blocks": SLIDING | {"max_width": 0}},
    "option-range: cache.every": {"cache": {"name": "sliding", "every": 0}},
    "option-range: cache.before": {"cache": {"name": "sliding", "before": -1}},
    "choice-unknown: cache.anchor='first'": {"cache": {"name": "sliding", "anchor": "first"}},
}


@each("sentence", REFUSED)
def test_refusals(sentence: str) -> None:
    with refused(sentence):
        sampler(**REFUSED[sentence])


def test_block_length_is_for_fixed_blocks() -> None:
    with refused("options-conflict: block_length, blocks=sliding"):
        sampler().generate([[1]], max_new_tokens=4, block_length=2)


def test_the_picture_and_the_commands_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = Sampler.from_pretrained("mini", device="cpu")
    fixed, slides, cached = (picture.decode(base, plugins)[0] for plugins in picture.PANELS.values())
    assert [len(forwards) for forwards in (fixed, slides, cached)] == [6, 5, 5]  # as the page says
    assert [one.window for one in slides[:3]] == [(0, 6), (2, 10), (2, 14)]
    assert all(all(one.computed) for one in slides) and not all(all(one.computed) for one in cached)
    assert picture.main(["--output", str(tmp_path / "window.png")]) == 0
    assert (tmp_path / "window.png").read_bytes().startswith(b"\x89PNG")
    (block, _) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines():
        assert main([*shlex.split(line, comments=True)[1:], "device=cpu", "stream=false"]) == 0, line
    assert capsys.readouterr().out.splitlines() == [
        "Bob, Carl, Clara, David, Harry, Karl, Nathan, Vera",
        "Ada, Cal, Dan",
        "Cal, Ben, Ada",
    ]
