"""What `prefix=`, `suffix=` and `pinned=` give of answers, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.checks import is_whole
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import FREE
from dllm_sampler.errors import UserError
from dllm_sampler.inputs import prompts

Piece = str | Sequence[int] | Tensor  # of an answer, as text or as token ids
Pinned = Sequence[int] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class Fixed:
    """What `prefix=`, `suffix=` and `pinned=` give: each one row for all prompts, one for each, or none."""

    prefix: tuple[list[int], ...] = ()
    suffix: tuple[list[int], ...] = ()
    pinned: tuple[list[int], ...] = ()

    @staticmethod
    def of(
        prefix: Piece | Sequence[Piece] | None,
        suffix: Piece | Sequence[Piece] | None,
        pinned: Pinned | None,
        tokenizer: PreTrainedTokenizerBase | None,
        spec: ModelSpec,
    ) -> Fixed:
        """The rows, as token ids.

        Raises:
            UserError: something that is neither text nor token ids, or ids that the model does not have.
        """

        def rows(name: str, value: Any, masks: bool = False) -> tuple[list[int], ...]:
            several = isinstance(value, list | tuple) and value and not all(isinstance(one, int) for one in value)
            several = several or (isinstance(value, Tensor) and value.dim() == 2)
            found = () if value is None else [*value] if several else [value]
            return tuple(piece_ids(one, name, tokenizer, spec, masks) for one in found)

        if any(isinstance(one, str) for one in (pinned if isinstance(pinned, list | tuple) else [pinned])):
            raise UserError("pinned must be token ids, -1 where one is free: text goes into prefix, suffix or infill")
        return Fixed(rows("prefix", prefix), rows("suffix", suffix), rows("pinned", pinned, True))

    def __bool__(self) -> bool:
        return bool(self.prefix or self.suffix or self.pinned)

    def uneven(self, count: int) -> UserError | None:
        """What is wrong where there are `count` prompts; None: nothing is."""
        for name, rows in vars(self).items():
            if len(rows) > 1 and len(rows) != count:
                return UserError(f"{name} has {len(rows)} entries for {count} prompts: give one for all, or for each")
        return None

    def answer(self, index: int, new_tokens: int) -> list[int] | None:
        """What is given of the answer to prompt `index`, from 0; None: nothing is.

        Raises:
            UserError: more than the answer has room for, or two tokens at one place.
        """
        own: dict[str, list[int]] = {}
        for name, rows in vars(self).items():
            if index >= len(rows) > 1:
                raise UserError(f"{name} has {len(rows)} entries, and there is prompt {index + 1}")
            if rows:
                own[name] = rows[index if len(rows) > 1 else 0]
        if all(token == FREE for row in own.values() for token in row):
            return None
        sizes = " and ".join(_size(name, len(row)) for name, row in own.items())
        fixed = len(own.get("prefix", ())) + len(own.get("suffix", ()))
        if max(fixed, len(own.get("pinned", ()))) > new_tokens:
            raise UserError(f"prompt {index + 1}: max_new_tokens={new_tokens} has no room for {sizes}")
        given = [FREE] * new_tokens
        for name, row in own.items():
            begin = new_tokens - len(row) if name == "suffix" else 0
            for at, token in enumerate(row, begin):
                if FREE not in (token, given[at]) and token != given[at]:
                    raise UserError(
                        f"prompt {index + 1}: token {at + 1} of the answer is {given[at]} in one of"
                        f" {', '.join(own)} and {token} in another"
                    )
                given[at] = given[at] if token == FREE else token
        return given


def _size(name: str, count: int) -> str:
    """What is given, counted, for an error."""
    tokens = "token" if count == 1 else "tokens"
    return f"{count} pinned {tokens}" if name == "pinned" else f"a {name} of {count} {tokens}"


def piece_ids(
    piece: Any, name: str, tokenizer: PreTrainedTokenizerBase | None, spec: ModelSpec, masks: bool
) -> list[int]:
    """Token ids of a text, or ids that are given, checked; where `masks` may be, `FREE` in their place."""
    if isinstance(piece, str):
        if tokenizer is None:
            raise UserError(f"{name} is text, but this checkpoint has no tokenizer: give token ids")
        ids = prompts.text_ids(piece, tokenizer, name, special=False)
    else:
        ids = piece.tolist() if isinstance(piece, Tensor) else piece
        if not isinstance(ids, list | tuple) or not all(map(is_whole, ids)):
            raise UserError(f"{name} must be {'' if masks else 'text or '}token ids, not {piece!r:.60}")
    free = {FREE, spec.mask_id} if masks else set()
    for token in ids:
        if token not in free and not 0 <= token < spec.vocab_size:
            raise UserError(f"{name} has the token id {token}, outside the vocabulary of {spec.vocab_size}")
        if token == spec.mask_id and not masks:
            raise UserError(f"{name} contains the mask token (id {token}): leave a place free by pinned, or by a gap")
    return [FREE if token in free else token for token in ids]
