"""What `linattn bench` measures: linattn and the forms that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

METHODS = {
    "linattn": "linattn.linear_attention",
    "naive": "linear attention by autograd: a D x D state stored for every token",
    "softmax": "torch's scaled_dot_product_attention",
    "quadratic": "linear attention with its N x N weights written out",
}


@dataclass(frozen=True)
class Problem:
    """One case: a method on one shape."""

    method: str
    B: int
    N: int
    H: int
    D: int
    dtype: str = "float32"
    device: str = "cpu"
    backend: str = "auto"
    decay: str = "none"  # of linattn: "none", "head", "token", "channel"
    delta: bool = False  # of linattn
    causal: bool = True

    def flops(self) -> dict[str, float]:
        """Return the FLOPs of chunks of 32, 4 D^2 + 64 D and 10 D^2 + 192 D a token and head.

        The ruler for every implementation, so that only times decide; what one really does, with
        longer chunks, gates or the delta rule, is more.
        """
        tokens = self.B * self.N * self.H
        forward = tokens * (4.0 * self.D**2 + 64.0 * self.D)
        backward = tokens * (10.0 * self.D**2 + 192.0 * self.D)
        return {"forward": forward, "forward+backward": forward + backward}

    def tensor_bytes(self) -> int:
        """Return the bytes of q, k, v, o and their four gradients together."""
        itemsize = torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()
        return 8 * self.B * self.N * self.H * self.D * itemsize

    def inputs(self) -> tuple[list[Tensor], Tensor]:
        """Return the leaves (q, k, v and gates, [B, N, H, D]) and the gradient of o."""
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, self.dtype)
        shape = (self.B, self.N, self.H, self.D)

        def to(x: Tensor) -> Tensor:
            return x.to(self.device, dtype)

        x = [torch.randn(shape, generator=generator) for _ in range(4)]
        x[1] = torch.nn.functional.normalize(x[1], dim=-1)
        leaves = [to(t) for t in x[:3]]
        if self.method == "linattn":
            sizes = {"head": shape[2:3], "token": shape[:3], "channel": shape}
            if self.decay != "none":
                leaves.append(to(-torch.rand(sizes[self.decay], generator=generator)))
            if self.delta:
                leaves.append(to(torch.rand(shape[:3], generator=generator)))
        return leaves, to(x[3])

    def function(self) -> Callable[..., Tensor]:
        """Return the function of the leaves that is measured."""
        if self.method == "linattn":
            return self._linattn
        return {"naive": _naive, "softmax": _softmax, "quadratic": _quadratic}[self.method](
            self.causal
        )

    def _linattn(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        from linattn import linear_attention

        log_decay = gates[0] if self.decay != "none" else None
        beta = gates[-1] if self.delta else None
        return linear_attention(q, k, v, log_decay, beta, causal=self.causal, backend=self.backend)


def _naive(causal: bool) -> Callable[..., Tensor]:
    def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        states = torch.einsum("bnhk,bnhv->bnhkv", k, v)  # [B, N, H, D, D]
        states = states.cumsum(1) if causal else states.sum(1, keepdim=True).expand_as(states)
        return torch.einsum("bnhkv,bnhk->bnhv", states, q) * q.shape[-1] ** -0.5

    return naive


def _softmax(causal: bool) -> Callable[..., Tensor]:
    def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return o.transpose(1, 2)

    return softmax


def _quadratic(causal: bool) -> Callable[..., Tensor]:
    def quadratic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, N, D]
        weights = torch.matmul(q, k.mT) * q.shape[-1] ** -0.5  # [B, H, N, N]
        return torch.matmul(weights.tril() if causal else weights, v).transpose(1, 2)

    return quadratic
