"""Mamba-1's selective scan in plain torch, with its gradient: a parallel scan in each chunk.

The states of one chunk, [B, chunk, D, n], exist at a time. Backward first walks forward for the
state at the start of every chunk, then makes those inside again from the last chunk to the first.
Products of decays are all that is multiplied, so nothing overflows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn._validation import sequence_bounds, state_dtype

CHUNK = 16  # tokens: the states of a chunk with n = 16 are as large as one of x's chunks of 256


@dataclass
class _Inputs:
    """The tensors of a call in the dtype of the sums, with nothing where no token is."""

    x: Tensor
    dt: Tensor  # after bias and softplus
    before: Tensor  # dt after the bias
    A: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor | None
    gate: Tensor | None
    first: Tensor | None  # [N] int64: the sequence that begins at a token of a packed row, or -1
    initial: Tensor  # [B or S, D, n]
    bounds: list[int] | None


def _prepare(
    x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, mask: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> _Inputs:  # fmt: skip
    sums = state_dtype(x.dtype)

    def present(y: Tensor) -> Tensor:
        y = y.to(sums)
        return y if mask is None else torch.where(mask[..., None], y, 0)

    before = present(dt)
    if dt_bias is not None:
        before = before + dt_bias.to(sums)
    step = torch.logaddexp(before, torch.zeros_like(before)) if softplus else before
    first, bounds, sequences = None, None, x.shape[0]
    if cu_seqlens is not None:
        bounds = sequence_bounds(cu_seqlens, x.shape[1])
        sequences = len(bounds) - 1
        first = torch.full((x.shape[1],), -1, device=x.device)
        for i in range(sequences):
            if bounds[i] < bounds[i + 1]:
                first[bounds[i]] = i
    initial = initial_state
    if initial is None:
        initial = x.new_zeros((sequences, *A.shape), dtype=sums)
    return _Inputs(
        present(x), present(step), before, A.to(sums), present(b), present(c),
        None if skip is None else skip.to(sums), None if z is None else present(z), first,
        initial, bounds,
    )  # fmt: skip


def _scan(a: Tensor, b: Tensor, own: Tensor | None) -> Tensor:
    """Return h_t = a_t h_{t-1} + b_t along dimension 1, h before the first token being 0.

    own: [c] the number of each token's sequence; None: one. h is 0 again where another begins, and
    what is not finite there is not multiplied by 0 but left out.
    """
    step, length = 1, a.shape[1]
    while step < length:
        from_before, through = a[:, step:] * b[:, :-step], a[:, step:] * a[:, :-step]
        if own is not None:
            same = (own[step:] == own[:-step])[:, None, None]
            from_before, through = (torch.where(same, y, 0) for y in (from_before, through))
        b = torch.cat([b[:, :step], b[:, step:] + from_before], dim=1)
        a = torch.cat([a[:, :step], through], dim=1)
        step *= 2
    return b


@dataclass
class _Chunk:
    """Some tokens, all [B, c, D, n]."""

    decay: Tensor
    states: Tensor
    last: Tensor  # the states before each token
    own: Tensor | None  # [c] the number of each token's sequence in the chunk
    begins: Tensor | None  # places where a packed sequence begins

    def goes_on(self) -> bool:
        """Return whether the first token belongs to a sequence of the chunk before."""
        return self.begins is None or not bool((self.begins == 0).any())


def _chunk(p: _Inputs, start: int, h: Tensor) -> _Chunk:
    """Make the states of a chunk; h [B, D, n] is the one before it."""
    some = slice(start, start + CHUNK)
    decay = torch.exp(p.dt[:, some, :, None] * p.A)
    enters = (p.dt[:, some] * p.x[:, some])[..., None] * p.b[:, some, None]
    own, begins = None, None
    if p.first is not None:
        own = (p.first[some] >= 0).cumsum(0)
        begins = (p.first[some] >= 0).nonzero()[:, 0]
        enters[0, begins] += decay[0, begins] * p.initial[p.first[some][begins]]
    found = _Chunk(decay, enters, enters, own, begins)
    if found.goes_on():
        enters[:, 0] += decay[:, 0] * h
    found.states = _scan(decay, enters, own)
    found.last = torch.cat([h[:, None], found.states[:, :-1]], dim=1)
    if p.first is not None:
        found.last[0, begins] = p.initial[p.first[some][begins]]
    return found


def _before_all(p: _Inputs) -> Tensor:
    return p.initial if p.first is None else torch.zeros_like(p.initial[:1].expand(1, *p.A.shape))


def forward(
    x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, mask: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and the final state."""
    p = _prepare(x, dt, A, b, c, skip, z, dt_bias, softplus, mask, initial_state, cu_seqlens)
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h, final = _before_all(p), p.initial.clone()
    for start in range(0, x.shape[1], CHUNK):
        some = slice(start, start + CHUNK)
        states = _chunk(p, start, h).states
        y = _outputs(p, some, states)
        gate = None if p.gate is None else p.gate[:, some]
        o[:, some] = y if gate is None else y * gate * torch.sigmoid(gate)
        h = states[:, -1]
        for i, t in _ends(p, start):
            final[i] = states[0, t]
    if p.bounds is None:
        final = h.clone()
    if mask is not None:
        o.masked_fill_(~mask[..., None], 0)
    return o, final


