"""`Sampler.from_callable`: any function from tokens to logits is a model."""

from typing import Any

import torch
from torch import Tensor, nn

from dllm_sampler import Result, Sampler
from dllm_sampler.core.spec import ModelSpec
from tests import toys
from tests.refusals import refused
from tests.sampling import each, few

NUMBERS: dict[str, Any] = {"vocab_size": toys.VOCAB, "mask_id": toys.MASK, "eos_id": toys.EOS}
PLUGINS: list[dict[str, Any]] = [
    {"scheduler": {"name": "threshold", "threshold": 0.7}},
    {"scheduler": "klass", "temperature": 0.8},
    {"scheduler": {"name": "freedave", "draft": 2}},  # which asks about several candidates
    {"scheduler": "random_order", "stop": "none", "top_k": 5, "temperature": 1.0},
]


class Plain(nn.Module):
    """A module of a user's own, around a network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = toys.transformer()
        self.seen: list[tuple[torch.dtype, torch.dtype, torch.Size]] = []

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.seen.append((ids.dtype, mask.dtype, ids.shape))
        assert (ids[mask] >= 0).all() and mask[:, 0].all(), "padding is at the right"
        return self.network(ids, keys=mask)


@few("plugins", PLUGINS)
def test_a_function_answers_as_the_network_inside_it(plugins: dict[str, Any]) -> None:
    """Tokens, forwards and log-probabilities are those of the denoiser; each row is that row alone."""
    module = Plain()
    own = Sampler.from_callable(module, **NUMBERS, blocks={"name": "fixed", "length": 6}, **plugins)
    other = Sampler(toys.wrapped(module.network), cache="none", blocks={"name": "fixed", "length": 6}, **plugins)
    found, right = (one.generate(toys.PROMPTS, max_new_tokens=13, seed=toys.SEEDS) for one in (own, other))
    assert torch.equal(found.tokens, right.tokens) and torch.equal(found.nfe, right.nfe)
    torch.testing.assert_close(found.trace.logprob, right.trace.logprob, atol=1e-12, rtol=0)
    for row, (prompt, seed) in enumerate(zip(toys.PROMPTS, toys.SEEDS, strict=True)):
        alone = own.generate([prompt], max_new_tokens=13, seed=seed)
        assert torch.equal(alone.tokens[0], found.tokens[row]) and alone.nfe[0] == found.nfe[row]
    many = own.generate_many(toys.PROMPTS, batch_size=2, max_new_tokens=13, seed=toys.SEEDS, order="given")
    assert torch.equal(Result.stack(many).tokens, found.tokens)
    assert {kinds[:2] for kinds in module.seen} == {(torch.int64, torch.bool)}


def test_what_a_function_says_of_itself() -> None:
    module, table = Plain().float(), torch.zeros(1, 1, toys.VOCAB)
    assert Sampler.from_callable(module, **NUMBERS).denoiser.spec.dtype == torch.float32
    made = Sampler.from_callable(
        lambda ids, mask: table.expand(*ids.shape, -1), **NUMBERS, pad_id=3, dtype="float64", device="cpu",
        max_positions=9, tokenizer=toys.tokenizer(), stop="none",
    )  # fmt: skip
    spec = made.denoiser.spec
    assert (spec.pad_id, spec.dtype, spec.device.type, spec.cacheable) == (3, torch.float64, "cpu", False)
    assert made.generate([5], max_new_tokens=8).texts is not None and not table.any()
    with refused("context-exceeded"):
        made.generate([5, 6], max_new_tokens=8)


@each(
    ("function", "sentence"),
    [
        (lambda ids, mask: torch.zeros(*ids.shape, 7), "function-result: float32, [1, 7]"),
        (lambda ids, mask: torch.zeros(len(ids), toys.VOCAB), "function-result: float32, [1, 40]"),
        (lambda ids, mask: torch.zeros(*ids.shape, toys.VOCAB).long(), "function-result: int64"),
        (lambda ids, mask: torch.zeros(*ids.shape, toys.VOCAB, device="meta"), "function-result"),
        (lambda ids, mask: None, "function-result: logits_fn"),
    ],
)
def test_functions_that_return_something_else(function: Any, sentence: str) -> None:
    with refused(sentence):
        Sampler.from_callable(function, **NUMBERS).generate([1, 2], max_new_tokens=2)


def test_what_no_function_can_be() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"logits_fn": 3}, "function-invalid: logits_fn"),
        ({"logits_fn": lambda ids: ids}, "function-invalid: logits_fn"),
        ({"eos_id": None}, "token-outside-vocabulary: eos_id=null"),
        ({"mask_id": 40}, "token-outside-vocabulary: mask_id, 40"),
        ({"eos_id": True}, "token-outside-vocabulary: eos_id"),
        ({"mask_id": toys.EOS}, "mask-token-invalid: mask_id, eos_id, 34"),
        ({"eos_id": (toys.EOS, toys.MASK)}, "mask-token-invalid: mask_id, eos_id, 39"),
        ({"cache": "dual"}, "cache-incompatible: cache=dual, cache=none"),
    ]
    for changes, sentence in cases:
        given: dict[str, Any] = {"logits_fn": Plain(), **NUMBERS, **changes}
        with refused(sentence):
            Sampler.from_callable(**given)
    with refused("model-invalid: Sampler.from_callable"):
        Sampler(Plain())  # pyright: ignore[reportArgumentType]


def test_an_attribute_error_inside_a_spec_is_shown() -> None:
    class Broken:
        @property
        def spec(self) -> ModelSpec:
            return self.missing  # pyright: ignore

    class BrokenModule(nn.Module):
        spec = Broken.spec

    for one in (Broken(), BrokenModule()):
        with refused("model-invalid: 'missing'") as caught:
            Sampler(one)  # pyright: ignore[reportArgumentType]
        assert isinstance(caught.value.__cause__, AttributeError)
