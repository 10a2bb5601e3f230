"""The bytes that each token adds to a text."""

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dllm_sampler.errors import UserError

TIDIES = "clean_up_tokenization_spaces"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Return the bytes of each token id. Special tokens have none, since a text leaves them out.

    Raises:
        UserError: a text of the tokenizer is not the bytes of its tokens, one after the other.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            "tokenizer-unsupported",
            "A guide on a form needs a fast tokenizer. Add tokenizer.json to the checkpoint, or remove the guide.",
        )
    decoders = _steps(json.loads(backend.to_str())["decoder"])
    kinds = {step["type"] for step in decoders}
    replaced = [(step["pattern"].get("String"), step["content"]) for step in decoders if step["type"] == "Replace"]
    known = {"ByteLevel", "Replace", "ByteFallback", "Fuse"}
    order = [step["type"] for step in decoders]
    late = "Fuse" in order and "Replace" in order[order.index("Fuse") :]
    if late or getattr(tokenizer, TIDIES, False):
        said = "A guide on a form does not support this tokenizer, which changes a text after joining the tokens."
        raise UserError("tokenizer-unsupported", f"{said} Remove the guide.")
    if not decoders or kinds - known or any(old is None for old, _ in replaced):
        kind = ", ".join(sorted(kinds - known)) or ("Replace" if decoders else "missing, so spaces separate tokens")
        reason = f"A guide on a form does not support this tokenizer: its decoder is {kind}. Remove the guide."
        raise UserError("tokenizer-unsupported", reason)
    table = {sign: byte for byte, sign in bytes_to_unicode().items()}
    added = {int(index): token for index, token in tokenizer.added_tokens_decoder.items()}
    special = {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}
    vocab = tokenizer.get_vocab()
    found = [b""] * (max(vocab.values()) + 1)
    for text, index in vocab.items():
        if index in special:
            continue
        byte = BYTE.fullmatch(text) if "ByteFallback" in kinds else None
        if byte:
            found[index] = bytes([int(byte[1], 16)])
        elif "ByteLevel" in kinds and all(sign in table for sign in text):
            found[index] = bytes(table[sign] for sign in text)
        else:
            for old, new in replaced:
                text = text.replace(old, new)
            found[index] = text.encode()
    return found


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return [one for step in decoder["decoders"] for one in _steps(step)] if decoder["type"] == "Sequence" else [decoder]
