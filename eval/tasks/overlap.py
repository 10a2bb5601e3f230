"""Overlap of two texts: ROUGE, BLEU and, if its package is installed, BERTScore."""

from functools import cache
from importlib import import_module
from typing import Any

from dllm_sampler.errors import UserError, first_line, installing


def need(module: str, what: str) -> Any:
    """Return a module of the extra `eval`, which `what` needs, or raise `UserError` if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise UserError("package-missing", f"{what} needs the package {module}. Run {installing('eval')}.") from None


def rouge(text: str, reference: str) -> dict[str, float]:
    """Return F-measures `rouge_1`, `rouge_2`, `rouge_l` with stemming, 0 to 1 (the package rouge-score)."""
    kinds = {"rouge1": "rouge_1", "rouge2": "rouge_2", "rougeL": "rouge_l"}
    scorer = need("rouge_score.rouge_scorer", "ROUGE").RougeScorer(list(kinds), use_stemmer=True)
    found = scorer.score(reference, text)
    return {name: float(found[kind].fmeasure) for kind, name in kinds.items()}


def bleu(text: str, reference: str) -> float:
    """Return sentence BLEU against one reference, 0 to 1: 13a tokens, up to 4-grams, no smoothing (sacrebleu).

    A text of fewer than four tokens, or without a 4-gram of the reference, has 0.
    """
    scorer = need("sacrebleu", "BLEU").BLEU(smooth_method="none", effective_order=False)
    return float(scorer.corpus_score([text], [[reference]]).score) / 100


def bert_score(text: str, reference: str) -> float:
    """Return the F1 of BERTScore for English texts, about 0 to 1."""
    try:
        scorer = _bert_scorer()
    except Exception as error:  # the hub's kinds of errors are many
        raise UserError(
            "model-not-found",
            f"task.bert_score=true cannot load roberta-large ({first_line(error)}). Run `hf download"
            " FacebookAI/roberta-large` where there is a network, or set task.bert_score=false.",
        ) from error
    return float(scorer.score([text], [reference])[2][0])


@cache
def _bert_scorer() -> Any:
    return need("bert_score", "BERTScore").BERTScorer(lang="en")
