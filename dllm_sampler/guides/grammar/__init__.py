"""Context-free languages over bytes: which partial texts can be completed, and how. No tensors, no plug-ins."""

from dllm_sampler.guides.grammar.language import Language
from dllm_sampler.guides.grammar.partial import END, End, Word

__all__ = ["END", "End", "Language", "Word"]
