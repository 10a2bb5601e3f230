"""Documents of the hub's data sets, or of local files in the same schema."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_sampler.cli.inputs import file_records
from dllm_sampler.errors import UserError, first_line
from dllm_sampler.eval.protocols.prompts import Document
from dllm_sampler.eval.protocols.spec import Data
from dllm_sampler.host.paths import expanded

FIELDS: Mapping[str, tuple[str, ...]] = {
    "gsm8k": ("question", "answer"),
    "minerva_math": ("problem", "solution"),
    "humaneval": ("prompt", "test", "entry_point"),
    "mbpp": ("text", "test_list"),
}
NEEDS = {"answer": ("#### ", "#### "), "solution": (r"\\f?box", r"\boxed{...}")}  # what graders look for in a field
SUFFIXES = (".jsonl", ".json", ".parquet")


def load(kind: str, data: Data, split: str, given: str | None) -> list[Document]:
    """Return the documents of a split.

    Args:
        kind: the kind of data set, a key of `FIELDS`.
        data: the data set of the hub.
        split: the name of the split, for example `test` or `train`.
        given: None, or a path in place of the hub's data set. A file has the documents of the split with the questions.
            A folder has a file or more for each split, in a folder named after `kind` or one for each subset, if any.

    Raises:
        UserError: the documents cannot be read, or lack a field. If they are not on this machine and the hub cannot be
            reached, the message has the command that downloads them.
    """
    found = _of_hub(data, split) if given is None else _of_files(kind, data, given, split)
    where = data.path if given is None else f"task.data={given}"
    for number, document in enumerate(found, 1):
        for field in FIELDS[kind]:
            value = document.get(field)
            several = isinstance(value, list | tuple) and bool(value) and all(isinstance(one, str) for one in value)
            pattern, form = NEEDS.get(field, ("", ""))
            if not (several if field == "test_list" else isinstance(value, str) and re.search(pattern, value)):
                what = "list of texts" if field == "test_list" else f"text with `{form}`" if form else "text"
                said = f"{where}: document {number} of split {split} has no {what} under `{field}`"
                have = f"its fields are {', '.join(map(str, document))}" if document else "it has no fields"
                raise UserError("example-invalid", f"{said} ({have}). Correct the data.")
    if not found:
        raise UserError("samples-missing", f"{where}: split {split} is empty. Set task.data to documents of it.")
    return found


def _of_hub(data: Data, split: str) -> list[Document]:
    import datasets

    try:
        parts = [datasets.load_dataset(data.path, subset, split=split) for subset in data.subsets]
    except Exception as error:  # of the network, the hub, or the cache
        raise UserError(
            "hub-unreachable",
            f"Cannot load the data set {data.path} from this machine or the hub ({first_line(error)}). Run `hf download"
            f" --repo-type dataset {data.path} --local-dir FOLDER` where there is a network, and set task.data=FOLDER.",
        ) from error
    return [dict(document) for part in parts for document in part]  # type: ignore[arg-type]


def _of_files(kind: str, data: Data, given: str, split: str) -> list[Document]:
    path = expanded("task.data", given)
    if not path.exists():
        raise UserError("file-missing", f"task.data={given} does not exist. Name a file or folder with the documents.")
    path = path / kind if (path / kind).is_dir() else path
    if path.is_dir():
        folders = [path / subset for subset in data.subsets if subset and (path / subset).is_dir()] or [path]
        found = [file for folder in folders for file in sorted(folder.rglob(f"*{split}*"))]
    else:
        found = [path] if split == data.split else []
    files = [file for file in found if file.suffix in SUFFIXES]
    if not files:
        raise UserError(
            "file-missing",
            f"task.data={given} has no documents of split {split}. Name a folder with {split}.jsonl, {split}.json or"
            f" {split}.parquet.",
        )
    return [document for file in files for document in read(file)]


def read(file: Path) -> Sequence[Document]:
    """Return the documents in a file: Parquet, JSON lines if it ends in `.jsonl`, else a list in JSON.

    Raises:
        UserError: the file cannot be read, or does not have objects.
    """
    if file.suffix == ".parquet":
        from datasets import Dataset
        from datasets.exceptions import DatasetGenerationError

        try:
            return [dict(one) for one in Dataset.from_parquet(str(file))]  # type: ignore[arg-type,union-attr]
        except (OSError, ValueError, DatasetGenerationError) as error:  # pyarrow's are among them
            reason = first_line(error.__cause__ or error)
            raise UserError("file-unreadable", f"{file} cannot be read ({reason}). Replace the file.") from error
    if file.suffix == ".jsonl":
        lines = file_records("task.data", str(file))
        for where, row in lines:
            if not isinstance(row, dict):
                raise UserError("file-invalid", f"{where} is not a JSON object. Write one object in each line.")
        return [row for _, row in lines]
    try:
        rows: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        said = f"{file} cannot be read ({first_line(error)})"
        raise UserError("file-unreadable", f"{said}. Correct it, or name it .jsonl if it has JSON lines.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError("file-invalid", f"{file} is not a list of JSON objects. Write [{{...}}, ...].")
    return rows
