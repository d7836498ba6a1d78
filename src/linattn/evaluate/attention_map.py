"""The implicit attention map of any mixer: what each token takes of each other one's value.

A mixer here is linear in its values: o_i = sum_j P_ij v_j. Column j of P is what the operator
returns for values that are 1 at token j and 0 elsewhere, so that the map of every recurrence comes
of the operator itself, a block of columns at a time, without N x N. Softmax attention's comes of
its definition. What a layer does to its values before or its outputs after (a convolution, gates,
norms, Mamba-2's step size and skip, MetaLA's augmentation) is no part of the map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linattn._validation import reject
from linattn.ops import linear_attention


class AttentionMap(Protocol):
    """The map of one call, P [H, N, N], in parts."""

    @property
    def causal(self) -> bool:
        """Whether token i sees only j <= i."""

    @property
    def heads(self) -> int:
        """H."""

    @property
    def tokens(self) -> int:
        """N."""

    def columns(self, first: int, last: int) -> Tensor:
        """Return P[:, :, first:last], [H, N, last - first] float32."""


@dataclass
class LinearMap:
    """The map of a call of `linear_attention` with one batch row."""

    name: str
    q: Tensor  # [1, N, Hq, Dk]
    k: Tensor  # [1, N, Hk, Dk]
    log_decay: Tensor | None
    beta: Tensor | None
    options: dict[str, Any]  # scale, bias, normalize, causal, mask
    heads: int

    @property
    def causal(self) -> bool:
        """Whether token i sees only j <= i."""
        return bool(self.options["causal"])

    @property
    def tokens(self) -> int:
        """N."""
        return self.q.shape[1]

    def columns(self, first: int, last: int) -> Tensor:
        """Return P[:, :, first:last], [H, N, last - first] float32."""
        v = torch.zeros(self.tokens, last - first, dtype=self.q.dtype, device=self.q.device)
        v[torch.arange(first, last), torch.arange(last - first)] = 1
        v = v[None, :, None].expand(1, -1, self.heads, -1)
        o = linear_attention(self.q, self.k, v, self.log_decay, self.beta, **self.options)
        return o[0].transpose(0, 1).float()


@dataclass
class SoftmaxMap:
    """The map of a call of scaled_dot_product_attention with one batch row."""

    name: str
    q: Tensor  # [H, N, D]
    k: Tensor  # [H, N, D]
    allowed: Tensor | None  # bool, or added to the logits: [1 or H, N, N]
    causal: bool
    scale: float

    def __post_init__(self) -> None:
        blocks = [self._logits(i, i + 256) for i in range(0, self.tokens, 256)]
        self.total = torch.logsumexp(torch.stack([b.logsumexp(-1) for b in blocks]), 0)  # [H, N]

    @property
    def heads(self) -> int:
        """H."""
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
        """N."""
        return self.q.shape[1]

    def _logits(self, first: int, last: int) -> Tensor:
        """Return the logits of these keys [H, N, m]; -inf: not seen."""
        k = self.k[:, first:last].float()
        logits = self.scale * self.q.float() @ k.mT
        if self.allowed is not None:
            part = self.allowed[..., first:last]
            if part.dtype == torch.bool:
                return logits.masked_fill(~part, -math.inf)
            return logits + part
        if self.causal:
            place = torch.arange(self.tokens, device=k.device)
            later = place[first:last][None] > place[:, None]
            return logits.masked_fill(later, -math.inf)
        return logits

    def columns(self, first: int, last: int) -> Tensor:
        """Return P[:, :, first:last], [H, N, last - first] float32."""
        return torch.exp(self._logits(first, last) - self.total[:, :, None])


class Recorder(TorchFunctionMode):
    """While entered, keeps the map of every call of an attention operator, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[LinearMap | SoftmaxMap] = []
        self.name = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let a call run, and look at it."""
        kwargs = kwargs or {}
        name = str(func)
        result = func(*args, **kwargs)
        if result is None:  # the kernel of a few tokens has left it to another
            return result
        if name.startswith("linattn.") and name.endswith("_additive"):
            q, k, v, log_decay, mask, initial, packed, scale, bias, normalize, causal, _ = args
            self._linear(q, k, v, log_decay, None, mask, initial, packed, scale, bias, normalize,
                         causal)  # fmt: skip
        elif name.startswith("linattn.") and name.endswith("_delta"):
            q, k, v, log_decay, beta, mask, initial, packed, scale, _ = args
            self._linear(q, k, v, log_decay, beta, mask, initial, packed, scale, 0.0, False, True)
        elif name == "linattn_cpu.step.default":
            q, k, v, log_decay, beta, mask, initial, _, scale, bias, normalize = args
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            self._linear(q, k, v, log_decay, beta, mask, initial, None, scale, bias, normalize,
                         True)  # fmt: skip
        elif func is nn.functional.scaled_dot_product_attention:
            self._softmax(*args, **kwargs)
        return result

    def _linear(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
        mask: Tensor | None, initial: Tensor | None, packed: Tensor | None, scale: float,
        bias: float, normalize: bool, causal: bool,
    ) -> None:  # fmt: skip
        _one_row(q, initial is not None or packed is not None)
        heads = max(q.shape[2], k.shape[2], v.shape[2])
        options = {
            "scale": scale, "bias": bias, "normalize": normalize, "causal": causal, "mask": mask,
        }  # fmt: skip
        self.maps.append(LinearMap(self.name, q, k, log_decay, beta, options, heads))

    def _softmax(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        _one_row(q, q.shape[2] != k.shape[2])
        k = k[0].repeat_interleave(q.shape[1] // k.shape[1], 0)
        allowed = None if attn_mask is None else attn_mask[0]
        causal = is_causal or (allowed is not None and not bool(_later(allowed).any()))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.maps.append(SoftmaxMap(self.name, q[0], k, allowed, causal, scale))


def _later(allowed: Tensor) -> Tensor:
    seen = allowed if allowed.dtype == torch.bool else allowed > -math.inf
    return seen.triu(1)


def _one_row(q: Tensor, more: bool) -> None:
    if q.shape[0] != 1 or more:
        reject("inputs", f"{q.shape[0]} rows, a cache or packed sequences", "one whole sequence")


@torch.inference_mode()
def record(model: Any, inputs: dict[str, Tensor]) -> list[LinearMap | SoftmaxMap]:
    """Return the maps of all layers of a model of this library for one sequence, in order.

    A bidirectional layer of two recurrences has two, the second of the sequence turned round.

    Args:
        model: a language model or classifier.
        inputs: of its `forward`, one row of at least two tokens.

    Raises:
        ValueError: several rows, one token, a model without recorded calls.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not all(hasattr(layer, "mixer") for layer in layers):
        reject("model", type(model).__name__, "a model of this library")
    recorder = Recorder()

    def named(name: str) -> Any:
        def before(*_: Any) -> None:
            recorder.name = name

        return before

    hooks = [
        layer.register_forward_pre_hook(named(f"layer {i} {type(layer.mixer).__name__}"))
        for i, layer in enumerate(layers)
    ]
    training = model.training
    model.train(False)
    try:
        with recorder:
            model(**inputs)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if not recorder.maps:
        reject("model", "layers without a map, as a convolution's", "at least one mixer with one")
    if recorder.maps[0].tokens < 2:
        reject("inputs", "one token", "at least two")
    return recorder.maps


def blocks(attention: AttentionMap, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (first, columns [H, N, <= size]) over all columns of a map."""
    for first in range(0, attention.tokens, size):
        yield first, attention.columns(first, min(first + size, attention.tokens))


def whole(attention: AttentionMap) -> Tensor:
    """Return the map [H, N, N]."""
    return attention.columns(0, attention.tokens)
