"""The denoisers: answers for asked positions, live modules left alone, guidance, masked LMs of transformers."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Cache, Denoiser
from dllm_sampler.core.values import Candidates, Canvas, Query, Spent
from dllm_sampler.engine import layout
from dllm_sampler.models import fused
from dllm_sampler.models.cfg import GuidedDenoiser, guided, laid_out
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.diffusion_gemma import Memory
from dllm_sampler.models.huggingface import cache_keyword
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.models.uniform import _Text
from tests import toys
from tests.refusals import refused
from tests.sampling import each

TINY = toys.transformer(kv_heads=2).config
PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
LENGTH = 5 + 4
close = partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)


def denoiser(shift: bool = False, dtype: torch.dtype = torch.float64) -> TransformerDenoiser:
    torch.manual_seed(0)
    return TransformerDenoiser(Transformer(TINY).to(dtype), mask_id=39, eos_id=38, pad_id=37, shift=shift)


def canvas_of(model: Denoiser, prompts: list[list[int]] = PROMPTS) -> Canvas:
    return layout.canvas(prompts, 4, [0] * len(prompts), model.spec, FixedBlocks(4), CounterNoise(), False)


def ask(model: Denoiser, canvas: Canvas, query: Query, cache: Cache | None = None) -> tuple[Tensor, Spent]:
    """Logits `[B, K, Q, V]` and what they cost."""
    live = (cache or NoCache()).init(canvas, model.spec)
    plan = toys.planned(canvas, query, model.spec, live)
    hidden, spent = model(canvas, query, plan)
    return plan.head_rows.spread(model.head(hidden)), spent


def test_each_row_of_a_padded_batch_answers_as_if_alone():
    model = denoiser()
    canvas = canvas_of(model)
    logits, spent = ask(model, canvas, Query.window(canvas))
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt + [39] * 4])
        close(logits[row, 0], model.transformer(ids)[0, len(prompt) :].detach())
    assert spent.nfe.tolist() == [1, 1, 1]
    assert spent.computed.tolist() == [9, 6, 7]


def test_shifted_models_answer_from_the_row_before():
    model = denoiser(shift=True)
    canvas = canvas_of(model)
    positions = torch.tensor([[0, 1, 6, LENGTH], [0, 3, 4, 5], [2, 6, LENGTH, LENGTH]])
    logits, _ = ask(model, canvas, Query.at(canvas, positions))
    for row, prompt in enumerate(PROMPTS):
        raw = model.transformer(torch.tensor([prompt + [39] * 4]))[0].detach()
        for place, column in enumerate(positions[row].tolist()):
            if column < LENGTH:  # the rest is filler
                close(logits[row, 0, place], raw[max(column - 1, 0)])


def test_hypotheses_and_cost_of_candidates():
    model = denoiser()
    canvas = canvas_of(model)
    positions = torch.tensor([[5, 7], [6, LENGTH], [5, 8]])
    guesses = torch.randint(0, 37, (3, 2, 2))
    live = torch.tensor([[True, True], [True, False], [True, True]])
    query = Query(positions, guesses, candidates=Candidates(live))
    one = [Query(positions, guesses[:, [k]]) for k in range(2)]
    alone = torch.cat([ask(model, canvas, each)[0] for each in one], 1)
    both, spent = ask(model, canvas, query)
    close(both[[0, 2]], alone[[0, 2]])
    close(both[1, 0, 0], alone[1, 0, 0])
    assert (both[1, 1] == 0).all(), "a candidate that is not alive has no answer"
    assert spent.computed.tolist() == [18, 6, 14]
    ids = torch.tensor([[1, 2, 3, 4, 5, guesses[0, 1, 0], 39, guesses[0, 1, 1], 39]])
    close(alone[0, 1], model.transformer(ids)[0, [5, 7]].detach())


def test_finished_rows_cost_nothing():
    model = denoiser()
    canvas = canvas_of(model)
    canvas = replace(canvas, done=torch.tensor([False, True, False]))
    _, spent = ask(model, canvas, Query.window(canvas))
    assert spent.nfe.tolist() == [1, 0, 1]
    assert spent.computed.tolist() == [9, 0, 7]


def test_what_is_no_transformer_is_refused():
    with refused("model-invalid: dllm_sampler"):
        TransformerDenoiser(nn.Linear(2, 2), mask_id=0, eos_id=1)
    with refused("token-outside-vocabulary: eos_id, 40"):
        TransformerDenoiser(Transformer(TINY), mask_id=39, eos_id=40)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mask_id": "x"}, "token-outside-vocabulary: mask_id='x'"),
        ({"eos_id": None}, "end-token-missing: eos_id=null"),
        ({"eos_id": [[1]]}, "token-outside-vocabulary: eos_id=[1]"),
        ({"attention": "x"}, "choice-unknown: attention='x'"),
        ({"blocks_from": "x"}, "choice-unknown: blocks_from='x'"),
        ({"block_length": 0}, "option-range: block_length=0"),
        ({"device": "cpu"}, "option-type: device='cpu'"),
    ]
    for change, refusal in wrong:
        with refused(refusal):
            TransformerDenoiser(Transformer(TINY), **{"mask_id": 39, "eos_id": 38, **change})


@each("cache", [NoCache(), DualCache()])
def test_guidance_mixes_two_branches(cache: Cache):
    model = denoiser()
    canvas = canvas_of(model)
    query = Query.window(canvas)
    logits, spent = ask(guided(model, 0.5), canvas, query, cache)
    assert spent.nfe.tolist() == [1, 1, 1]
    assert spent.computed.tolist() == [18, 12, 14]
    conditional, _ = ask(model, canvas, query)
    blank = replace(canvas, ids=canvas.ids.masked_fill(canvas.layout.frozen, 39))
    unconditional, _ = ask(model, blank, query)
    close(logits, unconditional + 1.5 * (conditional - unconditional))


def test_guidance_of_strength_zero_is_the_model_itself():
    model = denoiser()
    assert guided(model, 0) is model
    assert isinstance(guided(model, 1), GuidedDenoiser)
    for scale in (-1.0, float("nan"), float("inf")):
        with refused("option-range: model.cfg_scale"):
            guided(model, scale)


def masked_lm(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForMaskedLM

    sizes: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 34, "pad_token_id": 1, "eos_token_id": 2,
        "bos_token_id": 0, "cls_token_id": 0, "sep_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():  # fresh weights are so small that positions would hardly matter
        for weight in model.parameters():
            weight.mul_(10) if weight.dim() > 1 else None
    return model


@each("kind", ["bert", "roberta", "modernbert", "distilbert"])
def test_masked_language_models(kind: str):
    from dllm_sampler.models.huggingface import MaskedLMDenoiser

    network = masked_lm(kind)
    model = MaskedLMDenoiser(network, mask_id=39, eos_id=2, pad_id=1)
    assert not model.spec.cacheable
    assert model.spec.max_positions == (32 if kind == "roberta" else 34)
    canvas = canvas_of(model)
    logits, spent = ask(model, canvas, Query.window(canvas))
    assert spent.computed.tolist() == [9, 6, 7]
    for row, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            alone = network(input_ids=torch.tensor([prompt + [39] * 4])).logits[0]
        torch.testing.assert_close(logits[row, 0], alone[len(prompt) :], atol=1e-4, rtol=1e-4)


def test_masked_language_models_load(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from dllm_sampler.models import huggingface
    from dllm_sampler.models.loading import load

    network = masked_lm("bert")
    network.save_pretrained(tmp_path)
    with refused("mask-token-missing"):
        load(tmp_path, device="cpu")
    words = Tokenizer(WordLevel({"a": 7, "[MASK]": 39, "[SEP]": 2, "[PAD]": 1, "?": 0}, unk_token="?"))
    special = {"mask_token": "[MASK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "?"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path)
    loaded = load(tmp_path, device="cpu")
    spec = loaded.denoiser.spec
    assert (spec.mask_id, spec.eos_id, spec.pad_id, spec.cacheable) == (39, 2, 1, False)
    canvas = canvas_of(loaded.denoiser)
    query = Query.window(canvas)
    live = huggingface.wrap(network, loaded.tokenizer)
    torch.testing.assert_close(ask(loaded.denoiser, canvas, query)[0], ask(live, canvas, query)[0])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with refused("checkpoint-pickled"):
        load(tmp_path, device="cpu")


@each("scale", [0.0, 1.5])
def test_weights_lie_side_by_side_where_kernels_multiply_them_together(scale: float) -> None:
    """Under guidance too; without such kernels nothing is moved."""
    model = toys.transformer()
    projections = [getattr(model.layers[0], name).weight.data for name in ("q_proj", "k_proj", "v_proj")]
    plain, fast = (cast(Any, SimpleNamespace(layer=layer)) for layer in (None, object()))
    denoiser = guided(toys.wrapped(model), scale)
    laid_out(denoiser, plain)
    assert fused.adjacent(*projections) is None
    laid_out(denoiser, fast)
    moved = [getattr(model.layers[0], name).weight.data for name in ("q_proj", "k_proj", "v_proj")]
    assert fused.adjacent(*moved) is not None
    assert all(map(torch.equal, moved, projections))


def test_the_cache_goes_by_the_name_that_a_model_has_for_it() -> None:
    """transformers 5.24 renamed `past_key_values` to `cache`, and its layers hand more arguments to `update`."""

    class Older(nn.Module):
        def forward(self, ids: Any, past_key_values: Any = None, **_: Any) -> Any: ...

    class Newer(nn.Module):
        def forward(self, ids: Any, cache: Any = None, **_: Any) -> Any: ...

    assert [cache_keyword(Older), cache_keyword(Newer)] == ["past_key_values", "cache"]
    keys, canvas = torch.arange(12.0).view(1, 1, 3, 4), canvas_of(denoiser(), [[1, 2]])
    memory = Memory(1, canvas)
    memory.columns = torch.tensor([[0, 1, 2]])
    for one in (memory, _Text()):
        stored, _ = one.update(keys, keys, 0, kwargs={"sliding_window": 4})
        assert torch.equal(stored[:, :, :3], keys)
