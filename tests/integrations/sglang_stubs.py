"""What surrounds a block algorithm in SGLang: its base class in two forms, and a server that runs it on a CPU.

The first form restates the contract in a few lines. The second is `sglang.srt.dllm` as released, where the wheel is
installed; the heavy modules that it imports are replaced by empty ones.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.models.denoiser import TransformerDenoiser
from tests import toys
from tests.integrations.engine import block_logits

ALGORITHMS = "sglang.srt.dllm.algorithm"
HEAVY = {
    "sglang.srt.layers.logits_processor": ["LogitsProcessorOutput"],
    "sglang.srt.model_executor.forward_batch_info": ["ForwardBatch"],
    "sglang.srt.model_executor.model_runner": ["ModelRunner"],
    "sglang.srt.server_args": ["ServerArgs"],
    "sglang.srt.configs.model_config": ["ModelConfig"],
    "sglang.srt.arg_groups.overrides": ["resolving_view"],
}


class Contract:
    """What SGLang promises an algorithm, and wants of it."""

    def __init__(self, config: Any):
        self.block_size, self.mask_id, self.fdfo = config.block_size, config.mask_id, config.first_done_first_out_mode

    def init_step_state(self, batch: Any) -> list[Any]:
        raise NotImplementedError

    def step(self, batch: Any, logits: Tensor, states: list[Any]) -> list[bool]:
        raise NotImplementedError

    def max_steps(self, block_size: int) -> int:
        raise NotImplementedError

    def run(self, runner: Any, batch: Any, states: list[Any] | None = None) -> tuple[Any, ...]:
        """First done, first out: one forward. Synchronous: forwards until every block of the batch is final."""
        if not self.fdfo:
            return self._synchronous(runner, batch)
        kept = states or [None] * batch.batch_size
        if None in kept:  # SGLang opens all of them, and uses those of requests that have none
            kept = [new if old is None else old for old, new in zip(kept, self.init_step_state(batch), strict=True)]
        out = runner.forward(batch, pp_proxy_tensors=None)
        done = self.step(batch, out.logits_output.full_logits, kept)
        accepted = [self.block_size * over for over in done]
        left = [None if over else state for over, state in zip(done, kept, strict=True)]
        return out.logits_output, batch.input_ids.view(-1, self.block_size).tolist(), accepted, left, False

    def _synchronous(self, runner: Any, batch: Any) -> tuple[Any, ...]:
        given = batch.dllm_prompt_mask
        given = batch.input_ids.view(-1, self.block_size) != self.mask_id if given is None else given
        states, start = self.init_step_state(batch), given.sum(1).tolist()
        out = runner.forward(batch, pp_proxy_tensors=None)
        if min(start) == self.block_size:
            return out.logits_output, [], None, None, False
        for _ in range(self.max_steps(self.block_size)):
            if all(self.step(batch, out.logits_output.full_logits, states)):
                break
            out = runner.forward(batch, pp_proxy_tensors=None)
        blocks = batch.input_ids.view(-1, self.block_size)
        return out.logits_output, [row[at:] for row, at in zip(blocks, start, strict=True)], None, None, False


def installed() -> Path | None:
    """The folder of SGLang's released package; None: it is not installed."""
    try:
        return Path(str(metadata.distribution("sglang").locate_file("sglang")))
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def importable(folder: Path | None) -> Iterator[None]:
    """Have `sglang.srt.dllm` and `sglang.srt.plugins`: those in `folder`, or the contract restated, if that is None."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    for name in before:
        del sys.modules[name]
    try:
        for name in ("sglang", "sglang.srt"):  # their own code imports what needs a GPU
            _stub(name).__path__ = [] if folder is None else [str(folder.joinpath(*name.split(".")[1:]))]
        if folder is None:
            package, base = _stub(ALGORITHMS), _stub(f"{ALGORITHMS}.base")
            vars(package)["algo_name_to_cls"] = {}
            vars(base)["DllmAlgorithm"] = Contract
        else:
            for name, classes in HEAVY.items():
                vars(_stub(name)).update({one: type(one, (), {}) for one in classes})
            vars(_stub("sglang.srt.utils"))["is_npu"] = lambda: False
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)


def _stub(name: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    return module


def algorithm(name: str, settings: dict[str, Any], fdfo: bool, length: int = toys.FILTER_BLOCK) -> Any:
    """An algorithm from SGLang's own registry."""
    config = SimpleNamespace(
        algorithm_config=settings, block_size=length, mask_id=toys.MASK, first_done_first_out_mode=fdfo
    )
    return import_module(ALGORITHMS).algo_name_to_cls[name](config)


class Req:
    """A request as SGLang's scheduler keeps it, and shows it to an algorithm."""

    def __init__(self, request: Request, tokenizer: Any = None, ends: Sequence[int] = (toys.EOS,)):
        self.rid, self.origin_input_ids, self.output_ids = request.rid, array("q", request.prompt), array("q")
        self.tokenizer, self.eos_token_ids, self.vocab_size = tokenizer, set(ends), toys.VOCAB
        self.sampling_params = SimpleNamespace(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            max_new_tokens=request.tokens,
            sampling_seed=request.seed,
        )


