"""A tiny model of every family of transformers that `accelerate` knows."""

import importlib

import torch

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_heads": 4, "linear_head_dim": 8, "num_experts": 4,
    "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16, "state_size": 16, "mamba_d_state": 16, "ssm_state_size": 16,
    "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 8,
    "mamba_head_dim": 8, "mamba_headdim": 8, "num_heads": 8, "n_mamba_heads": 2,
    "mamba_n_groups": 2, "n_groups": 2, "mamba_ngroups": 1, "time_step_rank": 4,
    "mamba_dt_rank": 4, "expand": 2, "mamba_expand": 2, "chunk_size": 8, "mamba_chunk_size": 8,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
# What a family needs beside; "class": of its configuration, where it is not the only one.
FAMILIES = {
    "bailing_hybrid": {"layer_group_size": 2, "num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {},
    "falcon_mamba": {},
    "granitemoehybrid": {"layer_types": MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": MIXED, "num_key_value_heads": 4},
    "lara_mini": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm3": {},
    "mamba": {},
    "mamba2": {},
    "nemotron_h": {},
    "olmo_hybrid": {},
    "qwen3_5": {"class": "Qwen3_5TextConfig"},
    "qwen3_5_moe": {"class": "Qwen3_5MoeTextConfig"},
    "qwen3_next": {},
    "glm5_next": {
        "class": "Glm5NextTextConfig", "around": "Glm5NextConfig", "num_key_value_heads": 4,
        "index_topk": 32, "index_n_heads": 2, "index_head_dim": 8, "qk_rope_head_dim": 0,
        "mlp_layer_types": ["dense"] * 4, "index_kpool": 4,
        "others": {"vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2,
                   "out_hidden_size": 32, "intermediate_size": 16,
                   "projection_intermediate_size": 16}},
    },
    "inkling": {
        "class": "InklingTextConfig", "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16, "unpadded_vocab_size": 96,
        "local_layer_ids": [0, 2], "mlp_layer_types": ["dense"] * 4,
    },
    "inkling2": {
        "class": "Inkling2TextConfig", "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16, "unpadded_vocab_size": 96,
        "n_layers_per_attn_res_block": 2,
    },
    "inkling2_loop": {
        "class": "Inkling2LoopTextConfig", "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16,
        "unpadded_vocab_size": 96, "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1,
        "loop_layer_index_end": 3, "loop_num_passes": 2, "loop_gate_rank": 4,
    },
    "minimax": {"block_size": 16, "layer_types": MIXED},
    "qwen4_exp": {
        "class": "Qwen4ExpTextConfig", "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2,
        "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
        "indexer_compress_ratio": 4, "layer_types": MIXED,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 16, "n_mamba_heads": 8,
    },
}  # fmt: skip
# Without experts where a router decides by the last bits of a bfloat16 number.
DENSE = {"kimi_linear": {"mlp_layer_types": ["dense"] * 4}}


def tiny(family, **changes):
    """Return a model in float32 with weights large enough that every part is felt."""
    folder = f"transformers.models.{family}"
    module = importlib.import_module(f"{folder}.configuration_{family}")
    modeling = importlib.import_module(f"{folder}.modeling_{family}")
    special = dict(FAMILIES[family])
    names = [n for n in vars(module) if n.endswith("Config") and n != "PreTrainedConfig"]
    kind = getattr(module, special.pop("class", names[0]))
    models = [n for n in vars(modeling) if n.endswith("ForCausalLM")]
    around, others = special.pop("around", None), special.pop("others", {})
    known = {*kind.__dataclass_fields__, *kind.attribute_map}
    sizes = {name: size for name, size in SIZES.items() if name in known}
    config = kind(**{**sizes, **special, **changes})
    if around is not None:  # a model of images and text, which is given text
        config = getattr(module, around)(text_config=config.to_dict(), **others)
        models = [n for n in vars(modeling) if n.endswith("ForConditionalGeneration")]
    torch.manual_seed(0)
    model = getattr(modeling, models[0])(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and not name.endswith("A_log"):
                torch.nn.init.normal_(p, std=0.15)
    return model.float().eval()


def tokens(*shape, seed=0):
    """Return tokens that are no padding, the same for a shape and seed."""
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))
