"""Grammar-constrained decoding (arXiv 2508.10111): recorded decisions, grammars and closed-form logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.values import Canvas
from dllm_sampler.errors import UserError
from dllm_sampler.guides import Temperature
from dllm_sampler.guides.grammar.language import Language
from dllm_sampler.host.reading import load_json
from dllm_sampler.published import Behind, PublishedFixedSteps, PublishedGrammar
from dllm_sampler.sampler import Sampler
from tests import grammars
from tests.conformance.builder import Checkpoints, Setup
from tests.conformance.lines import Line, Size


class Arguments(BaseModel):
    """What the published function takes, and how much of the prompt is part of the text."""

    model_config = ConfigDict(strict=True, frozen=True)

    steps: Size
    gen_length: Size
    block_length: Size
    temperature: float = 0.0
    max_resamples: Size = 100
    mask_id: int = 255
    eos_ids: list[int]
    constrained_prompt_tokens: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class Offset(Guide):
    """Logits plus `amp * sin(0.37 i (v + 1) + 1.3 v)` at answer position i and token v, and a bias of the end token.

    The mask is the last choice of all.
    """

    amp: float
    eos_bias: float
    eos_id: int
    mask_id: int

    @property
    @override
    def measures(self) -> bool:
        return True

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        column = head_rows.pick(head_rows.query.positions[:, None])  # [R]
        place = (column - canvas.layout.first[head_rows.row]).double()[:, None]
        token = torch.arange(logits.shape[-1], dtype=torch.float64)
        added = self.amp * torch.sin(0.37 * place * (token + 1) + 1.3 * token)
        added[:, self.eos_id] += self.eos_bias
        logits = logits + added.float()
        logits[:, self.mask_id] = -1e9
        return logits


def constrained(line: Line, checkpoints: Checkpoints) -> Setup:
    """The LLaDA driver; the record's `decisions` are compared too. Forwards after the last decision are not made."""
    args, extra = line.arguments(Arguments), line.model_extra or {}
    (prompt,) = line.prompts
    count = args.constrained_prompt_tokens
    about = extra["logits"]
    guide = PublishedGrammar(
        tries=args.max_resamples,
        known=_language(checkpoints.folder / "traces" / "languages.json", extra["language"]),
        texts_of=tuple(text.encode() for text in extra["texts"]),
        ending=frozenset(args.eos_ids),
        before=tuple(prompt[len(prompt) - count :]),
        greedy=args.temperature == 0,
    )
    guides: list[Guide] = [Offset(about["amp"], about["eos_bias"], args.eos_ids[0], args.mask_id)]
    if args.temperature > 0:
        guides.append(Temperature(value=args.temperature))
    seed = args.seed
    sampler = Sampler(
        checkpoints.load(line.model, args.mask_id, args.eos_ids[0]),
        scheduler=PublishedFixedSteps(args.steps),
        blocks=FixedBlocks(args.block_length),
        stop=Behind(),
        cache="none",
        guide=[*guides, guide],
        noise=None if seed is None else ReplayNoise(seed, "llada"),
        compat=True,
    )
    return Setup(sampler, args.gen_length, counted={"decisions": guide.decisions})


@lru_cache
def _language(path: Path, name: str) -> Language:
    """A language of the traces.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        about: dict[str, Any] = load_json(path.read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError) as error:
        raise UserError("file-unreadable", f"{path} does not describe the language {name!r}: {error}") from None
    prelex = about["prelex"]
    return grammars.language(
        about["grammar"],
        about["lex"],
        skip=grammars.SKIP if about["strip_chars"] is None else about["strip_chars"].encode(),
        prelex=None if prelex is None else (prelex[0].encode(), prelex[1].encode()),
    )
