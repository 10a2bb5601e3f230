"""What a pattern that cannot be a form is said to lack."""

from __future__ import annotations

import pytest

from dllm_sampler import UserError
from dllm_sampler.guides.forms import library
from dllm_sampler.guides.forms.automaton import byte_automaton
from dllm_sampler.guides.forms.faults import fault

pytest.importorskip("outlines_core")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"[$^\]](?<!a)", "'(?<!' at character 7 is look-around"),
        (r"(a)\1", r"'\1' at character 4 is a reference to another part"),
        (r"^\ba$", r"'\b' at character 2 is a word boundary"),
        ("^a$|b$", "'$' at character 3 is an anchor inside"),
        ('{"a": [0-9]{2}}', "'{' at character 1 is a brace that is no count"),
        (r"\p{L}{2,}[a", "unterminated character set at character 10"),
        (r"^\p{Greek}$", "outlines-core cannot read it"),  # nothing that is known to be wrong
    ],
)
def test_what_is_wrong_with_a_pattern_and_where(pattern: str, said: str) -> None:
    assert fault(pattern).startswith(said)


@pytest.mark.parametrize(
    ("crash", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "takes more than 4 GiB to build"),
        ("raise MemoryError", "takes more than 4 GiB to build"),
        ("import os; os.kill(os.getpid(), 11)", "is nested too deeply"),
        ("raise KeyError('lost')", r"outlines-core failed \(KeyError: 'lost'\): write it in another way"),
        ("import sys; sys.exit(3)", r"outlines-core failed \(exit status 3\)"),
    ],
)
def test_why_a_form_was_not_built(crash: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "BUILD", crash)
    with pytest.raises(UserError, match=f"the form 'a' .*{said}"):
        byte_automaton("a")
