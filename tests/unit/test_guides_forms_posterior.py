"""Confidence from the law of each token given the form: against every string there is."""

import itertools
from dataclasses import replace

import pytest
import torch

from dllm_sampler import Sampler
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.statistics import measure
from dllm_sampler.core.values import Query
from dllm_sampler.engine.readout import read
from dllm_sampler.guides import EndTokens, Temperature
from tests import toys
from tests.forms import END, LENGTH, MASK, PATTERNS, VOCAB, built, laid_out, law, ruled, strings
from tests.sampling import crossed, each


@pytest.mark.parametrize(
    ("pattern", "temperature"),
    crossed([*PATTERNS, "(?s).*"], [None, Temperature(0.6), Temperature(0.6, measured=True)], together=0),
)
def test_the_posterior_is_that_of_all_strings(pattern: str, temperature: Temperature | None) -> None:
    """All statistics: some masks are not asked about, some that stands is; rows end early; ids beyond the tokenizer."""
    generator, vocab, needs = torch.Generator().manual_seed(6), 9, {"margin", "gap", "entropy", "current", "logits"}
    rule = ruled(pattern, posterior=True, vocab=vocab)
    guides = rule.guides if temperature is None else (temperature, *rule.guides)
    vars(rule.guides[0]).update(drawn=temperature is not None)
    rule = rule._replace(guides=guides, needs=frozenset(needs))
    legal = [one for one in strings(pattern) if one[3] == 4]
    for witness, size in itertools.product(legal[:: max(1, len(legal) // 5)], (3, 4)):
        free = torch.rand(2, LENGTH, generator=generator) < 0.7
        free[:, 1], free[:, size:] = True, False
        canvas = laid_out(free.tolist(), [witness, witness])
        canvas = replace(canvas, end=torch.tensor([size, size]))
        columns = torch.tensor([[1, 2, LENGTH], [0, 1, 2]])
        ids = canvas.ids.gather(1, columns)[:, None].repeat(1, 2, 1)
        ids[1, 1, 1] = witness[1]  # another hypothesis
        query = replace(Query.at(canvas, columns), ids=ids)
        logits = 2 * torch.randn(12, vocab, generator=generator).double()
        found = read(logits.clone(), canvas, HeadRows.every(query), rule)
        assert found.logits is not None
        cold = logits / 0.6 if temperature is not None and temperature.measured else logits
        cold[:, MASK] = -torch.inf
        for row, candidate in itertools.product(range(2), range(2)):
            there = [at for at in range(3) if int(columns[row, at]) < size]
            places = columns[row, there].tolist()
            stands = torch.where(canvas.masked[row, :LENGTH], MASK, torch.tensor(witness))
            stands[places] = ids[row, candidate, there]
            own = law(pattern, stands, cold.view(2, 2, 3, vocab)[row, candidate, there], places, size)
            torch.testing.assert_close(found.logits[row, candidate, there].softmax(-1), own)
            token, current = found.token[row, candidate, there], ids[row, candidate, there]
            wanted = measure(own.log(), token, current, frozenset(needs))
            for name in ("confidence", "margin", "gap", "entropy", "current"):
                torch.testing.assert_close(getattr(found, name)[row, candidate, there], getattr(wanted, name), msg=name)


@each("ban", [END, 0])
def test_a_posterior_where_all_that_fits_is_forbidden(ban: int) -> None:
    """Then nothing else is possible."""
    rule = ruled("a", posterior=True)
    rule = rule._replace(guides=(EndTokens("ban", (ban, 3, 4)), *rule.guides))
    canvas = laid_out([[True] * LENGTH], [[0] * LENGTH])
    found = read(torch.randn(4, VOCAB).double(), canvas, HeadRows.every(Query.window(canvas)), rule)
    assert built("a").accepted(found.token[0, 0].tolist()) and bool(found.confidence.isfinite().all())


def test_tokens_that_stand_or_fall_together_tie() -> None:
    """Exactly, so that no rounding ranks them; what the form decides has confidence 1."""
    guide = {"name": "regex", "pattern": "(abcdefgh|bcdefgha)ij", "posterior": True}
    sampler = toys.sampler("llada", scheduler={"name": "fixed", "steps": 1}, guide=guide)
    found = sampler.generate([[at, 3] for at in range(20)], max_new_tokens=10).trace.logprob[:, 2:]  # of the answer
    linked = found[:, 3:6]  # there is no token that joins any of these with another letter
    assert torch.equal(linked, linked[:, :1].expand(-1, 3)) and bool((linked < 0).any())
    assert bool((found[:, 6:8] == 0).all())


def test_a_posterior_commits_what_the_form_decides() -> None:
    """The model would not write these names, and is sure of nothing else."""
    prompts, nfe = ["shuffle: Eve, Tom, Zoe, Amy", "copy: Max"], []
    for posterior in (False, True):
        guide = {"name": "choices", "choices": ["Ada, Ben, Cal", "Ada, Ben, Dan"], "posterior": posterior}
        sampler = Sampler.from_pretrained("mini", device="cpu", scheduler="threshold", guide=guide)
        found = sampler.generate(prompts, max_new_tokens=12)
        assert found.texts is not None and {text[:8] for text in found.texts} == {"Ada, Ben"}
        nfe.append(int(found.nfe.sum()))
    assert nfe[1] * 2 <= nfe[0]
