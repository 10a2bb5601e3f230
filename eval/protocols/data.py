"""Documents of the hub's data sets, or of local files in the same schema."""

import json
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
SUFFIXES = (".jsonl", ".json", ".parquet")


def load(kind: str, data: Data, split: str, given: str | None) -> list[Document]:
    """Return the documents of a split.

    `split` is `test` or `train`. `given` is a file with this split's documents, or a folder with a file for each split,
    in place of the hub's. The folder may have a folder for each kind.

    Raises:
        UserError: the documents cannot be read, or lack a field. If they are not on this machine and the hub cannot be
            reached, the message has the command that downloads them.
    """
    found = _of_hub(data, split) if given is None else _of_files(kind, given, split)
    where = data.path if given is None else f"task.data={given}"
    for number, document in enumerate(found, 1):
        lacking = [field for field in FIELDS[kind] if field not in document]
        if lacking:
            have = ", ".join(document)
            raise UserError(
                "example-invalid",
                f"{where}: document {number} lacks `{lacking[0]}` (it has {have}). Name other task.data.",
            )
    if not found:
        raise UserError("samples-missing", f"{where} has no documents in split {split}. Name other task.data.")
    return found


def _of_hub(data: Data, split: str) -> list[Document]:
    import datasets

    try:
        parts = [datasets.load_dataset(data.path, subset, split=split) for subset in data.subsets]
    except Exception as error:  # of the network, the hub, or the cache
        raise UserError(
            "hub-unreachable",
            f"Cannot load the data set {data.path} from this machine or the hub ({first_line(error)}). Run"
            f" `hf download --repo-type dataset {data.path}` where there is a network, or set task.data=FOLDER.",
        ) from error
    return [dict(document) for part in parts for document in part]  # type: ignore[arg-type]


def _of_files(kind: str, given: str, split: str) -> list[Document]:
    path = expanded("task.data", given)
    if not path.exists():
        raise UserError("file-missing", f"task.data={given} does not exist. Name a file or folder with the documents.")
    path = path / kind if (path / kind).is_dir() else path
    if path.is_dir():
        files = [file for file in sorted(path.rglob(f"*{split}*")) if file.suffix in SUFFIXES]
    else:
        files = [path] if path.suffix in SUFFIXES else []
    if not files:
        raise UserError(
            "file-missing",
            f"task.data={given} has no documents of split {split}. Name a folder with {split}.jsonl, json or parquet.",
        )
    return [document for file in files for document in _read(file)]


def _read(file: Path) -> Sequence[Document]:
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
