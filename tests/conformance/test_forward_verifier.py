"""The small autoregressive model of APD's traces, read piece by piece, says what its recorded forward says."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from dllm_sampler import Canvas
from dllm_sampler.models import autoregressive
from tests import toys

FOLDER = Path(__file__).parent / "data" / "tiny-qwen2-verifier"


def test_read_in_pieces_with_drafts_turned_down() -> None:
    """Two rows whose answers begin apart, at speeds of their own; every draft ends in two wrong tokens."""
    data = load_file(FOLDER / "forward.safetensors")
    text, logits = data["input_ids"], data["logits"]
    length = text.shape[1]
    judge = autoregressive.load(str(FOLDER), replace(toys.denoiser().spec, dtype=torch.float32))
    first = torch.tensor([6, 2])
    ids = torch.zeros(2, length + 5, dtype=torch.long)
    ids[:, :length] = text[0]
    canvas: Canvas = toys.changed(
        toys.canvas(torch.ones(2, length + 4, dtype=torch.bool)), first=first, shortest=length - 2
    )
    reading, width = judge.begin(canvas), 5
    for accepted in ([1, 3], [2, 1], [3, 3], [1, 2], [3, 1]):
        draft = ids.clone()
        for row in range(2):
            draft[row, first[row] + 3 : first[row] + 5] = 7
        got = reading.logits(canvas, draft, first, width)
        for row in range(2):
            own = int(first[row])
            # The fourth row has read three drafted tokens, all of them right; the fifth a wrong one.
            torch.testing.assert_close(got[row, :4], logits[0, own - 1 : own + 3], atol=1e-4, rtol=1e-4)
            assert not torch.allclose(got[row, 4], logits[0, own + 3], atol=1e-2)
        first = first + torch.tensor(accepted)
