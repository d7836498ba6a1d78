"""HGRN2 (Qin et al. 2024): gated linear attention whose key is what the decay lets go."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn._backends import NAMES
from linattn.layers._arguments import at_least_float32, blank_padding, check_forward, require_choice
from linattn.layers.cache import RecurrentCache
from linattn.layers.family import Family
from linattn.ops import linear_attention


class HGRN2(nn.Module):
    """HGRN2: forget gates with a lower bound, and keys that are 1 - forget gate.

        q = silu(x Wq);  v = x Wi;  f = lb + (1 - lb) sigmoid(x Wf);  k = 1 - f
        S_t = diag(f_t) S_{t-1} + k_t v_t^T;  o_t = S_t^T q_t / sqrt(Dk)         a head
        y   = rms_norm(o) Wo                                                    norm over all heads

    Source: Qin et al., *HGRN2: Gated Linear RNNs with State Expansion* (COLM 2024). The paper's
    names, ours: output gate q_proj, input i v_proj, forget gate f decay_proj, W_o o_proj,
    expand ratio key_dim, lower bound beta lower_bound.

    Parameters: 2 dim num_heads key_dim + 2 dim^2 + dim; 4 dim^2 + dim with the defaults.

    Args:
        dim: channels of x, a multiple of num_heads.
        num_heads: H, heads of dim / H value channels (the paper: dim / 128).
        key_dim: channels of a query and key head, default dim / num_heads.
        lower_bound: lb, in [0, 1): 0 in the first layer of a model, rising with depth.
        backend: as in `linear_attention`.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    family: ClassVar[Family] = Family(
        "silu(x Wq)",
        "1 - alpha",
        "x Wi",
        "lb + (1 - lb) sigmoid(x Wf), a channel",
        "1",
        "dynamic",
        tied_key=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        lower_bound: float = 0.0,
        backend: str = "auto",
    ):
        super().__init__()
        check.require_positive_int("dim", dim)
        check.require_positive_int("num_heads", num_heads)
        if dim % num_heads != 0:
            check.reject("dim", dim, f"a multiple of num_heads = {num_heads}")
        check.require_number("lower_bound", lower_bound)
        if not 0 <= lower_bound < 1:
            check.reject("lower_bound", lower_bound, "a number in [0, 1)")
        require_choice("backend", backend, ("auto", *NAMES))
        self.value_dim = dim // num_heads
        self.key_dim = self.value_dim if key_dim is None else key_dim
        check.require_positive_int("key_dim", self.key_dim)
        self.dim, self.num_heads, self.lower_bound, self.backend = (
            dim, num_heads, lower_bound, backend,
        )  # fmt: skip
        keys = num_heads * self.key_dim
        self.q_proj = nn.Linear(dim, keys, bias=False)
        self.decay_proj = nn.Linear(dim, keys, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim, eps=1e-5)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: RecurrentCache | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, RecurrentCache]:
        """Mix the tokens of x; arguments and result as in `LinearAttention.forward`."""
        check_forward(x, self.dim, True, cache, RecurrentCache, return_cache, cu_seqlens)
        x = blank_padding(x, mask)
        v = self._heads(self.v_proj(x))
        logits = at_least_float32(self._heads(self.decay_proj(x)))
        free = (1 - self.lower_bound) * torch.sigmoid(-logits)  # 1 - f, without cancellation
        log_decay = nn.functional.logsigmoid(logits)
        if self.lower_bound > 0:
            log_decay = torch.log1p(-free)
        o, state = linear_attention(
            self._heads(nn.functional.silu(self.q_proj(x))),
            free.to(v.dtype),
            v,
            log_decay,
            mask=mask,
            initial_state=None if cache is None else cache.state,
            return_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        o = self.norm(o.flatten(-2).to(self.norm.weight.dtype)).to(v.dtype)
        y: Tensor = self.o_proj(o)  # [B, N, dim]
        return (y, RecurrentCache(state)) if return_cache else y

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))  # [B, N, H, D]

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps, however long the sequence."""
        return self.num_heads * self.key_dim * self.value_dim

    def extra_repr(self) -> str:
        """Return the options that are not seen in the submodules."""
        return f"num_heads={self.num_heads}, lower_bound={self.lower_bound:.4g}"
