"""What a mechanism does to a run: one run with it against another without, as `test_fired.py` compares them."""

from itertools import pairwise

import torch

from dllm_sampler import Result
from tests import toys

TOKENS = 15


def answers_differ(one: Result, two: Result) -> bool:
    return not torch.equal(one.tokens, two.tokens)


def skips_rows(one: Result, two: Result) -> bool:
    length = two.trace.end - two.trace.begin
    return bool((one.trace.rows < one.nfe * length).all() and torch.equal(two.trace.rows, two.nfe * length))


def computes_less(one: Result, two: Result) -> bool:
    """Fewer positions in a forward, for which answers change."""
    return bool((one.trace.rows / one.nfe < two.trace.rows / two.nfe).all()) and answers_differ(one, two)


def parallel(one: Result, two: Result) -> bool:
    """Several tokens in some forward, and not the same number in each."""
    counts = [len(step) for row in range(len(toys.PROMPTS)) for step in one.trace.steps(row)]
    return max(counts) > 1 and len(set(counts)) > 1 and bool((one.nfe < two.nfe).any())


def saves_forwards(one: Result, two: Result) -> bool:
    return bool((one.nfe < two.nfe).any() and (one.lengths == two.lengths).all())


def cuts_the_context(one: Result, two: Result) -> bool:
    """Rows are shorter, fewer positions were computed, and predictions before the end token changed."""
    before = torch.arange(TOKENS) < torch.minimum(one.lengths, two.lengths)[:, None]
    origin = one.trace.origin
    changed = ((one.trace.logprob[:, origin:] - two.trace.logprob[:, origin:]).abs() > 0.01) & before
    return bool((one.trace.end < two.trace.end).any() and (one.trace.rows < two.trace.rows).any() and changed.any())


def fills_the_end(one: Result, two: Result) -> bool:
    """Some row has more end tokens in fewer forwards, as many columns as before, and other predictions."""
    more = (one.trace.decoded == toys.EOS).sum(1) > (two.trace.decoded == toys.EOS).sum(1)
    apart = (one.trace.logprob - two.trace.logprob).abs().amax() > 0.01
    return bool((more & (one.nfe < two.nfe)).any() and apart) and torch.equal(one.trace.end, two.trace.end)


def other_order(one: Result, two: Result) -> bool:
    """The same number of forwards, other positions in them."""
    return torch.equal(one.nfe, two.nfe) and not torch.equal(one.trace.generated, two.trace.generated)


def fewer_forwards(one: Result, two: Result) -> bool:
    return bool((one.nfe <= two.nfe).all() and (one.nfe < two.nfe).any())


def same_in_fewer(one: Result, two: Result) -> bool:
    """Equal answers, fewer forwards."""
    return torch.equal(one.tokens, two.tokens) and bool(one.nfe.sum() < two.nfe.sum())


def fewer_but_other(one: Result, two: Result) -> bool:
    """Fewer forwards, of more positions, and other tokens."""
    wider = (one.trace.rows / one.nfe > two.trace.rows / two.nfe).all()
    return fewer_forwards(one, two) and bool(wider) and answers_differ(one, two)


def takes_back(one: Result, two: Result) -> bool:
    """Tokens were replaced or filled again, in more forwards than where none is, and others stand in the end."""
    taken = bool(one.trace.revised.any()) and not bool(two.trace.revised.any())
    return taken and bool((one.nfe > two.nfe).any()) and answers_differ(one, two)


def fills_again(one: Result, two: Result) -> bool:
    """At one position a step, two final tokens in one forward mean that the one of another forward was taken back."""
    return torch.equal(one.nfe, two.nfe) and bool((one.trace.generated.sort(1).values.diff(dim=1) == 0).any())


def refreshes(one: Result, two: Result) -> bool:
    """Between the openings of blocks whole forwards were made, and they changed predictions."""
    apart = (one.trace.logprob - two.trace.logprob).abs().amax() > 0.01
    return torch.equal(one.nfe, two.nfe) and bool((one.trace.rows > two.trace.rows).all() and apart)


def serves_and_changes(one: Result, two: Result) -> bool:
    """Fewer positions were computed, and predictions were other than without a cache."""
    return skips_rows(one, two) and bool((one.trace.logprob - two.trace.logprob).abs().amax() > 0.01)


def more_kinds(one: Result, two: Result) -> bool:
    """More kinds of tokens in the answers, in as many forwards."""
    kinds = [toys.reward([row.tolist() for row in found.trace.decoded]) for found in (one, two)]
    return sum(kinds[0]) > sum(kinds[1]) and torch.equal(one.nfe, two.nfe)


def accepts_and_rejects(one: Result, two: Result) -> bool:
    """Every round was verified: half of the forwards commit nothing, some commit several tokens, some not all."""
    steps = [[len(step) for step in one.trace.steps(row)] for row in range(len(toys.PROMPTS))]
    blocks = torch.tensor([(len(prompt) + TOKENS + 5) // 6 - len(prompt) // 6 for prompt in toys.PROMPTS])
    rounds = torch.tensor([sum(count > 0 for count in row) for row in steps])
    halves = torch.equal(2 * rounds, one.nfe) and max(map(max, steps)) > 1
    return halves and bool((rounds > blocks).all()) and answers_differ(one, two)


def stays_greedy(one: Result, two: Result) -> bool:
    """Drafts commit nothing, a verification several tokens at times, and these are those of one token per forward."""
    steps = [len(step) for row in range(len(toys.PROMPTS)) for step in one.trace.steps(row)]
    return torch.equal(one.tokens, two.tokens) and steps.count(0) > 0 and max(steps) > 1


def inserts(one: Result, two: Result) -> bool:
    """A first forward committed nothing; canvases grew, and columns were inserted between older ones."""
    assert one.trace.born is not None
    born = one.trace.born[:, one.trace.origin :]
    between = (born[:, :-1] > born[:, 1:]) & (
        torch.arange(TOKENS - 1) < (one.trace.end - one.trace.origin - 1)[:, None]
    )
    late = (one.trace.generated != 0).all() and bool((one.trace.end - one.trace.origin > 4).all())
    return bool(between.any() and late and (two.trace.born is None))


def grows_and_shrinks(one: Result, two: Result) -> bool:
    """From 6 columns some canvas grew, and some had columns cut off, one of them all."""
    size = one.trace.end - one.trace.origin
    return bool((size > 6).any() and (size == 0).any() and one.trace.revised.any() and not one.trace.revised.all())


def fills_at_once(one: Result, two: Result) -> bool:
    """A row's last forward fills several masks where the other one fills one."""
    last = (one.trace.generated == one.nfe[:, None] - 1).sum(1)
    return fewer_forwards(one, two) and bool((last > 1).any())


def decodes_ahead(one: Result, two: Result) -> bool:
    """Blocks of 4 have commits while the one before has masks, and in one forward with it; else each waits."""
    ahead, together = ([found.trace.generated[:, at : at + 4] for at in (0, 4, 8, 12)] for found in (one, two))
    overlap = [[bool((b.amin(1) <= a.amax(1)).any()) for a, b in pairwise(found)] for found in (ahead, together)]
    at_once = bool((ahead[0][:, :, None] == ahead[1][:, None]).any())
    return all(overlap[0]) and not any(overlap[1]) and at_once
