"""Train a model on rewards for its own answers, each token scored by the state it was committed from (CJ-GRPO).

python examples/train_grpo.py --model mini --steps 20

A reward is a function in TRL's form. With `likelihood="masked"` the answers are scored as in diffu-GRPO.
"""

from __future__ import annotations

import argparse

from dllm_sampler.training import TrajectoryGRPOConfig, TrajectoryGRPOTrainer

PROMPTS = ["latin: 1_3_, _3_1, 2___, _41_", "latin: 12__, __1_, 2__3, _3__", "shuffle: Ada, Ben, Cal, Dan"]


def variety(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Return a score for each answer: here, as many different characters as there are places."""
    return [len(set(text)) / max(len(text), 1) for text in completions]


def main(words: list[str] | None = None) -> float:
    """Train for a few steps and return the last mean reward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--output", default="my-model")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(words)

    args = TrajectoryGRPOConfig(
        options.output, max_steps=options.steps, per_device_train_batch_size=3, num_generations=6, new_tokens=24,
        learning_rate=3e-4, rollout={"scheduler": "ascending", "temperature": 1.0}, logging_steps=1,
    )  # fmt: skip
    data = [{"prompt": prompt} for prompt in PROMPTS]
    trainer = TrajectoryGRPOTrainer(options.model, variety, args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line][-1]


if __name__ == "__main__":
    main()
