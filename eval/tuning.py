"""`dllm-tune`: search for the fastest configuration that answers about as well as one token per step."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dllm_sampler import config
from dllm_sampler.cli.compose import App, composition
from dllm_sampler.cli.explain import listing
from dllm_sampler.cli.help import check_topics
from dllm_sampler.cli.terminal import ending, show
from dllm_sampler.cli.user_files import entry, with_config_dir
from dllm_sampler.errors import NotWrittenError, UserError, counted, installing
from dllm_sampler.eval.experiment import (
    MARK,
    ONE_PER_STEP,
    Found,
    Trial,
    experiment,
    holds,
    say,
    show_trials,
    tasks_of,
    too_few,
    trials,
)
from dllm_sampler.eval.folders import RunFolder
from dllm_sampler.eval.jobs import EVAL, Job, check_folder, jobs, lines, of_hydra, values
from dllm_sampler.eval.report.data import Method, Run
from dllm_sampler.eval.space import Tuning
from dllm_sampler.host import files
from dllm_sampler.host.version import __version__

if TYPE_CHECKING:
    from optuna import Study

TUNE = App("dllm-tune", "tune", ("tune",))
REFERENCE = ("scheduler=fixed", "cache=none")  # one token per step
USAGE = """\
Find the fastest configuration that answers about as well as one token per step.

Usage: dllm-tune [tune=NAME] [tune.FIELD=VALUE ...] [NAME=VALUE ...]

  dllm-tune task=mini task.operation=sort tune.name=sorting
  dllm-sample experiment=sorting "sort: Dan, Ada, Cal"
  dllm-tune model=llada-8b tune.loss=2 tune.trials=100 tune.measure=tokens_per_second

