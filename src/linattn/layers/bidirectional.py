"""Two causal mixers, one for each direction, as one mixer that sees every token."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn.layers._arguments import check_forward


class Bidirectional(nn.Module):
    """y = mixer(x) + flip(backward_mixer(flip(x))), each sequence flipped in itself.

    For classification with a mixer that has a decay or a delta rule: those know no order but one.
    A token's own contribution is counted in both directions. Source: the bidirectional state
    spaces of Long Range Arena (Gu et al. 2022), with weights of its own for each direction.

    Parameters: twice those of the mixer.

    Args:
        mixer: any causal layer; the backward one is of the same kind, with fresh weights.

    Raises:
        TypeError: the mixer has no dim: it is not one of this library's layers.
    """

    causal = False

    def __init__(self, mixer: nn.Module):
        super().__init__()
        if not isinstance(getattr(mixer, "dim", None), int):
            check.reject("mixer", type(mixer).__name__, "a layer of linattn.layers", kind=TypeError)
        self.dim: int = mixer.dim  # type: ignore[assignment]
        self.mixer, self.backward_mixer = mixer, copy.deepcopy(mixer)
        for module in self.backward_mixer.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: None = None,
        return_cache: bool = False,
    ) -> Tensor:
        """Mix the tokens of x [B, N, dim]; mask and cu_seqlens as in `LinearAttention.forward`.

        Raises:
            ValueError: a cache: what comes later is not known while decoding.
        """
        check_forward(x, self.dim, False, cache, type(None), return_cache, cu_seqlens)
        if mask is not None:
            check.check_mask(mask, x, "x")
        tokens = torch.arange(x.shape[1], device=x.device)
        order = tokens.flip(0)  # [N]; turning twice gives the tokens back
        if cu_seqlens is not None:
            check.check_cu_seqlens(cu_seqlens, x)
            bounds = cu_seqlens.to(x.device, torch.int64)
            sequence = torch.searchsorted(bounds[1:], tokens, right=True)
            order = bounds[sequence] + bounds[sequence + 1] - 1 - tokens
        turned = None if mask is None else mask[:, order]
        back = self.backward_mixer(x[:, order], mask=turned, cu_seqlens=cu_seqlens)
        y: Tensor = self.mixer(x, mask=mask, cu_seqlens=cu_seqlens) + back[:, order]
        return y
