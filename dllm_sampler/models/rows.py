"""Models that compute logits of whole rows in one call. A cache cannot run their layers, so they have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from dllm_sampler.core.checks import check_count, is_whole
from dllm_sampler.core.ends import end_ids
from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.core.visibility import visible
from dllm_sampler.errors import UserError, first_line, invalid, short
from dllm_sampler.models.denoiser import spent

LogitsFunction = Callable[[Tensor, Tensor], Tensor]


class RowsDenoiser:
    """A denoiser that runs whole rows in every step, through `logits`.

    Its hidden states are the logits: a model's head may be nonlinear, so guidance mixes logits. Rows are right-padded,
    as on the canvas: the first column is position 0.
    """

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return logits `[N, L, V]` of the tokens `[N, L]`. `mask [N, L] bool` is true for columns that are seen."""
        raise NotImplementedError

    def module(self) -> RowsModule:
        """Return the model as a module with the call of a `Transformer`, for training."""
        raise NotImplementedError

    @torch.no_grad()
    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Return logits `[R, V]`, one row for each of `plan.head_rows`, and the cost."""
        batch, candidates, width = query.ids.shape
        ids = query.rows(canvas)[:, :, :-1]  # [B, K, L]
        seen = visible(canvas, query)[:, None, :-1].expand_as(ids)
        logits = self.logits(ids.flatten(0, 1), seen.flatten(0, 1))  # [B*K, L, V]
        asked = query.positions.clamp(max=canvas.length - 1)  # [B, Q]
        asked = asked[:, None].expand(-1, candidates, -1).flatten(0, 1)[..., None]
        logits = logits.gather(1, asked.expand(-1, -1, logits.shape[-1]))  # [B*K, Q, V]
        return plan.head_rows.pick(logits.view(batch, candidates, width, -1)), spent(canvas, plan)

    def head(self, hidden: Tensor) -> Tensor:
        """Return `hidden` itself, which contains logits."""
        return hidden


@dataclass(frozen=True)
class FunctionDenoiser(RowsDenoiser):
    """A denoiser that calls a function of tokens.

    Args:
        function: takes `ids [B, L]` int64 and `mask [B, L]` bool, and returns logits `[B, L, V]`. Where `mask` is
            false, columns are padding: their ids are arbitrary, and their logits are not read.
        spec: facts about the model.
    """

    function: LogitsFunction
    spec: ModelSpec

    @classmethod
    def of(
        cls,
        function: LogitsFunction,
        *,
        vocab_size: int,
        mask_id: int,
        eos_id: int | Sequence[int],
        pad_id: int | None = None,
        max_positions: int = 2**20,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> FunctionDenoiser:
        """Return a denoiser that calls `function`, with a spec of these numbers.

        Args:
            eos_id: the end-of-text token, or several. Each ends an answer, and the first is the one that is written.
            pad_id: the padding token. By default the first end-of-text token.
            max_positions: longest row that the function takes.
            device: device of `ids` and `mask`. By default that of a module's parameters, or the CPU for a function.
            dtype: dtype of the logits. By default that of a module's parameters, or float32 for a function.

        Raises:
            UserError: `function` cannot be called with two arguments, or a number is out of range.
        """
        if not callable(function):
            raise invalid("logits_fn", function, "Give a function of (ids, mask)", "function-invalid")
        try:
            signature(function).bind(None, None)
        except TypeError as error:
            said = f"logits_fn cannot be called with (ids, mask): {first_line(error)}"
            raise UserError("function-invalid", f"{said}. Give a function of these two.") from None
        except ValueError:  # it is not written in Python, and has no signature
            pass
        check_count("vocab_size", vocab_size)
        check_count("max_positions", max_positions)
        ends = tuple(eos_id) if isinstance(eos_id, list | tuple) and eos_id else (eos_id,)
        given = [("mask_id", mask_id), *(("eos_id", end) for end in ends)]
        for name, token in given if pad_id is None else [*given, ("pad_id", pad_id)]:
            if not is_whole(token) or not 0 <= token < vocab_size:
                way = f"Set a token id from 0 to {vocab_size - 1}"
                raise invalid(name, token, way, "token-outside-vocabulary")
        first, *others = end_ids(cast("tuple[int, ...]", ends))
        weight = next(function.parameters(), None) if isinstance(function, nn.Module) else None
        spec = ModelSpec(
            vocab_size=vocab_size,
            mask_id=mask_id,
            eos_id=first,
            other_eos_ids=tuple(others),
            pad_id=first if pad_id is None else pad_id,
            max_positions=max_positions,
            num_layers=0,
            num_kv_heads=1,
            head_dim=1,
            dtype=dtype or (torch.float32 if weight is None else weight.dtype),
            device=device or (torch.device("cpu") if weight is None else weight.device),
            cacheable=False,
        )
        return cls(function, spec)

    @override
    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        found = self.function(ids, mask)
        if not isinstance(found, Tensor):
            raise UserError("function-result", f"logits_fn returned {short(repr(found))}. Return a tensor of logits.")
        if found.shape != (*ids.shape, self.spec.vocab_size) or not found.is_floating_point():
            raise UserError(
                "function-result",
                f"logits_fn returned {str(found.dtype).removeprefix('torch.')} {list(found.shape)} for ids"
                f" {list(ids.shape)}. Return floating-point logits {[*ids.shape, self.spec.vocab_size]}.",
            )
        if found.device != ids.device:
            raise UserError(
                "function-result",
                f"logits_fn returned logits on {found.device} for ids on {ids.device}. Return them on {ids.device}, or"
                f" set device={found.device}.",
            )
        return found

    @override
    def module(self) -> RowsModule:
        return FunctionModule(self)


class RowsModule(nn.Module):
    """A model of whole rows with the call of a `Transformer`, for training."""

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return logits `[N, L, V]` of the tokens `[N, L]`. `mask [N, L] bool` is true for columns that are seen."""
        raise NotImplementedError

    def forward(
        self, ids: Tensor, *, positions: Tensor | None = None, keys: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Return logits `[N, M|Q, V]` of the tokens `[N, M]`.

        Args:
            positions: `[N, M]` in ascending order. Columns before position 0 are padding. The default is 0..M-1.
            keys: `[N, M] bool` columns that are seen. The default is all.
            rows: `[N, Q]` columns whose logits are returned. The default is all.
        """
        width = ids.shape[1]
        rows = torch.arange(width, device=ids.device).expand_as(ids) if rows is None else rows
        keys = torch.ones_like(ids, dtype=torch.bool) if keys is None else keys
        if positions is not None:  # these models count from the first column: rows are moved to begin there
            first = -positions[:, :1]  # [N, 1]
            index = (torch.arange(width, device=ids.device) + first) % width
            ids, keys = ids.gather(1, index), keys.gather(1, index)
            rows = (rows - first) % width
        logits = self.logits(ids, keys)
        return logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[-1]))


class FunctionModule(RowsModule):
    """A `FunctionDenoiser` with the call of a `Transformer`, for training."""

    def __init__(self, denoiser: FunctionDenoiser):
        super().__init__()
        self.denoiser = denoiser
        self.function = denoiser.function  # if it is a module, its weights are this one's

    @override
    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.denoiser.logits(ids, mask)
