"""Loading of a denoiser and its tokenizer from a folder or a hub id."""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dllm_sampler.config import ModelSettings
from dllm_sampler.core.checks import check_choice, check_count, is_real, is_whole
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.spec import BlocksFrom, ModelSpec
from dllm_sampler.errors import NoEffectWarning, UserError, counted, first_line, invalid, unknown
from dllm_sampler.host.paths import expanded
from dllm_sampler.models import adapter as adapters
from dllm_sampler.models import quantized, weights
from dllm_sampler.models.denoiser import TransformerDenoiser, check_tokens
from dllm_sampler.models.families import ALIASES, FAMILIES
from dllm_sampler.models.family import Family
from dllm_sampler.models.fields import Fields, config_error, end_tokens, shown
from dllm_sampler.models.nemotron import NEMOTRON
from dllm_sampler.models.transformer import Transformer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DOWNLOADS = ["*.json", "model*.safetensors", "filter.safetensors", adapters.WEIGHTS, "*.txt", "*.model", "*.jinja"]
# Settings of a generation config that no option of ours has: for draws, and for any answer.
FILTERS = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
PENALTIES = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "exponential_decay_length_penalty", "guidance_scale",
)  # fmt: skip
BALANCED = ("auto", "balanced", "balanced_low_0")
Places = dict[str, str | int | torch.device]  # one of our modules to its device


class Loaded(NamedTuple):
    """A model ready to sample from, and its tokenizer if the checkpoint has one."""

    denoiser: Denoiser
    tokenizer: PreTrainedTokenizerBase | None


class _Token(NamedTuple):
    """A special token, and the place that names it, for errors."""

    id: int
    place: str