def _outputs(p: _Inputs, some: slice, states: Tensor) -> Tensor:
    """Return what comes before the gate, [B, c, D]."""
    y = (states * p.c[:, some, None]).sum(-1)
    return y if p.skip is None else y + p.skip * p.x[:, some]


def _ends(p: _Inputs, start: int) -> list[tuple[int, int]]:
    """Return (sequence, place in the chunk) of the packed sequences that end in a chunk."""
    if p.bounds is None:
        return []
    return [
        (i, stop - 1 - start)
        for i, stop in enumerate(p.bounds[1:])
        if p.bounds[i] < stop and start < stop <= start + CHUNK
    ]


def backward(
    grad_o: Tensor, grad_state: Tensor, x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor,
    skip: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, softplus: bool,
    mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of all tensors in order, empty where there is none."""
    p = _prepare(x, dt, A, b, c, skip, z, dt_bias, softplus, mask, initial_state, cu_seqlens)
    g = grad_o.to(p.x.dtype)
    if mask is not None:
        g = torch.where(mask[..., None], g, 0)
    dx, ddt, db, dc, dz = (torch.empty_like(y) for y in (p.x, p.x, p.b, p.b, p.x))
    dA, dskip = torch.zeros_like(p.A), p.x.new_zeros(x.shape[2])
    h, starts = _before_all(p), []
    for start in range(0, x.shape[1], CHUNK):
        starts.append(h)
        h = _chunk(p, start, h).states[:, -1]
    d_initial = grad_state.to(p.x.dtype).clone()
    # What the state after a chunk hears from later tokens.
    later = d_initial if p.bounds is None else torch.zeros_like(h)
    for start in reversed(range(0, x.shape[1], CHUNK)):
        some = slice(start, start + CHUNK)
        chunk = _chunk(p, start, starts.pop())
        decay, states = chunk.decay, chunk.states
        gy = g[:, some]
        if p.gate is not None:
            gate = p.gate[:, some]
            s = torch.sigmoid(gate)
            dz[:, some] = gy * _outputs(p, some, states) * s * (1 + gate * (1 - s))
            gy = gy * gate * s
        heard = gy[..., None] * p.c[:, some, None]
        heard[:, -1] += later
        for i, t in _ends(p, start):
            heard[0, t] += grad_state[i]
        # The same scan from the last token on: a state is heard through the next token's decay.
        ahead = torch.cat([decay[:, 1:], torch.ones_like(decay[:, :1])], dim=1)
        own = None if chunk.own is None else chunk.own.flip(0)
        dh = _scan(ahead.flip(1), heard.flip(1), own).flip(1)
        later = decay[:, 0] * dh[:, 0]
        if p.first is not None:
            begins = chunk.begins
            d_initial[p.first[some][begins]] = decay[0, begins] * dh[0, begins]
            if not chunk.goes_on():
                later = torch.zeros_like(later)
        exponent = dh * decay * chunk.last
        entered = (dh * p.b[:, some, None]).sum(-1)
        dx[:, some] = entered * p.dt[:, some]
        ddt[:, some] = entered * p.x[:, some] + (exponent * p.A).sum(-1)
        dA += (exponent * p.dt[:, some, :, None]).sum((0, 1))
        db[:, some] = torch.einsum("btdn,btd->btn", dh, p.dt[:, some] * p.x[:, some])
        dc[:, some] = torch.einsum("btdn,btd->btn", states, gy)
        if p.skip is not None:
            dx[:, some] += gy * p.skip
            dskip += (gy * p.x[:, some]).sum((0, 1))
    if p.bounds is None:
        d_initial = later
    if softplus:
        ddt = ddt * torch.sigmoid(p.before)
    if mask is not None:
        dx, ddt, db, dc, dz = (torch.where(mask[..., None], y, 0) for y in (dx, ddt, db, dc, dz))
    wanted = (x, dt, A, b, c, skip, z, dt_bias, initial_state)
    found = (dx, ddt, dA, db, dc, dskip, dz, ddt.sum((0, 1)), d_initial)
    return tuple(
        x.new_empty(0) if y is None else gradient.to(y.dtype).contiguous()
        for y, gradient in zip(wanted, found, strict=True)
    )
