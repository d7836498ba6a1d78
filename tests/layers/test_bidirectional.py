"""Bidirectional: both directions, padding and packed sequences turned each in itself."""

import pytest
import torch

from linattn.layers import Bidirectional, MetaLA, Retention


@pytest.mark.parametrize("make", [lambda: MetaLA(16, 2), lambda: Retention(16, 2)])
def test_both_directions_are_seen_and_each_is_its_mixer(make):
    torch.manual_seed(0)
    layer = Bidirectional(make()).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    x = torch.randn(2, 11, 16, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    expected = layer.mixer(x) + layer.backward_mixer(x.flip(1)).flip(1)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    (g,) = torch.autograd.grad(y[:, 5].sum(), x)
    assert (g.abs().sum((0, 2)) > 0).all()

    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 7:] = mask[1, :3] = False
    y = layer(x, mask=mask)
    for row, part in ((0, slice(0, 7)), (1, slice(3, 11))):
        alone = layer(x[row : row + 1, part])
        torch.testing.assert_close(y[row : row + 1, part], alone, rtol=1e-9, atol=1e-9)

    lengths = [3, 0, 1, 7]
    bounds = torch.tensor([0, 3, 3, 4, 11])
    packed = layer(x[:1], cu_seqlens=bounds)
    apart = [layer(part) for part in x[:1].split(lengths, 1) if part.shape[1]]
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-9, atol=1e-9)


def test_what_it_refuses():
    layer = Bidirectional(MetaLA(16, 2))
    with pytest.raises(ValueError, match="causal=False"):
        layer(torch.randn(1, 3, 16), return_cache=True)
    with pytest.raises(TypeError, match="mixer: got Linear; expected a layer"):
        Bidirectional(torch.nn.Linear(3, 3))
