"""Numbers of a `config.json` that describe no network, and fields of it that a class of transformers ignores."""

import json
import math
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, Qwen2Config

from dllm_sampler.errors import NoEffectWarning, UserError
from dllm_sampler.models import diffusion_gemma, huggingface, loading
from dllm_sampler.models.huggingface import unread
from tests.refusals import refused
from tests.sampling import each, few
from tests.unit.test_models_fields import FOLDERS, save

needs_gemma = pytest.mark.skipif(
    not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"), reason="this transformers has no DiffusionGemma"
)

ABSURD = [2**31, 10**18, 10**400, -1, 1.5, "x", True, math.nan, math.inf, 1e308, 1e-320, [], {"a": 1}, [2**31]]
SIZES = [
    (kind, key) for kind, (_, raw) in FOLDERS.items() for key in raw if key not in ("model_type", "use_bias")
] + [("llada2", "rope_theta"), ("llada2", "rms_norm_eps"), ("llada2", "routed_scaling_factor"),
     ("llada2", "block_size"), ("llada2", "partial_rotary_factor"), ("llada2", "num_shared_experts"),
     ("llada", "mlp_ratio"), ("llada2", "moe_shared_expert_intermediate_size"), ("llada", "rope_theta")]  # fmt: skip
FRACTIONS = ("rope_theta", "rms_norm_eps", "routed_scaling_factor", "partial_rotary_factor")  # 1.5 is one


@few("kind", FOLDERS)
def test_absurd_numbers_are_one_sentence_before_anything_is_built(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, kind)

    def build(_: object) -> None:
        raise AssertionError("a network was built")

    monkeypatch.setattr(loading, "Transformer", build)
    raw = FOLDERS[kind][1]
    for key in (key for which, key in SIZES if which == kind):
        for value in ABSURD:
            if (key in FRACTIONS and value in (1.5, 1e-320, 2**31)) or (key.endswith("_id") and value != 10**400):
                continue
            (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
            begun = time.perf_counter()
            with pytest.raises((UserError, AssertionError)) as caught:
                loading.load(tmp_path, device="cpu")
            if not key.endswith("_id"):  # tokens are compared with the vocabulary of the network
                assert caught.type is UserError, (key, value)
            assert key in str(caught.value) or key.endswith("_id"), (key, value, caught.value)
            assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
            assert time.perf_counter() - begun < 1


def test_more_layers_than_the_tensors_make(tmp_path: Path):
    save(tmp_path, num_hidden_layers=3)
    with refused("checkpoint-config-invalid: num_hidden_layers"):
        loading.load(tmp_path, device="cpu")


def test_sizes_whose_product_is_no_tensor_are_one_sentence(tmp_path: Path):
    """Each alone has room in the large tensor that the checkpoint holds beside the others."""
    save(tmp_path, "llada", d_model=2**20, embedding_size=2**20, mlp_hidden_size=2**20, n_heads=2, n_kv_heads=2)
    stored = {"model.transformer.blocks.1.attn_norm.weight": torch.zeros(2**20, dtype=torch.int8)}
    save_file(stored, tmp_path / "model.safetensors")
    with refused("checkpoint-tensors"):
        loading.load(tmp_path, device="cpu")


GEMMA = Path(__file__).parents[1] / "conformance/data/tiny-diffusion-gemma"


def gemma(folder: Path, text: dict[str, Any], whole: dict[str, Any]) -> None:
    shutil.copytree(GEMMA, folder, dirs_exist_ok=True)
    raw = json.loads((GEMMA / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **whole, "text_config": {**raw["text_config"], **text}}))
    diffusion_gemma.load(folder, None, None, torch.device("cpu"))


@needs_gemma
@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("final_logit_softcapping", (None, 0, -3.0, math.nan, "x", True)),
        ("sliding_window", (None, 0, -1, 2.5, 10**18)),
        ("top_k_experts", (0, 5, -1, None)),
        ("canvas_length", (None, 0, -1, 10**9, "x")),
        (
            "rope_parameters",
            (
                {"full_attention": {"rope_theta": 1e6}, "sliding_attention": None},
                {"full_attention": {}},
                {"full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
            ),
        ),
    ],
)
def test_numbers_that_transformers_takes_as_they_are(tmp_path: Path, key: str, values: tuple[Any, ...]):
    """Each was a traceback in the first step, or another network without a word."""
    for value in values:
        with pytest.raises(UserError, match=key) as caught:
            gemma(tmp_path, *(({}, {key: value}) if key == "canvas_length" else ({key: value}, {})))
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@needs_gemma
def test_what_a_class_of_transformers_does_not_know_is_told(tmp_path: Path):
    """It drops them, and computes something else than the checkpoint's author did."""
    with pytest.warns(NoEffectWarning, match=r"without effect: text_config.attn_logit_softcapping = 30"):
        gemma(tmp_path, {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemma(tmp_path, {}, {})
    bert = {"position_embedding_type": "absolute", "gradient_checkpointing": False, "hidden_act": "gelu"}
    assert unread(BertConfig(), bert) == {}
    assert unread(BertConfig(), bert | {"position_embedding_type": "relative_key"}) == {
        "position_embedding_type": "relative_key"
    }
    older = {"global_rope_theta": 160000.0, "global_attn_every_n_layers": 3, "norm_eps": 1e-5, "layer_norm_eps": 1e-5}
    for layers in (2, 3, 4):  # 3 is the default
        given: dict[str, Any] = older | {"global_attn_every_n_layers": layers}
        assert unread(ModernBertConfig(**given), given) == {}, "what it converts"
    assert unread(ModernBertConfig(), older | {"layer_norm_eps": 1e-6}) == {"layer_norm_eps": 1e-6}
    assert unread(Qwen2Config(), {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e6}) == {}


@each("layers", [0, 1])
def test_fewer_layers_than_a_masked_lm_has(tmp_path: Path, layers: int):
    """transformers leaves out the others."""
    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=1, intermediate_size=8)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": layers}))
    with refused(f"checkpoint-tensors: bert.encoder.layer.{layers}"):
        huggingface.load(tmp_path, None, None, torch.device("cpu"))
