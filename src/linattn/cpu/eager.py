"""Which calls may go to a native kernel with no operator of torch.library in between."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from linattn import cpu

# Tokens of a decoding step: beyond, what the operators cost is little beside the work.
MOST_TOKENS = 16


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether nothing but the result of a call on these tensors is wanted.

    A gradient, a tangent, a batch of torch.func, a trace, a subclass or a mode that looks at
    operators must see the general path. Every question costs 0.1 us: few are asked.
    """
    if torch.compiler.is_compiling() or not cpu.load()[0]:
        return False
    if (
        forward_ad._current_level >= 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return False
    recorded = torch.is_grad_enabled()
    for x in tensors:
        if x is None:
            continue
        if type(x) is not Tensor and type(x) is not Parameter:
            return False
        if recorded and x.requires_grad:
            return False
    return True
