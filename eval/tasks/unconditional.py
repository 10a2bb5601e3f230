"""Texts without a question, measured as SEDD, MDLM and their kind do: generative perplexity, entropy and MAUVE."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dllm_sampler.core.checks import check_count
from dllm_sampler.errors import UserError, as_typed, counted
from dllm_sampler.eval.tasks.base import Answer, Sample, Task
from dllm_sampler.eval.tasks.jsonl import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def entropy(ids: Sequence[int]) -> float:
    """Return the entropy of a sample's own token frequencies, in nats. Repetition makes it small."""
    return -sum(count / len(ids) * math.log(count / len(ids)) for count in Counter(ids).values())


def pieces(ids: Sequence[int], context: int) -> Iterator[Sequence[int]]:
    """Yield consecutive pieces of a text, each of at most `context` tokens."""
    return (ids[first : first + context] for first in range(0, len(ids), context))


@dataclass
class Unconditional(Task):
    """Samples of the model's own law of texts, all from the same beginning.

    The score is 1 for a text that is not empty. `grade.entropy` is the mean entropy of token frequencies. With a
    judge, `generative_perplexity` is the exponential of the mean loss over all tokens of all texts. Low values reward
    repetition: read it with the entropy.

    Args:
        count: number of samples.
        seed: has no effect on samples. Their draws depend on the option `seed`.
        length: tokens of a sample.
        begin: text before each sample, which is not measured. None (or an empty text) means the tokenizer's BOS token.
        judge: a causal language model, FOLDER or ORG/NAME. Texts are encoded again with its tokenizer. None means no
            judge.
        references: JSON lines, each with a `text` from the data that the model imitates, at least `count` of them. With
            the judge they give `mauve` (arXiv 2102.01454), by the package mauve-text with its defaults. None means no
            MAUVE.
        context: most tokens that the judge reads at once. The judge's own limit applies, too. The first token of each
            piece is not measured.

    Raises:
        UserError: a number is too small, the judge or the references cannot be used, or references lack a judge.
    """

    name: ClassVar[str] = "unconditional"

    length: int = 1024
    begin: str | None = None
    judge: str | None = None
    references: str | None = None
    context: int = 1024

    def __post_init__(self) -> None:
        check_count("task.length", self.length)
        check_count("task.context", self.context, 2)
        if self.judge is not None:
            _checkpoint(self.judge)  # a mistake shows before hours of work
        elif self.context != type(self).context:
            raise UserError(
                "option-missing", f"task.context={self.context} has no effect without a judge. Set task.judge=MODEL."
            )
        if self.references is not None:
            if self.judge is None:
                raise UserError(
                    "option-missing",
                    f"task.references={self.references} needs a judge. Name a causal language model of transformers,"
                    " for example task.judge=openai-community/gpt2-large, or remove task.references.",
                )
            _ = self._references, _mauve()

    @property
    def max_new_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The length of a sample in tokens."""
        return self.length

    @property
    def dependency(self) -> Literal["high"]:
        """`high`, since the tokens of a text have to agree with one another."""
        return "high"

    def samples(self) -> Sequence[Sample]:
        """Return samples with the same prompt. Their answers differ by the seeds of the draws."""
        return [Sample(index, self.begin or "") for index in range(self.count)]

    def prompt(self, sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> str | Sequence[int]:
        """Return the beginning: text, or the BOS token.

        Raises:
            UserError: the tokenizer has no BOS token.
        """
        if self.begin:
            return self.begin
        bos: Any = None if tokenizer is None else tokenizer.bos_token_id
        if bos is None:
            raise UserError(
                "option-missing",
                f"The tokenizer has no BOS token, which task.begin={as_typed(self.begin)} needs. Set task.begin=TEXT.",
            )
        return [int(bos)]

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return `score` and the entropy of the tokens before the end-of-text token."""
        if not answer.ids:
            return {"score": 0.0, "entropy": 0.0}
        return {"score": float(bool(answer.text.strip())), "entropy": entropy(answer.ids)}

    def together(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> Mapping[str, float]:
        """Return the judge's measures: generative perplexity, and MAUVE if there are references."""
        if self.judge is None:
            return {}
        judge, found = _Judge(self.judge, self.context), {}
        texts = [answer.text for answer in answers]
        if losses := [loss for text in texts for loss in judge.losses(text)]:
            found["generative_perplexity"] = math.exp(fmean(losses))
        if self.references is not None:
            sides = [judge.features(texts), judge.features(self._references[: len(texts)])]
            if all(len(side) for side in sides):
                compared = _mauve().compute_mauve(*sides, max_text_length=self.context, verbose=False)
                found["mauve"] = float(compared.mauve)
        return found

    @cached_property
    def _references(self) -> list[str]:
        assert self.references is not None
        lines = read_texts("task.references", self.references, "text")
        if len(lines) < self.count:
            raise UserError(
                "file-invalid",
                f"task.references={self.references} has {counted(len(lines), 'text')} for {self.count} samples. Add"
                f" texts, or set task.count={len(lines)}.",
            )
        return [line["text"] for line in lines]


def _mauve() -> Any:
    try:
        return import_module("mauve")
    except ImportError:  # also of the packages that it needs
        raise UserError(
            "package-missing",
            "task.references needs a package that is not installed. Run pip install mauve-text, or remove"
            " task.references.",
        ) from None


@cache
def _checkpoint(judge: str) -> tuple[Path, PreTrainedTokenizerBase]:
    """Return the folder of the judge, which is downloaded if necessary, and its tokenizer.

    Raises:
        UserError: it is not a checkpoint of a causal language model with a tokenizer.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # a slow import

    from dllm_sampler.models import loading, weights

    folder = loading.find(judge, option="task.judge")
    fix = "Name a causal language model of transformers, for example task.judge=openai-community/gpt2-large"
    if not (folder / "config.json").is_file():
        raise UserError("checkpoint-incomplete", f"task.judge={judge} has no config.json. {fix}.")
    kind = weights.read_json(folder / "config.json").get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError("architecture-unknown", f"task.judge={judge} has the model_type {as_typed(kind)}. {fix}.")
    weights.tensor_files(folder)
    tokenizer = loading.load_tokenizer(folder)
    if tokenizer is None:
        raise UserError("tokenizer-missing", f"task.judge={judge} has no tokenizer. Add its files to {folder}.")
    return folder, tokenizer


class _Judge:
    """A causal language model that reads at most `context` tokens of a text at once."""

    def __init__(self, name: str, context: int):
        import torch  # with transformers, which the tasks' list does not wait for
        from transformers import AutoModelForCausalLM

        from dllm_sampler.models import huggingface

        folder, self.tokenizer = _checkpoint(name)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = huggingface.pretrained(AutoModelForCausalLM, folder, "a causal language model", None)
        self.model.eval().to(device)
        self.context = min(context, getattr(self.model.config, "max_position_embeddings", context))

    def _read(self, piece: Sequence[int]) -> Any:
        import torch

        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([piece], device=self.model.device), output_hidden_states=True)

    def losses(self, text: str) -> list[float]:
        """Return the loss in nats of every token but the first of each piece."""
        found: list[float] = []
        for piece in pieces(self.tokenizer.encode(text, add_special_tokens=False), self.context):
            if len(piece) > 1:
                laws = self._read(piece).logits[0, :-1].float().log_softmax(-1)
                found += [-float(law[token]) for law, token in zip(laws.cpu(), piece[1:], strict=True)]
        return found

    def features(self, texts: Sequence[str]) -> np.ndarray:
        """Return the last hidden state of the last token of each text that is not empty, as MAUVE defines features."""
        each = [self.tokenizer.encode(text)[: self.context] for text in texts if text]
        return np.array([self._read(ids).hidden_states[-1][0, -1].float().cpu().numpy() for ids in each if ids])
