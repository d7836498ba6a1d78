"""The recurrence of Mamba's first version, with a state for every channel: `selective_scan`."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from linattn import _scan_contracts
from linattn import _validation as check
from linattn._backends import choose
from linattn.cpu.selective_scan import decode


@overload
def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    mask: Tensor | None = None, initial_state: Tensor | None = None,
    return_state: Literal[False] = False, out_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> Tensor: ...  # fmt: skip


@overload
def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    mask: Tensor | None = None, initial_state: Tensor | None = None, return_state: Literal[True],
    out_state: Tensor | None = None, cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    mask: Tensor | None = None, initial_state: Tensor | None = None, return_state: bool,
    out_state: Tensor | None = None, cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    mask: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    out_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Run a linear recurrence of n states in every channel, whose parameters follow the input.

        h_t[d] = exp(dt_t[d] A[d]) * h_{t-1}[d] + dt_t[d] x_t[d] B_t      h_t[d]: n numbers
        o_t[d] = (C_t . h_t[d] + D[d] x_t[d]) * z_t[d] sigmoid(z_t[d])    z: where it is given

    with softplus(dt_t[d] + dt_bias[d]) for dt_t[d] where `dt_softplus`. Where all channels of a
    head decay alike (Mamba-2) `linear_attention` has the same in matrix products, and faster.

    Args:
        x: [Bt, N, E], E channels of Bt rows; float64, float32, bfloat16 or float16. A transposed
            [Bt, E, N] is read in place, here and below.
        dt: [Bt, N, E], the step size, dtype of x or float32.
        A: [E, n], dtype of x or float32. exp(dt A) is the decay: A <= 0, where dt >= 0.
        B: [Bt, N, n], how x enters the states, dtype of x or float32.
        C: [Bt, N, n], how they are read, dtype of x or float32.
        D: [E], what skips them, dtype of x or float32.
        z: [Bt, N, E], the gate, dtype of x.
        dt_bias: [E], added to dt, dtype of x or float32.
        dt_softplus: take log(1 + exp(dt)) for dt, after the bias.
        mask: [Bt, N] bool. False: no token; the state passes, its output and gradients are 0, and
            its inputs may be anything.
        initial_state: [Bt, E, n] float32 (float64 for float64); packed: one for each sequence.
            None: zeros. Gradients flow through it.
        return_state: also return the states after the last token, of that shape and dtype.
        out_state: a tensor of that shape and dtype which receives them; it may be `initial_state`
            itself, for decoding. Only without gradients.
        cu_seqlens: [S + 1] int32 or int64, the bounds of S sequences packed in one row (Bt = 1);
            no sequence sees another, and some may be empty.
        backend: as in `linear_attention`.

    Returns:
        o [Bt, N, E] in x's dtype, or (o, state) with `return_state`. Sums are taken in float32, or
        float64 for float64. Autocast changes nothing.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device, value or combination; names argument, got, expected.
        RuntimeError: the named backend is not available here; a second derivative is asked of a
            fast backend.

    Memory: saved for backward are the inputs alone; states are made again in blocks of tokens.
    Sources: Gu & Dao 2023 (Mamba), section 3.2 and algorithm 2; spec.md D, "S6".

    Example:
        >>> x, dt, A = torch.randn(2, 100, 64), torch.rand(2, 100, 64), -torch.rand(64, 16)
        >>> selective_scan(x, dt, A, torch.randn(2, 100, 16), torch.randn(2, 100, 16)).shape
        torch.Size([2, 100, 64])
    """
    for name, tensor in (("x", x), ("dt", dt), ("A", A), ("B", B), ("C", C)):
        check.require_tensor(name, tensor)
    if cu_seqlens is None and backend in ("auto", "cpu") and type(return_state) is bool:
        decoded = decode(x, dt, A, B, C, D, z, dt_bias, dt_softplus, mask, initial_state, out_state)
        if decoded is not None:
            return decoded if return_state else decoded[0]
    _check(x, dt, A, B, C, D, z, dt_bias, mask, cu_seqlens)
    check.require_bool("dt_softplus", dt_softplus)
    check.require_bool("return_state", return_state)
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wide = check.state_dtype(x.dtype)
    for name, state in (("initial_state", initial_state), ("out_state", out_state)):
        if state is not None:
            check.require_tensor(name, state)
            check.require_like(name, state, (wide,), x, "x")
            check.require_shape(name, state, "[Bt, E, n] (packed: Bt = S)", [rows, *A.shape])
    if out_state is not None:
        check.check_out_state(out_state, [x, dt, A, B, C, D, z, dt_bias, initial_state])
    chosen = choose(backend, x.device.type)
    if chosen == "triton":
        check.reject("backend", "'triton'", "another: it has no selective scan")
    given = (x, dt, A, B, C, D, z, dt_bias, dt_softplus, mask, initial_state, cu_seqlens)
    if chosen == "reference":
        from linattn.reference import selective_scan as reference

        o, state = reference.forward(*given)
    else:
        o, state = _scan_contracts.forward(*given, chosen)
    if out_state is not None:
        state = out_state.copy_(state)
    return (o, state) if return_state else o


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    check.require_strided("x", x)
    if x.dim() != 3 or x.shape[2] < 1:
        check.reject("x", f"shape {list(x.shape)}", "3 dimensions [Bt, N, E], E >= 1")
    if x.dtype not in check.FLOAT_DTYPES:
        wanted = "torch.float64, torch.float32, torch.bfloat16 or torch.float16"
        check.reject("x", x.dtype, wanted, kind=TypeError)
    (rows, N, E), wide = x.shape, check.state_dtype(x.dtype)
    if A.dim() != 2 or A.shape[0] != E or A.shape[1] < 1:
        check.reject("A", f"shape {list(A.shape)}", f"[E, n] with E = {E} and n >= 1")
    n = A.shape[1]
    shapes: list[tuple[str, Tensor | None, str, list[int]]] = [
        ("dt", dt, "[Bt, N, E]", [rows, N, E]), ("A", A, "[E, n]", [E, n]),
        ("B", B, "[Bt, N, n]", [rows, N, n]), ("C", C, "[Bt, N, n]", [rows, N, n]),
        ("D", D, "[E]", [E]), ("z", z, "[Bt, N, E]", [rows, N, E]),
        ("dt_bias", dt_bias, "[E]", [E]),
    ]  # fmt: skip
    for name, given, letters, shape in shapes:
        if given is None:
            continue
        check.require_tensor(name, given)
        check.require_like(name, given, (x.dtype,) if name == "z" else (x.dtype, wide), x, "x")
        check.require_shape(name, given, letters, shape)
    if mask is not None:
        check.check_mask(mask, x, "x")
    if cu_seqlens is not None:
        check.check_cu_seqlens(cu_seqlens, x, "x")