tune=NAME is a file of conf/tune, or ./conf/tune: what may be chosen, and the goal. Any other word is
one of dllm-eval and holds for every trial. The search is stored in output=FOLDER: the same command resumes
it. The winner, confirmed on samples that the search did not see, is written to
./conf/experiment/NAME.yaml, where all commands find it (--config-dir DIR names another folder).
The fields of tune=fast, the default:
"""


class Tuner:
    """A search and its study.

    `study.db` in the output folder is an SQLite database of Optuna with one study for each search. Each trial has the
    attributes `words`, `score` and `speed`, or `refused`, the reason that it cannot run. The words of dllm-eval that
    the search is given hold for every trial.
    """

    def __init__(self, tuning: Tuning, words: Sequence[str], console: Console):
        for word in words:
            key = word.partition("=")[0].lstrip("+~")
            if key in tuning.choices.keys or (key := key.partition(".")[0]) in tuning.choices.keys:
                raise UserError("options-conflict", f"{word}: tune.space also searches {key}. Remove one of them.")
        self.tuning, self.words, self.console = tuning, list(words), console
        self.base = jobs([*words, *REFERENCE])
        self.output = Path(self.base[0].options.output).expanduser()
        from dllm_sampler.eval.launch import device  # imports torch and transformers: a mistake does not wait for them

        self.device = device(self.base, 0)

    def search(self) -> str:
        """Run the missing trials, write the winner's file, and return a sentence about the winner."""
        from dllm_sampler.eval.launch import bars

        tuning = self.tuning
        if tuning.file.exists() and not (tuning.file.is_file() and MARK.encode() in tuning.file.read_bytes()):
            raise UserError("file-overwrite", f"{tuning.file} is not from dllm-tune. Set another tune.name.")
        check_folder(str(tuning.file), tuning.file.parent)
        with self.study() as study, bars(self.console) as progress:
            if few := too_few([len(job.built_task.samples()) for job in self.base], tuning):
                self.console.print(f"dllm-tune: {few}", highlight=False, soft_wrap=True)
            every = progress.add_task(ONE_PER_STEP, total=tuning.trials)
            reference = self.reference(self.words)
            least = reference.score - tuning.loss / 100
            while (done := len(known := _values(study))) < tuning.trials:
                best = max(known, default=0)
                progress.update(every, completed=done, description=f"best {best:.2f}" if best > 0 else "searching")
                self.trial(study, done, least)
            progress.update(every, completed=done, description="confirming")
            tried = trials(study, reference, tuning)
            winner, fresh, plain, verdicts = self.confirm(tried, reference)
        show_trials(tried, reference, verdicts, tuning)
        none = f"no configuration of {len(tried)} qualified;" if winner is reference else ""
        text = experiment(tuning, winner, fresh, plain, self.unseen(fresh), none)
        files.make_folder(tuning.file.parent)
        files.write(tuning.file, text)
        if none:
            found = (
                f"No configuration of {len(tried)} qualified: each loses more than tune.loss={tuning.loss:g} allows, is"
                f" no faster, or cannot run. {ONE_PER_STEP.capitalize()} is kept ({' '.join(winner.chosen)}):"
                f" {say(plain, tuning)}"
            )
        else:
            found = f"{' '.join(winner.chosen)}: {say(fresh, tuning)}; {ONE_PER_STEP}: {say(plain, tuning)}"
        return f"{found}, on {self.unseen(fresh)}. Written to {tuning.file}: use it as experiment={tuning.name}."

    @cached_property
    def digest(self) -> str:
        """A hash of the search's settings, apart from its name and number of trials, and of its jobs."""
        what = {**asdict(self.tuning), "trials": None, "name": None, "jobs": [job.identity for job in self.base]}
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]

    @contextmanager
    def study(self) -> Iterator[Study]:
        """Open the study of this search in the output folder, or create it. It stays locked for this process.

        Raises:
            NotWrittenError: the database cannot be written.
            UserError: Optuna is missing, another process runs this search, or the database is damaged.
        """
        try:
            import optuna
            from sqlalchemy.exc import OperationalError, SQLAlchemyError  # comes with Optuna
        except ImportError as error:
            raise UserError("package-missing", f"The search needs Optuna. Run {installing('eval')}.") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        files.make_folder(self.output)
        file = self.output.resolve() / "study.db"
        busy = f"Another dllm-tune runs this search in {self.output}. Wait until it ends, or set another output=FOLDER."
        try:
            with files.locked(self.output / f".{self.digest}.lock", busy):
                self._make(file)
                url, name = f"sqlite:///{file}", self.digest
                study = optuna.create_study(storage=url, study_name=name, direction="maximize", load_if_exists=True)
                for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):  # of a process that was ended
                    study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                yield study
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            cause = error if isinstance(error, SQLAlchemyError) else error.__cause__
            reason = str(getattr(cause, "orig", None) or error).partition("\n")[0]
            if not isinstance(cause, OperationalError):  # neither a full disk nor a lock
                raise UserError("run-damaged", f"{file} is damaged ({reason}). Remove it to restart.") from error
            raise NotWrittenError(
                f"{file} cannot be used ({reason}). Check disk and permissions, then rerun the command to resume."
            ) from error

    def _make(self, file: Path) -> None:
        """Create the database in another file, and move it into place.

        If its creation is interrupted, Optuna may later store a study several times.
        """
        from optuna.storages import RDBStorage

        part = file.with_name(f".{file.name}.part")
        with files.locked(file.with_name(f".{file.name}.lock")):  # of all searches of the folder
            if file.exists():
                return
            for stale in file.parent.glob(f"{part.name}*"):  # sqlite's journal, too
                stale.unlink(missing_ok=True)
            RDBStorage(f"sqlite:///{part}").engine.dispose()
            files.move(part, file)

    def trial(self, study: Study, done: int, least: float) -> None:
        """Let Optuna propose a configuration, measure it, and report its value.

        The value is the speed if the score is at least `least`. Otherwise it is score - least, which is negative. It is
        -1 for a configuration that cannot run. The number of finished trials is added to the seed of the proposal.
        """
        import optuna

        # Seeded by the finished trials, not by the process: an interrupted search resumes as if it had not been.
        study.sampler = optuna.samplers.TPESampler(seed=self.tuning.seed + done)
        trial = study.ask()
        words = self.tuning.choices.choose(trial)
        trial.set_user_attr("words", words)
        found = self.measure(self.words, words)
        if isinstance(found, str):
            trial.set_user_attr("refused", found)
            study.tell(trial, -1.0)
            return
        trial.set_user_attr("score", found.score)
        trial.set_user_attr("speed", found.speed)
        study.tell(trial, found.speed if found.score >= least - 1e-9 else found.score - least)

    def reference(self, words: Sequence[str]) -> Found:
        """Return the results of one token per step.

        Raises:
            UserError: one token per step cannot run, or its score is 0.
        """
        found = self.measure(words, REFERENCE)
        if isinstance(found, str):
            raise UserError(
                "baseline-failed",
                f"One token per step ({' '.join(REFERENCE)}), the baseline of the search, cannot run: {found}",
            )
        if found.score <= 0:
            raise UserError(
                "baseline-failed",
                f"The baseline, one token per step, scores 0 on {tasks_of(found.jobs)}. Use an easier task.",
            )
        return found

    def measure(self, words: Sequence[str], chosen: Sequence[str]) -> Found | str:
        """Return a configuration's results on all tasks, or the reason that it cannot run."""
        from dllm_sampler.eval.launch import run_all
        from dllm_sampler.eval.runner import Share

        try:
            found = jobs([*words, *chosen, "oracle=false"])
        except UserError as error:  # for example two chosen values of one plug-in that exclude each other
            return str(error)
        if refused := run_all(found, Share(), self.device, lambda job: None, lambda done: None):
            return next(iter(refused.values()))
        runs = {}
        for job in found:
            about = RunFolder(job.folder).about()
            assert about is not None
            runs[job.name] = Run(about, RunFolder(job.folder).records())
        figures = Method("", "", runs).figures(runs)
        score, speed = figures["score"], figures[self.tuning.measure]
        assert score is not None
        if speed is None:
            raise UserError(
                "option-not-applicable",
                f"tune.measure={self.tuning.measure} counts tokens of texts, and these answers have none. Set another.",
            )
        return Found(found, chosen, score, speed)

    def confirm(self, tried: Sequence[Trial], reference: Found) -> tuple[Found, Found, Found, dict[Sequence[str], str]]:
        """Find the fastest configuration that also holds on samples that the search did not see.

        Returns:
            The winner (`reference` if no configuration holds), its results on the other samples, the results of one
            token per step on them, and the result of each configuration that qualified, by its words.
        """
        tasks = [job.built_task for job in self.base]
        # The sampler's seed changes too, for tasks whose samples do not depend on `task.seed`.
        draws = max(job.options.seed for job in self.base) + max(len(task.samples()) for task in tasks)
        other = [word for word in self.words if not word.startswith(("task.seed=", "seed="))]
        other += [f"task.seed={max(task.seed for task in tasks) + 1}", f"seed={draws}"]
        plain = self.reference(other)
        good = [trial.words for trial in tried if not trial.reason]
        verdicts: dict[Sequence[str], str] = {}
        for words in good:
            found, fresh = self.measure(self.words, words), self.measure(other, words)
            if isinstance(found, str) or isinstance(fresh, str):
                verdicts[words] = f"cannot run: {found if isinstance(found, str) else fresh}"
            elif reason := holds(fresh.score, fresh.speed, plain, self.tuning):
                verdicts[words] = f"{reason}, on the samples that confirm"
            else:
                slower = dict.fromkeys(good, "qualifies, slower than the chosen one")
                return found, fresh, plain, {**slower, **verdicts, words: "chosen"}
        return reference, plain, plain, verdicts

    def unseen(self, fresh: Found) -> str:
        """Return a description of the confirming samples: their number, and how many have prompts of the search."""
        seen, prompts = set(_prompts(self.base)), _prompts(fresh.jobs)
        count, old = counted(len(prompts), "sample"), sum(prompt in seen for prompt in prompts)
        if old == len(prompts):
            return f"{count} with the prompts of the search, under another seed"
        return f"{count} " + (f"({old} with prompts of the search)" if old else "that the search did not see")


