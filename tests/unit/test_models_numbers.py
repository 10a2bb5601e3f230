"""Sizes in the configuration of a network that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest

from dllm_sampler.errors import UserError
from dllm_sampler.models.fields import check_numbers


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648, and the checkpoint has 2 tensors"),
        ({"text_config": {"hidden_size": 10**18}}, "hidden_size is 1000000000000000000, and the largest tensor"),
        ({"vision": [{"num_heads": -1}]}, "num_heads should be a whole number from 0 on, not -1"),
        ({"vocab_size": 10**400}, "vocab_size is a number of more than 30 digits"),
    ],
)
def test_absurd_sizes_of_networks_that_transformers_builds(raw: dict[str, Any], said: str):
    shapes, deep = {"embed": (100, 16), "norm": (16,)}, [raw]
    for _ in range(2000):
        deep = [deep]
    sane = {"num_hidden_layers": 12, "vocab_size": 100, "hidden_size": 16, "max_position_embeddings": 10**9}
    check_numbers(sane | {"eos_token_id": -1, "text_config": sane, "num_labels": True}, shapes, "config.json")
    with pytest.raises(UserError, match=f"config.json: {said}"):
        check_numbers({"deep": deep}, shapes, "config.json")
