"""`dllm-report`: a page, pictures and tables of the results of runs."""

import sys
from collections.abc import Sequence
from pathlib import Path

from dllm_sampler.cli.terminal import Parser, ending, show
from dllm_sampler.core.checks import check_count
from dllm_sampler.errors import UserError
from dllm_sampler.eval.jobs import check_folder
from dllm_sampler.eval.report.data import load, read
from dllm_sampler.eval.report.rows import rows, text
from dllm_sampler.host import files
from dllm_sampler.host.paths import expanded

PAGE, FIGURE = (".html", ".htm"), (".pdf", ".svg", ".png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dllm-report` and return its exit status."""
    parser = Parser(
        prog="dllm-report",
        description="Make an HTML page with PNG files, a CSV file or a figure of runs of dllm-eval.",
        epilog="The page loads nothing from the network. With --csv or --figure it is made only if --output is given."
        " Exit status: 0, or 2 after a mistake in the arguments.",
    )
    add = parser.add_argument
    add("runs", nargs="*", default=["outputs/eval"], metavar="RUNS", help="folders of runs (outputs/eval)")
    add("--output", metavar="FILE", help="the page; its pictures go next to it (report.html)")
    add("--csv", metavar="FILE", help="a row for each configuration and task; - is standard output")
    add("--figure", metavar="FILE", help="score against tokens per forward, for a paper: .pdf, .svg or .png")
    add("--title", default="Samplers compared", help="at the top of the page (%(default)s)")
    add("--published", action="store_true", help="show published figures of the same model and task, if there are any")
    add("--replays", type=int, default=2, metavar="N", help="samples of each run that can be watched (%(default)s)")

    def run() -> int:
        options = parser.parse_args(arguments)
        check_count("--replays", options.replays, 0)
        runs = [expanded("RUNS", path) for path in options.runs]
        table, streams = options.csv, sys.stderr if options.csv == "-" else sys.stdout
        makes_page = options.output is not None or (table is None and options.figure is None)
        page = check("--output", "report.html" if options.output is None else options.output) if makes_page else None
        figure = check("--figure", options.figure, FIGURE) if options.figure is not None else None
        if table is not None:
            write_csv(runs, table)
        if figure is not None:
            print(write_figure(runs, figure, options.published), file=streams)
        if page is not None:
            print(write(runs, page, options.title, options.replays, options.published), file=streams)
        return 0

    return ending("dllm-report", run)


def check(name: str, output: str, suffixes: Sequence[str] = PAGE) -> Path:
    """Return the path of a page or a figure, which the option `name` gives. It is called before the work.

    Raises:
        UserError: the path has another ending, is a folder, or is below a file. Or matplotlib is not installed.
    """
    target = _target(name, output, suffixes)
    from dllm_sampler.eval.report.figure import require_matplotlib  # imports torch: a mistake does not wait for it

    require_matplotlib()
    return target


def _target(name: str, output: str, suffixes: Sequence[str]) -> Path:
    target, (*others, last) = expanded(name, output), suffixes
    if target.suffix.lower() not in suffixes:
        endings = f"{', '.join(others)} or {last}" if others else last
        raise UserError("file-name", f"{name}={output} should end in {endings}. Name another file.")
    if target.is_dir():
        raise UserError("path-invalid", f"{name}={output} is a folder. Name a file.")
    check_folder(f"{name}={output}", target.parent)
    return target


def write(
    runs: Sequence[Path], target: Path, title: str = "Samplers compared", replays: int = 2, published: bool = False
) -> str:
    """Write the page of runs and its pictures to a path from `check`, and return a line that names them.

    `replays` samples of each run can be watched. `published` adds published figures to the pictures.

    Raises:
        UserError: see `read`. Or a file cannot be written.
    """
    found = load(runs)
    from dllm_sampler.eval.report.page import page  # imports torch: a mistake does not wait for it
    from dllm_sampler.eval.report.pictures import pictures

    files.make_folder(target.parent)
    names = []
    for name, content in pictures(found, published).items():
        file = target.with_name(f"{target.stem}-{name}.png")
        files.write(file, content)
        names.append(file.name)
    files.write(target, page(found, title, replays))
    return " ".join([str(target), *names])


def write_figure(runs: Sequence[Path], target: Path, published: bool = False) -> Path:
    """Draw a figure for a paper, write it to a path from `check`, and return the path.

    Raises:
        UserError: see `read`. Or the file cannot be written.
    """
    found = load(runs)
    from dllm_sampler.eval.report.figure import draw  # imports matplotlib: a mistake does not wait for it

    files.make_folder(target.parent)
    files.write(target, draw(found, target.suffix.lower()[1:], published=published))
    return target


def write_csv(runs: Sequence[Path], output: str) -> None:
    """Write a CSV file with a row for each configuration and task, and print its name.

    `-` is standard output. With it, a pipe or a device only the table is written.

    Raises:
        UserError: see `read`. Or the file does not end in .csv, or cannot be written.
    """
    if output == "-":
        show(text(rows(read(runs))).removesuffix("\n"))
        return
    stream = files.is_stream(output)
    target = Path(output) if stream else _target("--csv", output, [".csv"])
    table = text(rows(read(runs)))
    files.make_folder(target.parent)
    files.write(target, table)
    if not stream:
        print(target)


if __name__ == "__main__":
    sys.exit(main())
