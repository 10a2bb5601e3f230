"""Distil a model from its own answers until it is sure of many tokens at once (dParallel, arXiv 2509.26488).

python examples/train_distill.py --model FOLDER --data examples/facts.jsonl --output my-model
"""

from __future__ import annotations

import argparse

from datasets import load_dataset

from dllm_sampler.training import DistillConfig, DistillTrainer


def main(words: list[str] | None = None) -> float:
    """Train, and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llada-8b")
    parser.add_argument("--data", default="examples/facts.jsonl")
    parser.add_argument("--output", default="my-model")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(words)

    data = load_dataset("json", data_files=options.data, split="train")
    args = DistillConfig(options.output, max_steps=options.steps, new_tokens=32, keep=False, logging_steps=1)
    trainer = DistillTrainer(options.model, args=args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line][-1]


if __name__ == "__main__":
    main()
