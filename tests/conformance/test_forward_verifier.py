"""The small autoregressive model of APD's traces, read piece by piece, says what its recorded forward says."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from dllm_sampler import Canvas
from dllm_sampler.speculative import autoregressive
from tests import toys

FOLDER = Path(__file__).parent / "data" / "tiny-qwen2-verifier"


def test_read_in_pieces_with_drafts_turned_down() -> None:
    """Two rows, one of them padded, at speeds of their own; every draft ends in two wrong tokens."""
    data = load_file(FOLDER / "forward.safetensors")
    text, logits = data["input_ids"], data["logits"]
    length = text.shape[1]
    judge = autoregressive.load(str(FOLDER), replace(toys.denoiser().spec, dtype=torch.float32))
    begin = torch.tensor([0, 4])
    ids = torch.zeros(2, length + 5, dtype=torch.long)
    ids[0, :length], ids[1, 4 : 4 + length] = text[0], text[0]
    canvas: Canvas = replace(toys.canvas(torch.ones(2, length + 4, dtype=torch.bool)), begin=begin, origin=6)
    reading, first, width = judge.begin(canvas), torch.tensor([6, 6]), 5
    for accepted in ([1, 3], [2, 1], [3, 3], [1, 2], [3, 1]):
        draft = ids.clone()
        for row in range(2):
            draft[row, first[row] + 3 : first[row] + 5] = 7
        got = reading.logits(canvas, draft, first, width)
        for row in range(2):
            own = int(first[row] - begin[row])
            # The fourth row has read three drafted tokens, all of them right; the fifth a wrong one.
            torch.testing.assert_close(got[row, :4], logits[0, own - 1 : own + 3], atol=1e-4, rtol=1e-4)
            assert not torch.allclose(got[row, 4], logits[0, own + 3], atol=1e-2)
        first = first + torch.tensor(accepted)
