"""Schedulers of this package in SGLang 0.5.23 and later: `--dllm-algorithm DllmSampler --dllm-algorithm-config x.yaml`.

`python -m dllm_sampler.integrations` writes the YAML. Every process of a server calls `register`, but few of them
decode. So this module imports the rest of the package when an algorithm is made, and SGLang when it is registered.
Letters: B rows of a batch, W positions of a block, V vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from dllm_sampler.core.ends import end_ids
from dllm_sampler.errors import UserError

if TYPE_CHECKING:
    from dllm_sampler.integrations.serving import Answer, Model, Row, Serving
    from dllm_sampler.integrations.settings import Sampling

NAME = "DllmSampler"
CONFIG = "--dllm-algorithm-config"
FAILED = -1  # SGLang ends a request at a token outside the vocabulary
EVERY_TOKEN = 2**30  # SGLang's top_k of a request without one

# Settings of SGLang's own sampler, with the value that has no effect.
OTHERS = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
}
OF_REQUEST = ("return_logprob", "custom_logit_processor")

NOT_FINITE = (
    "the model returned NaN or infinite logits; check the weights and the dtype (float16 overflows where bfloat16 does"
    " not)"
)
NOT_SHOWN = "SGLang has not validated the request, so its length and end-of-text token are unknown"
ENDLESS = "its block is not decoded after the most forwards that it can need (compat: true lets the model choose masks)"

logger = logging.getLogger(__name__)


def register() -> None:
    """Add the algorithm `DllmSampler` to SGLang. This is an entry point of the group `sglang.srt.plugins`."""
    base = import_module("sglang.srt.dllm.algorithm.base").DllmAlgorithm
    algorithms = import_module("sglang.srt.dllm.algorithm").algo_name_to_cls
    algorithms[NAME] = type(NAME, (BlockAlgorithm, base), {"__doc__": BlockAlgorithm.__doc__, "__module__": __name__})


class BlockAlgorithm:
    """An algorithm of SGLang for any scheduler that needs only the logits of a block.

    `register` combines this class with SGLang's base class. Noise depends only on the request's seed (or id), step and
    column. So the ranks of a tensor-parallel group, which all see the same logits, write the same tokens.

    Raises:
        UserError: a setting is wrong, or SGLang cannot run the scheduler.
    """

    block_size: int
    mask_id: int
    fdfo: bool
    live: ClassVar[BlockAlgorithm | None] = None  # the instance of this process, which validates requests

    def __init__(self, config: Any):
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        from dllm_sampler.integrations.serving import Serving
        from dllm_sampler.integrations.settings import Settings

        settings = Settings.read(config.algorithm_config or {}, CONFIG)
        self.serving: Serving = Serving(settings, self.block_size, self.mask_id)
        self.requests: WeakValueDictionary[str, Any] = (
            WeakValueDictionary()
        )  # SGLang's requests by id, until it drops them
        self.made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # forwards of each request in complete blocks
        BlockAlgorithm.live = self

    @classmethod
    def configure_server_args(cls, server_args: Any) -> None:
        """Refuse wrong settings before the model is loaded."""
        from dllm_sampler.core.naming import named
        from dllm_sampler.integrations.settings import LENGTH, Settings

        settings = Settings.load(server_args.dllm_algorithm_config, CONFIG)
        rule = settings.checked(settings.block_size or LENGTH)
        if rule.form is not None and getattr(server_args, "skip_tokenizer_init", False):
            raise UserError(
                "tokenizer-missing", f"guide={named(rule.form)} needs a tokenizer. Remove --skip-tokenizer-init."
            )

    @classmethod
    def validate_request(cls, req: Any) -> str | None:
        """Return the reason that a request cannot be served, or None if it can.

        SGLang calls this once for each request. The request is stored for the length and the tokens of its answer.
        """
        wanted = req.sampling_params
        unknown = [name for name, plain in OTHERS.items() if (getattr(wanted, name, plain) or plain) != plain]
        unknown += [name for name in OF_REQUEST if getattr(req, name, None)]
        if unknown:
            return f"{NAME} supports only temperature, top_k and top_p of a request. Remove {', '.join(unknown)}."
        if cls.live is None:
            return None
        sampling = _sampling(wanted.temperature, wanted.top_k, wanted.top_p)
        why = cls.live.serving.obstacle(sampling, _model(req))
        if why is None:
            cls.live.requests[req.rid] = req
        return why

    def max_steps(self, block_size: int) -> int:
        """Return the number of forwards after which the synchronous mode stops decoding a block."""
        return self.serving.steps

    def init_step_state(self, forward_batch: Any) -> list[Any]:
        """Return the state of each request in a new block. Reads the device, so this waits for the forward."""
        ids, frozen = self._ids(forward_batch), forward_batch.dllm_prompt_mask
        frozen = ids != self.mask_id if frozen is None else frozen
        names = forward_batch.rids or [str(row) for row in range(len(ids))]
        samplings = self._samplings(forward_batch, len(ids))
        rows = self.serving.open(ids, frozen, list(map(self._answer, names, samplings)))
        for name, row in zip(names, rows, strict=True):
            if row.lost:
                logger.error(f"{NAME}: request {name} ends here: {NOT_SHOWN}")
        return list(rows)

    def step(self, forward_batch: Any, full_logits: Tensor, states: Sequence[Any]) -> list[bool]:
        """Write the decisions after a forward into `input_ids`. Returns True for each block that is final.

        A block is final if the forward saw its last tokens, or if it cannot be completed.

        Args:
            forward_batch: SGLang's batch with the blocks `input_ids [B*W]` and the ids of their requests.
            full_logits: `[B*W, V]` logits, which are overwritten.
            states: the states of `init_step_state`, changed in place.
        """
        rows: Sequence[Row] = states
        ids, first = self._ids(forward_batch), forward_batch.positions.view(-1, self.block_size)[:, 0].long()
        verdict = self.serving.step(rows, ids, full_logits.view(*ids.shape, -1), first)
        for places, why in ((verdict.failed, NOT_FINITE), (verdict.endless, ENDLESS)):
            for place in places:
                name = forward_batch.rids[place] if forward_batch.rids else place
                logger.error(f"{NAME}: request {name} ends here: {why}")
        for place, count in verdict.made.items():
            request = self.requests.get(forward_batch.rids[place]) if forward_batch.rids else None
            if request is not None:
                self.made[request] = count
        # In the synchronous mode a lost row is in further forwards, and a token outside the vocabulary must not be.
        last = self.fdfo or all(verdict.settled)
        ids = self.serving.marked(rows, verdict.ids, FAILED) if last else verdict.ids
        forward_batch.input_ids.copy_(ids.flatten())
        return verdict.settled

    def _ids(self, forward_batch: Any) -> Tensor:
        return forward_batch.input_ids.view(-1, self.block_size).long()

    def _answer(self, name: str, sampling: Sampling) -> Answer:
        from dllm_sampler.integrations.serving import Answer

        request = self.requests.get(name)
        if request is None:
            return Answer(_seed(name), sampling, known=False)
        seed, made = getattr(request.sampling_params, "sampling_seed", None), self.made.get(request, 0)
        seed = _seed(name) if seed is None else seed
        if not self.serving.formed:
            return Answer(seed, sampling, made)
        sampling = sampling._replace(length=request.sampling_params.max_new_tokens)
        return Answer(seed, sampling, made, tuple(request.output_ids))

    def _samplings(self, forward_batch: Any, count: int) -> list[Sampling]:
        from dllm_sampler.integrations.settings import Sampling

        info = forward_batch.sampling_info
        if self.serving.fixed or info is None or info.is_all_greedy:
            return [Sampling()] * count
        values = torch.stack([one.flatten().double() for one in (info.temperatures, info.top_ks, info.top_ps)], 1)
        return [_sampling(temperature, int(top_k), top_p) for temperature, top_k, top_p in values.tolist()]


def _sampling(temperature: float, top_k: int, top_p: float) -> Sampling:
    """Return a request's sampling settings, whose float32 numbers are rounded to those that were typed."""
    from dllm_sampler.integrations.settings import Sampling

    if temperature == 0 or top_k == 1:
        return Sampling()
    cut = top_k if 1 < top_k < EVERY_TOKEN else None
    return Sampling(float(f"{temperature:.6g}"), cut, None if top_p >= 1 else float(f"{top_p:.6g}"))


def _model(request: Any) -> Model:
    from dllm_sampler.integrations.serving import Model

    tokenizer, listed = request.tokenizer, request.eos_token_ids or ()
    also = [getattr(tokenizer, "eos_token_id", None), *(getattr(tokenizer, "additional_stop_token_ids", None) or ())]
    # SGLang lists end-of-text tokens in no order. If there are several, the tokenizer's comes first.
    found = (*(also[:1] if len(listed) != 1 else ()), *sorted(listed), *also)
    ends = end_ids(one for one in found if one is not None)
    return Model(request.vocab_size, ends, tokenizer)


def _seed(name: str) -> int:
    """Return a seed from a request's id, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
