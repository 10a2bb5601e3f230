"""DEER from the command line."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dllm_sampler.cli.main import main


@pytest.fixture
def target(checkpoint: Path, tmp_path: Path) -> Path:
    """A random Llama with the checkpoint's tokenizer."""
    vocab = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=48, initializer_range=0.5, bos_token_id=None, eos_token_id=1,
        pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "target" / file).write_bytes((checkpoint / file).read_bytes())
    return tmp_path / "target"


def test_command_line(checkpoint: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The answers are the target's own; the figures say what was taken."""
    words = ["copy : Ada", "reverse : Ben , Cal", f"model={checkpoint}", f"target={target}", "max_new_tokens=9"]
    lines = {}
    for k in (0, 3):
        assert main([*words, f"draft_length={k}", f"output={tmp_path / 'out.jsonl'}"]) == 0
        lines[k] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    said = capsys.readouterr()
    assert "drafted tokens taken" in said.err
    assert said.out.splitlines()[:2] == said.out.splitlines()[2:]
    for plain, drafted in itertools.pairwise(lines.values()):
        for one, other in zip(plain, drafted, strict=True):
            assert one["tokens"] == other["tokens"]
            assert one["nfe"] == len(one["tokens"]) == len(one["accepted"])
            assert other["nfe"] == len(other["accepted"]) == max(other["step_map"]) + 1
            assert one["drafter_nfe"] == 0 < other["drafter_nfe"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["stream=true"], "stream=true and target="),
        (["block_length=4"], "block_length=4 has no effect with target="),
        (["scheduler=fixed"], "scheduler=fixed has no effect with target= unless drafts are scheduled"),
        (["scheduler.threshold=0.5"], "scheduler.threshold=0.5 has no effect with target= unless drafts are scheduled"),
        (["draft_length=-1"], "draft_length=-1 is invalid. Set a whole number of at least 0"),
        (["draft_scheduled=true", "temperature=1"], "(in Python scheduled=True) needs greedy decoding"),
        (["separator=[NONE]"], "separator='[NONE]'"),
        (["target=null"], "draft_length=3 has no effect without a verifier"),
        (["max_new_tokens=48"], "max_new_tokens=48"),
    ],
)
def test_command_line_mistakes(
    checkpoint: Path, target: Path, more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["copy : Ada", f"model={checkpoint}", f"target={target}", "draft_length=3", *more]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
