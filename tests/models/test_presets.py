"""Presets and the memory of a training step."""

import pytest
import torch
from tiny import KINDS, config, tokens

from linattn.models import LinattnForCausalLM
from linattn.models.memory import published_memory, saved_bytes, training_memory
from linattn.models.mixers import MIXERS
from linattn.models.presets import PRESETS, preset


def parameters(c):
    with torch.device("meta"):
        return sum(p.numel() for p in LinattnForCausalLM(c).parameters())


@pytest.mark.parametrize(
    ("name", "millions"),
    [("metala-360m", 359.8), ("metala-380m", 374), ("metala-1.3b", 1336), ("metala-1.4b", 1440)],
)
def test_the_published_sizes(name, millions):
    """359.8 M, 0.38 B, 1.336 B and 1.44 B, within 0.1 %, 2 % where the paper rounds so."""
    c = preset(name)
    assert abs(parameters(c) / 1e6 / millions - 1) < 1e-3
    assert c.mixers == ["metala"] * 24


@pytest.mark.parametrize("name", ["pythia-14m", "bytes-800k"])
def test_a_preset_has_one_size_whatever_the_mixer(name):
    sizes = [parameters(preset(name, mixer)) for mixer in MIXERS]
    sizes.append(parameters(preset(name, ["metala", "softmax"])))
    expected = 14.07e6 if name == "pythia-14m" else 0.82e6
    for size in sizes:
        assert abs(size / expected - 1) < 0.02


def test_what_presets_refuse():
    with pytest.raises(ValueError, match="preset: got 'gpt'; expected one of"):
        preset("gpt")
    with pytest.raises(ValueError, match=r"mixer: got .* parameters a layer; expected less than"):
        preset("pythia-14m", "kda", mixer_options={"kda": {"head_dim": 128}})
    assert preset("pythia-14m", intermediate_size=64).intermediate_size == 64
    assert all(preset(name).model_type == "linattn" for name in PRESETS)


def test_the_published_formula():
    """Llama-3.2-1B: 14.8 + 8.05 GB, the sum its authors worked out."""
    assert published_memory(1_236_000_000, 16, 32, 64, 4096) == pytest.approx(22.9e9, rel=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_counted_without_taking_it(kind):
    """What autograd saves of fake tensors is what it saves in a real step, within 5 %."""
    c = config(kind, intermediate_size=64)
    m, x = LinattnForCausalLM(c).train(), tokens(2, 300)
    counted = training_memory(c, 300, 2)
    assert counted.parameters == sum(p.numel() for p in m.parameters())
    assert counted.saved == pytest.approx(saved_bytes(m, x), rel=0.05)
    assert counted.total > 16 * counted.parameters


def test_memory_grows_linearly_with_the_tokens():
    c = preset("pythia-14m")
    a, b = (training_memory(c, n).saved for n in (2048, 8192))
    assert 3.8 < b / a < 4.05
