"""Feature maps, against their formulas."""

import math

import pytest
import torch

from linattn import feature_maps
from linattn.feature_maps import normalised


@pytest.mark.parametrize("name", [*feature_maps.FEATURE_MAPS, "hedgehog"])
def test_size_dtype_and_gradient(name):
    phi, size = feature_maps.make_feature_map(name, 3, 6)
    x = torch.randn(2, 5, 3, 6, requires_grad=True)
    y = phi(x)
    assert y.shape == (2, 5, 3, size)
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    if name != "hedgehog":
        assert phi(x.bfloat16()).dtype == torch.bfloat16


def test_values():
    x = torch.tensor([-1.0, 0.0, 2.0])
    expected = torch.tensor([math.exp(-1), 1.0, 3.0])
    torch.testing.assert_close(feature_maps.elu_plus_one(x), expected)
    torch.testing.assert_close(feature_maps.squared_relu(x), torch.tensor([0.0, 0.0, 4.0]))
    torch.testing.assert_close(feature_maps.relu(x), torch.tensor([0.0, 0.0, 2.0]))
    assert feature_maps.identity(x) is x
    torch.testing.assert_close(feature_maps.normalised(x).norm(), torch.tensor(1.0))
    assert feature_maps.normalised(torch.zeros(3)).eq(0).all()


def test_taylor_is_the_second_order_series_of_exp():
    q, k = torch.randn(2, 7, 16, dtype=torch.float64)
    s = (q * k).sum(-1) / 4
    product = (feature_maps.taylor(q) * feature_maps.taylor(k)).sum(-1)
    torch.testing.assert_close(product, 1 + s + s * s / 2)


def test_hedgehog_starts_from_the_identity_and_is_positive():
    phi = feature_maps.Hedgehog(2, 4)
    x = torch.randn(1, 3, 2, 4)
    expected = torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    torch.testing.assert_close(phi(x), expected)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"feature_map: got 'cosine'; expected one of .*hedgehog"):
        feature_maps.make_feature_map("cosine", 1, 2)
    with pytest.raises(ValueError, match=r"x: got shape \[1, 3, 2, 5\]; expected \[B, N, 2, 4\]"):
        feature_maps.Hedgehog(2, 4)(torch.zeros(1, 3, 2, 5))


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1.0, 1e30, 3e38])
def test_normalised_has_unit_norm_at_any_size(size):
    """Neither the squares of large numbers nor those of small ones may be lost."""
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0]], dtype=torch.float64).mul(size / 4).float()
    expected = torch.tensor([[0.6, -0.8], [0.0, 0.0]])
    torch.testing.assert_close(normalised(x), expected, rtol=1e-4 if size < 1e-38 else 1e-6, atol=0)
    x.requires_grad_()
    normalised(x).sum().backward()
    assert torch.isfinite(x.grad).all() or size < 1e-38


def test_normalised_refuses_integers():
    with pytest.raises(TypeError, match=r"x: got torch.int64; expected a floating-point dtype"):
        normalised(torch.arange(4))
