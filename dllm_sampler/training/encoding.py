"""Examples as tokens: a prompt as the sampler reads it, and an answer that ends in an end token."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError
from dllm_sampler.inputs import prompts
from dllm_sampler.training.examples import Example
from dllm_sampler.training.masking import Pair

WAY_OUT = "raise train.max_length up to the model's context, or leave such examples out by train.longer=drop"


class Encoder:
    """Encodes examples, each line of a user's data once.

    Args:
        tokenizer: of the model.
        spec: the model.
        most: tokens of a prompt with its answer.
        way_out: what to do with a longer example.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec, most: int, way_out: str = WAY_OUT):
        self.tokenizer, self.spec, self.most, self.way_out = tokenizer, spec, most, way_out
        self._known: dict[int, tuple[Example, Pair]] = {}  # examples of a user's data, which stay

    def __call__(self, example: Example) -> Pair:
        """The tokens of prompt and answer.

        Raises:
            UserError: naming the line and what is wrong with it.
        """
        prompt, answer = self._pair(example)
        length = len(prompt) + len(answer)
        if length > self.most:
            raise UserError(
                "example-too-long",
                f"{example.where} has {length} tokens of prompt and answer, and there is room for {self.most}:"
                f" {self.way_out}",
            )
        return prompt, answer

    def fits(self, example: Example) -> bool:
        """Whether there is room for an example."""
        return sum(map(len, self._pair(example))) <= self.most

    def check_canvas(self, example: Example, new_tokens: int) -> None:
        """Refuse an example whose answer could not be sampled.

        Raises:
            UserError: naming the line.
        """
        prompt, answer = self(example)
        if len(answer) - 1 > new_tokens:
            raise UserError(
                "example-too-long",
                f"the answer of {example.where} has {len(answer) - 1} tokens. Raise train.new_tokens={new_tokens}.",
            )
        self._check_room(prompt, example.where, new_tokens)

    def prompt(self, example: Example, new_tokens: int) -> list[int]:
        """The tokens of a prompt alone, whose answer is to be sampled.

        Raises:
            UserError: naming the line and what is wrong with it.
        """
        if _is_chat(example):
            ids = self._chat_ids(prompts.chat_text(list(example.prompt), self.tokenizer, example.where))  # pyright: ignore
        else:
            ids = self._ids(example.prompt, example.where)
        self._check_tokens(ids, example.where)
        self._check_room(ids, example.where, new_tokens)
        return ids

    def _check_room(self, prompt: list[int], where: str, new_tokens: int) -> None:
        if len(prompt) + new_tokens > self.spec.max_positions:
            raise UserError(
                "example-too-long",
                f"the prompt of {where} has {len(prompt)} tokens, with train.new_tokens={new_tokens} more than"
                f" the model's context of {self.spec.max_positions}",
            )

    def _check_tokens(self, ids: list[int], where: str) -> None:
        mask = self.spec.mask_id
        bad = [token for token in ids if not 0 <= token < self.spec.vocab_size or token == mask]
        if bad:
            what = "the mask token" if bad[0] == mask else f"a token outside the model's {self.spec.vocab_size}"
            raise UserError("example-invalid", f"{where} has {what} (id {bad[0]}) in its prompt or answer")

    def _pair(self, example: Example) -> Pair:
        if id(example) in self._known:
            return self._known[id(example)][1]
        if _is_chat(example):
            prompt, answer = self._chat(example)
        else:
            prompt = self._ids(example.prompt, example.where)
            answer = self._answer(example.answer, example.where)
        self._check_tokens(prompt + answer, example.where)
        ended = answer[-1] in self.spec.eos_ids  # by a chat template, for example
        found = prompt, answer if ended else [*answer, self.spec.eos_id]
        if not example.task:
            self._known[id(example)] = example, found
        return found

    def _ids(self, prompt: object, where: str) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError("example-invalid", f"{where} has an empty prompt")
            return prompts.text_ids(prompt, self.tokenizer, where)
        assert isinstance(prompt, list)
        return list(prompt)

    def _answer(self, text: str, where: str) -> list[int]:
        found = prompts.text_ids(text, self.tokenizer, f"the answer of {where}", special=False)
        if not found:
            raise UserError("example-invalid", f"the answer of {where} has no tokens")
        return found

    def _chat(self, example: Example) -> Pair:
        """Messages by the chat template: the answer is what it writes behind the beginning of the assistant's turn."""
        where, messages = example.where, list(example.prompt)
        begun = prompts.chat_text(messages, self.tokenizer, where)  # pyright: ignore[reportArgumentType]
        turn = {"role": "assistant", "content": example.answer}
        whole = prompts.chat_text([*messages, turn], self.tokenizer, where, begin=None)  # pyright: ignore[reportArgumentType]
        if not whole.startswith(begun):
            raise UserError("chat-template-failed", f"{where}: this chat template cannot write an answer. Give texts.")
        return self._chat_ids(begun), self._answer(whole[len(begun) :], where)

    def _chat_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore


def _is_chat(example: Example) -> bool:
    return isinstance(example.prompt, list) and bool(example.prompt) and isinstance(example.prompt[0], dict)


def check_prompts(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, spec: ModelSpec, new_tokens: int
) -> None:
    """Refuse examples of a user's data whose answers could not be sampled, before the first is.

    Raises:
        UserError: naming the line and what is wrong with it.
    """
    encode = Encoder(tokenizer, spec, spec.max_positions)
    for example in examples:
        encode.prompt(example, new_tokens)
