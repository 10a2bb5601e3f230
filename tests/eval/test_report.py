"""The report: self-contained, escaped, and alive in a browser."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import pytest

from dllm_sampler.eval.markdown import write as write_file
from dllm_sampler.eval.report import command, headline
from dllm_sampler.eval.report.data import Comparison, compare
from dllm_sampler.eval.report.page import page
from dllm_sampler.eval.report.pictures import pictures
from tests.eval.made import comparison, record, run

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
    assert headline.best(same).startswith("No method is faster than fixed"), "nor is one that is as fast"


def test_figures_of_several_tasks() -> None:
    found = comparison().figures["all tasks"]["threshold 0.3"]
    assert found["score"] == 0.5 and found["nfe"] == 1
    low, high = found["score_low"], found["score_high"]
    assert low is not None and high is not None and low == pytest.approx(1 - high)
    assert 0.2 < low < 0.5


def test_headline() -> None:
    first, second, third = headline.sentences(comparison())
    assert first.startswith("threshold 0.9 is the fastest that scores as one token per step does")
    assert "100.0 % against 100.0 %, with 3.0 times fewer forwards (2.00 tokens per forward instead of 0.67)" in first
    assert "from 100.0 % to 0.0 % on tasks of high dependency, and from 100.0 % to 100.0 % on the others" in second
    assert "would need 1.0 forwards for each (4.0 tokens per forward)" in third and "reaches 50 % of it" in third


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
    assert pictures(apart()) == {}
    assert "Not on all tasks, so only under its own: wino." in page(apart(), "Apart", 1)


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
    data = json.loads(inside[1])
    assert data["methods"][0]["runs"]["copy"]["replays"][0]["prompt"] == NASTY


def test_pictures() -> None:
    drawn = pictures(comparison())
    assert set(drawn) == {"front", "tasks", "dependency"}
    assert all(content.startswith(b"\x89PNG") and len(content) > 5000 for content in drawn.values())


@pytest.mark.parametrize("nasty", ["a b c", NASTY, None])
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
    assert 'class="noise"' in dumped("method=2&task=shuffle&sample=1&step=1"), "a position that was never written"
    assert dumped("method=1&task=copy&sample=0&step=1").count('class="noise"') == 3
    assert "★" in dom and "PB80" in dom
    slow = dumped("method=0&view=%E0%A4%A")  # an address that was cut in the middle of a letter
    assert 'data-ready="yes"' in slow and "forward 6 of 6" in slow and "6 forwards" in slow


def test_mistakes_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert command.main([str(tmp_path)]) == 2
    assert "there are no samples under" in capsys.readouterr().err
    assert command.main([str(tmp_path), "--output", "report.pdf"]) == 2
    assert "ends in .html" in capsys.readouterr().err
    assert command.main(["--nonsense"]) == 2
