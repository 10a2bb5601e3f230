"""The readout kernel against float64, against the sampler's own readout, and where logits are no numbers."""

from dataclasses import fields
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler.core import noise
from dllm_sampler.kernels import partial, readout, reference
from dllm_sampler.kernels.sampling import Sampling
from tests.kernels import readout_checks as checks
from tests.kernels.readout_checks import INF
from tests.refusals import refused
from tests.sampling import crossed, sampled

KERNELS = pytest.mark.parametrize("kernel", [readout.readout, reference.readout], ids=["triton", "torch"])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of these tests have several parts, as real ones do, and a last one that is cut."""
    monkeypatch.setattr(readout, "PART", 256)
    monkeypatch.setattr(readout, "BLOCK", 128)


@KERNELS
@pytest.mark.parametrize(("dtype", "size"), crossed(DTYPES, [(3, 1), (1, 2), (2, 600)]))
def test_against_float64(kernel: Any, dtype: torch.dtype, size: tuple[int, int]) -> None:
    rows, vocab = size
    if vocab == 1 and kernel is reference.readout:
        pytest.skip("torch has no second of one")
    checks.readout_against_float64(kernel, "cpu", dtype, rows, vocab)


@KERNELS
@pytest.mark.parametrize(("dtype", "temperature"), crossed(DTYPES, [0.0, 0.6, 2.0]))
def test_as_the_sampler_reads(kernel: Any, dtype: torch.dtype, temperature: float) -> None:
    checks.like_the_sampler(kernel, "cpu", dtype, temperature)


@KERNELS
@pytest.mark.parametrize("vocab", sampled([50, 512, 600]))  # two whole parts, and two and a piece
def test_rows_that_are_not_finite(kernel: Any, vocab: int) -> None:
    checks.rows_that_are_not_finite(kernel, "cpu", vocab)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_as_large_as_they_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    checks.readout_against_float64(readout.readout, "cpu", dtype, 2, 9000)
    checks.rows_that_are_not_finite(readout.readout, "cpu", 9000)


@KERNELS
def test_close_to_one(kernel: Any) -> None:
    checks.close_to_one(kernel, "cpu", exact_entropy=kernel is readout.readout)


VALUES = st.sampled_from([-INF, -1e4, -30.0, -1.0, 0.0, -0.0, 0.5, 0.5, 3.0, 1e4])  # few: ties everywhere


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(VALUES, min_size=150, max_size=150), min_size=1, max_size=2),
    st.sampled_from([0.0, 0.3, 1.0, 7.0]),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
)
def test_ties_and_extremes(rows: list, temperature: float, measured: bool, dtype: torch.dtype, seed: int) -> None:
    logits = torch.tensor(rows).to(dtype)
    logits[:, 3] = 0.25  # something is possible
    sampling = Sampling(8, temperature, measured, checks.keys_of(len(rows), seed), torch.full((len(rows),), 8))
    found, expected = (kernel(logits, sampling) for kernel in (readout.readout, reference.readout))
    assert torch.equal(found.token, expected.token)
    assert (found.token != 8).all()
    assert (found.current == -INF).all()
    seen = logits.clone()
    seen[:, 8] = -INF
    seen = seen.float() / temperature if measured and temperature else seen
    size = float(seen[seen.isfinite()].abs().max()) + 1
    checks.compare(found, checks.exact(seen, found.token, None), size)


@KERNELS
def test_the_largest_logits(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies 3e38 below the best has no mass, and no infinity on the way there either."""
    monkeypatch.setattr(readout, "PART", 1024)
    for place in (0, 390):
        logits = torch.zeros(1, 400)
        logits[0, place] = 3e38
        found = kernel(logits)
        assert (int(found.token), float(found.confidence), float(found.entropy)) == (place, 1.0, 0.0)


def test_many_draws_are_torchs_draws() -> None:
    """Tokens, not only their distribution: no near tie in these is decided otherwise."""
    logits = torch.randn(12, 120, generator=checks.seeded(5)).bfloat16()
    for seed in range(2):
        sampling = Sampling(temperature=1.0, keys=checks.keys_of(12, seed))
        tokens = [kernel(logits, sampling).token for kernel in (readout.readout, reference.readout)]
        assert torch.equal(*tokens)
        assert len(tokens[0].unique()) > 6


@triton.jit
def _noise_kernel(keys, out, COUNT: tl.constexpr):
    row = tl.program_id(0) + tl.zeros([1, 1], tl.int64)
    low, high = partial.words(keys, row, row == row)
    ids = tl.arange(0, COUNT)[None]
    tl.store(out + row * COUNT + ids, partial.gumbel(low, high, ids))


def test_noise_is_as_close_as_logarithms_are() -> None:
    """The integers must be equal: one wrong bit would move the noise by much more than this."""
    keys, count = checks.keys_of(8), 8192
    found = torch.full((8, count), torch.nan)
    _noise_kernel[(8,)](keys, found, COUNT=tl.constexpr(count))
    expected = noise.token_noise(keys, count)
    assert found.isfinite().all()
    assert float((found - expected).abs().max()) < 2e-6
    assert float((found != expected).double().mean()) < 0.5
    # and both are close to float64, also at the large end, which wins draws
    k = keys[:, None]
    low, high = (k & 0x7FFFFFFF).int(), ((k >> 32) & 0x7FFFFFFF).int()
    word = torch.arange(count, dtype=torch.int32) * -0x61C88647
    bits = noise._mix32(noise._mix32(word + low) ^ high) & 0x7FFFFFFF
    uniform = ((bits.float() + 0.5) * noise.SCALE).double()
    torch.testing.assert_close(found.double(), -(-torch.log1p(-uniform)).log(), rtol=3e-7, atol=5e-7)


def test_a_row_does_not_depend_on_its_batch() -> None:
    """To the last bit."""
    logits = torch.randn(3, 600, generator=checks.seeded(2)) * 4
    given: dict[str, Any] = {"keys": checks.keys_of(3), "current": torch.tensor([0, 300, 599])}
    found = readout.readout(logits, Sampling(temperature=0.9, **given))
    names = [field.name for field in fields(found) if getattr(found, field.name) is not None]
    assert len(names) == 7
    for row in range(3):
        own = {name: value[row : row + 1] for name, value in given.items()}
        alone = readout.readout(logits[row : row + 1], Sampling(temperature=0.9, **own))
        for name in names:
            assert torch.equal(getattr(alone, name)[0], getattr(found, name)[row]), name


def test_no_rows() -> None:
    assert readout.readout(torch.empty(0, 9)).token.shape == (0,)


@KERNELS
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"temperature": -1.0}, "option-range: temperature=-1"),
        ({"temperature": 1.0}, "option-missing: temperature, keys"),
        ({"mask_id": 9}, "token-outside-vocabulary: mask_id, 9"),
    ],
)
def test_mistakes_are_named(kernel: Any, arguments: dict[str, Any], said: str) -> None:
    with refused(said):
        kernel(torch.zeros(2, 9), Sampling(**arguments))
    with refused("shape-mismatch: (2, 9)"):
        kernel(torch.zeros(9, 2).T)
