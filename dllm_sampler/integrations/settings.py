"""The settings in an engine's configuration file, which `python -m dllm_sampler.integrations` writes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import yaml
from pydantic import Field

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
LENGTH = 32  # of blocks on which settings without a block_size are checked


class Sampling(NamedTuple):
    """Sampling settings of a request. The default is greedy."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    length: int | None = None  # most tokens of the answer, if a guide judges its form


@dataclass(frozen=True)
class Settings:
    """The settings in an engine's configuration file.

    Args:
        scheduler, guide, compat: as for `BlockRule`.
        temperature, top_k, top_p: for all requests. Without a temperature each request has its own.
        block_size: positions of a block. The engine reads this, too. By default the model's.
    """

    scheduler: str | dict[str, Any]
    guide: list[Any] | dict[str, Any] | str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    compat: bool = False
    block_size: Annotated[int, Field(ge=1)] | None = None

    @staticmethod
    def read(values: Mapping[str, Any], where: str) -> Settings:
        """Return the settings in a mapping, which errors call `where`.

        Raises:
            UserError: a name is unknown, a value has the wrong type, or the scheduler is missing.
        """
        checked = config.check(where, Settings, values)
        if "scheduler" not in checked:
            way = f"Give it the file that {COMMAND} scheduler=NAME writes"
            raise UserError("option-missing", f"{where} names no scheduler. {way}.")
        return Settings(**checked)

    @staticmethod
    def load(path: str | None, where: str) -> Settings:
        """Return the settings in a YAML file. Errors call the option of this file `where`.

        Raises:
            UserError: the file cannot be read, or as `read`.
        """
        if path is None:
            return Settings.read({}, where)
        try:
            found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = getattr(error, "strerror", None) or first_line(error)
            said = f"{where}: the file '{path}' cannot be read as YAML ({reason}). Correct its name or its content."
            raise UserError("file-unreadable", said) from error
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
            ends: end-of-text tokens of the model, empty if unknown.
            sampling: sampling settings of a request. By default those of this object.
            guides: guides to use instead of the settings'. One that judges forms needs the `tokenizer`.
            warn: pass on the warnings of `BlockRule`. `checked` does this once.

        Raises:
            UserError: as `BlockRule`.
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
        """Return a rule built without a request or a model. For guides that judge forms, tokens are bytes.

        Raises:
            UserError: a setting is wrong, or a plug-in needs more than the logits of a block.
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
        """Return True if these settings decide how tokens are drawn, so that requests cannot. They made `rule`."""
        return self.temperature is not None or any(one.draws or one.truncates for one in rule.plugins.guides)
