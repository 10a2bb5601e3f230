"""The canvas in the terminal."""

import io
import re
from typing import cast

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dllm_sampler import Sampler
from dllm_sampler.cli.live import Screen, figures, render
from dllm_sampler.cli.output import Totals
from dllm_sampler.result import Commits
from tests.sampling import each


@each("stop", ["prefix", "none", "truncate", "block"])
def test_the_streams_figures_are_those_of_the_last_line(stop: str) -> None:
    """What stands behind an end token is counted by neither."""
    mini = Sampler.from_pretrained("mini", device="cpu", stop=stop)
    totals = Totals()
    *_, last = mini.stream(["copy: Ada, Ben", "reverse: Ada, Ben, Cal, Dan"], max_new_tokens=32, block_length=8)
    assert last.result is not None
    totals.add(0, last.result, 1.0)
    shown = figures(last, mini.denoiser.spec.eos_ids)
    assert re.search(r"[\d.]+ tokens per forward", shown)[0] in totals.line("cpu")  # type: ignore[index]
    assert "12/12 tokens" in shown and "12 tokens in" in totals.line("cpu")


class Words:
    """A tokenizer of digits."""

    all_special_ids = (9,)

    def decode(self, ids: list[int]) -> str:
        return "".join(map(str, ids))


def test_noise_that_is_not_open_is_counted() -> None:
    tokenizer = cast(PreTrainedTokenizerBase, Words())
    ids, masked, steps = [1, 0, 2, 0, 0, 3, 0], [False, True, False, True, True, False, True], [0] * 7
    assert render(ids, masked, steps, tokenizer, open_end=3).plain == "1 ░░ 2 ... 2 more 3 ... 1 more"
    assert render(ids, masked, steps, tokenizer).plain == "1 ░░ 2 ░░ ░░ 3 ░░"
    assert render([0] * 64, [True] * 64, [0] * 64, tokenizer, open_end=2).plain == "░░ ░░ ... 62 more"


def test_a_stream_shows_what_is_open_and_nothing_behind_the_end() -> None:
    out = io.StringIO()
    mini = Sampler.from_pretrained("mini", device="cpu")
    screen = Screen(Console(file=out, width=400), ["1"], mini.tokenizer, 0, mini.denoiser.spec.eos_ids)
    for commits in mini.stream("copy: Ada, Ben", max_new_tokens=128, block_length=8, scheduler="fixed"):
        screen.show(commits)
    first, *_, last = out.getvalue().splitlines()
    assert first.count("░") <= 16 and "... 120 more" in first
    assert "░" not in last and "more" not in last and "Ada, Ben" in last


@each(("behind", "rate"), [(0, "0.50"), (6, "2.00")])
def test_tokens_behind_an_end_token_count_while_they_are_committed(behind: int, rate: str) -> None:
    """As with `stop=none`, which commits one a step: the rate does not fall."""
    tokens = torch.full((1, 8), 1)
    masked = torch.ones(1, 8, dtype=torch.bool)
    tokens[0, 1] = 9  # the end token
    masked[0, : 2 + behind] = False
    commits = Commits(4, tokens, masked, torch.zeros(1, 8, dtype=torch.long), torch.tensor([4]))
    assert figures(commits, (9,)) == f"step 4 · NFE 4 · {2 + behind}/{2 + behind} tokens · {rate} tokens per forward"
