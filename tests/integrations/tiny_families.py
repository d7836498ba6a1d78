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
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 16, "n_mamba_heads": 8,
    },
}  # fmt: skip
# Found in the installed package, not yet compared.
NOT_COMPARED = {
    "glm5_next": "a model of images and text; its text part has no class of its own",
    "inkling": "a model of sound, images and text", "inkling2": "a model of images and text",
    "inkling2_loop": "a model of images and text",
    "qwen4_exp": "its text configuration has no sizes by default",
    "zamba": "a tiny one cannot tie its shared layers",
}  # fmt: skip


def tiny(family, **changes):
    """Return a model in float32 with weights large enough that every part is felt."""
    from transformers import AutoModelForCausalLM

    special = dict(FAMILIES[family])
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    names = [n for n in vars(module) if n.endswith("Config") and n != "PreTrainedConfig"]
    kind = getattr(module, special.pop("class", names[0]))
    default = kind()
    sizes = {name: size for name, size in SIZES.items() if hasattr(default, name)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**{**sizes, **special, **changes}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and not name.endswith("A_log"):
                torch.nn.init.normal_(p, std=0.15)
    return model.float().eval()
