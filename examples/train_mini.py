"""Train a masked-diffusion model from scratch on the tasks of `mini`, small enough for one CPU core.

python examples/train_mini.py --steps 200 --output my-mini
"""

from __future__ import annotations

import argparse

from dllm_sampler import Sampler
from dllm_sampler.training import MiniConfig, MiniTrainer

SHAPE = {
    "hidden_size": 64, "intermediate_size": 176, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32,
    "max_positions": 128,
}  # fmt: skip
DATA = {
    "size": 1024, "batch_tokens": 640, "phases": {"0": {"copy": 1, "sort": 1}}, "tails": [1.0], "long": 0.0,
    "max_response": 32,
}  # fmt: skip


def main(words: list[str] | None = None) -> str:
    """Train, and return an answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="my-mini")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(words)

    args = MiniConfig(options.output, max_steps=options.steps, learning_rate=1e-3, model=SHAPE, data=DATA)
    trainer = MiniTrainer(args)
    trainer.train()
    trainer.save_model()
    return (Sampler.from_pretrained(options.output).generate("copy: Ada, Ben", max_new_tokens=8).texts or [""])[0]


if __name__ == "__main__":
    print(main())
