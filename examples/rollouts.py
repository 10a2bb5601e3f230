"""The sampler as rollout engine of a loop of your own: sample, judge, score the trajectories, update.

    python examples/rollouts.py --steps 20

A module in training is sampled from as it is; nothing is copied and no mode changes. TRL-style rewards work unchanged.
"""

from __future__ import annotations

import argparse

import torch

from dllm_sampler import Result, Sampler
from dllm_sampler.training.policy import advantages
from dllm_sampler.training.trajectory import Trajectories, check

PROMPTS = ["latin: 1_3_, _3_1, 2___, _41_", "latin: 12__, __1_, 2__3, _3__", "shuffle: Ada, Ben, Cal, Dan"]


def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Reward answers: here, by the share of different characters."""
    return [len(set(text)) / max(len(text), 1) for text in completions]


def main(words: list[str] | None = None) -> float:
    """Train for a few steps and return the last mean reward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--group", type=int, default=6)
    options = parser.parse_args(words)

    sampler = Sampler.from_pretrained("mini", dtype="float32", device="cpu", scheduler="ascending", temperature=1.0)
    check(sampler)  # can its trajectories be scored again?
    model, spec = sampler.denoiser.transformer, sampler.spec  # pyright: ignore[reportAttributeAccessIssue]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    mean = 0.0
    for step in range(options.steps):
        answers = sampler.generate_many(PROMPTS, samples=options.group, max_new_tokens=24, seed=1000 * step)
        result = Result.stack(answers)
        prompts = [prompt for prompt in PROMPTS for _ in range(options.group)]
        scores = torch.tensor(reward(prompts, result.texts or []), dtype=torch.float64)
        advantage = advantages(scores, options.group, scale=False)
        view = Trajectories(result.trace, spec)  # each token with the state it was committed from
        optimizer.zero_grad()
        for chunk in view.chunks(batch_tokens=8192):  # no more activations than of one chunk
            logprob, _ = chunk.score(model)
            weight = view.weight[chunk.row[:, None], chunk.columns] * advantage[chunk.row, None] / len(scores)
            (-(weight * chunk.there) * logprob).sum().backward()
        optimizer.step()
        mean = float(scores.mean())
        print(f"step {step + 1}  reward {mean:.3f}")
    return mean


if __name__ == "__main__":
    main()