@dataclass
class Request:
    """A request of a user, and what the server has of its answer."""

    prompt: list[int]
    tokens: int
    rid: str = "0"
    temperature: float = 1.0
    top_k: int = 1  # what SGLang makes of temperature=0
    top_p: float = 1.0
    seed: int | None = None  # `sampling_seed`
    ids: list[int] = field(default_factory=list)  # whole blocks so far
    block: list[int] | None = None  # the active one, between rounds
    state: Any = None
    forwards: int = 0  # of blocks that were not all prompt
    failed: bool = False  # SGLang ended it at a token that does not exist
    kept: Any = field(default=None, repr=False)  # SGLang's own object, from the first round on

    @property
    def over(self) -> bool:
        return self.failed or len(self.ids) >= len(self.prompt) + self.tokens

    @property
    def answer(self) -> list[int]:
        return self.ids[len(self.prompt) : len(self.prompt) + self.tokens]


@dataclass
class Server:
    """Runs an algorithm as SGLang's scheduler does: blocks on a grid, those of prompts too."""

    algorithm: Any
    model: TransformerDenoiser
    dtype: torch.dtype = torch.float64
    mask: float = 0.0  # added to the logit of the mask
    broken: str = ""  # the request for which the model returns NaN
    tokenizer: Any = None
    ends: Sequence[int] = (toys.EOS,)  # at which SGLang ends an answer
    batch: list[Request] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)  # the blocks that the last forward computed keys of
    buffer: Tensor | None = None  # where all logits of one batch size are written, as a CUDA graph does

    def serve(self, requests: list[Request], arrivals: list[int] | None = None) -> list[Request]:
        """Answer all; each joins the batch at the round that `arrivals` says."""
        clock = 0
        while not all(one.over for one in requests):
            at = zip(requests, arrivals or [0] * len(requests), strict=True)
            self.batch = [one for one, come in at if come <= clock and not one.over]
            clock += 1
            if self.batch:
                self.round()
        return requests

    def admit(self, one: Request) -> None:
        """Show a request to the algorithm before its first forward."""
        one.kept = Req(one, self.tokenizer, self.ends)
        validate = getattr(type(self.algorithm), "validate_request", lambda req: None)
        assert validate(one.kept) is None

    def retract(self, one: Request) -> None:
        """Take a request's place in the cache: it keeps whole blocks of its answer, and computes all of them again."""
        one.ids, one.block, one.state = [], None, None

    def round(self) -> None:
        length, batch = self.algorithm.block_size, self.batch
        for one in batch:
            if one.kept is None:
                self.admit(one)
            if one.block is None:
                known: Any = one.kept
                given = [*one.prompt, *known.output_ids][len(one.ids) : len(one.ids) + length]
                one.block = [*given, *[self.algorithm.mask_id] * (length - len(given))]
        _, blocks, accepted, states, _ = self.algorithm.run(self, self.described(), [one.state for one in batch])
        for row, one in enumerate(batch):
            if accepted is not None and not accepted[row]:
                one.block, one.state = blocks[row], states[row]
                continue
            decoded = one.block or []
            if accepted is None and blocks:
                decoded = decoded[: length - len(blocks[row])] + blocks[row].tolist()
            one.failed = min(blocks[row] if accepted is not None else decoded) < 0
            assert one.failed or (decoded if accepted is None else blocks[row]) == self.seen[row], "its keys are stale"
            one.ids, one.block, one.state = one.ids + (decoded if accepted is None else blocks[row]), None, None
            one.kept.output_ids.extend(one.ids[len(one.prompt) + len(one.kept.output_ids) :])

    def described(self) -> Any:
        """SGLang's batch, as far as an algorithm looks at it."""
        length, batch = self.algorithm.block_size, self.batch
        positions = torch.tensor([range(len(one.ids), len(one.ids) + length) for one in batch], dtype=torch.int32)
        lengths = torch.tensor([[len(one.prompt)] for one in batch])
        literal = any(self.algorithm.mask_id in one.prompt for one in batch)
        return SimpleNamespace(
            batch_size=len(batch),
            input_ids=torch.tensor([one.block for one in batch]).flatten(),
            positions=positions.flatten(),
            dllm_prompt_mask=positions < lengths if literal else None,
            rids=[one.rid for one in batch],
            sampling_info=SimpleNamespace(
                is_all_greedy=all(one.top_k == 1 for one in batch),
                temperatures=torch.tensor([[one.temperature] for one in batch]),
                top_ks=torch.tensor([one.top_k for one in batch], dtype=torch.int32),
                top_ps=torch.tensor([one.top_p for one in batch]),
            ),
        )

    def forward(self, batch: Any, pp_proxy_tensors: object = None) -> Any:
        """Logits `[B*W, V]`, where those of the last forward were."""
        blocks = batch.input_ids.view(len(self.batch), -1).tolist()
        assert min(map(min, blocks)) >= 0, "no model embeds such a token"
        self.seen = blocks
        logits = torch.cat(
            [
                block_logits(self.model, [*one.ids, *block], len(block))[0]
                for one, block in zip(self.batch, blocks, strict=True)
            ]
        ).to(self.dtype)
        logits[:, self.algorithm.mask_id] += self.mask
        for row, one in enumerate(self.batch):
            one.forwards += len(one.ids) + len(blocks[row]) > len(one.prompt)
            if one.rid == self.broken and len(one.ids) + len(blocks[row]) > len(one.prompt):
                logits[row * len(blocks[row])] = torch.nan
        if self.buffer is None or self.buffer.shape != logits.shape:
            self.buffer = torch.empty_like(logits)
        self.buffer.copy_(logits)
        return SimpleNamespace(logits_output=SimpleNamespace(full_logits=self.buffer), can_run_graph=False)
