"""Building forms: what a pattern that cannot be one is said to lack, and what is built once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dllm_sampler.guides import Regex
from dllm_sampler.guides.forms import automaton, library
from dllm_sampler.guides.forms.automaton import byte_automaton
from dllm_sampler.guides.forms.faults import fault
from dllm_sampler.guides.forms.regular import Form
from tests import toys
from tests.forms import built
from tests.refusals import refused
from tests.sampling import each

pytest.importorskip("outlines_core")


@each(
    ("pattern", "said"),
    [
        (r"[$^\]](?<!a)", "'(?<!' at character 7 is look-around"),
        (r"(a)\1", r"'\1' at character 4 is a reference to another part"),
        (r"^\ba$", r"'\b' at character 2 is a word boundary"),
        ("^a$|b$", "'$' at character 3 is an anchor inside"),
        ('{"a": [0-9]{2}}', "'{' at character 1 is a brace"),
        (r"\p{L}{2,}[a", "'unterminated character set' at character 10"),
        (r"^\p{Greek}$", "outlines-core cannot read it"),  # nothing that is known to be wrong
    ],
)
def test_what_is_wrong_with_a_pattern_and_where(pattern: str, said: str) -> None:
    reason, way = fault(pattern)
    assert f"{reason}. {way}".startswith(said)


@each(
    ("crash", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "form-too-large"),
        ("raise MemoryError", "form-too-large"),
        ("import os; os.kill(os.getpid(), 11)", "form-too-large"),
        ("raise KeyError('lost')", "form-invalid: 'lost'"),
        ("import sys; sys.exit(3)", "form-invalid"),
    ],
)
def test_why_a_form_was_not_built(crash: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "BUILD", crash)
    with refused(said):
        byte_automaton("a")


def test_packages_are_found_as_here_but_not_in_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder, module in (("there", "outlines_core"), ("here", "json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{module}.py").write_text(f"raise KeyError('{folder}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "there"))
    monkeypatch.chdir(tmp_path / "here")
    with refused("form-invalid: 'there'"):
        byte_automaton("a")


def test_several_patterns_by_one_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A task has a form for each prompt: what is equal is built once, and all in one process."""
    monkeypatch.setenv("DLLM_SAMPLER_CACHE", str(tmp_path))
    automaton.lifted.cache_clear()
    run, calls = library.run, []
    monkeypatch.setattr(library, "run", lambda *given: calls.append(given) or run(*given))
    tokens, patterns = [b"", b"", b"a", b"b", b"ab"], ["a+", "(ab)*", "a+", "b{3}"]
    together = automaton.build_all(patterns, tokens, 5, (0,), 1)
    assert len(calls) == 1 and together[0] is together[2]
    automaton.lifted.cache_clear()
    again = automaton.build_all(patterns, tokens, 5, (0,), 1)
    assert len(calls) == 1, "from disk"
    monkeypatch.setenv("DLLM_SAMPLER_CACHE", str(tmp_path / "other"))
    automaton.lifted.cache_clear()
    for one, other, pattern in zip(together, again, patterns, strict=True):
        alone = automaton.build_all([pattern], tokens, 5, (0,), 1)[0]
        for found in (one, other):
            assert torch.equal(found.moves, alone.moves) and torch.equal(found.accepts, alone.accepts)
            assert torch.equal(found.classes, alone.classes) and found.shortest == alone.shortest
    with refused("form-invalid"):
        automaton.build_all(["c", "(c", "d"], tokens, 5, (0,), 1)


def test_a_form_is_bound_to_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = toys.sampler(guide=Regex("[a-c]+"), stop="none")
    (guide,) = sampler.plugins.guides
    with monkeypatch.context() as patch:
        patch.setattr(Regex, "build", lambda *_: pytest.fail("built again"))
        for drawn in (None, 1.0):  # block lengths bind every plug-in again, and so does another sampler
            other = toys.sampler(guide=guide, stop="none", temperature=drawn, tokenizer=sampler.tokenizer)
            assert other.generate(toys.PROMPTS, max_new_tokens=6, block_length=3).valid.all()  # type: ignore[union-attr]
    with refused("tokenizer-missing"):
        toys.sampler(guide=guide, tokenizer=None)
    plain = Regex("[a-c]+")
    drawn = toys.sampler(guide=plain, stop="none", temperature=1.0).generate(toys.PROMPTS, max_new_tokens=6, seed=1)
    both = toys.sampler(guide=guide, stop="none", temperature=1.0, tokenizer=sampler.tokenizer)
    assert torch.equal(both.generate(toys.PROMPTS, max_new_tokens=6, seed=1).tokens, drawn.tokens)


def test_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And read from disk by the next process, unless the file is damaged, which harms nobody who has read it."""
    monkeypatch.setenv("DLLM_SAMPLER_CACHE", str(tmp_path))
    automaton.lifted.cache_clear()
    first = built("(a|b)+c")
    automaton.lifted.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(automaton, "byte_automaton", lambda *_: pytest.fail("built again"))
        again = built("(a|b)+c")
    for name in automaton.TENSORS:
        assert torch.equal(getattr(again, name), getattr(first, name))
    assert (again.start, again.shortest) == (first.start, first.shortest) and isinstance(Regex("a"), Form)
    automaton.lifted.cache_clear()
    (file,) = (tmp_path / "forms").glob("*.safetensors")
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(again.moves, first.moves)
    assert built("(a|b)+c").shortest == first.shortest
