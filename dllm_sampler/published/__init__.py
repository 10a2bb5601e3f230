"""Plug-ins that reproduce quirks of published code, which the package's own plug-ins leave out.

Most classes extend the plug-in of the same method, for the replay of recorded runs. To run a published loop, pass the
objects:

    from dllm_sampler.published import ForcedFirst, PublishedDualCache

    Sampler(denoiser, scheduler=ForcedFirst(Threshold(0.9)), cache=PublishedDualCache(), compat=True)
"""

from dllm_sampler.published.adablock import AmongTop
from dllm_sampler.published.apd import EndsAnywhere, PublishedParallelDecoding
from dllm_sampler.published.caches import PublishedDelayedCache, PublishedElasticCache
from dllm_sampler.published.dinfer import PublishedCredit, PublishedDInferThreshold
from dllm_sampler.published.dllm import (
    BinomialSteps,
    HiddenUncounted,
    HidesPads,
    KeepsTokens,
    RightPaddedDraws,
    StopTogether,
)
from dllm_sampler.published.editing import PublishedEditing, PublishedRemasking, UnrefreshedBlocks
from dllm_sampler.published.fixed import (
    AnyBlock,
    PublishedFactor,
    PublishedFixedSteps,
    PublishedOrigin,
    PublishedPositionCalibrated,
)
from dllm_sampler.published.freedave import PublishedFreeDave
from dllm_sampler.published.grammar import Behind, PublishedGrammar
from dllm_sampler.published.klass import MostUncertain, PublishedKlass
from dllm_sampler.published.learn2pd import PublishedCachedEndOfText, PublishedEndOfText, PublishedLearnedFilter
from dllm_sampler.published.lengths import AboveThreshold, PublishedRhoEos, RenewedGuidance, RestlessEngine
from dllm_sampler.published.linear_spec import PublishedLinearSpec
from dllm_sampler.published.localleap import PublishedLocalLeap
from dllm_sampler.published.multi_block import (
    HeldProgress,
    OneAfterAnother,
    PublishedDelayedPrefix,
    PublishedFill,
    StaleMasks,
    StrictEntropy,
)
from dllm_sampler.published.particles import PrefixDraws, PublishedSelfRewarding, RestDraws
from dllm_sampler.published.rcr import PublishedRunningConfidence
from dllm_sampler.published.remix import PublishedRejectionMixing
from dllm_sampler.published.rnd1 import CappedEntropyBound, EvenRest, JudgedTemperature, ShiftedDraws
from dllm_sampler.published.s2d2 import Level, PublishedSelfVerified
from dllm_sampler.published.seeded import (
    BlockDraws,
    ContextDraws,
    LeavesAtEnd,
    PartDraws,
    PrefillsApart,
    PublishedSubBlockCache,
    SeededBlocks,
    SeededContext,
    StopStored,
    StoresApart,
)
from dllm_sampler.published.sliding import FillAtBlock, FirstFromRefresh, StepQuota, WithoutLookahead
from dllm_sampler.published.slowfast import PublishedSlowFast
from dllm_sampler.published.stops import AllEnd, EarlyStop, PromptCounts, StopAt
from dllm_sampler.published.suffix import SuffixDraws
from dllm_sampler.published.svdd import AbsorbingKernel
from dllm_sampler.published.unrolled import Unrolled
from dllm_sampler.published.window import (
    ForcedFirst,
    PublishedDualCache,
    PublishedPrefixCache,
    PublishedSparseCache,
    PublishedWindow,
)
from dllm_sampler.published.wino import PublishedWino

__all__ = [
    "AboveThreshold",
    "AbsorbingKernel",
    "AllEnd",
    "AmongTop",
    "AnyBlock",
    "Behind",
    "BinomialSteps",
    "BlockDraws",
    "CappedEntropyBound",
    "ContextDraws",
    "EarlyStop",
    "EndsAnywhere",
    "EvenRest",
    "FillAtBlock",
    "FirstFromRefresh",
    "ForcedFirst",
    "HeldProgress",
    "HiddenUncounted",
    "HidesPads",
    "JudgedTemperature",
    "KeepsTokens",
    "LeavesAtEnd",
    "Level",
    "MostUncertain",
    "OneAfterAnother",
    "PartDraws",
    "PrefillsApart",
    "PrefixDraws",
    "PromptCounts",
    "PublishedCachedEndOfText",
    "PublishedCredit",
    "PublishedDInferThreshold",
    "PublishedDelayedCache",
    "PublishedDelayedPrefix",
    "PublishedDualCache",
    "PublishedEditing",
    "PublishedElasticCache",
    "PublishedEndOfText",
    "PublishedFactor",
    "PublishedFill",
    "PublishedFixedSteps",
    "PublishedFreeDave",
    "PublishedGrammar",
    "PublishedKlass",
    "PublishedLearnedFilter",
    "PublishedLinearSpec",
    "PublishedLocalLeap",
    "PublishedOrigin",
    "PublishedParallelDecoding",
    "PublishedPositionCalibrated",
    "PublishedPrefixCache",
    "PublishedRejectionMixing",
    "PublishedRemasking",
    "PublishedRhoEos",
    "PublishedRunningConfidence",
    "PublishedSelfRewarding",
    "PublishedSelfVerified",
    "PublishedSlowFast",
    "PublishedSparseCache",
    "PublishedSubBlockCache",
    "PublishedWindow",
    "PublishedWino",
    "RenewedGuidance",
    "RestDraws",
    "RestlessEngine",
    "RightPaddedDraws",
    "SeededBlocks",
    "SeededContext",
    "ShiftedDraws",
    "StaleMasks",
    "StepQuota",
    "StopAt",
    "StopStored",
    "StopTogether",
    "StoresApart",
    "StrictEntropy",
    "SuffixDraws",
    "UnrefreshedBlocks",
    "Unrolled",
    "WithoutLookahead",
]
