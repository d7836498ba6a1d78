"""Same weights in, same outputs out: our layers and those of transformers."""

import pytest
import torch

from linattn.layers import GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba2


def test_same_weights_same_outputs_as_the_layer_of_qwen3_next():
    """An implementation that no one here wrote; its l2 norm has an epsilon of 1e-6."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from transformers.models.qwen3_next import Qwen3NextConfig

    H, Hv, Dk, Dv, dim = 2, 4, 8, 16, 32
    config = Qwen3NextConfig(
        hidden_size=dim, linear_num_key_heads=H, linear_num_value_heads=Hv,
        linear_key_head_dim=Dk, linear_value_head_dim=Dv, linear_conv_kernel_dim=4,
        num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = modeling.Qwen3NextGatedDeltaNet(config, 0)
    ours = GatedDeltaNet(dim, H, num_value_heads=Hv, key_dim=Dk, value_dim=Dv)
    with torch.no_grad():  # theirs has the parts of a key head together
        each = Hv // H
        parts = theirs.in_proj_qkvz.weight.unflatten(0, (H, -1))
        q, k, v, z = parts.split([Dk, Dk, each * Dv, each * Dv], dim=1)
        b, a = theirs.in_proj_ba.weight.unflatten(0, (H, -1)).split([each, each], dim=1)
        for to, x in (
            (ours.q_proj, q), (ours.k_proj, k), (ours.v_proj, v), (ours.g_proj, z),
            (ours.beta_proj, b), (ours.decay_proj, a),
        ):  # fmt: skip
            to.weight.copy_(x.flatten(0, 1))
        ours.convolution.weight.copy_(theirs.conv1d.weight[:, 0])
        ours.A_log.copy_(theirs.A_log)
        ours.dt_bias.copy_(theirs.dt_bias)
        ours.norm.weight.copy_(theirs.norm.weight)
        ours.norm.eps = theirs.norm.variance_epsilon  # felt where outputs are small, as here
        ours.o_proj.weight.copy_(theirs.out_proj.weight)
    x = torch.randn(2, 100, dim)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-5)


def test_same_weights_same_outputs_as_the_layer_of_kimi_linear():
    """An implementation that no one here wrote; it has no bias in the output gate."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    from transformers.models.kimi_linear import KimiLinearConfig

    H, D, dim = 2, 16, 32
    config = KimiLinearConfig(
        hidden_size=dim, linear_num_heads=H, linear_head_dim=D, linear_conv_kernel_dim=4,
        num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = modeling.KimiLinearDeltaAttention(config, 0)
    ours = KimiDeltaAttention(dim, H, head_dim=D)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(ours, name).weight.copy_(getattr(theirs, name).weight)
        gate = theirs.forget_gate
        gate.dt_bias.copy_(ours.dt_bias.flatten())
        gate.A_log.copy_(ours.A_log[:, None])
        for to, x in (
            (ours.beta_proj, theirs.b_proj), (ours.decay_proj[0], gate.f_a_proj),
            (ours.decay_proj[1], gate.f_b_proj), (ours.g_proj[0], theirs.g_a_proj),
            (ours.g_proj[1], theirs.g_b_proj), (ours.norm, theirs.o_norm),
        ):  # fmt: skip
            to.weight.copy_(x.weight)
        ours.g_proj[1].bias.zero_()
        ours.norm.eps = theirs.o_norm.variance_epsilon
        ours.convolution.weight.copy_(theirs.conv1d.weight[:, 0])
    x = torch.randn(2, 100, dim)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("index", [0, 2])
def test_same_weights_same_outputs_as_the_lightning_attention_of_minimax(index):
    """An implementation that no one here wrote."""
    modeling = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    from transformers.models.minimax import MiniMaxConfig

    H, D, dim, layers = 4, 8, 32, 4
    config = MiniMaxConfig(
        hidden_size=dim, num_attention_heads=H, head_dim=D, num_hidden_layers=layers,
        block_size=16, layer_types=["linear_attention"] * layers,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = modeling.MiniMaxLightningAttention(config, index)
    ours = LightningAttention(dim, H, head_dim=D, slopes="geometric", depth=index / (layers - 1))
    with torch.no_grad():
        q, k, v = theirs.qkv_proj.weight.unflatten(0, (H, -1)).split(D, dim=1)
        for to, x in ((ours.q_proj, q), (ours.k_proj, k), (ours.v_proj, v)):
            to.weight.copy_(x.flatten(0, 1))
        ours.g_proj.weight.copy_(theirs.output_gate.weight)
        ours.o_proj.weight.copy_(theirs.out_proj.weight)
        ours.norm.eps = theirs.norm.variance_epsilon
    x = torch.randn(2, 100, dim)
    expected, _ = theirs(x, None, None)
    torch.testing.assert_close(ours(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("G", [1, 2])
def test_same_weights_same_outputs_as_the_mamba2_of_transformers(G):
    """An implementation that no one here wrote."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    from transformers.models.mamba2 import Mamba2Config

    H, N, P, dim = 4, 8, 16, 32
    config = Mamba2Config(
        hidden_size=dim, num_heads=H, head_dim=P, state_size=N, n_groups=G, conv_kernel=4,
        expand=H * P // dim, num_hidden_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = modeling.Mamba2Mixer(config, 0)
    ours = Mamba2(dim, H, key_dim=N, value_dim=P, num_key_heads=G)
    with torch.no_grad():
        ours.in_proj.weight.copy_(theirs.in_proj.weight)
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
        ours.convolution.weight.copy_(theirs.conv1d.weight[:, 0])
        ours.convolution.bias.copy_(theirs.conv1d.bias)
        for name in ("A_log", "dt_bias", "D"):
            getattr(ours, name).copy_(getattr(theirs, name))
        ours.norm_weight.copy_(theirs.norm.weight)
        ours.norm.eps = theirs.norm.variance_epsilon
    x = torch.randn(2, 100, dim)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-5)
