"""Recorded prompts and grades of the authors' own harnesses, compared with ours line by line."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from dllm_sampler.cli.inputs import file_records
from dllm_sampler.errors import UserError
from dllm_sampler.eval.protocols import data, grading, prompts, spec
from dllm_sampler.eval.protocols.prompts import Document, Message, Prompt
from dllm_sampler.eval.protocols.spec import Cell

TRAIN = "gsm8k_train.json"
END = "<|endoftext|>"
_PIECE = re.compile(r"<\|[a-z_]+\|>|.", re.DOTALL)
_BEGIN = {"dream": "<|beginoftext|>", "llada": "<|startoftext|>"}
_LLADA = "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"
_FIELDS = ("protocol", "variant", "task", "doc_id")  # of every line
Line = Mapping[str, Any]


class _Letters:
    """The tokenizer of the recordings: a token is a character, or a special token. Ids are the texts themselves."""

    eos_token = END

    def __call__(self, text: str) -> dict[str, list[str]]:
        return {"input_ids": _PIECE.findall(text)}

    def decode(self, ids: Sequence[str], skip_special_tokens: bool) -> str:
        return "".join(piece for piece in ids if len(piece) == 1 or not skip_special_tokens)


@dataclass(frozen=True)
class Outcome:
    """The comparison of one recorded line.

    name: the file and the number of the line; wrong: clauses on what differs, empty if the line passes
    """

    name: str
    wrong: Sequence[str]


def replay(folder: Path) -> Iterator[Outcome]:
    """Yield the outcome of every line of `prompts/*.jsonl` and `grading/*.jsonl`.

    Raises:
        UserError: the folder has no such files, or one of them is invalid.
    """
    asked = _lines(folder / "prompts", "doc")
    graded = _lines(folder / "grading", "raw_output", "metrics")
    if not asked and not graded:
        raise UserError("file-missing", f"{folder} has no prompts/*.jsonl and no grading/*.jsonl. Name another folder.")
    train = folder / "prompts" / TRAIN
    examples = data.read(train) if train.exists() else []
    yield from _replay_prompts(asked, examples, str(train))
    documents = {(line["task"], line["doc_id"]): line["doc"] for _, line in asked}
    documents |= {(line["protocol"], line["task"], line["doc_id"]): line["doc"] for _, line in asked}
    for name, line in graded:
        key = line["protocol"], line["task"], line["doc_id"]
        document = line.get("doc") or documents.get(key) or documents.get(key[1:])
        if document is None:
            yield Outcome(name, [f"no line in prompts/ has the document {key[2]} of task {key[1]}"])
        else:
            try:
                yield Outcome(name, _compare_grade(_cell(name, line), document, line))
            except UserError as error:  # a package is missing
                yield Outcome(name, [str(error)])


def _lines(folder: Path, *fields: str) -> list[tuple[str, Line]]:
    """Return the lines of the files of a folder, each after its place. Every line has `fields`."""
    found: list[tuple[str, Line]] = []
    for file in sorted(folder.glob("*.jsonl")):
        found += file_records("--replay", str(file))
    for where, line in found:
        if not isinstance(line, dict) or not {*_FIELDS, *fields} <= set(line):
            needed = ", ".join((*_FIELDS, *fields))
            raise UserError("file-invalid", f"{where} is not a JSON object with {needed}. Remove the line.")
    return found


def _cell(where: str, line: Line) -> Cell:
    """Return the cell of a line: its protocol, variant and kind of task, and the harness's task if that decides."""
    variant, task = f"{line['protocol']}/{line['variant']}", str(line.get("lm_eval_task")).replace("_", "-")
    for name in spec.names():
        every = spec.load(name).cells.values()
        cells = [cell for cell in every if (cell.variant, cell.kind) == (variant, line["task"])]
        named = [cell for cell in cells if Path(cell.lm_eval or "").stem.replace("_", "-") == task]
        if cells:
            return (named or cells)[0]
    raise UserError("file-invalid", f"{where}: no protocol has {variant} with task {line['task']}. Remove the line.")


def _replay_prompts(asked: Sequence[tuple[str, Line]], train: Sequence[Document], where: str) -> Iterator[Outcome]:
    runs: dict[tuple[str, str], list[tuple[str, Line]]] = defaultdict(list)
    for name, line in asked:
        cell = _cell(name, line)
        runs[cell.variant, cell.task].append((name, line))
    for lines in runs.values():
        documents: dict[int, Document] = {line["doc_id"]: line["doc"] for _, line in lines}
        known = next(iter(documents.values()))  # stands in for documents that are not recorded: their draws count
        cell = _cell(*lines[0])
        try:
            every = [documents.get(one, known) for one in range(max(documents) + 1)]
            built = list(prompts.build(cell, every, train, where))
        except UserError as error:  # a package, or the examples, are missing
            yield from (Outcome(name, [str(error)]) for name, _ in lines)
            continue
        for name, line in lines:
            yield Outcome(name, _compare_prompt(cell, built[line["doc_id"]], line))


def _compare_prompt(cell: Cell, prompt: Prompt, line: Line) -> list[str]:
    family = "dream" if "dream" in cell.variant else "llada"
    written = prompt.text if prompt.messages is None else _chat(family, prompt.messages, prompt.continues)
    given = ("" if not cell.bos else _BEGIN[family]) + written
    ours = {"messages": prompt.messages, "until": prompts.stop_strings(cell), "model_input": given}
    ours["request"] = written if cell.chat.startswith("lm-eval") else prompt.text
    return [f"`{name}` differs" for name in ours if not _same(name, ours[name], line)]


def _same(name: str, ours: Any, line: Line) -> bool:
    if line.get(f"{name}_sha256") is not None:
        plain = ours if isinstance(ours, str) else json.dumps(ours, sort_keys=True, ensure_ascii=False)
        return sha256(plain.encode()).hexdigest() == line[f"{name}_sha256"] and line.get(name, ours) in (ours, None)
    return name not in line or line[name] == ours


def _chat(family: str, messages: Sequence[Message], continues: bool) -> str:
    """Return the text of messages in the chat template of the recordings."""
    if family == "llada":
        turns = [_LLADA.format(role=one["role"], content=one["content"].strip()) for one in messages]
        return "".join([_BEGIN[family], *turns, "<|start_header_id|>assistant<|end_header_id|>\n\n"])
    system = {"role": "system", "content": "You are a helpful assistant."}
    turns = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in [system, *messages]]
    whole = "".join(turns)
    return whole.removesuffix("<|im_end|>\n") if continues else f"{whole}<|im_start|>assistant\n"


def _compare_grade(cell: Cell, document: Document, line: Line) -> list[str]:
    letters: Any = _Letters()
    text, _ = prompts.cut_answer(cell, letters(line["raw_output"])["input_ids"], letters)
    wrong = [] if text == line.get("after_wrapper", text) else ["`after_wrapper` differs"]
    ours = grading.grade(cell, document, line.get("after_wrapper", text))
    expected = {**line["metrics"]}
    if "post_pass@1" in line:
        expected[grading.SCRIPT] = line["post_pass@1"]
    if "extracted" in line and line["extracted"] != ours.extracted:
        wrong.append("`extracted` differs")
    if "post_code" in line and line["post_code"] != ours.script:
        wrong.append("`post_code` differs")
    wrong += [
        f"the metric {name} differs" for name, value in expected.items() if float(value) != ours.metrics.get(name)
    ]
    if cell.published not in ours.metrics:
        wrong.append(f"the published metric {cell.published} is missing")
    return wrong