def _values(study: Study) -> list[float]:
    return [trial.value for trial in study.get_trials(deepcopy=False) if trial.value is not None]


def _prompts(found: Sequence[Job]) -> list[str]:
    return [json.dumps(sample.prompt) for job in found for sample in job.built_task.samples()]


def tuning(words: Sequence[str]) -> tuple[Tuning, list[str]]:
    """Return the search that the words describe, and the words for dllm-eval.

    Raises:
        UserError: a word is unknown, is not allowed in a search, or has an invalid value.
    """
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise UserError("option-syntax", f"'{word}' is not NAME=VALUE. See dllm-tune --help.")
        if of_hydra(word) or word.lstrip("+~").startswith(("suite=", "report=", "workers=")):
            raise UserError("option-not-applicable", f"{word} does not work in a search. Remove it.")
    own = [word for word in words if re.match(r"[+~]{0,2}tune[.=]", word)]
    # A space may name any group and field. `Space` checks them.
    added = [f"++{word}" if word.startswith("tune.space.") else word for word in own]
    settings = composition(TUNE, added).tree.get("tune") or {}
    rest = [word for word in words if word not in own]
    if not any(word.startswith("output=") for word in rest):
        rest.append("output=outputs/tune")
    for line in lines([*rest, *REFERENCE]):  # a mistake shows here, before the search's space imports torch
        each = {word: values(word) for word in line}
        composition(EVAL, [found[0] for found in each.values()])
        for word, found in each.items():
            key = word.partition("=")[0].lstrip("+~")
            if len(found) > 1 and key != "seed" and key.partition(".")[0] != "task":
                raise UserError("option-repeated", f"{word} has several values. Give one.")
    made = Tuning(**config.check("tune", Tuning, settings, whole=True))
    for knob, domain in made.choices.options.items():
        try:
            first = domain.values[0] if domain.values else domain.low
            word = f"{knob}={'null' if first is None else first}"
            for line in lines([*rest, *REFERENCE, word]) if "." in knob else ():
                composition(EVAL, [values(one)[0] for one in line])
        except UserError as error:
            raise UserError(error.code, f"tune.space.options.{knob}: {error}") from None
    if made.name in config.names("experiment"):
        raise UserError("choice-taken", f"tune.name={made.name} is the name of a packaged experiment. Choose another.")
    return made, rest


def main(words: Sequence[str] | None = None) -> int:
    """Run `dllm-tune` and return its exit status."""
    given = list(sys.argv[1:] if words is None else words)
    return ending("dllm-tune", lambda: with_config_dir(given, _run), "interrupted. Rerun the command to resume.")


def _run(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        check_topics("dllm-tune", words, None)
        print(USAGE)
        listing(Console(), "tune", Tuning, entry("tune", "fast").settings)
    elif "--version" in words:
        print(f"dllm-tune {__version__}")
    else:
        show(Tuner(*tuning(words), Console(stderr=True)).search())
    return 0


if __name__ == "__main__":
    sys.exit(main())
