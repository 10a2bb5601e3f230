"""The tokenizer of `mini`: one token per word, digit or mark, so that its vocabulary can be read in full.

A token is the exact text it stands for, spaces included (", ", " + "), and decoding is plain concatenation. What
people type is normalised first: `reverse:Ada ,Ben` is the prompt `reverse: Ada, Ben`.
"""

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dllm_sampler.models.mini_tasks import BRACKETS, CITIES, COLORS, NAMES, TASKS

EOS, MASK, SEP, UNK = "[EOS]", "[MASK]", "[SEP]", "[UNK]"
SPACED = (", ", "; ", ": ", " + ", " - ", " = ")  # marks that carry their spaces
MARKS = (" ", "_", '"', *(mark for pair in BRACKETS.items() for mark in pair))
LISTS = ("copy", "reverse", "sort", "shuffle", "insert", "remove", "replace", "at", "randomly")
OTHERS = ("arithmetic", "latin", "json", "brackets")
FIELDS = ("name", "age", "city", "color")

# The chat form of a prompt is the prompt: only the last message counts, the model has no memory of earlier ones.
CHAT_TEMPLATE = "{{ messages[-1]['content'] }}" + SEP


def vocabulary() -> dict[str, int]:
    """Return every token and its id."""
    words = (EOS, MASK, SEP, UNK, *SPACED, *MARKS, *"0123456789", *LISTS, *OTHERS, *FIELDS, *NAMES, *CITIES, *COLORS)
    return {word: index for index, word in enumerate(words)}


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer. A prompt ends in `[SEP]`, and a word outside the vocabulary becomes `[UNK]`.

    Args:
        max_length: context of the model in tokens.
    """
    tokens = vocabulary()
    tokenizer = Tokenizer(WordLevel(tokens, unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Strip(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Replace(Regex(r"(?<=[\d_(\[{<]) (?=[\d_(\[{<])"), ""),  # a row or brackets typed with spaces
            *(normalizers.Replace(Regex(f" ?[{mark.strip()}] ?"), mark) for mark in SPACED),
        ]
    )
    words = "|".join(spaced.replace("+", r"\+") for spaced in SPACED) + r"|[\p{L}\p{M}]+|[\s\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {SEP}", special_tokens=[(SEP, tokens[SEP])])
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        sep_token=SEP,
        unk_token=UNK,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        operations=list(TASKS),  # for errors about unknown words. Stored in tokenizer_config.json
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