def load(
    path: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str = "auto", **settings: Any
) -> Loaded:
    """Load a checkpoint.

    Args:
        path: a folder, or a hub id `org/name`. An adapter of peft in it is merged into the weights in it, or else into
            those of the base that the adapter names.
        dtype: dtype of the weights, or its name. By default as stored, but float32 for float16 weights on a CPU, which
            has no fast and exact arithmetic for them.
        device: `auto` is the GPU if there is one, else the CPU. A `device_map` takes precedence.
        settings: fields of `config.ModelSettings`, which explains them.

    Raises:
        UserError: the checkpoint cannot be loaded with these arguments.
    """
    chosen = ModelSettings(str(path), **settings)
    target = as_device(device)
    wanted = as_dtype(dtype)
    if chosen.quantize not in (None, "int8"):
        raise invalid("model.quantize", chosen.quantize, "Set null or int8", "choice-unknown")
    if chosen.quantize is not None and chosen.device_map is not None:
        raise UserError("options-conflict", "model.quantize=int8 does not work with model.device_map. Remove one.")
    folder, added = with_adapter(
        find(path, chosen.revision, chosen.trust_remote_code), chosen.adapter, chosen.trust_remote_code
    )
    if not (folder / "config.json").is_file():
        raise UserError("checkpoint-incomplete", f"{folder} has no config.json. Name a folder with a checkpoint.")
    raw = weights.read_json(folder / "config.json")
    family = find_family(raw, folder)
    if chosen.causal_context is not None and (family is None or family.attention != "causal_context"):
        said = f"{folder}: model.causal_context={str(chosen.causal_context).lower()} works only for {NEMOTRON.name}"
        raise UserError("option-not-applicable", f"{said}. Remove it.")
    _check_blocks(family, folder, chosen.block_length, chosen.blocks_from)
    if family is None:
        _check_transformers(raw, folder, chosen, added)
    known = None if family is None else PreTrainedConfig()
    tokenizer = None if added is None else load_tokenizer(added, chosen.trust_remote_code, known or PreTrainedConfig())
    tokenizer = tokenizer or load_tokenizer(folder, chosen.trust_remote_code, known)
    _add_texts(tokenizer, folder, chosen)
    if family is None:
        from dllm_sampler.models import diffusion_gemma, huggingface

        if raw.get("model_type") == diffusion_gemma.MODEL_TYPE:
            return Loaded(diffusion_gemma.load(folder, tokenizer, wanted, target, chosen.device_map), tokenizer)
        return Loaded(huggingface.load(folder, tokenizer, wanted, target, added, chosen.eos_id), tokenizer)

    source = str(folder / "config.json")
    config = family.config(raw, source, weights.shapes(folder))
    try:
        with torch.device("meta"):
            model = Transformer(config).eval()
    except RuntimeError as error:  # the product of sizes is more than a tensor can have
        raise config_error(source, f"no network can be built ({first_line(error)})") from None
    # All that can be refused is refused before the weights are read, which may take minutes.
    made = _denoiser(model, raw, folder, family, tokenizer, target, chosen)
    if added is not None:
        adapters.check(model, added, family)
    if wanted is None:
        wanted = weights.stored_dtype(folder)
        if wanted == torch.float16 and target.type == "cpu":
            wanted = torch.float32
    places = None if chosen.device_map is None else _places(model, chosen.device_map, wanted)

    def fill(place: Callable[[str], torch.device]) -> None:
        weights.fill(model, folder, family, wanted, place)
        if added is not None:
            adapters.merge(model, added, family)

    if chosen.quantize is not None:
        if wanted not in (torch.bfloat16, torch.float32):  # sums of integers leave float16's range
            said = f"model.quantize=int8 does not support {str(wanted).removeprefix('torch.')} weights"
            raise UserError("options-conflict", f"{said}. Set dtype=bfloat16 or dtype=float32.")
        quantized.check(config)
        fill(lambda name: torch.device("cpu"))
        quantized.quantize(model, target)
    elif places is None:
        fill(lambda name: target)
    else:
        located = {name: _place(name, places) for name in model.state_dict()}
        fill(located.__getitem__)
        used = {_place(module, places) for module in places}
        target = min((device for device in used if device.type != "cpu"), key=str, default=torch.device("cpu"))
        dispatch_model(model, places, main_device=target)
        made = replace(made, device=target)  # inputs and the cache live on the first accelerator
    if chosen.causal_context is False:
        made = made.in_blocks("whole_prompt")
    if chosen.block_length is not None:
        made = made.in_blocks(cast(BlocksFrom, chosen.blocks_from), chosen.block_length)
    return Loaded(made, tokenizer)


def with_adapter(
    folder: Path, adapter: str | Path | None = None, trust_remote_code: bool = False
) -> tuple[Path, Path | None]:
    """Return the folder of a model's weights, and that of the adapter to merge into them.

    Raises:
        UserError: there are two adapters, an adapter names no base, or `adapter` contains no adapter.
    """
    own = None
    if adapters.has_adapter(folder):
        own = folder
        if not weights.present(folder):
            path, revision = adapters.find_base(folder)
            try:
                folder = find(path, revision, trust_remote_code, "base_model_name_or_path")
            except UserError as error:
                wrong = str(error).rpartition(". ")[0]  # without its advice
                raise UserError(
                    "adapter-invalid", f"{own / adapters.CONFIG}: {wrong}. {adapters.base_advice(own)}"
                ) from None
            if adapters.has_adapter(folder):
                said = f"The base of the adapter {own} is {folder}, which is an adapter, too"
                raise UserError("adapter-unsupported", f"{said}. Merge that into its own base first.")
    if adapter is None:
        return folder, own
    if own is not None:
        raise UserError("options-conflict", f"model.adapter={adapter}: {own} has an adapter, too. Remove one.")
    own = find(adapter, None, trust_remote_code, "model.adapter")
    if not adapters.has_adapter(own):
        raise UserError("adapter-invalid", f"model.adapter={adapter} has no {adapters.CONFIG}. Name an adapter.")
    return folder, own


