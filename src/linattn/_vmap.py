"""torch.vmap over a registered operator: the mapped dimension becomes more batch rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def batching_rule(operator: Any, names: list[str]) -> Callable[..., Any]:
    """Return the rule that `torch.library.register_vmap` takes; `names` are the arguments."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        size = info.batch_size

        def mapped(x: Any, dim: int | None) -> Any:
            """Return a tensor with the mapped dimension first."""
            if not isinstance(x, Tensor):
                return x
            return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

        moved = [mapped(x, dim) for x, dim in zip(arguments, in_dims, strict=True)]
        tensors = dict(zip(names, moved, strict=True))
        if tensors["cu_seqlens"] is not None:  # a packed call has one row: one call for each
            calls = [
                operator(*(x[i] if isinstance(x, Tensor) else x for x in moved))
                for i in range(size)
            ]
            return _without_saved([torch.stack(found) for found in zip(*calls, strict=True)][:2])
        g = tensors["log_decay"]
        if g is not None and g.dim() == 2:  # one a head, but other ones for each call
            _, B, N = tensors["q"].shape[:3]
            tensors["log_decay"] = g[:, None, None].expand(size, B, N, g.shape[1])
        results = operator(
            *(x.flatten(0, 1) if isinstance(x, Tensor) else x for x in tensors.values())
        )
        shape = (size, -1) if size else (0, tensors["q"].shape[1])
        return _without_saved([found.unflatten(0, shape) for found in results[:2]])

    return rule


def convolution_batching_rule(operator: Any) -> Callable[..., Any]:
    """Return the rule of `causal_conv1d`: more batch rows, or one call each for other weights."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        size = info.batch_size
        moved = [
            x if dim is None or not isinstance(x, Tensor) else x.movedim(dim, 0)
            for x, dim in zip(arguments, in_dims, strict=True)
        ]
        x, weight, bias, silu, mask, initial_state, cu_seqlens = moved
        own_weights = in_dims[1] is not None or in_dims[2] is not None
        if own_weights or cu_seqlens is not None:
            return one_call_each(operator)(info, in_dims, *arguments)

        def rows(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None:
                return None
            return (x.expand(size, *x.shape) if dim is None else x).flatten(0, 1)

        results = operator(
            rows(x, in_dims[0]), weight, bias, silu, rows(mask, in_dims[4]),
            rows(initial_state, in_dims[5]), None,
        )  # fmt: skip
        return tuple(found.unflatten(0, (size, -1)) for found in results), (0, 0)

    return rule


def one_call_each(operator: Any) -> Callable[..., Any]:
    """Return the rule that calls once for each index of the mapped dimension."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        calls = [
            operator(
                *(
                    x if dim is None or not isinstance(x, Tensor) else x.select(dim, i)
                    for x, dim in zip(arguments, in_dims, strict=True)
                )
            )
            for i in range(info.batch_size)
        ]
        results = tuple(torch.stack(found) for found in zip(*calls, strict=True))
        return results, (0,) * len(results)

    return rule


def _without_saved(results: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Return o and the state with their mapped dimension, and an empty tensor that has none.

    The saved states are for autograd, which works on the one larger call inside of the rule.
    """
    return (*results, results[0].new_empty(0)), (0, 0, None)
