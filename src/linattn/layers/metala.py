"""MetaLA: the optimal linear approximation to softmax attention map (Chou et al. 2024)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn._backends import NAMES
from linattn.layers._arguments import at_least_float32, blank_padding, check_forward, require_choice
from linattn.layers.cache import ConvolutionCache, RecurrentCache
from linattn.layers.family import Family
from linattn.layers.short_convolution import ShortConvolution
from linattn.ops import linear_attention


class MetaLA(nn.Module):
    """The MetaLA mixer: query and a decay for every channel, and no key of its own.

        u = silu(conv(x));  q, v = u Wq, u Wv;  alpha = sigmoid(u Wa)^(1/16);  k = 1 - alpha
        S_t = diag(alpha_t) S_{t-1} + k_t v_t^T                                  a head
        o_t = S_t^T q_t / sqrt(Dk) + sigmoid((q_t . (w_aug * k_t)) v_t)          self-augmentation
        y   = (silu(u Wg + b) * layer_norm(o)) Wo                                norm over a head

    Source: Chou et al., *MetaLA* (NeurIPS 2024), its released layer. The paper's names, ours:
    W_Q q_proj, W_alpha decay_proj, W_V v_proj, W_G g_proj, W_O o_proj, w_aug augmentation_weight.
    The paper's layer norm in front and its residual belong to the block around the mixer.

    Parameters: 4 dim^2 and dim (kernel_size + 1) + dim / 2 for the convolution, the gate's bias
    and w_aug; with key=True dim^2 / 2 more.

    Args:
        dim: channels of x, a multiple of 2 num_heads.
        num_heads: H heads of Dk = dim / (2 H) for q and the decay and Dv = dim / H for v.
        kernel_size: taps of the convolution, 1 to 8 (4 for language, 2 for MQAR); None: no
            convolution and no SiLU, the published ablation.
        augmentation: "sigmoid", as released: of the whole vector; "linear", the paper's parallel
            form without it; None, the ablation. w_aug = 0 at first, and the half that a sigmoid
            adds then to every channel goes in the layer norm.
        key: whether keys are a projection, u Wk, and not 1 - alpha: the ablation.
        backend: as in `linear_attention`.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    family: ClassVar[Family] = Family(
        "u Wq",
        "1 - alpha",
        "u Wv",
        "sigmoid(u Wa)^(1/16), a channel",
        "silu(u Wg + b)",
        "dynamic",
        tied_key=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        kernel_size: int | None = 4,
        augmentation: str | None = "sigmoid",
        key: bool = False,
        backend: str = "auto",
    ):
        super().__init__()
        check.require_positive_int("dim", dim)
        check.require_positive_int("num_heads", num_heads)
        if dim % (2 * num_heads) != 0:
            check.reject("dim", dim, f"a multiple of 2 num_heads = {2 * num_heads}")
        require_choice("augmentation", augmentation, ("sigmoid", "linear", None))
        require_choice("backend", backend, ("auto", *NAMES))
        check.require_bool("key", key)
        self.dim, self.num_heads, self.augmentation, self.backend = (
            dim, num_heads, augmentation, backend,
        )  # fmt: skip
        self.key_dim, self.value_dim = dim // (2 * num_heads), dim // num_heads
        self.convolution = (
            None if kernel_size is None else ShortConvolution(dim, kernel_size, backend=backend)
        )
        self.q_proj = nn.Linear(dim, dim // 2, bias=False)
        self.k_proj = nn.Linear(dim, dim // 2, bias=False) if key else None
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.decay_proj = nn.Linear(dim, dim // 2, bias=False)
        self.g_proj = nn.Linear(dim, dim)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.augmentation_weight = (
            None if augmentation is None else nn.Parameter(torch.empty(num_heads, self.key_dim))
        )
        for layer in self.children():  # as the released model does
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.g_proj.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the augmentation to none."""
        if self.augmentation_weight is not None:
            nn.init.zeros_(self.augmentation_weight)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: ConvolutionCache | RecurrentCache | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, ConvolutionCache | RecurrentCache]:
        """Mix the tokens of x; arguments and result as in `LinearAttention.forward`.

        The cache is a ConvolutionCache, without a convolution a RecurrentCache.
        """
        kind = RecurrentCache if self.convolution is None else ConvolutionCache
        check_forward(x, self.dim, True, cache, kind, return_cache, cu_seqlens)
        u = blank_padding(x, mask)
        window: Tensor | None = None
        if self.convolution is not None:
            before = cache.convolution if isinstance(cache, ConvolutionCache) else None
            u, window = self.convolution(u, mask, before, cu_seqlens)

        q, v = self._heads(self.q_proj(u)), self._heads(self.v_proj(u))
        logits = at_least_float32(self.decay_proj(u))
        log_decay = self._heads(nn.functional.logsigmoid(logits) / 16)  # [B, N, H, Dk]
        rest = (-torch.expm1(log_decay)).to(v.dtype)  # 1 - alpha
        k = rest if self.k_proj is None else self._heads(self.k_proj(u))
        o, state = linear_attention(
            q,
            k,
            v,
            log_decay,
            scale=self.key_dim**-0.5,
            mask=mask,
            initial_state=None if cache is None else cache.state,
            return_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        o = o.to(log_decay.dtype)
        if self.augmentation_weight is not None:  # with q unscaled
            weight = (q * self.augmentation_weight * rest).sum(-1, keepdim=True) * v
            # The norm takes a constant away: a sigmoid less its one half, which would swallow the
            # low bits of o (small at first) and with them float32's agreement over a training.
            o = o + (torch.tanh(weight / 2) / 2 if self.augmentation == "sigmoid" else weight)
        o = nn.functional.layer_norm(o, (self.value_dim,), eps=1e-5)
        gate = nn.functional.silu(self.g_proj(u))
        y: Tensor = self.o_proj(gate * o.flatten(-2).to(gate.dtype))  # [B, N, dim]
        y = blank_padding(y, mask)
        if not return_cache:
            return y
        if window is None:
            return y, RecurrentCache(state)
        return y, ConvolutionCache(state, window)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))  # [B, N, H, D]

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps, however long the sequence."""
        window = 0 if self.convolution is None else self.convolution.state_size()
        return self.num_heads * self.key_dim * self.value_dim + window

    def extra_repr(self) -> str:
        """Return the options that are not seen in the submodules."""
        return f"num_heads={self.num_heads}, augmentation={self.augmentation!r}"
