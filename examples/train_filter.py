"""Train a filter that accepts predictions of a model as final (Learn2PD, arXiv 2509.25188), and sample with it.

python examples/train_filter.py --model mini --output my-filter
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dllm_sampler import Sampler
from dllm_sampler.models.filter import save
from dllm_sampler.training.filter import FilterConfig, FilterTrainer, collect

PROMPTS = [f"copy: {', '.join(names)}" for names in (["Ada"], ["Ada", "Ben"], ["Cal", "Ada", "Dan"], ["Ben", "Dan"])]


def main(words: list[str] | None = None) -> int:
    """Train on the model's own answers, and return the forwards of an answer with the filter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--output", default="my-filter")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--block", type=int, default=32)
    options = parser.parse_args(words)

    folder, blocks = Path(options.output), {"name": "fixed", "length": options.block}
    reference = Sampler.from_pretrained(options.model, scheduler="fixed", blocks=blocks, stop="none")
    records = [
        collect(reference, some, options.block, options.block, 4, folder / name)
        for name, some in (("training", PROMPTS[1:]), ("validation", PROMPTS[:1]))
    ]
    args = FilterConfig(
        str(folder), max_steps=options.steps, learning_rate=1e-2, eval_strategy="steps", eval_steps=50,
        save_strategy="no",
    )  # fmt: skip
    trainer = FilterTrainer(args, *records)
    trainer.train()
    save(folder / "filter.safetensors", trainer.best, reference.denoiser.spec, options.block)
    scheduler = {"name": "learn2pd", "filter": str(folder / "filter.safetensors")}
    sampler = Sampler.from_pretrained(options.model, scheduler=scheduler, blocks=blocks)
    return int(sampler.generate(PROMPTS[0], max_new_tokens=options.block).nfe[0])


if __name__ == "__main__":
    print(f"{main()} forwards")
