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
    positive: bool = False  # q and k >= 0, as a feature map leaves them
    lengths: tuple[int, ...] | None = None  # packed
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def affine(self) -> bool:
        """Whether the state has one more row and column."""
        return self.bias != 0.0 or self.normalize


# Every kind of call that has a definition: decay x delta rule, kernel x decay, causal or not.
KINDS = {
    "plain": Case(),
    "head": Case(decay="head"),
    "token": Case(decay="token"),
    "channel": Case(decay="channel"),
    "delta": Case(delta=True),
    "delta head": Case(delta=True, decay="head"),
    "delta token": Case(delta=True, decay="token"),
    "delta channel": Case(delta=True, decay="channel"),
    "affine": Case(bias=1.5, normalize=True),
    "affine head": Case(bias=1.5, normalize=True, decay="head"),
    "affine token": Case(bias=1.5, normalize=True, decay="token"),
    "unnormalised": Case(bias=0.5),
    "unnormalised head": Case(bias=0.5, decay="head"),
    "unnormalised token": Case(bias=0.5, decay="token"),
    "normalised": Case(normalize=True, positive=True),
    "normalised head": Case(normalize=True, positive=True, decay="head"),
    "normalised token": Case(normalize=True, positive=True, decay="token"),
    "every token": Case(causal=False),
    "every token affine": Case(causal=False, bias=1.5, normalize=True),
    "every token unnormalised": Case(causal=False, bias=0.5),
    "every token normalised": Case(causal=False, normalize=True, positive=True),
}


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
    if case.positive:
        q, k = q.abs(), k.abs()
    if case.delta or case.affine:
        k = torch.nn.functional.normalize(k, dim=-1)
    if case.affine:  # weights then lie in [bias - 1, bias + 1]
        q = torch.nn.functional.normalize(q, dim=-1)
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
            if case.positive:
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

    `on` is "o", "state" or "both". Everything comes back in float64.
    """
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.tensors.items()}
    o, state = replace(inputs, tensors=leaves).call(backend)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for name, y in (("o", o), ("state", state)):
        weight = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        if on in (name, "both"):
            # Rounded first, so that every dtype sees the loss that the reference sees.
            loss = loss + (weight.bfloat16().to(y.dtype) * y).double().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"o": o.detach().double(), "state": state.detach().double()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[f"d{name}"] = (torch.zeros_like(leaf) if grad is None else grad).double()
    return found


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return norm(got - expected) / norm(expected); the norm of the error where expected is 0."""
    size = float(expected.norm())
    error = float((got - expected).norm())
    return error / size if size > 0 else error


def error_budget(
    expected: Tensor, plain: Tensor, dtype: torch.dtype, *, largest: float = 0.0
) -> float:
    """Return the largest 2-norm of an error that a backend may make in a dtype.

    2 * (error of the reference in that dtype + eps * max|expected| * sqrt(size)), where `expected`
    is the reference in float64 and `plain` the reference in `dtype`. `largest` is a size that
    intermediate values are known to reach, where what is expected is smaller.
    """
    largest = max(largest, float(expected.abs().max()) if expected.numel() else 0.0)
    rounding = torch.finfo(dtype).eps * largest * expected.numel() ** 0.5
    return 2 * (float((plain - expected).norm()) + rounding)


def compare(inputs: Inputs, backend: str, *, on: str = "both") -> list[str]:
    """Return what is wrong with a backend on these inputs, one line a tensor; empty if nothing.

    Held to `TOLERANCE`, or, where a result is what cancellation has left, to the error budget
    `error_budget`.
    """
    dtype = inputs.tensors["q"].dtype
    exact = run(inputs.double(), "reference", on=on)
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
        # Dividing by the sum of the weights cancels terms of order 1, all of them for one token.
        order_one = 1.0 if inputs.options["normalize"] else 0.0
        budget = error_budget(expected, plain[name], dtype, largest=order_one)
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


LAYOUTS = ("heads first", "channels before tokens", "every second", "fused")


def lay_out(x: Tensor, how: str) -> Tensor:
    """Return the numbers of x [B, N, ...], laid out in memory as one of LAYOUTS says."""
    if how == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "channels before tokens":
        return x.transpose(1, -1).contiguous().transpose(1, -1)
    if how == "every second":
        return x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=-1)[:, ::2, ..., ::2]
    if how == "fused":  # the middle third of one wide projection
        return torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]]
    raise ValueError(f"how: got {how!r}; expected one of {LAYOUTS}")
