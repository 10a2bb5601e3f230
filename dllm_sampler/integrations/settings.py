"""Our part of an engine's configuration file, which `python -m dllm_sampler.integrations` writes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import yaml

from dllm_sampler import config
from dllm_sampler.core.protocols import Guide
from dllm_sampler.errors import UserError, first_line
from dllm_sampler.guides.forms.automaton import STATES
from dllm_sampler.integrations import COMMAND
from dllm_sampler.integrations.block import BlockRule, model
from dllm_sampler.integrations.forms import OF_BYTES, of_bytes, of_text
from dllm_sampler.kernels.backend import TORCH, Backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU = torch.device("cpu")
LENGTH = 32  # of blocks to try settings on, where neither they nor a model say it


class Sampling(NamedTuple):
    """Sampling settings of a request. The default is greedy."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    length: int | None = None  # most tokens of its answer, where a guide says what form that has


@dataclass(frozen=True)
class Settings:
    """Our part of an engine's configuration file.

    Args:
        scheduler, guide, compat: as `BlockRule`'s.
        temperature, top_k, top_p: for all requests. Without a temperature each request has its own.
        block_size: positions of a block, which the engine reads. By default the model's.
    """

    scheduler: str | dict[str, Any]
    guide: list[Any] | dict[str, Any] | str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    compat: bool = False
    block_size: int | None = None

    @staticmethod
    def read(values: Mapping[str, Any], where: str) -> Settings:
        """The settings in a mapping, which errors call `where`.

        Raises:
            UserError: an unknown name, a value of a wrong type, or no scheduler.
        """
        checked = config.check(where, Settings, values)
        if "scheduler" not in checked:
            raise UserError("option-missing", f"{where} names no scheduler. Run {COMMAND} scheduler=NAME.")
        return Settings(**checked)

    @staticmethod
    def load(path: str | None, where: str) -> Settings:
        """The settings in a YAML file; errors as `read`'s.

        Raises:
            UserError: it cannot be read.
        """
        if path is None:
            return Settings.read({}, where)
        try:
            found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(
                "file-unreadable", f"{where}: {path} cannot be read ({first_line(error)}). Correct it."
            ) from error
        if not isinstance(found, dict):
            raise UserError("config-invalid", f"{where}: {path} has no names with values. Write scheduler: threshold.")
        return Settings.read(found, where)

    def rule(
        self,
        length: int,
        mask_id: int = 0,
        sampling: Sampling | None = None,
        vocab_size: int = 1,
        ends: tuple[int, ...] = (0,),
        device: torch.device = CPU,
        kernels: Backend = TORCH,
        guides: Sequence[Guide] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        warn: bool = False,
    ) -> BlockRule:
        """Build the rule that decides over blocks of `length`.

        Args:
            ends: tokens that end an answer, if known.
            sampling: of a request. By default that of these settings.
            guides: in place of those of these settings; one on the form of answers needs the `tokenizer`.
            warn: whether it warns, as `BlockRule` does; `checked` has warned already.

        Raises:
            UserError: see `BlockRule`.
        """
        spec = model(vocab_size, mask_id, ends, length, device)
        chosen = self.sampling if sampling is None else sampling
        with warnings.catch_warnings():
            if not warn:
                warnings.simplefilter("ignore", UserWarning)
            return BlockRule(
                self.scheduler,
                spec,
                length,
                guide=self.guide if guides is None else guides,
                temperature=chosen.temperature,
                top_k=chosen.top_k,
                top_p=chosen.top_p,
                compat=self.compat,
                tokenizer=tokenizer,
                max_new_tokens=chosen.length,
                kernels=kernels,
            )

    def checked(self, length: int) -> BlockRule:
        """The rule without a request or a model; a guide on the form of answers counts in bytes.

        Raises:
            UserError: an engine that shows logits only cannot run it, or a setting is wrong.
        """
        guides = config.build("guide", self.guide)
        if not any(of_text(one) for one in guides):
            return self.rule(length, guides=guides, warn=True)
        sampling, (vocab_size, mask_id, end) = self.sampling._replace(length=STATES), OF_BYTES
        return self.rule(length, mask_id, sampling, vocab_size, (end,), guides=guides, tokenizer=of_bytes(), warn=True)

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of requests without their own."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    def fixes(self, rule: BlockRule) -> bool:
        """Return True if these settings, which made `rule`, choose tokens, so that requests cannot."""
        return self.temperature is not None or any(one.draws or one.truncates for one in rule.plugins.guides)
