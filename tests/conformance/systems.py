"""The table of published systems.

To add one, write a `Builder` (a line and the checkpoints in, a `Setup` out) next to those of its model family, and
enter it here: under the `system` of its lines, or under the part before the slash where one builder serves all.
"""

from __future__ import annotations

from tests.conformance import (
    a2d,
    apd,
    block_causal,
    caches,
    constrained,
    d3llm,
    dawn,
    diffusion_gemma,
    dinfer,
    discrete_ddim,
    dream,
    extras,
    fast_dllm_v2,
    freedave,
    klass_wino,
    learn2pd,
    lengths,
    llada,
    lopa,
    nemotron,
    particles,
    rnd1,
    s2d2,
    sliding,
    soft,
    stable_diffcoder,
    suffix,
    svdd,
    unmasking,
)
from tests.conformance.builder import Builder, Unsupported

SYSTEMS: dict[str, Builder] = {
    "llada-vanilla": llada.vanilla,
    "fast-dllm": llada.fast_dllm_first,
    "fast-dllm-v1": llada.fast_dllm,
    "dream": dream.dream,
    "fast-dllm-dream": dream.fast_dllm,
    "apd-dream": apd.apd,
    "adablock": unmasking.adablock,
    "adablock-dream": unmasking.adablock_dream,
    "ass": unmasking.ascending,
    "dparallel-entropy": unmasking.dparallel,
    "d3llm": d3llm.multi_block,
    "d3llm-cache": d3llm.multi_block,
    "eb-sampler": unmasking.entropy_bound,
    "eoser": unmasking.eoser,
    "eoser-ass": unmasking.ascending,
    "localleap": unmasking.localleap,
    "pc-sampler": unmasking.calibrated,
    "prophet": unmasking.prophet,
    "sr-smc/llada": particles.smc,
    "sr-smc/llada-cache": particles.smc,
    "sr-smc/dream": particles.smc_dream,
    "dinfer-threshold": dinfer.dinfer,
    "dinfer-hierarchy": dinfer.dinfer,
    "dinfer-credit": dinfer.dinfer,
    "illada": llada.vanilla,
    "sdar": block_causal.sdar,
    "sdar-moe": block_causal.sdar,
    "stable-diffcoder": stable_diffcoder.generate_block,
    "fast-dllm-v2/generate": fast_dllm_v2.generate,
    "fast-dllm-v2/generate/block-cache": fast_dllm_v2.generate,
    "fast-dllm-v2/batch_sample": fast_dllm_v2.batch_sample,
    "fast-dllm-v2/batch_sample/block-cache": fast_dllm_v2.batch_sample,
    "nemotron-labs-diffusion/generate": nemotron.generate,
    "nemotron-labs-diffusion/linear_spec": nemotron.speculate,
    "a2d/mdlm": a2d.mdlm,
    "a2d/bd3lm": a2d.bd3lm,
    "bert-chat/mdlm": a2d.mdlm,
    "rnd1/diffusion_sample": rnd1.sample,
    "s2d2": s2d2.generate,
    "llada2": block_causal.llada2,
    "llada2.1": block_causal.llada2_1,
    "t2m": block_causal.t2m,
    "dmax": soft.dmax,
    "remix": soft.remix,
    "constrained_cfg": constrained.constrained,
    "svdd": svdd.recorded,
    "diffusion-gemma": diffusion_gemma.generate,
    "discrete-ddim": discrete_ddim.generate,
    "freedave": freedave.freedave,
    "freedave-static": freedave.freedave,
    "freedave-dream": freedave.freedave,
    "freedave-sdar": freedave.sdar,
    "learn2pd": learn2pd.plain,
    "learn2pd-eot": learn2pd.end_of_text,
    "daedal": lengths.daedal,
    "rho-eos": lengths.rho_eos,
    "klass": klass_wino.klass,
    "wino": klass_wino.wino,
    "pcs-entropy": klass_wino.baseline,
    "pcs-margin": klass_wino.baseline,
    "dawn": dawn.generate,
    "dkv-cache-decode": caches.dkv_decode,
    "dkv-cache-greedy": caches.dkv_greedy,
    "dkv-cache-dream": caches.dkv_dream,
    "dllm-cache": caches.dllm_cache,
    "d2f": lopa.lopa,
    "lopa": lopa.lopa,
    "ccd": extras.ccd,
    "dsb": sliding.dsb,
    "dsb-cache": sliding.dsb,
    "dcd": sliding.dcd,
    "dcd-cache": sliding.dcd,
    "dcd-static": sliding.dcd,
    "slowfast": extras.slowfast,
    "rcr": extras.rcr,
    "remdm": extras.remdm,
    "sparse-dllm": extras.sparse,
    "dpad": suffix.dpad,
    "streaming": suffix.streaming,
}


def find(system: str) -> Builder:
    """The builder of a system.

    Raises:
        Unsupported: there is none.
    """
    builder = SYSTEMS.get(system) or SYSTEMS.get(system.partition("/")[0])
    if builder is None:
        raise Unsupported("no plug-ins for this system yet")
    return builder