def warn_of_sampling(spec: ModelSpec, options: Mapping[str, Any]) -> None:
    """Warn of sampling settings of a checkpoint, which have no effect here, unless `options` set their own."""
    if spec.folder is None:
        return
    file = spec.folder / "generation_config.json"
    if not file.is_file():
        file = spec.folder / "config.json"
    raw = weights.read_json(file)
    sure, heat = raw.get("do_sample"), raw.get("temperature")
    draws = sure is True or (sure is None and is_real(heat) and heat not in (0, 1))
    chosen = any(options.get(name) not in (None, [], (), "none") for name in ("temperature", "top_k", "top_p", "guide"))
    values: dict[str, Any] = {}  # those that have options of the same names
    if draws and not chosen:
        values = {"temperature": heat or 1.0}
        values |= {name: raw[name] for name, off in (("top_k", 0), ("top_p", 1)) if raw.get(name) not in (None, off)}
    asked = {name: raw[name] for name in ("do_sample", *values) if values and raw.get(name) is not None}
    others = {name: raw[name] for name in FILTERS if draws and raw.get(name) not in (None, 0, 1)}
    others |= {name: raw[name] for name in PENALTIES if raw.get(name) not in (None, 0, 1, [], {})}
    if values or others:
        listing = ", ".join(f"{name}={shown(value)}" for name, value in {**asked, **others}.items())
        words = " ".join(f"{name}={value}" for name, value in values.items())
        without = f", without {', '.join(others)}" if others else ""
        how = f"Set {words} to draw tokens that way{without}" if values else "No option does the same"
        warnings.warn(f"{file} asks for {listing}. This has no effect here. {how}.", NoEffectWarning, stacklevel=3)


def find(
    path: str | Path, revision: str | None = None, trust_remote_code: bool = False, option: str = "model.path"
) -> Path:
    """Return the checkpoint's folder. A hub id is downloaded unless it is cached.

    The folder is in the published layout of its family. Other files are not read, and pickled weights are refused.

    - `config.json`: its layers and sizes are compared with the headers of the weights before a network is built. A
      field about the network that its family does not read (`sliding_window`, `rope_scaling`, `quantization_config`
      ...) is refused unless its value has no effect. Other unknown fields are named in a warning
    - `model.safetensors`, or `model.safetensors.index.json` and its shards
    - the tokenizer's files, if any
    - `generation_config.json`: it may list several end-of-text tokens, as `config.json` may
    - `filter.safetensors`: the default of `scheduler=learn2pd`
    - `adapter_config.json`, `adapter_model.safetensors`: an adapter, which is merged into the weights

    Raises:
        UserError: the folder does not exist, or the hub id is unknown, gated, or not cached and cannot be downloaded.
    """
    folder = expanded(option, path)
    if folder.is_dir():
        return folder
    name = str(path)
    if folder.exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        raise UserError("model-not-found", f"{option}={name!r} is not a folder. Name a folder or a hub id org/name.")
    patterns = [*DOWNLOADS, "*.py"] if trust_remote_code else DOWNLOADS
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        way = "Ask for access on its page there, then run `hf auth login`"
        raise UserError("model-gated", f"The model {name} is gated on the hub. {way}.") from None
    except RevisionNotFoundError:
        way = "Set model.revision to a branch, tag or commit from its page there"
        raise UserError("model-not-found", f"The model {name} has no revision {revision} on the hub. {way}.") from None
    except RepositoryNotFoundError:
        raise UserError(
            "model-not-found", f"No folder or public hub model is named {name}. Check the name, or run `hf auth login`."
        ) from None
    except Exception as error:  # whatever the network, a proxy or the disk raises
        reason, wanted = first_line(error).removeprefix("Got: "), f"{name} --revision {revision}" if revision else name
        raise UserError(
            "hub-unreachable",
            f"The model {name} is not on this machine, and cannot be downloaded ({reason}). Run `hf download {wanted}`"
            f" where there is a network, or set {option} to a folder that contains the model.",
        ) from None


