"""Rollouts of this sampler in TRL's GRPOTrainer: data, rewards, loss, logging and checkpoints are TRL's.

    pip install -c constraints.txt -e '.[trl]' && python examples/trl_grpo.py --steps 20

TRL asks a trainer for two things that a masked-diffusion model does in its own way: to answer prompts, and to say how
likely the answers are. Each token is scored by the state that it was committed from, as in CJ-GRPO (arXiv 2509.23924).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from dllm_sampler import Sampler, Trace
from dllm_sampler.models import saving
from dllm_sampler.training.trajectory import check, trajectories

PROMPTS = ["latin: 1_3_, _3_1, 2___, _41_", "latin: 12__, __1_, 2__3, _3__", "shuffle: Ada, Ben, Cal, Dan"]


def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """What is wanted of the answers: here, as many different characters as there are places."""
    return [len(set(text)) / max(len(text), 1) for text in completions]


class Policy(PreTrainedModel):
    """The network as transformers' Trainer wants a model."""

    config_class = PreTrainedConfig

    def __init__(self, network: nn.Module):
        super().__init__(PreTrainedConfig())
        self.network, self.generation_config = network, GenerationConfig()

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """The network's own."""
        return self.network(*args, **options)


class DiffusionGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with the answers of a sampler; the model that it trains is the sampler's."""

    def __init__(self, sampler: Sampler, **options: Any):
        check(sampler)  # can its trajectories be scored again?
        self._sampler, self._traces = sampler, dict[bool, Trace]()
        self.network: nn.Module = sampler.denoiser.transformer  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(model=Policy(self.network), processing_class=sampler.tokenizer, **options)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        """Tokens of an answer to each prompt, and their log-probabilities; prompts come repeated for each group."""
        assert self.max_completion_length is not None
        training = self.network.training
        seed = 1_000_003 * self.state.global_step + self.accelerator.process_index
        result = self._sampler.generate(prompt_ids, max_new_tokens=self.max_completion_length, seed=seed)
        self._traces[training], self._rows = result.trace, torch.arange(len(prompt_ids))
        recorded = result.trace.logprob[:, result.trace.origin :].tolist()
        ends = result.lengths.tolist()
        cut = [[row[:end] for row, end in zip(rows, ends, strict=True)] for rows in (result.tokens.tolist(), recorded)]
        return tuple(cut)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        found = super()._generate_and_score_completions(inputs)
        return found | {"rows": torch.arange(len(inputs))}  # TRL shuffles and cuts these like all the rest

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        self._rows = inputs["rows"]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        """`[B, logits_to_keep]` of the tokens, each by the state it was committed from, and the entropies there."""
        trace = self._traces[self.network.training]
        blocks = self._sampler.plugins.blocks.lookahead(trace.generated.shape[1])  # a causal context asks about it
        view = trajectories(trace.row(*self._rows.tolist()), self._sampler.spec, blocks=blocks)
        found: list[Tensor] = [torch.zeros(len(input_ids), trace.generated.shape[1], device=input_ids.device)] * 2
        for chunk in view.chunks(batch_tokens=8192):
            one = chunk.to(input_ids.device)
            at = (one.row[:, None].expand_as(one.there)[one.there], one.columns[one.there] - trace.origin)
            found = [all.index_put(at, some[one.there]) for all, some in zip(found, one.score(model), strict=True)]
        logps, entropies = (values[:, :logits_to_keep] for values in found)
        return logps, entropies, None


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
    settings = GRPOConfig(
        str(options.output), max_steps=options.steps, num_generations=options.group, max_completion_length=24,
        per_device_train_batch_size=len(PROMPTS) * options.group, learning_rate=3e-4, gradient_checkpointing=False,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": PROMPTS})
    trainer = DiffusionGRPOTrainer(sampler, reward_funcs=reward, args=settings, train_dataset=data)
    trainer.train()
    folder = sampler.denoiser.folder  # pyright: ignore[reportAttributeAccessIssue]
    saving.save(trainer.network, folder, options.output, None)
    found = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    for step, mean in enumerate(found, 1):
        print(f"step {step}  reward {mean:.3f}")
    return found[-1]


if __name__ == "__main__":
    main()
