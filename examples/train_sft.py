"""Fine-tune a masked-diffusion model on a JSON Lines file of prompts and completions, as TRL's trainers are used.

    python examples/train_sft.py --model FOLDER --data examples/facts.jsonl --output my-model

MaskedDiffusionTrainer is a Trainer of transformers: callbacks, trackers, accelerate and checkpoints are those of any.
"""

from __future__ import annotations

import argparse

from datasets import load_dataset

from dllm_sampler.training import MaskedDiffusionConfig, MaskedDiffusionTrainer


def main(words: list[str] | None = None) -> float:
    """Train, and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llada-8b")
    parser.add_argument("--data", default="examples/facts.jsonl")
    parser.add_argument("--output", default="my-model")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(words)

    data = load_dataset("json", data_files=options.data, split="train")
    args = MaskedDiffusionConfig(options.output, max_steps=options.steps, learning_rate=1e-4, logging_steps=1)
    trainer = MaskedDiffusionTrainer(options.model, args=args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line][-1]


if __name__ == "__main__":
    main()
