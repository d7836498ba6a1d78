"""Many programs at once, and what only a GPU can do: long sequences, memory, inductor."""

import pytest
import torch

from linattn import backends, linear_attention
from linattn.testing import Case, make_inputs, relative_error
from operator_calls import KINDS, TRITON_DEVICE, with_gradients

pytestmark = pytest.mark.skipif(
    not backends()["triton"].available, reason=backends()["triton"].reason
)
ON_GPU = TRITON_DEVICE == "cuda"
SOME = pytest.mark.parametrize("kind", ["plain", "affine token", "channel", "delta channel"])


def gpu(test):
    """Mark a test as one that needs a GPU; it is skipped without one."""
    return pytest.mark.gpu(pytest.mark.skipif(not ON_GPU, reason="no GPU here")(test))


def long_inputs(kind, N, dtype=torch.float32, H=2, D=64):
    case = Case(N=N, B=1, heads=(H, H, H), Dk=D, Dv=D, strength=0.1, dtype=dtype, **KINDS[kind])
    return make_inputs(case).to(TRITON_DEVICE)


@SOME
def test_the_same_bits_again_and_the_values_of_the_other_backend(kind):
    """A race between programs would show in either; the interpreter has none to show."""
    inputs = long_inputs(kind, 8192 if ON_GPU else 150, D=64 if ON_GPU else 16)

    def loss(o, state):
        return (o * o).sum() + state.sum()

    o, state, grads = with_gradients(inputs, "triton", loss)
    again = with_gradients(inputs, "triton", loss)
    exact = with_gradients(inputs.double(), "chunked", loss)
    assert torch.equal(o, again[0])
    assert torch.equal(state, again[1])
    assert relative_error(o.double(), exact[0]) < 2e-5
    assert relative_error(state.double(), exact[1]) < 2e-5
    for name, grad in grads.items():
        assert torch.equal(grad, again[2][name]), name
        assert relative_error(grad.double(), exact[2][name]) < 2e-4, name


@gpu
@SOME
def test_memory_grows_with_the_length_alone(kind):
    """Beside inputs and gradients: states of the chunks, no [N, N] and no state a token."""

    def peak(N):
        inputs = long_inputs(kind, N, torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with_gradients(inputs, "triton", lambda o, state: o.float().sum())
        return torch.cuda.max_memory_allocated() - before

    peak(4096)  # what libraries keep
    assert peak(16384) < 4.5 * peak(4096)


@gpu
def test_offsets_beyond_32_bits():
    """2^31 numbers a tensor; with a strong decay the last tokens know of nothing before."""
    N, H, D = 2**17 + 100, 128, 128
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    x = torch.randn(1, N, H, D, dtype=torch.bfloat16, device="cuda")
    g = torch.full((1, N, H), -2.0, device="cuda", dtype=torch.bfloat16)
    whole = linear_attention(x, x, x, log_decay=g, backend="triton")[:, -64:]
    end, g = x[:, -256:], g[:, -256:]
    alone = linear_attention(end, end, end, log_decay=g, backend="triton")[:, -64:]
    assert relative_error(whole.double(), alone.double()) < 1e-2


@gpu
@SOME
def test_compiled_by_inductor(kind):
    torch._dynamo.reset()
    inputs = long_inputs(kind, 300)

    def call(**tensors):
        return linear_attention(**tensors, **inputs.options, backend="triton")

    expected = call(**inputs.tensors)
    torch.testing.assert_close(torch.compile(call, fullgraph=True)(**inputs.tensors), expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("N", [1, 100])
def test_tensors_on_a_gpu_that_is_not_the_current_one(N):
    """Case: Triton launches on the current GPU, wherever the tensors are."""
    x = torch.randn(1, N, 2, 32)
    with torch.cuda.device(0):
        found = linear_attention(*(x.to("cuda:1") for _ in range(3)), backend="triton")
    torch.testing.assert_close(found.cpu(), linear_attention(x, x, x), rtol=1e-4, atol=1e-5)
