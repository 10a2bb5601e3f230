"""Names of the tensors of each family: our modules to the checkpoint's (see `Family.names`)."""

LLADA = {
    "embed": "model.transformer.wte",
    "norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "layers.*.attn_norm": "model.transformer.blocks.*.attn_norm",
    "layers.*.q_proj": "model.transformer.blocks.*.q_proj",
    "layers.*.k_proj": "model.transformer.blocks.*.k_proj",
    "layers.*.v_proj": "model.transformer.blocks.*.v_proj",
    "layers.*.o_proj": "model.transformer.blocks.*.attn_out",
    "layers.*.mlp_norm": "model.transformer.blocks.*.ff_norm",
    "layers.*.ffn.gate_proj": "model.transformer.blocks.*.ff_proj",
    "layers.*.ffn.up_proj": "model.transformer.blocks.*.up_proj",
    "layers.*.ffn.down_proj": "model.transformer.blocks.*.ff_out",
}

QWEN = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "layers.*.attn_norm": "model.layers.*.input_layernorm",
    "layers.*.q_proj": "model.layers.*.self_attn.q_proj",
    "layers.*.k_proj": "model.layers.*.self_attn.k_proj",
    "layers.*.v_proj": "model.layers.*.self_attn.v_proj",
    "layers.*.o_proj": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.ffn.gate_proj": "model.layers.*.mlp.gate_proj",
    "layers.*.ffn.up_proj": "model.layers.*.mlp.up_proj",
    "layers.*.ffn.down_proj": "model.layers.*.mlp.down_proj",
}

NEMOTRON = {own: name.replace("model.", "encoder.", 1) for own, name in QWEN.items()} | {"lm_head": "diffusion_head"}

SDAR = QWEN | {
    "layers.*.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.k_norm": "model.layers.*.self_attn.k_norm",
}

SDAR_MOE = SDAR | {
    "layers.*.ffn.router": "model.layers.*.mlp.gate",
    "layers.*.ffn.experts.gate_proj": "model.layers.*.mlp.experts.#.gate_proj.weight",
    "layers.*.ffn.experts.up_proj": "model.layers.*.mlp.experts.#.up_proj.weight",
    "layers.*.ffn.experts.down_proj": "model.layers.*.mlp.experts.#.down_proj.weight",
}

LLADA_MOE = SDAR_MOE | {
    "layers.*.ffn.router.bias": "model.layers.*.mlp.expert_bias",
    "layers.*.ffn.shared.gate_proj": "model.layers.*.mlp.shared_expert.gate_proj",
    "layers.*.ffn.shared.up_proj": "model.layers.*.mlp.shared_expert.up_proj",
    "layers.*.ffn.shared.down_proj": "model.layers.*.mlp.shared_expert.down_proj",
}

LLADA2 = LLADA_MOE | {
    "embed": "model.word_embeddings",
    "layers.*.q_proj": "model.layers.*.attention.query_key_value[q]",
    "layers.*.k_proj": "model.layers.*.attention.query_key_value[k]",
    "layers.*.v_proj": "model.layers.*.attention.query_key_value[v]",
    "layers.*.q_norm": "model.layers.*.attention.query_layernorm",
    "layers.*.k_norm": "model.layers.*.attention.key_layernorm",
    "layers.*.o_proj": "model.layers.*.attention.dense",
    "layers.*.ffn.router.bias": "model.layers.*.mlp.gate.expert_bias",
    "layers.*.ffn.shared.gate_proj": "model.layers.*.mlp.shared_experts.gate_proj",
    "layers.*.ffn.shared.up_proj": "model.layers.*.mlp.shared_experts.up_proj",
    "layers.*.ffn.shared.down_proj": "model.layers.*.mlp.shared_experts.down_proj",
}
