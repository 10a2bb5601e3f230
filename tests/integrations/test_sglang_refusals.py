"""What SGLang's adapter refuses: settings before the model is loaded, and requests before their first forward."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dllm_sampler import UserError
from dllm_sampler.integrations import sglang
from tests.contract.cases import Settings
from tests.integrations.sglang_stubs import Req, Request, algorithm


def request(more: Settings, **fields: Any) -> Any:
    found = Req(Request([5], 9, temperature=1.0, top_k=2**30))
    vars(found.sampling_params).update(more)
    vars(found).update(fields)
    return found


def test_requests_that_ask_for_more_are_refused(registered: str) -> None:
    live = type(algorithm(sglang.NAME, {"scheduler": "threshold"}, True))
    assert live.validate_request(request({"min_p": 0.0, "regex": None}, return_logprob=False)) is None
    assert live.validate_request(request({"top_p": 0.9})) is None
    assert "Remove min_p, json_schema." in live.validate_request(request({"min_p": 0.1, "json_schema": "{}"}))
    assert "Remove return_logprob." in live.validate_request(request({}, return_logprob=True))
    assert live.validate_request(request({"sampling_seed": 3})) is None
    assert "temperature=inf" in live.validate_request(request({"temperature": float("inf")}))


WRONG = {
    "scheduler: treshold": "unknown scheduler 'treshold'. Did you mean 'threshold'",
    "schedular: threshold": "Did you mean 'scheduler'",
    "scheduler: {name: threshold, threshold: high}": "threshold='high' is invalid. Set a number",
    "scheduler: wino": "scheduler=wino needs more than the logits of a block",
    "{scheduler: threshold, top_k: 5}": "top_k changes nothing at temperature 0",
    "block_size: 4": "names no scheduler",
    "[threshold]": "has no names with values",
    "scheduler: [": "cannot be read",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_settings_are_refused_before_the_model_is_loaded(registered: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    cls = import_module("sglang.srt.dllm.algorithm").algo_name_to_cls[sglang.NAME]
    with pytest.raises(UserError) as error:
        cls.configure_server_args(SimpleNamespace(dllm_algorithm_config=str(file)))
    assert WRONG[text] in str(error.value) and "\n" not in str(error.value)
