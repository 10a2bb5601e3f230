"""Guides, which rewrite the logits that tokens are chosen from, or refuse tokens that a step would commit."""

from dllm_sampler.guides.end_tokens import EndTokens
from dllm_sampler.guides.forms.regular import Choices, JsonSchema, Regex
from dllm_sampler.guides.grammar.guide import Grammar
from dllm_sampler.guides.truncation import Temperature, TopK, TopP

__all__ = ["Choices", "EndTokens", "Grammar", "JsonSchema", "Regex", "Temperature", "TopK", "TopP"]
