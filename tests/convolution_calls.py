"""Calls of causal_conv1d and what comes of them."""

import torch

from linattn import causal_conv1d
from operator_calls import TRITON_DEVICE


def make(N=40, B=2, C=5, W=4, bias=True, state=True, lengths=None, mask=False,
         dtype=torch.float64, silu=True, weight_dtype=None, seed=0):  # fmt: skip
    """Return the tensors and the options of a call."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    B, N = (1, sum(lengths)) if lengths is not None else (B, N)
    S = B if lengths is None else len(lengths)
    tensors = {"x": normal(B, N, C).to(dtype), "weight": normal(C, W).to(weight_dtype or dtype)}
    if bias:
        tensors["bias"] = normal(C).to(weight_dtype or dtype)
    if state:
        tensors["initial_state"] = normal(S, W - 1, C).to(dtype)
    options = {"activation": "silu" if silu else None}
    if mask:
        options["mask"] = torch.rand(B, N, generator=generator) > 0.3
    if lengths is not None:
        options["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return tensors, options


def run(tensors, options, backend):
    """Return o, the state and all gradients, in float64; Triton's kernels run on a GPU if any."""
    if backend == "triton":
        tensors, options = (
            {n: x.to(TRITON_DEVICE) if isinstance(x, torch.Tensor) else x for n, x in some.items()}
            for some in (tensors, options)
        )
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    o, state = causal_conv1d(**leaves, **options, return_state=True, backend=backend)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64, device=o.device)
    for y in (o, state):
        weight = torch.randn(y.shape, generator=generator).bfloat16()
        loss = loss + (y.double() * weight.to(y.device).double()).sum()
    found = {"o": o.detach().double(), "state": state.detach().double()}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[f"d{name}"] = (torch.zeros_like(leaf) if grad is None else grad).double()
    return {name: x.cpu() for name, x in found.items()}
