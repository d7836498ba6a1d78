"""`linattn check`: every available backend against the reference, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from linattn import triton
from linattn._backends import backends
from linattn.testing import TOLERANCE, Case, compare, make_inputs

KINDS = {
    "no decay": Case(),
    "per-head decay": Case(decay="head"),
    "per-token decay": Case(decay="token"),
    "per-channel decay": Case(decay="channel"),
    "delta rule": Case(delta=True),
    "delta rule, per-head decay": Case(delta=True, decay="head"),
    "delta rule, per-token decay": Case(delta=True, decay="token"),
    "delta rule, per-channel decay": Case(delta=True, decay="channel"),
    "affine, normalised": Case(bias=1.5, normalize=True),
    "every token sees all": Case(causal=False),
}


@dataclass(frozen=True)
class Result:
    """One kind of call in one dtype on one backend; `wrong` is empty where all is well."""

    backend: str
    kind: str
    dtype: torch.dtype
    wrong: list[str]


def run() -> Iterator[Result]:
    """Yield a result for every backend, kind and dtype: o, state and all gradients compared."""
    for backend in backends().values():
        if not backend.available or backend.name == "reference":
            continue
        on_triton = backend.name == "triton"
        if on_triton and triton.is_interpreted():  # it takes minutes, and says nothing of a GPU
            continue
        for kind, case in KINDS.items():
            for dtype in TOLERANCE:
                if on_triton and dtype == torch.float64:
                    continue
                case = replace(case, N=100, Dk=16, Dv=24, heads=(2, 1, 2), state=True, dtype=dtype)
                yield Result(backend.name, kind, dtype, compare(make_inputs(case), backend.name))
