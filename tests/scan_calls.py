"""Calls of selective_scan and what comes of them."""

import torch

from linattn import selective_scan

EVERYTHING = ("D", "z", "dt_bias", "initial_state")


def make(N=40, B=2, E=5, n=4, given=EVERYTHING, softplus=True, lengths=None, mask=False,
         dtype=torch.float64, wide=False, seed=0):  # fmt: skip
    """Return the tensors and the options of a call; `wide`: parameters and gates in float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    B, N = (1, sum(lengths)) if lengths is not None else (B, N)
    S = B if lengths is None else len(lengths)
    dt = normal(B, N, E) - 1
    tensors = {
        "x": normal(B, N, E), "dt": dt if softplus else dt.exp(), "A": -normal(E, n).exp(),
        "B": normal(B, N, n), "C": normal(B, N, n), "D": normal(E), "z": normal(B, N, E),
        "dt_bias": normal(E), "initial_state": normal(S, E, n),
    }  # fmt: skip
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    for name in list(tensors):
        if name in EVERYTHING and name not in given:
            del tensors[name]
        elif name == "initial_state" or (wide and name not in ("x", "z")):
            tensors[name] = tensors[name].to(sums)
        else:
            tensors[name] = tensors[name].to(dtype)
    options = {"dt_softplus": softplus}
    if mask:
        options["mask"] = torch.rand(B, N, generator=generator) > 0.3
    if lengths is not None:
        options["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return tensors, options


def run(tensors, options, backend):
    """Return o, the state and all gradients, in float64."""
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    o, state = selective_scan(**leaves, **options, return_state=True, backend=backend)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator).bfloat16().double() for y in (o, state)]
    loss = (o.double() * weights[0]).sum() + (state.double() * weights[1]).sum()
    found = {"o": o.detach().double(), "state": state.detach().double()}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[f"d{name}"] = (torch.zeros_like(leaf) if grad is None else grad).double()
    return found
