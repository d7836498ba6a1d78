"""The short convolution in front of most mixers: `causal_conv1d`."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from linattn import _convolution_contracts
from linattn import _validation as check
from linattn._backends import choose
from linattn.cpu.convolution import decode

MOST_TAPS = 8  # kMostTaps of cpu/convolution.h


@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: Literal["silu"] | None = None, mask: Tensor | None = None,
    initial_state: Tensor | None = None, return_state: Literal[False] = False,
    out_state: Tensor | None = None, cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> Tensor: ...  # fmt: skip


@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: Literal["silu"] | None = None, mask: Tensor | None = None,
    initial_state: Tensor | None = None, return_state: Literal[True],
    out_state: Tensor | None = None, cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: Literal["silu"] | None = None, mask: Tensor | None = None,
    initial_state: Tensor | None = None, return_state: bool,
    out_state: Tensor | None = None, cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = None,
    mask: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    out_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Convolve each channel with its own few taps, over this token and those before it.

        o_t[c] = f(bias[c] + sum_{w < W} weight[c, W - 1 - w] x_{t-w}[c])      f: silu or nothing

    as `torch.nn.functional.conv1d` has it with C groups and W - 1 zeros in front, but tokens
    before channels. The state is the last W - 1 inputs.

    Args:
        x: [B, N, C]; float64, float32, bfloat16 or float16. A transposed [B, C, N] is read in
            place.
        weight: [C, W] with 1 <= W <= 8, dtype of x or float32; the last tap meets x_t. (Of a
            torch.nn.Conv1d: `weight.squeeze(1)`.)
        bias: [C], dtype of x or float32.
        activation: None or "silu", x * sigmoid(x), applied last.
        mask: [B, N] bool. False: the token counts as x_t = 0, its output and gradients are 0, and
            its value may be anything.
        initial_state: the inputs before the first token, [B, W - 1, C], the oldest first, dtype of
            x; packed: one for each sequence. None: zeros. Gradients flow through it.
        return_state: also return the last W - 1 inputs, of that shape and dtype.
        out_state: a tensor of that shape and dtype which receives them; it may be `initial_state`
            itself, for decoding. Only without gradients.
        cu_seqlens: [S + 1] int32 or int64, the bounds of S sequences packed in one row (B = 1);
            no sequence sees another, and some may be empty.
        backend: as in `linear_attention`.

    Returns:
        o [B, N, C] in x's dtype, or (o, state) with `return_state`. Sums are taken in float32, or
        float64 for float64. Autocast changes nothing: x and its state keep their dtype.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device, value or combination; names argument, got, expected.
        RuntimeError: the named backend is not available here; a second derivative is asked of a
            fast backend.

    Memory: saved for backward are the inputs alone.
    Sources: Fu et al. 2023 (H3, the shift before the gate); Gu & Dao 2023 (Mamba); spec.md D lists
    the layers that carry one.

    Example:
        >>> causal_conv1d(torch.randn(2, 100, 64), torch.randn(64, 4), activation="silu").shape
        torch.Size([2, 100, 64])
    """
    check.require_tensor("x", x)
    check.require_tensor("weight", weight)
    if cu_seqlens is None and backend in ("auto", "cpu") and type(return_state) is bool:
        decoded = decode(x, weight, bias, activation, mask, initial_state, out_state)
        if decoded is not None:
            return decoded if return_state else decoded[0]
    _check(x, weight, bias, activation, mask, cu_seqlens)
    check.require_bool("return_state", return_state)
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = [rows, weight.shape[1] - 1, x.shape[2]]
    for name, state in (("initial_state", initial_state), ("out_state", out_state)):
        if state is not None:
            check.require_tensor(name, state)
            check.require_like(name, state, (x.dtype,), x, "x")
            check.require_shape(name, state, "[B, W - 1, C] (packed: B = S)", shape)
    if out_state is not None:
        check.check_out_state(out_state, [x, weight, bias, initial_state])
    chosen = choose(backend, x.device.type)
    if chosen == "reference":
        from linattn.reference import convolution

        o, state = convolution.forward(
            x, weight, bias, activation == "silu", mask, initial_state, cu_seqlens
        )
    else:
        o, state = _convolution_contracts.forward(
            x, weight, bias, activation == "silu", mask, initial_state, cu_seqlens, chosen
        )
    if out_state is not None:
        state = out_state.copy_(state)
    return (o, state) if return_state else o


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    check.require_strided("x", x)
    if x.dim() != 3 or x.shape[2] < 1:
        check.reject("x", f"shape {list(x.shape)}", "3 dimensions [B, N, C], C >= 1")
    if x.dtype not in check.FLOAT_DTYPES:
        wanted = "torch.float64, torch.float32, torch.bfloat16 or torch.float16"
        check.reject("x", x.dtype, wanted, kind=TypeError)
    C = x.shape[2]
    if weight.dim() != 2 or weight.shape[0] != C or not 1 <= weight.shape[1] <= MOST_TAPS:
        expected = f"[C, W] with C = {C} and 1 <= W <= {MOST_TAPS}"
        if weight.dim() == 3:
            expected += "; weight.squeeze(1) of a Conv1d"
        check.reject("weight", f"shape {list(weight.shape)}", expected)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    check.require_like("weight", weight, (x.dtype, wide), x, "x")
    if bias is not None:
        check.require_tensor("bias", bias)
        check.require_like("bias", bias, (x.dtype, wide), x, "x")
        check.require_shape("bias", bias, "[C]", [C])
    if activation not in (None, "silu"):
        check.reject("activation", repr(activation), 'None or "silu"')
    if mask is not None:
        check.check_mask(mask, x, "x")
    if cu_seqlens is not None:
        check.check_cu_seqlens(cu_seqlens, x, "x")
