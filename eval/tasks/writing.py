"""Writing: a sentence with given words, a paraphrase, a summary (arXiv 2510.04767, with texts of our own)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from random import Random
from typing import Any, ClassVar, Literal

from dllm_sampler.core.checks import check_count
from dllm_sampler.errors import UserError
from dllm_sampler.eval.tasks import fluency, overlap, texts
from dllm_sampler.eval.tasks.base import Answer, Sample
from dllm_sampler.eval.tasks.drawn import Drawn, Prompt, chat
from dllm_sampler.eval.tasks.jsonl import read_texts
from dllm_sampler.eval.tasks.themes import NEAR, THEMES


@dataclass
class Writing(Drawn):
    """A task whose answers are prose.

    Args:
        grammar: `languagetool`, or the URL of a server. The score then uses the measure `grammar`. With None it uses
            `fluency_proxy`.
    """

    max_new_tokens = 64
    many = True

    grammar: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grammar is not None:
            fluency.tool(self.grammar)


@dataclass
class Words(Writing):
    """A task that asks for one sentence with given words.

    Args:
        level: `easy` has words of one theme, `medium` of two themes of one register, `hard` each of another theme.
        size: number of words.
    """

    level: Literal["easy", "medium", "hard"] = "easy"
    size: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("task.size", self.size, most=8)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Name of the task, for example words_easy."""
        return f"words_{self.level}"

    def draw(self, rng: Random, index: int) -> tuple[Prompt, Mapping[str, Any]]:
        """Draw words, and return a prompt that asks for a sentence with them."""
        if self.level == "hard":
            words = [rng.choice(THEMES[theme]) for theme in rng.sample(list(THEMES), self.size)]
        else:
            themes = [rng.choice(list(THEMES))] if self.level == "easy" else rng.choice(NEAR)
            half = self.size // 2 if len(themes) == 2 else 0
            words = rng.sample(THEMES[themes[-1]], half) + rng.sample(THEMES[themes[0]], self.size - half)
            rng.shuffle(words)
        listed = f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
        task = f"Write one sentence that makes sense and contains {listed}. Answer with the sentence alone."
        return chat(task), {"words": words}

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return `score`: the measure of writing if the answer has every word (`throws` has `throw`), else 0."""
        words = sample.facts["words"]
        there = [word in answer.text for word in words]
        counts, measures = fluency.grammar_measures(answer.text, self.grammar)
        return {
            "score": counts * all(there),
            **measures,
            "inclusion": float(all(there)),
            "words_included": sum(there) / len(there),
        }


@dataclass
class FromTexts(Writing):
    """A task on texts that are drawn from templates, or read from a file.

    Args:
        file: JSON lines, each with the texts that the task reads: `text`, or `dialogue` and `summary`. Sample i is
            line i. None means templates.
    """

    fields: ClassVar[tuple[str, ...]]

    file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.file is not None:
            _ = self.lines  # a mistake shows before a model is loaded

    @cached_property
    def lines(self) -> list[dict[str, str]]:
        """The objects on the lines of the file."""
        assert self.file is not None
        return read_texts("task.file", self.file, *self.fields)

    def samples(self) -> Sequence[Sample]:
        """Return the samples, at most as many as the file has."""
        return super().samples()[: None if self.file is None else len(self.lines)]


@dataclass
class Paraphrase(FromTexts):
    """A sentence to say in other words.

    Args:
        bert_score: measure BERTScore F1 against the sentence, and use it in the score.
    """

    name = "paraphrase"
    fields = ("text",)

    bert_score: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bert_score and find_spec("bert_score") is None:
            raise UserError(
                "package-missing",
                "task.bert_score=true needs a package that is not installed. Run pip install bert-score, or set"
                " task.bert_score=false.",
            )

    def draw(self, rng: Random, index: int) -> tuple[Prompt, Mapping[str, Any]]:
        """Draw a sentence, and the words that its paraphrase has to keep (names and days)."""
        if self.file is None:
            text, kept = texts.sentence(rng)
        else:
            text, kept = self.lines[index % len(self.lines)]["text"], []
        task = f"Say this in other words, with the same meaning. Answer with the new sentence alone.\n\n{text}"
        return chat(task), {"text": text, "kept": kept}

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return `score`: the measure of writing, times 1 - BLEU against the sentence, times a measure of meaning.

        The measure of meaning is BERTScore if `bert_score` is set, else `kept`, the share of names and days kept.
        """
        text, kept = str(sample.facts["text"]), list(sample.facts["kept"])
        counts, measures = fluency.grammar_measures(answer.text, self.grammar)
        new = 1 - overlap.bleu(answer.text, text)
        held = sum(word in answer.text for word in kept) / len(kept) if kept else 1.0
        found = {**measures, "one_minus_bleu": new, "kept": held}
        meaning = held
        if self.bert_score:
            meaning = found["bert_score"] = overlap.bert_score(answer.text, text)
        return {"score": counts * new * max(0.0, min(1.0, meaning)), **found}


@dataclass
class Summarise(FromTexts):
    """A summary of a short dialogue in one or two sentences."""

    name = "summarise"
    fields = ("dialogue", "summary")

    def __post_init__(self) -> None:
        super().__post_init__()
        overlap.need("rouge_score.rouge_scorer", "task=summarise")

    def draw(self, rng: Random, index: int) -> tuple[Prompt, Mapping[str, Any]]:
        """Draw a dialogue, and its summary."""
        if self.file is None:
            dialogue, summary = texts.dialogue(rng)
        else:
            line = self.lines[index % len(self.lines)]
            dialogue, summary = line["dialogue"], line["summary"]
        task = f"Sum up this conversation in one or two sentences. Answer with the summary alone.\n\n{dialogue}"
        return chat(task), {"summary": summary}

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return `score`: the measure of writing, times ROUGE-L against the reference."""
        counts, measures = fluency.grammar_measures(answer.text, self.grammar)
        found = overlap.rouge(answer.text, str(sample.facts["summary"]))
        return {"score": counts * found["rouge_l"], **measures, **found}