def find_family(raw: Mapping[str, Any], folder: Path) -> Family | None:
    """Return the family of a parsed `config.json`, or None for DiffusionGemma and masked LMs of transformers.

    Raises:
        UserError: the model type is unknown.
    """
    kind = str(raw.get("model_type") or "")
    for family in FAMILIES:
        if family.knows(ALIASES.get(kind.lower(), kind.lower()), raw):
            return family
    # Only here: transformers' modelling code takes seconds to import, which our own families should not cost.
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    from dllm_sampler.models import diffusion_gemma

    if kind == diffusion_gemma.MODEL_TYPE or kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return None
    said = f"model_type = {shown(raw['model_type'])} is not supported" if kind else "the field model_type is missing"
    raise UserError(
        "architecture-unknown",
        f"{folder / 'config.json'}: {said}. Use one of the families {_known()}, or a masked LM of transformers.",
    )


def load_tokenizer(
    folder: Path,
    trust_remote_code: bool = False,
    config: PreTrainedConfig | None = None,
    advice: str = "If you trust it, set model.trust_remote_code=true.",
) -> PreTrainedTokenizerBase | None:
    """Return the checkpoint's tokenizer with its chat template, or None if the folder has no tokenizer files.

    Args:
        config: replaces `config.json` if transformers does not know the model.
        advice: the second sentence of the error about a tokenizer with code of its own.

    Raises:
        UserError: the tokenizer needs code that is not trusted, or its files are broken.
    """
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in files):
        return None
    settings = weights.read_json(folder / files[1]) if (folder / files[1]).is_file() else {}
    code = settings.get("auto_map") or {}
    if not isinstance(code, list | dict):
        raise config_error(folder / files[1], f"auto_map must map names to code, not {shown(code)}")
    if (isinstance(code, list) or "AutoTokenizer" in code) and not trust_remote_code:
        raise UserError("code-untrusted", f"The tokenizer of {folder} runs code of its own. {advice}")
    try:
        if config is not None and not code and "tokenizer_class" not in settings and (folder / files[0]).is_file():
            # no file names a class: tokenizer.json is complete
            found: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            found = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever transformers, tokenizers or the checkpoint's own code raise
        reason = first_line(error)
        wrong = f"The tokenizer of {folder} cannot be loaded ({reason})"
        way = "Copy its files again, or install the package that it needs"
        raise UserError("tokenizer-invalid", f"{wrong}. {way}.") from None
    longest = getattr(found, "model_max_length", 0)
    if not is_real(longest):
        raise config_error(folder / files[1], f"model_max_length must be a number, not {shown(longest)}")
    return found


def _check_transformers(raw: Mapping[str, Any], folder: Path, chosen: ModelSettings, adapter: Path | None) -> None:
    """Refuse settings that DiffusionGemma or a masked LM does not support, and a `config.json` that is invalid."""
    from dllm_sampler.models import diffusion_gemma, huggingface

    gemma = raw.get("model_type") == diffusion_gemma.MODEL_TYPE
    for name in ("quantize", "mask_id", "eos_id" if gemma else "device_map"):
        value = getattr(chosen, name)
        if value is not None:
            kind = "DiffusionGemma" if gemma else "masked LMs of transformers"
            said = f"{folder}: model.{name}={value} does not work for {kind}"
            raise UserError("option-not-applicable", f"{said}. Remove it.")
    if gemma and adapter is not None:  # encoder and decoder share weights, which would get it twice
        raise UserError("adapter-unsupported", f"Cannot merge {adapter} into DiffusionGemma. Use it without adapter.")
    if gemma:
        diffusion_gemma.model_class(folder)
    huggingface.check_config(folder)


