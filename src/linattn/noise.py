"""Stand-ins for dropout in linear attention, whose N x N weights are never there to be dropped.

From *Towards Making Linear Attention Usable*: multiply each output by 1 + p s with s ~ N(0, 1),
which keeps the mean, costs O(N D) and vanishes in evaluation. The noise is made again from its
seed in backward, so nothing is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn._tangents import refuse_tangents
from linattn._validation import (
    FLOAT_DTYPES,
    reject,
    require_bool,
    require_number,
    require_tensor,
)


def multiplicative_noise(
    o: Tensor, p: float, training: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """Return o * (1 + p * s), s ~ N(0, 1) independent for each element.

    Args:
        o: any shape, float64, float32, bfloat16 or float16; usually the output of
            `linear_attention`, [B, N, H, D], before the heads are merged.
        p: standard deviation of the factor, >= 0, in the place of the dropout rate.
        training: False returns o itself, as does p == 0.
        generator: where the seed comes from; default torch's own, so `torch.manual_seed` makes
            the noise repeatable and activation checkpointing repeats it.

    Returns:
        A tensor of o's shape and dtype. The gradient is exact: it meets the same factor, made
        again from 8 bytes of seed; so are derivatives of any order.

    Raises:
        TypeError: o is no tensor of those dtypes, p not a number.
        ValueError: p < 0 or not finite.
    """
    require_tensor("o", o)
    if o.dtype not in FLOAT_DTYPES:
        reject("o", o.dtype, "float64, float32, bfloat16 or float16", kind=TypeError)
    _require_rate("p", p)
    require_bool("training", training)
    if not training or p == 0:
        return o
    if generator is not None and not isinstance(generator, torch.Generator):
        reject("generator", type(generator).__name__, "a torch.Generator or None", kind=TypeError)
    refuse_tangents("multiplicative_noise", "use derivatives in reverse mode", o)
    device = "cpu" if generator is None else generator.device
    seed = torch.randint(2**63 - 1, (), generator=generator, device=device).cpu()
    result: Tensor = torch.ops.linattn.multiplicative_noise(o, float(p), seed)
    return result


def element_dropout(q: Tensor, k: Tensor, p: float, training: bool = True) -> tuple[Tensor, Tensor]:
    """Return q and k with their elements dropped at rate p (inverted dropout).

    The variant of the published code: ordinary dropout on the elements of q and of k.

    Raises:
        TypeError: q or k is no tensor, p not a number.
        ValueError: p outside [0, 1].
    """
    require_tensor("q", q)
    require_tensor("k", k)
    _require_rate("p", p)
    if p > 1:
        reject("p", p, "a rate in [0, 1]")
    require_bool("training", training)
    dropout = torch.nn.functional.dropout
    return dropout(q, p, training), dropout(k, p, training)


def _require_rate(name: str, p: float) -> None:
    require_number(name, p)
    if p < 0:
        reject(name, p, "a number >= 0")


@torch.library.custom_op("linattn::multiplicative_noise", mutates_args=())
def _multiplicative_noise(o: Tensor, p: float, seed: Tensor) -> Tensor:
    generator = torch.Generator(o.device).manual_seed(int(seed))
    # In float32 at least: in 16 bits the factors would be coarse, and half the dtypes lack randn.
    dtype = torch.float64 if o.dtype == torch.float64 else torch.float32
    s = torch.randn(o.shape, dtype=dtype, device=o.device, generator=generator)
    return s.mul_(p).add_(1).mul_(o).to(o.dtype)


@_multiplicative_noise.register_fake
def _(o: Tensor, p: float, seed: Tensor) -> Tensor:
    return o.new_empty(o.shape)


def _save_seed(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: Tensor) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _same_noise(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.linattn.multiplicative_noise(grad, ctx.p, *ctx.saved_tensors), None, None


_multiplicative_noise.register_autograd(_same_noise, setup_context=_save_seed)
