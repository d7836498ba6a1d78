"""The stand-ins for dropout."""

import pytest
import torch

from linattn import multiplicative_noise
from linattn.noise import element_dropout


def seeded(o, p=0.3):
    torch.manual_seed(5)
    return multiplicative_noise(o, p)


def test_gradient_is_exact_to_second_order():
    o = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(seeded, (o,))
    assert torch.autograd.gradgradcheck(seeded, (o,))


def test_backward_meets_the_same_factor():
    o = torch.randn(50, requires_grad=True)
    y = seeded(o)
    (grad,) = torch.autograd.grad(y.sum(), o)
    torch.testing.assert_close(grad, y.detach() / o.detach())


def test_mean_and_deviation_of_the_factor():
    factor = multiplicative_noise(torch.ones(200_000), 0.25)
    assert abs(factor.mean() - 1) < 3e-3
    assert abs(factor.std() - 0.25) < 3e-3


def test_identity_in_evaluation_and_for_zero():
    o = torch.randn(5)
    assert multiplicative_noise(o, 0.5, training=False) is o
    assert multiplicative_noise(o, 0.0) is o


def test_nothing_of_the_size_of_the_output_is_stored():
    o = torch.randn(1000, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda t: t):
        multiplicative_noise(o, 0.5)
    assert sum(kept) <= 1


def test_generator_and_checkpoint_repeat_the_noise():
    o = torch.randn(100, requires_grad=True)
    a, b = (multiplicative_noise(o, 0.5, generator=torch.Generator().manual_seed(3)) for _ in "ab")
    assert torch.equal(a, b)
    y = torch.utils.checkpoint.checkpoint(
        lambda x: multiplicative_noise(x, 0.5).square(), o, use_reentrant=False
    )
    (grad,) = torch.autograd.grad(y.sum(), o)
    torch.testing.assert_close(grad * o.detach(), 2 * y.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept(dtype):
    assert seeded(torch.randn(8, dtype=dtype)).dtype == dtype


def test_compiles_whole():
    compiled = torch.compile(
        lambda o: multiplicative_noise(o, 0.3), fullgraph=True, backend="aot_eager"
    )
    o = torch.ones(100, requires_grad=True)
    y = compiled(o)
    assert y.std() > 0.1
    (grad,) = torch.autograd.grad(y.sum(), o)
    torch.testing.assert_close(grad, y.detach())


def test_element_dropout_drops_and_rescales():
    q, k = element_dropout(torch.ones(10_000), torch.ones(10_000), 0.25)
    assert abs((q == 0).float().mean() - 0.25) < 0.02
    torch.testing.assert_close(q.max(), torch.tensor(1 / 0.75))
    assert not torch.equal(q, k)
    assert torch.equal(element_dropout(q, k, 0.9, training=False)[0], q)


@pytest.mark.parametrize(
    ("call", "fragments"),
    [
        (lambda: multiplicative_noise(torch.ones(2), -0.1), ["p", "-0.1", ">= 0"]),
        (lambda: multiplicative_noise(torch.ones(2), "a"), ["p", "str", "float"]),
        (lambda: multiplicative_noise(torch.ones(2, dtype=torch.int), 0.1), ["o", "int32"]),
        (lambda: multiplicative_noise([1.0], 0.1), ["o", "list", "Tensor"]),
        (lambda: multiplicative_noise(torch.ones(2), 0.1, training=1), ["training", "int"]),
        (lambda: element_dropout(torch.ones(2), torch.ones(2), 1.5), ["p", "1.5", "[0, 1]"]),
    ],
)
def test_bad_input_is_named(call, fragments):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)


def test_a_dtype_without_arithmetic_is_named():
    with pytest.raises(TypeError, match=r"o: got torch.float8_e4m3fn; expected float64"):
        multiplicative_noise(torch.ones(4).to(torch.float8_e4m3fn), 0.1)
