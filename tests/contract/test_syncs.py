"""A step never waits for the device: on a GPU each of these operations would stall the queue."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dllm_sampler.check.promises import check_reads
from dllm_sampler.check.reads import HostRead, no_host_reads, watched_steps
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.contract.cases import SILENT, Case, met
from tests.contract.test_overhead import ELSEWHERE
from tests.sampling import sampled


def reached(case: Case) -> list[tuple[str, object]]:
    """Return what a case meets: all but its scheduler, whose decisions `test_overhead` watches if it can."""
    own = [("scheduler", case.scheduler["name"])] if case.scheduler["name"] in ELSEWHERE else []
    return [*met(case, ("cache", "blocks", "stop", "guide", "traits")), *own]


@pytest.mark.parametrize("case", sampled(SILENT, reached, lambda case: case.id))
def test_a_step_reads_nothing(case: Case) -> None:
    check_reads(case, [0, 1], max_steps=4)


def test_a_scheduler_that_looks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Threshold.tell
    monkeypatch.setattr(Threshold, "tell", lambda *args: bool(args[1].done.all()) or tell(*args))
    with pytest.raises(HostRead), watched_steps():
        toys.sampler().generate(toys.PROMPTS, max_new_tokens=4)


MASK = torch.tensor([True, False, True])
OFFENDERS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[1]),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "boolean index": lambda x: x[x > 0],
    "boolean write": lambda x: x.index_put((MASK,), x[0]),
    "masked_select": lambda x: x.masked_select(MASK),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(MASK.long()),
    "host constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "list index": lambda x: x[[0, 1]],
    "other device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("name", OFFENDERS)
def test_the_watch_catches(name: str) -> None:
    with pytest.raises(HostRead), no_host_reads():
        OFFENDERS[name](torch.ones(3))


def test_the_watch_lets_the_rest_pass() -> None:
    x = torch.arange(3.0)
    with no_host_reads():
        y = torch.where(x > 1, x, 0.0).gather(0, x.long()).masked_fill(MASK, -torch.inf)
        y[1] = y[torch.arange(2)].amax()
    assert y.tolist() == [-torch.inf, 0.0, -torch.inf]
