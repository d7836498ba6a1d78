"""The gradient of log_decay, gathered segment by segment into the shape that log_decay has."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.chunked.decay import NoDecay, TokenDecay
from linattn.chunked.layout import Layout, Segment


class LogDecayGradient:
    """Collects the gradient of log_decay, whatever its shape; empty without one."""

    def __init__(self, layout: Layout, log_decay: Tensor | None):
        self.layout, self.log_decay = layout, log_decay
        self.per_head: Tensor | None = None
        if log_decay is None:
            self.out = torch.empty(0, dtype=layout.dtype, device=layout.device)
        elif log_decay.dim() == 1:
            self.out = torch.zeros_like(log_decay)
            self.per_head = torch.zeros(layout.H, dtype=layout.dtype, device=layout.device)
        else:
            D = 1 if log_decay.dim() == 3 else layout.Dk
            self.out = layout.output_like(log_decay, layout.H, D, log_decay.dtype)
            self.out = self.out.view(log_decay.shape)

    def store(self, decay: NoDecay, segment: Segment) -> None:
        """Take over what the decay of one segment has gathered."""
        if self.log_decay is None:
            return
        assert isinstance(decay, TokenDecay)
        grad = decay.grad
        if self.per_head is not None:
            grad = self.layout.blank(grad, segment)
            self.per_head += grad.view(-1, self.layout.H, self.layout.C).sum((0, 2))
            self.out.copy_(self.per_head)
            return
        D = 1 if self.log_decay.dim() == 3 else self.layout.Dk
        self.layout.store(grad, self.out.view(*self.log_decay.shape[:3], D), segment)
