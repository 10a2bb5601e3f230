"""The example for TRL's GRPOTrainer, whose rollouts are this sampler's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dllm_sampler import Sampler, config

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of what is deprecated in transformers, but not yet in TRL
]


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps on mini; what TRL learns from are the very probabilities that were sampled from, in shuffled rows."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import trl_grpo  # pyright: ignore[reportMissingImports]

    compared: list[tuple[Any, ...]] = []
    score = trl_grpo.DiffusionGRPOTrainer._get_per_token_logps_and_entropies
    loss = trl_grpo.DiffusionGRPOTrainer._compute_loss

    def noted(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        self.inputs = inputs
        return loss(self, model, inputs)

    def compare(self: Any, *given: Any, **options: Any) -> Any:
        found = score(self, *given, **options)
        compared.append((found[0].detach(), self.inputs["sampling_per_token_logps"], self.inputs["rows"].tolist()))
        assert torch.equal(self.inputs["completion_mask"].bool(), found[1].detach() > 0)
        return found

    monkeypatch.setattr(trl_grpo.DiffusionGRPOTrainer, "_compute_loss", noted)
    monkeypatch.setattr(trl_grpo.DiffusionGRPOTrainer, "_get_per_token_logps_and_entropies", compare)
    assert 0 < trl_grpo.main(["--steps", "2", "--group", "4", "--output", str(tmp_path / "run")]) <= 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("step 2  reward 0.")
    assert len(compared) == 2 and sorted(compared[0][2]) == list(range(12)) != compared[0][2]
    for found, sampled, _ in compared:
        assert found.any()
        torch.testing.assert_close(found, sampled, atol=2e-5, rtol=0)
    before = load_file(Path(str(config.model("mini")["path"])) / "model.safetensors")
    after = load_file(tmp_path / "run" / "model.safetensors")
    assert before.keys() == after.keys() and any(not torch.equal(before[key], after[key]) for key in before)
    answer = Sampler.from_pretrained(str(tmp_path / "run"), device="cpu").generate("copy: Ada", max_new_tokens=8)
    assert answer.texts is not None
