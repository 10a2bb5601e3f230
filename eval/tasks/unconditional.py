"""Texts without a question, measured as SEDD, MDLM and their kind do: generative perplexity and entropy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dllm_sampler.errors import UserError
from dllm_sampler.eval.tasks.base import Answer, Sample, Task
from dllm_sampler.host.paths import expanded

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
        count: how many samples.
        seed: samples do not depend on it. Their draws depend on the option `seed`.
        length: tokens of a sample.
        begin: text before each sample, which is not measured. None: the tokenizer's first-token mark.
        judge: a causal language model, FOLDER or ORG/NAME. Texts are encoded again with its tokenizer. None: no judge.
        context: tokens that the judge reads at once, at most what its config allows. The first token of each piece is
            not measured.
    """

    name: ClassVar[str] = "unconditional"

    length: int = 1024
    begin: str | None = None
    judge: str | None = None
    context: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("context", 2)):
            if getattr(self, name) < least:
                raise UserError("option-range", f"task.{name} is {getattr(self, name)}. Set at least {least}.")
        if self.judge is not None and not expanded("task.judge", self.judge).is_dir() and self.judge.count("/") != 1:
            raise UserError(
                "model-not-found",
                f"Cannot find the folder task.judge={self.judge}. Name a checkpoint, or ORG/NAME of the hub.",
            )

    @property
    def max_new_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The length of a sample."""
        return self.length

    @property
    def dependency(self) -> Literal["high"]:
        """The tokens of a text have to agree with one another."""
        return "high"

    def samples(self) -> Sequence[Sample]:
        """Return equal samples. They differ by the seed of their draws."""
        return [Sample(index, self.begin or "") for index in range(self.count)]

    def prompt(self, sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> str | Sequence[int]:
        """Return the beginning: text, or the first-token mark.

        Raises:
            UserError: the tokenizer has no such mark.
        """
        if self.begin:
            return self.begin
        mark: Any = None if tokenizer is None else tokenizer.bos_token_id
        if mark is None:
            raise UserError(
                "option-missing", "task.begin is missing, and the tokenizer has no first-token mark. Set task.begin."
            )
        return [int(mark)]

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return `score` and the entropy of the tokens before the end token."""
        if not answer.ids:
            return {"score": 0.0, "entropy": 0.0}
        return {"score": float(bool(answer.text.strip())), "entropy": entropy(answer.ids)}

    def together(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> Mapping[str, float]:
        """Return the generative perplexity, if a judge is given and a text has two tokens."""
        if self.judge is None:
            return {}
        losses = _losses(self.judge, [answer.text for answer in answers], self.context)
        return {"generative_perplexity": math.exp(fmean(losses))} if losses else {}


def _losses(judge: str, texts: Sequence[str], context: int) -> list[float]:
    """Return the loss of every token that follows another one, in nats."""
    import torch  # with transformers, which the tasks' list does not wait for
    from transformers import AutoModelForCausalLM

    from dllm_sampler.models import huggingface, loading

    folder = loading.find(judge, option="task.judge")
    tokenizer = loading.load_tokenizer(folder)
    if tokenizer is None:
        raise UserError("tokenizer-missing", f"task.judge={judge} has no tokenizer. Name a checkpoint that has one.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = huggingface.pretrained(AutoModelForCausalLM, folder, "a causal language model", None).eval().to(device)
    context = min(context, getattr(model.config, "max_position_embeddings", context))
    found: list[float] = []
    for text in texts:
        for piece in pieces(tokenizer.encode(text, add_special_tokens=False), context):
            if len(piece) < 2:
                continue
            ids = torch.tensor([piece], device=device)
            with torch.inference_mode():
                laws = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            found += (-laws.gather(1, ids[0, 1:, None])[:, 0]).tolist()
    return found
