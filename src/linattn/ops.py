"""The one operator: `linear_attention`. Its docstring is the mathematics."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from linattn import _contracts
from linattn import _validation as check
from linattn._backends import choose
from linattn.cpu.step import decode


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    *, causal: bool = True, scale: float | None = None, bias: float = 0.0,
    normalize: bool = False, mask: Tensor | None = None, initial_state: Tensor | None = None,
    return_state: Literal[False] = False, out_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> Tensor: ...  # fmt: skip


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    *, causal: bool = True, scale: float | None = None, bias: float = 0.0,
    normalize: bool = False, mask: Tensor | None = None, initial_state: Tensor | None = None,
    return_state: Literal[True], out_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    *, causal: bool = True, scale: float | None = None, bias: float = 0.0,
    normalize: bool = False, mask: Tensor | None = None, initial_state: Tensor | None = None,
    return_state: bool, out_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    bias: float = 0.0,
    normalize: bool = False,
    mask: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    out_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Linear attention, with or without decay, delta rule and affine kernel, in O(N) time.

    Per batch row and head, with a state S of shape [Dk, Dv]:

        S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T                      without beta
        S'  = Diag(exp(g_t)) S_{t-1}                                  with beta, the delta rule:
        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T                      decay, then erase, then write
        o_t = scale * S_t^T q_t

    With `bias` or `normalize` the weight of key j for query i is affine in q . k, and the output
    may be divided by the sum of the weights:

        w_ij = (scale * q_i . k_j + bias) * exp(g_{j+1} + ... + g_i)
        o_i  = sum_j w_ij v_j  [ / sum_j w_ij ]

    This is the recurrence above for [scale * q, bias], [k, 1] and [v, 1]; its state is
    [Dk + 1, Dv + 1]: sum k v^T, sum k in the last column, sum v in the last row, the count in the
    corner. The sum of the weights is used as it is: where weights of both signs cancel it may
    be 0, and the output is then inf or NaN. Unit-norm q and k with bias >= scale keep weights >= 0.

    Args:
        q: queries [B, N, Hq, Dk]; float64, float32, bfloat16 or float16.
        k: keys [B, N, Hk, Dk], dtype of q.
        v: values [B, N, Hv, Dv], dtype of q. Hq, Hk and Hv each divide H, the largest of them;
            head h reads group h // (H / Hx), and nothing is copied.
        log_decay: g, the log of the decay, <= 0 (-inf: a hard reset), in q's dtype or float32:
            [H] one constant a head (RetNet), [B, N, H] one a token (Mamba-2),
            [B, N, H, Dk] one a channel (GLA, HGRN2, MetaLA, KDA).
        beta: write strength [B, N, H] of the delta rule, in q's dtype or float32.
        causal: whether token i sees only tokens j <= i. False: every token sees all, no decay
            and no beta.
        scale: factor on q . k, default Dk ** -0.5.
        bias: the b of the affine kernel a x + b, whose a is `scale`. Not with beta or a
            per-channel decay.
        normalize: divide each output by the sum of its weights. Not with beta or a per-channel
            decay.
        mask: [B, N] bool. False: the token is not there. It does not decay, write or count; its
            output and gradients are 0; its values may be anything.
        initial_state: the state before the first token, [B, H, Dk, Dv] (affine or normalised:
            [B, H, Dk + 1, Dv + 1]; packed: one for each sequence), float32 or bfloat16, or float64
            with float64 inputs. Gradients flow through it; it is never changed. All sums are
            taken in float32 (float64) in any case.
        return_state: also return the state after the last token: of that shape, in float32 or
            float64.
        out_state: a tensor of that shape and dtype which receives the final state, for decoding
            without allocation; it may be `initial_state` itself. Only without gradients. In
            bfloat16 the state is rounded once a call, and a decoding step moves half the bytes.
        cu_seqlens: [S + 1] int32 or int64, the bounds of S sequences packed in one row (B = 1);
            sequences do not see each other, and may be empty.
        backend: "auto" takes the fastest that can do the call; a name takes that one or raises.
            "reference" is the token loop, with derivatives of any order. See `linattn.backends`.

    Returns:
        o [B, N, H, Dv] in q's dtype (under autocast: the autocast dtype), or (o, state) with
        `return_state`.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device, value or combination; names argument, got, expected.
        RuntimeError: the named backend is not available here; a second derivative is asked of a
            fast backend.

    Memory: saved for backward are the inputs and at most one state for every Dk tokens; never
    N x N, never N x Dk x Dv. One token with an initial state is a single step of the recurrence.
    Sources: Katharopoulos et al. 2020; *Towards Making Linear Attention Usable* (affine kernel,
    O(N D) backward); Chou et al. 2024 (MetaLA, the unified form); Yang et al. 2024 (delta rule).

    Example:
        >>> q, k, v = (torch.randn(2, 1000, 8, 64) for _ in range(3))
        >>> linear_attention(q, k, v).shape
        torch.Size([2, 1000, 8, 64])
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        check.require_tensor(name, value)
    q, k, v = _autocast(q, k, v)
    if cu_seqlens is None and backend in ("auto", "cpu") and type(return_state) is bool:
        decoded = decode(
            q, k, v, log_decay, beta, mask, initial_state, out_state,
            scale, bias, normalize, causal,
        )  # fmt: skip
        if decoded is not None:
            return decoded if return_state else decoded[0]
    H = check.check_qkv(q, k, v)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    check.require_number("scale", scale)
    check.require_number("bias", bias)
    for name, flag in (
        ("causal", causal),
        ("normalize", normalize),
        ("return_state", return_state),
    ):
        check.require_bool(name, flag)
    if log_decay is not None:
        check.check_log_decay(log_decay, q, H)
    if beta is not None:
        check.check_beta(beta, q, H)
    check.check_options(causal, bias, normalize, log_decay, beta)
    if mask is not None:
        check.check_mask(mask, q)
    if cu_seqlens is not None:
        check.check_cu_seqlens(cu_seqlens, q)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    affine = bias != 0.0 or normalize
    for name, S in (("initial_state", initial_state), ("out_state", out_state)):
        if S is not None:
            check.check_state(name, S, q, v, H, sequences, affine)
    if out_state is not None:
        check.check_out_state(out_state, [q, k, v, log_decay, beta, initial_state])

    if initial_state is not None and initial_state.dtype == torch.bfloat16:
        initial_state = initial_state.float()  # a copy, so the step below is not in place
    chosen = choose(backend, q.device.type)
    if chosen == "reference":
        from linattn import reference

        o, state = reference.forward(
            q, k, v, log_decay, beta, mask, initial_state, cu_seqlens,
            float(scale), float(bias), normalize, causal,
        )  # fmt: skip
    else:
        o, state = _contracts.forward(
            q, k, v, log_decay, beta, mask, initial_state, out_state, cu_seqlens,
            float(scale), float(bias), normalize, causal, chosen,
        )  # fmt: skip
    if out_state is not None and state is not out_state:
        state = out_state.copy_(state)
    return (o, state) if return_state else o


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast take q, k and v in its dtype, as torch's own attention does.

    Gates, beta and states are left alone: they are few, and 16 bits would spoil the sums.
    """
    if not torch._C._is_any_autocast_enabled():  # at a third of the cost of the questions below
        return q, k, v
    device = q.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    if not all(x.is_floating_point() and x.dtype != torch.float64 for x in (q, k, v)):
        return q, k, v
    return q.to(dtype), k.to(dtype), v.to(dtype)
