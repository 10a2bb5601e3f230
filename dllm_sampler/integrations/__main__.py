"""`python -m dllm_sampler.integrations` checks settings and writes the YAML with which an engine runs them."""

import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from dllm_sampler import config
from dllm_sampler.cli.compose import SAMPLE, App, composition, own, parts
from dllm_sampler.cli.help import defaults
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.terminal import ending
from dllm_sampler.cli.user_files import with_config_dir
from dllm_sampler.cli.words import is_override
from dllm_sampler.errors import UserError
from dllm_sampler.host.version import __version__
from dllm_sampler.integrations import COMMAND

APP = App(COMMAND, SAMPLE.root, SAMPLE.groups, Options)
OURS = ("scheduler", "guide", "experiment", "blocks", "block_length", "temperature", "top_k", "top_p", "compat")
THEIRS = {
    "model": "the engine loads the model: --model-path of SGLang",
    "cache": "the engine has a cache of its own, which is exact",
    "stop": "the engine ends answers by itself",
    "chat": "the engine's API applies the chat template",
    "max_new_tokens": "each request sets it",
    "stop_strings": "each request sets it",
    "stop_token_ids": "each request sets it",
    "seed": "each request has a sampling_seed, or gets one from its id",
    "samples": "each request sets it, as n",
}
USAGE = f"""\
Check a scheduler's settings, and write the YAML with which SGLang runs them.

Usage: {COMMAND} [NAME=VALUE ...] > x.yaml

  {COMMAND} scheduler=klass scheduler.threshold=0.9 > x.yaml
  {COMMAND} experiment=sorting temperature=0 > x.yaml
  sglang serve --model-path inclusionAI/LLaDA2.0-mini --trust-remote-code \\
      --dllm-algorithm DllmSampler --dllm-algorithm-config x.yaml

Words are those of dllm-sample (dllm-sample --help lists them):
  scheduler=NAME  scheduler.FIELD=VALUE   what decides; its steps are those of a block
  guide=NAME      guide.NAME.FIELD=VALUE  what changes logits, or the form of answers
  temperature=VALUE  top_k=K  top_p=P     for all requests, and 0 is greedy. Without
                                          temperature= each request's own count, and
                                          SGLang gives 1 to one that names none
  block_length=N                          another block than the model's, if it has one
  experiment=NAME                         what dllm-tune found. What the engine has
                                          itself (model, cache, stop) is left out
  compat=true                             the mask may be chosen, as in published code

Without a word the YAML has scheduler=threshold. It goes to stdout; errors, one
sentence, and what was left out go to stderr. Exit status: 0, or 2 after an error.
Flags: -h, --help   --version   --config-dir DIR
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        words: the command line without the program's name. By default `sys.argv[1:]`.
    """
    given = list(sys.argv[1:] if words is None else words)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: _note(str(message))
        return ending(COMMAND, lambda: with_config_dir(given, _run))


def _run(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        print(USAGE, end="")
    elif "--version" in words:
        print(f"{COMMAND} {__version__}")
    else:
        print(written(words), end="")
    return 0


def written(words: Sequence[str]) -> str:
    """Return the YAML for the words of a command line. Notes about settings that it leaves out go to stderr.

    Raises:
        UserError: a word cannot be read, a name is unknown, a value is wrong, or no engine can run the scheduler.
    """
    for word in words:
        _check(word)
    composed = composition(APP, words)
    chosen = dict(composed.choices)
    _, plugins = parts(composed)
    options = Options(**config.check("", Options, composed.tree))
    from dllm_sampler.integrations.settings import LENGTH  # imports torch, after mistakes are reported
    from dllm_sampler.integrations.settings import Settings as Served

    settings = _settings(plugins, options)
    served = Served.read(settings, COMMAND)
    rule = served.checked(served.block_size or LENGTH)
    notes = list(_notes(chosen, options, served.fixes(rule)))
    for note in notes:
        _note(note)
    head = [shlex.join([*COMMAND.split(), *words]), f"dllm_sampler {__version__}", *notes]
    return "".join(f"# {line}\n" for line in head) + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def _check(word: str) -> None:
    """Refuse a word that is not a setting, or is one of the engine or its requests."""
    if not is_override(word):
        raise UserError("option-syntax", f"'{word}' is not NAME=VALUE. See {COMMAND} --help.")
    key = re.split(r"[.=@/]", word.lstrip("+~"))[0]
    if key in OURS or key not in {*config.GROUPS, *Options.__dataclass_fields__}:  # unknown names are refused later
        return
    why = THEIRS.get(key, f"they are {', '.join(OURS)}")
    raise UserError("option-not-applicable", f"{word} does not belong in an engine's settings ({why}). Remove it.")


def _settings(plugins: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Return the fields of `integrations.settings.Settings`."""
    from dllm_sampler.blocks.fixed import FixedBlocks

    blocks = config.build("blocks", plugins["blocks"])
    if not isinstance(blocks, FixedBlocks):
        said = (
            f"blocks={plugins['blocks']['name']} cannot run in an engine, which decodes blocks of one length in turn."
        )
        raise UserError("blocks-incompatible", f"{said} Use blocks=fixed, without an experiment that sets others.")
    guides = [_named("guide", _held(one)) for one in plugins["guide"]]
    found = {
        "scheduler": _named("scheduler", plugins["scheduler"]),
        "guide": guides or None,
        **{name: getattr(options, name) for name in ("temperature", "top_k", "top_p")},
        "compat": options.compat or None,
        "block_size": options.block_length or blocks.length,
    }
    return {name: value for name, value in found.items() if value is not None}


def _held(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a guide's settings, with a schema's text in place of its file name. A server may lack the file."""
    from dllm_sampler.guides.forms.schema import schema_text

    schema = given.get("schema")
    return {**given, "schema": schema_text(schema)} if isinstance(schema, str) and schema else dict(given)


def _named(group: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plug-in's settings, without the class if the name is that of a packaged plug-in."""
    return {name: value for name, value in given.items() if name != "_target_" or given["name"] in own(group)}


def _notes(chosen: Mapping[str, object], options: Options, fixed: bool) -> Iterator[str]:
    """Yield the settings of an experiment that the YAML leaves to the engine and its requests."""
    plain, default = asdict(Options()), defaults()
    left = [f"{group}={chosen[group]}" for group in ("model", "cache", "stop") if chosen[group] != default[group]]
    left += [f"{key}={value}" for key, value in asdict(options).items() if value != plain[key] and key not in OURS]
    if left:
        yield f"left out, since the engine and its requests set them: {', '.join(left)}"
    if not fixed:
        yield (
            "tokens are chosen at the temperature of each request, by default 1 in SGLang; temperature=0 makes all"
            " requests greedy, as dllm-sample is without temperature="
        )


def _note(text: str) -> None:
    print(f"{COMMAND}: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
