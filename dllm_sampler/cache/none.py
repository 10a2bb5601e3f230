"""No cache: every forward computes the whole row."""

from dataclasses import dataclass
from typing import ClassVar

from dllm_sampler.cache.base import Cache


@dataclass
class NoCache(Cache):
    """Compute every position in every step: exact, and the baseline of every speed-up."""

    stores: ClassVar[bool] = False
    keeps_noise: ClassVar[bool] = False

    @property
    def steady(self) -> bool:
        """See `Cache.steady`."""
        return True

    @property
    def settles(self) -> bool:
        """See `Cache.settles`."""
        return True

    @property
    def covers(self) -> bool:
        """See `Cache.covers`."""
        return True
