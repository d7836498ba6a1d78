"""What tests of a backend need: inputs of every kind, the error budget, NaN-filled memory.

Used by this package's tests and by `linattn check`; for anyone who adds a backend or a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from linattn._validation import state_dtype
from linattn.ops import linear_attention

# 2-norm of the error over that of the float64 reference on the same inputs; gradients: 3 times.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.bfloat16: 1.5e-2,
    torch.float16: 3e-3,
}


@dataclass(frozen=True)
class Case:
    """One call of `linear_attention`: what it is made of, not its numbers."""

    N: int = 65
    Dk: int = 5
    Dv: int = 7
    heads: tuple[int, int, int] = (2, 2, 2)  # of q, k, v
    B: int = 2
    decay: str | None = None  # None, "head", "token", "channel"
    strength: float = 1.0  # log-decays are uniform in [-strength, 0]
    reset: bool = False  # and one token in five is -inf
    delta: bool = False
    bias: float = 0.0
    normalize: bool = False
    causal: bool = True
    state: bool = False
    mask: bool = False
    lengths: tuple[int, ...] | None = None  # packed
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def affine(self) -> bool:
        """Whether the state has one more row and column."""
        return self.bias != 0.0 or self.normalize


@dataclass
class Inputs:
    """The tensors and options of one call; `tensors` are those that have gradients."""

    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def call(self, backend: str) -> tuple[Tensor, Tensor]:
        """Return o and the final state."""
        o, state = linear_attention(
            **cast(Any, self.tensors), **self.options, return_state=True, backend=backend
        )
        return o, state

    def to(self, device: str) -> Inputs:
        """Return the same on another device."""
        tensors = {n: x.detach().to(device) for n, x in self.tensors.items()}
        options = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in self.options.items()}
        return Inputs(tensors, options)

    def double(self) -> Inputs:
        """Return the same numbers in float64."""
        return replace(self, tensors={n: x.detach().double() for n, x in self.tensors.items()})


def make_inputs(case: Case) -> Inputs:
    """Return seeded inputs for a case; keys have unit norm where the recurrence needs it."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    N = case.N if case.lengths is None else sum(case.lengths)
    B = case.B if case.lengths is None else 1
    H, one = max(case.heads), int(case.affine)
    q, k = normal(B, N, case.heads[0], case.Dk), normal(B, N, case.heads[1], case.Dk)
    if case.delta or case.affine:
        k = torch.nn.functional.normalize(k, dim=-1)
    if case.affine:  # weights then lie in [bias - 1, bias + 1]
        q = torch.nn.functional.normalize(q, dim=-1)
    if case.normalize and case.bias == 0.0:  # the sum of the weights stays away from 0
        q, k = q.abs(), k.abs()
    x = {"q": q, "k": k, "v": normal(B, N, case.heads[2], case.Dv)}
    if case.decay is not None:
        shape = {"head": (H,), "token": (B, N, H), "channel": (B, N, H, case.Dk)}[case.decay]
        g = -case.strength * uniform(*shape)
        x["log_decay"] = torch.where(uniform(*shape) < 0.2, -torch.inf, g) if case.reset else g
    if case.delta:
        x["beta"] = uniform(B, N, H)
    if case.state:
        sequences = B if case.lengths is None else len(case.lengths)
        state = normal(sequences, H, case.Dk + one, case.Dv + one)
        if one:  # a state that tokens could have left: few keys beside the count
            state[:, :, -1, -1] = 5 + uniform(sequences, H)
            state[:, :, :-1, -1] *= 0.1
            if case.bias == 0.0:  # positive keys
                state[:, :, :-1, -1] = 0.1 + state[:, :, :-1, -1].abs()
        x["initial_state"] = state
    states = {"initial_state": state_dtype(case.dtype)}
    tensors = {n: t.to(states.get(n, case.dtype)) for n, t in x.items()}
    options: dict[str, Any] = {
        "causal": case.causal,
        "bias": case.bias,
        "normalize": case.normalize,
    }
    if case.affine:
        options["scale"] = 1.0
    if case.mask:
        options["mask"] = uniform(B, N) > 0.3
    if case.lengths is not None:
        bounds = torch.tensor([0, *case.lengths]).cumsum(0)
        options["cu_seqlens"] = bounds
    return Inputs(tensors, options)


def run(inputs: Inputs, backend: str, *, on: str = "both") -> dict[str, Tensor]:
    """Return o, state and d<name> for every tensor, for a fixed random loss on `on`.

    `on` is "o", "state" or "both". Everything comes back in float64, on the CPU; Triton's kernels
    run on the GPU if there is one.
    """
    if backend == "triton" and torch.cuda.is_available():
        inputs = inputs.to("cuda")
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.tensors.items()}
    o, state = replace(inputs, tensors=leaves).call(backend)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64, device=o.device)
    for name, y in (("o", o), ("state", state)):
        weight = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        if on in (name, "both"):
            # Rounded first, so that every dtype sees the loss that the reference sees.
            loss = loss + (weight.bfloat16().to(y) * y).double().sum()
    grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if loss.requires_grad:  # the state of no tokens from no state depends on nothing
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    results = {"o": o.detach(), "state": state.detach()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        results[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return {name: x.double().cpu() for name, x in results.items()}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return norm(got - expected) / norm(expected); the norm of the error where expected is 0."""
    size = float(expected.norm())
    error = float((got - expected).norm())
    return error / size if size > 0 else error


def compare(inputs: Inputs, backend: str, *, on: str = "both") -> list[str]:
    """Return what is wrong with a backend on these inputs, one line a tensor; empty if nothing.

    Held to `TOLERANCE`, or, where a result is what cancellation has left, to the error budget
    err <= 2 * (err of the reference in the same dtype + eps * max|ref| * sqrt(size)).
    """
    dtype = inputs.tensors["q"].dtype
    exact_inputs = inputs.double()
    exact = run(exact_inputs, "reference", on=on)
    got = run(inputs, backend, on=on)
    plain: dict[str, Tensor] | None = None
    wrong = []
    for name, expected in exact.items():
        if got[name].shape != expected.shape:
            wrong.append(f"{name}: shape {list(got[name].shape)}, not {list(expected.shape)}")
            continue
        tolerance = TOLERANCE[dtype] * (3 if name.startswith("d") else 1)
        error = relative_error(got[name], expected)
        if error <= tolerance:
            continue
        plain = run(inputs, "reference", on=on) if plain is None else plain
        eps = torch.finfo(dtype).eps
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        if inputs.options["normalize"] and expected.numel():
            # Dividing by the sum of the weights cancels terms of the size of v / weight: all of
            # them where there is one token. Weights here are above 1 / 2, the loss's below 5.
            largest = max(largest, 10 * float(exact_inputs.tensors["v"].abs().max()))
        rounding = eps * largest * expected.numel() ** 0.5
        budget = 2 * (float((plain[name] - expected).norm()) + rounding)
        if not float((got[name] - expected).norm()) <= budget:
            wrong.append(f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}")
    return wrong


@contextmanager
def nan_filled_empties() -> Iterator[None]:
    """Fill what torch.empty and its kin return with NaN, so that unwritten elements show."""

    def filled(make: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            x: Tensor = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return empty

    with (
        mock.patch("torch.empty", filled(torch.empty)),
        mock.patch("torch.empty_like", filled(torch.empty_like)),
        mock.patch("torch.Tensor.new_empty", filled(Tensor.new_empty)),
    ):
        yield
