"""diffu-GRPO (arXiv 2504.12216) by TRL's own GRPOTrainer: data, rewards, loss, logging and checkpoints are TRL's.

    pip install -c constraints.txt -e '.[train]' && python examples/trl_grpo.py --steps 20

Only public hooks are used. `rollout_func` answers prompts with a sampler. The model is one of transformers. Its forward
masks the whole answer and predicts all of its tokens at once, as diffu-GRPO scores them. For scores of each token by
the state it was committed from see `train_grpo.py`: TRL shows a model no states.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from dllm_sampler import Sampler
from dllm_sampler.models import saving
from dllm_sampler.models.transformer import Transformer

PROMPTS = ["latin: 1_3_, _3_1, 2___, _41_", "latin: 12__, __1_, 2__3, _3__", "shuffle: Ada, Ben, Cal, Dan"]


def variety(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Return a score for each answer: here, as many different characters as there are places."""
    return [len(set(text)) / max(len(text), 1) for text in completions]


class Masked(nn.Module):
    """A network that sees masks in place of an answer, as the backbone of a causal model.

    width: columns of the prompts in the batch, which TRL pads on the left
    """

    width = 0

    def __init__(self, network: Transformer, mask_id: int):
        super().__init__()
        self.network, self.mask_id = network, mask_id

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        """Return hidden states `[B, L, D]`, row i - 1 for token i, as a causal model has them."""
        there = attention_mask.bool()
        noisy = input_ids.clone()
        noisy[:, self.width :] = self.mask_id
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)

        def layer(index: int, own: Any, hidden: Tensor, rope: Any, rows: Tensor | None) -> Tensor:
            return own(hidden, rope, there[:, None, None])

        hidden = self.network(noisy, positions=positions, drive=layer)
        return SimpleNamespace(last_hidden_state=hidden.roll(-1, 1))


class Policy(PreTrainedModel):
    """A LLaDA-like network as TRL takes a model: a backbone, and a head of its own."""

    config_class = PreTrainedConfig
    base_model_prefix = "masked"

    def __init__(self, network: Transformer, mask_id: int):
        super().__init__(PreTrainedConfig())
        self.masked, self.generation_config = Masked(network, mask_id), GenerationConfig()

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.masked.network.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        """Return logits; TRL puts its fused head before this."""
        hidden = self.masked(input_ids, attention_mask).last_hidden_state
        return SimpleNamespace(logits=self.masked.network.lm_head(hidden))


def main(words: list[str] | None = None) -> float:
    """Train for a few steps and return the last mean reward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--group", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("trl-run"))
    options = parser.parse_args(words)

    sampler = Sampler.from_pretrained(
        options.model, dtype="float32", device="cpu", scheduler="ascending", temperature=1.0
    )
    denoiser: Any = sampler.denoiser
    tokenizer: Any = sampler.tokenizer
    policy = Policy(denoiser.transformer, denoiser.mask_id)
    settings = GRPOConfig(
        str(options.output), max_steps=options.steps, num_generations=options.group, max_completion_length=24,
        per_device_train_batch_size=len(PROMPTS) * options.group, learning_rate=3e-4, gradient_checkpointing=False,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip

    def roll_out(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return an answer to each prompt; these come repeated for each group."""
        seed = 1_000_003 * trainer.state.global_step + trainer.accelerator.process_index
        result = sampler.generate(prompts, max_new_tokens=24, seed=seed)
        ids = tokenizer(prompts)["input_ids"]
        policy.masked.width = max(map(len, ids))
        answers, recorded = result.tokens.tolist(), result.trace.logprob[:, result.trace.origin :].tolist()
        cut = [
            [row[:end] for row, end in zip(rows, result.lengths.tolist(), strict=True)] for rows in (answers, recorded)
        ]
        return {"prompt_ids": ids, "completion_ids": cut[0], "logprobs": cut[1]}

    data = Dataset.from_dict({"prompt": PROMPTS})
    rewards: Any = variety
    trainer = GRPOTrainer(
        policy, rewards, settings, train_dataset=data, processing_class=tokenizer, rollout_func=roll_out
    )
    trainer.train()
    saving.save(denoiser.transformer, denoiser.folder, options.output, None)
    found = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    for step, mean in enumerate(found, 1):
        print(f"step {step}  reward {mean:.3f}")
    return found[-1]


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
