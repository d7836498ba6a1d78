"""The kinds of call that every test goes through, and what tests do to a call."""

from dataclasses import replace

import pytest
import torch

from linattn import backends
from linattn.testing import Case, Inputs, compare, make_inputs, nan_filled_empties

# Triton's kernels have tests/triton, in sizes that its interpreter can do; on a GPU where one is.
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAST = [b.name for b in backends().values() if b.available and b.name in ("chunked", "cpu")]
fast = pytest.mark.parametrize("backend", FAST)
any_backend = pytest.mark.parametrize("backend", ["reference", *FAST])

KINDS = {
    "plain": {},
    "head": {"decay": "head"},
    "token": {"decay": "token"},
    "channel": {"decay": "channel"},
    "delta": {"delta": True},
    "delta head": {"delta": True, "decay": "head"},
    "delta token": {"delta": True, "decay": "token"},
    "delta channel": {"delta": True, "decay": "channel"},
    "affine": {"bias": 1.5, "normalize": True},
    "affine unnormalised": {"bias": 0.5},
    "affine head": {"bias": 1.5, "normalize": True, "decay": "head"},
    "affine token": {"bias": 1.5, "normalize": True, "decay": "token"},
    "affine unnormalised token": {"bias": 0.5, "decay": "token"},
    "every token": {"causal": False},
    "every token affine": {"causal": False, "bias": 1.5, "normalize": True},
    "every token affine unnormalised": {"causal": False, "bias": 0.5},
    "unnormalised head": {"bias": 0.5, "decay": "head"},
    "normalised": {"normalize": True},
    "normalised head": {"normalize": True, "decay": "head"},
    "normalised token": {"normalize": True, "decay": "token"},
    "every token normalised": {"normalize": True, "causal": False},
}
CAUSAL = [name for name, options in KINDS.items() if options.get("causal", True)]
DECAYED = [name for name, options in KINDS.items() if "decay" in options]
kinds = pytest.mark.parametrize("kind", KINDS)
causal_kinds = pytest.mark.parametrize("kind", CAUSAL)


def inputs_of(kind, **options):
    return make_inputs(Case(**{**KINDS[kind], **options}))


def check(backend, on="both", **options):
    """Hold a backend against the reference, with unwritten memory full of NaN."""
    inputs = make_inputs(Case(**options))
    with nan_filled_empties():
        wrong = compare(inputs, backend, on=on)
    assert not wrong, "\n".join(wrong)


def has_tokens(name, x):
    """All arguments are [B, N, ...] but the state and a decay [H]."""
    return name != "initial_state" and x.dim() >= 3


def leaves_of(inputs):
    copies = {n: x.detach().clone().requires_grad_() for n, x in inputs.tensors.items()}
    return replace(inputs, tensors=copies)


def pick(inputs, tokens):
    """Return the call on some of its tokens; a decay [H] and the initial state stay."""
    options = {n: x[:, tokens] if n == "mask" else x for n, x in inputs.options.items()}
    tensors = {n: x[:, tokens] if has_tokens(n, x) else x for n, x in inputs.tensors.items()}
    return Inputs(tensors, options)


def with_gradients(inputs, backend, loss):
    """Return o, the state, and the gradients of loss(o, state) by name."""
    leaves = leaves_of(inputs)
    o, state = leaves.call(backend)
    found = torch.autograd.grad(
        loss(o, state), list(leaves.tensors.values()), allow_unused=True, materialize_grads=True
    )
    return o.detach(), state.detach(), dict(zip(leaves.tensors, found, strict=True))


def bit_equal(a, b):
    """NaN equals nothing, so a NaN here is a failure as well."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
