"""Prompts as the harnesses of published protocols build them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from dllm_sampler.errors import UserError, counted, first_line, short
from dllm_sampler.eval.protocols import packages
from dllm_sampler.eval.protocols.spec import Cell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEED = 1234  # of lm-evaluation-harness, for examples
Message = dict[str, str]
Document = Mapping[str, Any]
_ROLES = {"HUMAN": "user", "BOT": "assistant"}


@dataclass(frozen=True)
class Prompt:
    """A question as a harness asks it.

    text: the prompt without a chat template
    messages: the chat messages, or None if the protocol uses no chat template
    """

    text: str
    messages: list[Message] | None

    @property
    def continues(self) -> bool:
        """True if the last message is the beginning of the answer."""
        return self.messages is not None and self.messages[-1]["role"] == "assistant"


class _Loader(yaml.SafeLoader):
    """A loader that reads `!function utils.name` as the text `utils.name`."""


_Loader.add_constructor("!function", lambda loader, node: str(node.value))
_JINJA = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_MINERVA = "Problem:\n{{problem}}\n\nSolution:"  # a function in lm-eval


@cache
def lm_eval_task(path: str) -> Mapping[str, Any]:
    """Return the configuration of a task of lm-evaluation-harness."""
    file = packages.lm_eval_tasks() / path
    task = yaml.load(packages.read(file), _Loader)
    included = (
        lm_eval_task(str(file.parent.relative_to(packages.lm_eval_tasks()) / task["include"]))
        if "include" in task
        else {}
    )
    return {**included, **task}


@cache
def lm_eval_examples(path: str) -> list[Document]:
    """Return the fixed examples of a task of lm-evaluation-harness, as version 0.4.8 has them."""
    given = lm_eval_task(path)["fewshot_config"]["samples"]
    if isinstance(given, list):
        return given
    file = (packages.lm_eval_tasks() / path).with_name("utils.py")
    found = packages.read_literal(file, given.rpartition(".")[2])
    return [{**one, **_as_0_4_8(one)} for one in found]


def _as_0_4_8(example: Document) -> Document:
    """Return the texts of a MATH example with two mistakes of version 0.4.8, which later versions correct."""
    texts = {key: example[key].replace("\\\\\n", "\\\n") for key in ("problem", "solution") if key in example}
    if texts.get("problem", "").endswith("{5-x}}$."):
        texts["problem"] += "}"
    return texts


def render(template: str, document: Document) -> str:
    """Return a Jinja template filled with the fields of a document."""
    try:
        return _JINJA.from_string(template).render(**document)
    except TemplateError as error:
        raise UserError(
            "config-invalid",
            f"The protocol's template {short(repr(template))} cannot be filled ({first_line(error)}). The fields are"
            f" {', '.join(document)}: correct prompt or prefix in the protocol's file.",
        ) from None


def question(cell: Cell, document: Document) -> str:
    """Return a question without examples, as lm-evaluation-harness asks it."""
    assert cell.lm_eval is not None
    own = lm_eval_task(cell.lm_eval)["doc_to_text"]
    return render(cell.prompt or (_MINERVA if cell.kind == "minerva_math" else own), document)


def target(cell: Cell, document: Document) -> str:
    """Return the answer of an example, or the tests of a question, as lm-evaluation-harness states it."""
    assert cell.lm_eval is not None
    own = str(lm_eval_task(cell.lm_eval)["doc_to_target"])
    return str(document["solution"]) if cell.kind == "minerva_math" else render(own, document)


def stop_strings(cell: Cell) -> list[str]:
    """Return the texts that end an answer."""
    if cell.until is not None or cell.lm_eval is None:
        return list(cell.until or ())
    return list(lm_eval_task(cell.lm_eval)["generation_kwargs"]["until"])


def draws_examples(cell: Cell) -> bool:
    """Return True if examples are drawn from the training split, different ones for each question."""
    return (
        cell.lm_eval is not None
        and cell.shots > 0
        and "samples" not in lm_eval_task(cell.lm_eval).get("fewshot_config", {})
    )


def build(cell: Cell, documents: Sequence[Document], train: Sequence[Document], where: str) -> Iterator[Prompt]:
    """Yield the prompt of each document.

    Examples are drawn as in a single process with all documents in order, also if several processes run.

    `train` may be empty if no examples are drawn. `where` is its source, as the user typed it.

    Raises:
        UserError: the training split has fewer documents than a prompt has examples.
    """
    if cell.opencompass is not None:
        rounds = packages.read_template(
            packages.located("opencompass") / "opencompass/configs/datasets" / cell.opencompass
        )
        if cell.prompt is not None:
            rounds[-1] = {**rounds[-1], "prompt": cell.prompt}
        yield from (_of_rounds(cell, rounds, document) for document in documents)
        return
    generator, draws = Random(SEED), draws_examples(cell)
    if draws and len(train) < cell.shots:
        has = f"{where}: split train has {counted(len(train), 'document')}"
        raise UserError("samples-missing", f"{has}, and prompts have {cell.shots} examples. Name other task.data.")
    fixed = [] if draws or not cell.shots else lm_eval_examples(str(cell.lm_eval))[: cell.shots]
    for document in documents:
        if draws and cell.chat == "lm-eval-turn":
            generator.sample(train, cell.shots)  # for a single chat turn it draws twice
        examples = generator.sample(train, cell.shots) if draws else fixed
        yield _of_lm_eval(cell, examples, document)


def _of_lm_eval(cell: Cell, examples: Sequence[Document], document: Document) -> Prompt:
    between = lm_eval_task(str(cell.lm_eval)).get("target_delimiter", " ")
    asked = question(cell, document)
    pairs = [(question(cell, one), target(cell, one)) for one in examples]
    text = "".join(f"{ask}{between}{answer}\n\n" for ask, answer in pairs) + asked
    begun = [] if cell.prefix is None else [{"role": "assistant", "content": render(cell.prefix, document)}]
    if cell.chat == "none":
        return Prompt(text, None)
    if cell.chat == "lm-eval-turns":
        turns = [
            {"role": role, "content": one}
            for pair in pairs
            for role, one in zip(("user", "assistant"), pair, strict=True)
        ]
        return Prompt(text, [*turns, {"role": "user", "content": asked}, *begun])
    shown = text if cell.wrap is None else cell.wrap.replace("{request}", text)
    return Prompt(text, [{"role": "user", "content": shown}, *begun])


def _of_rounds(cell: Cell, rounds: Sequence[Mapping[str, str]], document: Document) -> Prompt:
    fields = ["problem"] if cell.kind == "minerva_math" else document  # the other fields of MATH are not read
    values = {
        key: "\n".join(document[key]) if isinstance(document[key], list) else str(document[key]) for key in fields
    }
    messages = []
    for one in rounds:
        content = one["prompt"]
        for key, value in values.items():
            content = content.replace(f"{{{key}}}", value)
        messages.append({"role": _ROLES[one["role"]], "content": content})
    if cell.chat == "none":
        return Prompt("\n".join(one["content"] for one in messages), None)
    while messages[-1]["role"] == "assistant":  # the beginning of an answer, which chat models do not get
        messages.pop()
    return Prompt("", messages)


def cut_answer(cell: Cell, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the text of `tokens` that a protocol grades, and the text in which it counts tokens."""
    escaped = cell.escape and cell.answer != "cut-at-end-token"
    plain = cell.answer == "cut-without-special-tokens" or escaped
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=plain))
    if cell.answer == "cut-at-end-token" and tokenizer.eos_token:
        text = text.split(str(tokenizer.eos_token))[0]
    for stop in () if cell.escape else stop_strings(cell):
        text = text.split(stop)[0] if stop else text
    if cell.answer != "cut-with-special-tokens" or plain:
        return text, text
    ids: Any = tokenizer(text)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True)), text