def _check_blocks(family: Family | None, folder: Path, block_length: int | None, blocks_from: str) -> None:
    """Refuse `model.block_length` for a model whose checkpoint determines what tokens see."""
    check_choice("model.blocks_from", blocks_from, BlocksFrom)
    if block_length is None and blocks_from != "answer":
        said = f"model.blocks_from={blocks_from} has no effect without model.block_length"
        raise UserError("option-not-applicable", f"{said}. Set model.block_length, or remove model.blocks_from.")
    if block_length is not None:
        check_count("model.block_length", block_length)
        if family is None or not family.may_see_blocks:
            raise UserError(
                "option-not-applicable",
                f"{folder}: model.block_length={block_length} sets the attention of Tiny-A2D models only. Remove it,"
                " or set blocks.length to decode in blocks.",
            )


def _add_texts(tokenizer: PreTrainedTokenizerBase | None, folder: Path, chosen: ModelSettings) -> None:
    """Add the stop strings, chat options and chat template of the settings to the tokenizer.

    Raises:
        UserError: there is no tokenizer to add them to, or a text is empty.
    """
    for name in ("stop_strings", "chat_options", "chat_template"):
        value: Any = getattr(chosen, name)
        if value is None:
            continue
        if tokenizer is None:
            said = f"{folder} has no tokenizer, which model.{name} needs"
            raise UserError("tokenizer-missing", f"{said}. Copy its files there, or remove model.{name}.")
        if value == "" or (name == "stop_strings" and "" in value):
            raise invalid(f"model.{name}", value, "Give texts that are not empty", "option-type")
        if name == "chat_template":
            tokenizer.chat_template = value
        else:
            tokenizer.init_kwargs[name] = value


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a torch dtype from itself or its name, or None for `auto` or None, the checkpoint's own.

    Raises:
        UserError: the dtype is not one of `DTYPES`.
    """
    if dtype == "auto":
        return None
    if isinstance(dtype, str):
        if dtype.removeprefix("torch.") not in DTYPES:
            raise unknown("dtype", dtype, ["auto", *DTYPES])
        return DTYPES[dtype.removeprefix("torch.")]
    if dtype is not None and dtype not in DTYPES.values():
        raise invalid("dtype", dtype, f"Choose {', '.join(DTYPES)}", "choice-unknown")
    return dtype


def as_device(device: torch.device | str, option: str = "device") -> torch.device:
    """Return a torch device from itself or its name, checked to exist. `auto` is the GPU if there is one.

    Raises:
        UserError: the device does not exist. The message names it as the value of `option`.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise invalid(option, device, "Use auto, cpu, cuda or mps", "choice-unknown") from None
    if found.type not in ("cpu", "cuda", "mps"):
        raise invalid(option, str(device), "Use auto, cpu, cuda or mps", "choice-unknown")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device-missing", f"{option}={device} needs an Apple GPU. Use {option}=cpu.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        way = f"Use a number below {count}, as in {option}=cuda:0." if count else f"Use {option}=cpu."
        seen = counted(count, "GPU")
        raise UserError("device-missing", f"{option}={device} does not exist: torch sees {seen}. {way}")
    return found


