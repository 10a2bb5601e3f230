"""Rewards inside a generation: numbers of a user's function for the candidates of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.ends import first_end
from dllm_sampler.core.values import Canvas
from dllm_sampler.errors import RowError, UserError, counted, short
from dllm_sampler.host.functions import resolve_callable
from dllm_sampler.inputs.texts import decode

NOTHING = -1  # marks a position that is left out of an answer


class _Row(NamedTuple):
    number: int  # in the batch
    prompt: list[int]
    answers: list[list[int]]  # one for each candidate


def listed(given: Any) -> list[Any]:
    """Return the result of a user's function as a list.

    Raises:
        TypeError: the result is a mapping, a set or a text, or cannot be iterated over.
    """
    if isinstance(given, Mapping | Set | str):
        raise TypeError(f"the result of type {type(given).__name__} is not a list of numbers")
    return list(given)


@dataclass(frozen=True)
class Reward:
    """A user's function that judges answers, called as rewards in TRL.

    It is called with lists that have one entry per answer: `prompts` and `completions` (texts, if there is a
    tokenizer), `prompt_ids` and `completion_ids` (lists of token ids). It returns one number for each answer. -inf
    rejects an answer.

    Args:
        call: the function.
        name: name of the function in errors.
        tokenizer: decodes the texts. Without one the function gets only ids.
        end_ids: answers are cut before the first of these tokens. If empty, they are not cut.
    """

    call: Callable[..., Sequence[float]]
    name: str
    tokenizer: PreTrainedTokenizerBase | None
    end_ids: tuple[int, ...]

    @staticmethod
    def of(given: Any, setting: str, tokenizer: PreTrainedTokenizerBase | None, end_ids: tuple[int, ...]) -> Reward:
        """Return the reward for `given`, a function or a `package.module:function`. Errors name the `setting`.

        Raises:
            UserError: `given` is neither, or cannot be imported.
        """
        if not isinstance(given, str) and not callable(given):
            raise UserError("function-invalid", f"{setting} is {given!r}. Give a function or package.module:function.")
        name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        call: Any = resolve_callable(f"{setting}=", given) if isinstance(given, str) else given
        return Reward(call, f"{setting}={name}", tokenizer, end_ids)

    def __call__(self, canvas: Canvas, ids: Tensor, judged: Tensor) -> Tensor:
        """Return `[B, M] float64` rewards of the M answers of each row in `ids [B, M, L+1]`.

        L+1 is the length of the canvas with one column more, whose tokens are not read. Positions with `NOTHING` are
        left out. The function is called once for the rows `judged [B] bool`. The others have reward 0. The device is
        read once.

        Raises:
            RowError: the function raised an error, or did not return one number per answer.
        """
        values = [[0.0] * ids.shape[1]] * len(ids)
        rows = self._rows(canvas, ids, judged)
        if rows:
            given, count = self._judge(rows), ids.shape[1]
            for at, row in enumerate(rows):
                values[row.number] = given[at * count : at * count + count]
        return torch.tensor(values, dtype=torch.float64, device=ids.device)

    def _rows(self, canvas: Canvas, ids: Tensor, judged: Tensor) -> list[_Row]:
        end = canvas.end.clamp(max=canvas.length)
        if canvas.layout.surplus is not None:
            end = torch.minimum(end, canvas.layout.answer_end - canvas.layout.surplus)
        bounds = torch.stack([judged.to(ids.dtype), canvas.layout.first, end], 1)
        table = torch.cat([bounds, canvas.ids, ids.flatten(1)], 1).tolist()
        width, found = ids.shape[2], []
        for number, (wanted, first, stop, *numbers) in enumerate(table):
            if wanted:
                own, *answers = (numbers[at : at + width] for at in range(0, len(numbers), width))
                found.append(_Row(number, own[:first], [self._cut(answer[first:stop]) for answer in answers]))
        return found

    def _cut(self, answer: list[int]) -> list[int]:
        """Return an answer before its first end-of-text token, without positions that are left out."""
        if NOTHING in answer:
            answer = [token for token in answer if token != NOTHING]
        return answer[: first_end(answer, self.end_ids)]

    def _judge(self, rows: list[_Row]) -> list[float]:
        numbers, wanted = [row.number for row in rows], sum(len(row.answers) for row in rows)
        given: dict[str, Any] = {
            "prompt_ids": [row.prompt for row in rows for _ in row.answers],
            "completion_ids": [answer for row in rows for answer in row.answers],
        }
        if self.tokenizer is not None:
            texts = decode([row.prompt for row in rows], self.tokenizer, ())
            given["prompts"] = [text for text, row in zip(texts, rows, strict=True) for _ in row.answers]
            given["completions"] = decode(given["completion_ids"], self.tokenizer, ())
        try:
            # Steps may run in inference mode, whose tensors a function could neither keep nor differentiate.
            with torch.inference_mode(False), torch.no_grad():
                made = self.call(**given)
                found = None if made is None else listed(made)
        except (Exception, SystemExit) as error:  # whatever a user's function raises
            for row in rows if len(rows) > 1 else ():
                self._judge([row])  # raises for the first prompt that the function refuses
            reason = f"{type(error).__name__}: {error}".replace("\n", " ") if str(error) else type(error).__name__
            direct = error.__traceback__ is None or error.__traceback__.tb_next is None  # not inside the function
            if isinstance(error, TypeError) and direct and "unexpected keyword argument" in reason:
                reason += "; add an argument **_ for those that it does not use"
            raise RowError(
                "function-failed", f"{self.name} failed for {{prompts}} ({reason}). Correct it.", numbers
            ) from error
        if found is None:
            raise RowError(
                "function-result",
                f"{self.name} returned None for {{prompts}}. Return one number for each answer.",
                numbers,
            )
        if len(found) != wanted:
            raise RowError(
                "function-result",
                f"{self.name} returned {counted(len(found), 'number')} for the {counted(wanted, 'answer')} of"
                " {prompts}. Return one number for each answer.",
                numbers,
            )
        owners = [row.number for row in rows for _ in row.answers]
        return [self._number(value, owner) for value, owner in zip(found, owners, strict=True)]

    def _number(self, value: Any, row: int) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = math.nan
        if math.isnan(number) or number == math.inf:
            raise RowError(
                "function-result",
                f"{self.name} returned {short(repr(value))} for {{prompts}}. Return a finite number, or -inf.",
                [row],
            )
        return number
