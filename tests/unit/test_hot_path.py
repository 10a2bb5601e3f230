"""What was made fast gives what the plain way gives."""

import math

import torch

from dllm_sampler.core import statistics
from tests.sampling import each


@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@each("words", [7, 96, 101, 254, 256, 33000])  # with and without a rest; wide tiles
def test_the_best_token_is_torchs_argmax(dtype, words, monkeypatch):
    monkeypatch.setattr(statistics, "MANY", 0)
    for seed in range(16):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(0, 4, (2, 3, words), generator=generator).to(dtype)  # ties everywhere
        if seed % 3 == 0:
            logits[0, 1, seed % words] = math.nan
        if seed % 5 == 0:
            logits[1] = -math.inf
        assert torch.equal(statistics.argmax(logits), logits.argmax(-1))


def test_bfloat16_logits_are_measured_in_float32():
    logits = torch.randn(1, 1, 4, 1280, generator=torch.Generator().manual_seed(0)).bfloat16()
    token, needs = logits.argmax(-1), frozenset({"entropy", "logsumexp", "margin"})
    found = statistics.measure(logits.clone(), token, token, needs)
    exact = statistics.measure(logits.double(), token, token, needs)
    for name in ("confidence", *needs):
        torch.testing.assert_close(getattr(found, name), getattr(exact, name), rtol=1e-6, atol=1e-9)