def _denoiser(
    model: Transformer,
    raw: Mapping[str, Any],
    folder: Path,
    family: Family,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    chosen: ModelSettings,
) -> TransformerDenoiser:
    """Return the model with its special tokens, from the settings, `config.json`, generation config or tokenizer.

    All end-of-text tokens of the last three end an answer, unless the settings name one. The generation config's come
    first, since a chat model's answer ends before the text does. The tokenizer's is left out if a file names one, and
    it is the mask token or not a token of the model.

    Raises:
        UserError: the mask token or the end-of-text token is missing, or a token is not one of the model.
    """
    generation = folder / "generation_config.json"
    generating = weights.read_json(generation) if generation.is_file() else {}
    files = {str(folder / "config.json"): raw, str(generation): generating}
    tokens = f"the tokenizer of {folder}"

    def token(name: str) -> _Token | None:
        places = {place: file.get(name) for place, file in files.items()}
        for place, value in {**places, tokens: getattr(tokenizer, name, None)}.items():
            if value is None:
                continue
            if not is_whole(value):
                raise config_error(place, f"{name} must be one token id, not {shown(value)}")
            return _Token(value, f"{place}: {name}")
        return None

    def spelt(text: str | None) -> _Token | None:
        found = None if tokenizer is None or text is None else tokenizer.get_vocab().get(text)
        return None if found is None else _Token(found, f"the tokenizer of {folder}: {text}")

    mask = None if chosen.mask_id is None else _Token(chosen.mask_id, "model.mask_id")
    for look in (partial(token, "mask_token_id"), partial(token, "mask_id"), partial(spelt, family.mask_token)):
        mask = mask or look()
    pad, turn = token("pad_token_id"), spelt(family.end_of_turn)
    places = {place: files[place].get("eos_token_id") for place in reversed(files)}
    own = getattr(tokenizer, "eos_token_id", None)
    serves = is_whole(own) and own < model.config.vocab_size and (mask is None or own != mask.id)
    if serves or not end_tokens(places):
        places[tokens] = own
    ends = end_tokens(places) if chosen.eos_id is None else {chosen.eos_id: "model.eos_id"}
    if not ends:
        raise UserError("end-token-missing", f"{folder / 'config.json'} has no eos_token_id. Set model.eos_id.")
    if mask is None:
        raise UserError("mask-token-missing", f"{folder / 'config.json'} has no mask_token_id. Set model.mask_id.")
    if mask.id in ends:
        raise UserError(
            "mask-token-invalid",
            f"{mask.place} is {mask.id}, which is also the end-of-text token ({ends[mask.id]}). Set model.mask_id or"
            " model.eos_id to another token.",
        )
    for one in (mask, pad, turn, *(_Token(end, place) for end, place in ends.items())):
        if one is not None:
            check_tokens(model.config.vocab_size, **{one.place: one.id})
    source = Fields(raw, str(folder / "config.json"))
    return TransformerDenoiser(
        model, mask_id=mask.id, eos_id=tuple(ends), pad_id=pad and pad.id, eot_id=turn and turn.id,
        shift=family.shift, seeds=family.seeds, attention=family.attention,
        block_length=None if family.block_length is None else family.block_length(source), device=device,
        folder=folder,
    )  # fmt: skip


def _places(
    model: Transformer, device_map: str | Mapping[str, str | int | torch.device], dtype: torch.dtype | None
) -> Places:
    """Return the device of each of our modules, by the module's name as accelerate writes it."""
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in BALANCED:
        return {"": str(as_device(device_map, "model.device_map"))}
    whole = ["Layer"]  # a layer's parts stay together
    low_zero = device_map == "balanced_low_0"
    memory = get_balanced_memory(model, dtype=dtype, no_split_module_classes=whole, low_zero=low_zero)
    return dict(infer_auto_device_map(model, memory, dtype=dtype, no_split_module_classes=whole))


def _place(name: str, places: Places) -> torch.device:
    """Return the device of our parameter `name`, by the longest prefix in `places`.

    Raises:
        UserError: no prefix fits, or the device does not exist.
    """
    prefixes = [prefix for prefix in places if not prefix or name == prefix or name.startswith(prefix + ".")]
    if not prefixes:
        raise UserError("device-map-invalid", f"model.device_map has no device for {name}. Add one.")
    key = max(prefixes, key=len)
    place = places[key]
    if place == "disk":
        raise UserError("device-map-invalid", f"model.device_map cannot put {name} on disk. Use cpu.")
    option = f"model.device_map.{key}" if key else "model.device_map"
    return as_device(f"cuda:{place}" if isinstance(place, int) else place, option)


def _known() -> str:
    return ", ".join(family.name for family in FAMILIES)
