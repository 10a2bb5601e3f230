"""Align a drafter with an autoregressive target in two stages (DEER, arXiv 2512.15176).

python examples/train_deer.py --model FOLDER --target FOLDER --data examples/facts.jsonl --output my-drafter

The target is any causal model of transformers with the drafter's tokenizer. It writes the answers that the drafter
learns. `dllm-train train=deer` does the same.
"""

from __future__ import annotations

import argparse
from typing import Any

from datasets import load_dataset

from dllm_sampler import Sampler, SpeculativeSampler
from dllm_sampler.training import DeerConfig, DeerTrainer


def main(words: list[str] | None = None) -> float:
    """Train both stages, and return how many drafted tokens the target then accepts in a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dream-7b")
    parser.add_argument("--target", default="Qwen/Qwen2.5-7B-Instruct")
    parser.add_argument("--data", default="examples/facts.jsonl")
    parser.add_argument("--output", default="my-drafter")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(words)

    data: Any = load_dataset("json", data_files=options.data, split="train")
    sampler = Sampler.from_pretrained(options.model, dtype="float32")
    result = SpeculativeSampler(sampler, options.target, draft_length=0).generate([*data["prompt"]], max_new_tokens=24)
    answers = zip(data["prompt"], result.tokens.tolist(), result.lengths.tolist(), strict=True)
    rows = [{"prompt": prompt, "completion": tokens[:length]} for prompt, tokens, length in answers]
    for stage in ("distill", "refine"):
        args = DeerConfig(options.output, stage=stage, draft_length=8, max_steps=options.steps, learning_rate=1e-4)
        trainer = DeerTrainer(sampler, args, rows)
        trainer.train()
    trainer.save_model()
    drafter = Sampler.from_pretrained(options.output, dtype="float32")
    pair = SpeculativeSampler(drafter, options.target, draft_length=8)
    return pair.generate(rows[0]["prompt"], max_new_tokens=24).mean_accepted


if __name__ == "__main__":
    print(f"{main():.2f} accepted tokens a round")
