"""The kernels of the short causal convolution: forward, and backward in two passes.

    y_t = sum_w weight_w x_{t - W + 1 + w} + bias,  o = y or silu(y)

Position p of a sequence is x_p from 0 on and the initial state before. Backward first finds dy and
each block's part of the gradients of weight and bias, then what every position is heard by.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.triton.numerics import narrow


@triton.jit
def _block_of(table, block, T: tl.constexpr):
    """Return batch row, tokens [T], begin and end of their sequence, and its number."""
    row = tl.load(table + 5 * block)
    t = tl.load(table + 5 * block + 1) + tl.arange(0, T).to(tl.int64)
    begin, end = tl.load(table + 5 * block + 2), tl.load(table + 5 * block + 3)
    return row, t, begin, end, tl.load(table + 5 * block + 4)


@triton.jit
def _places(x, row, t, c):
    """Return where the elements [T, len(c)] of a [B, N, C] tensor are."""
    return x[0] + row * x[1][0] + t[:, None] * x[1][1] + c[None, :].to(tl.int64) * x[1][2]


@triton.jit
def _kept(mask, row, t, own, MASKED: tl.constexpr):
    """Return which of a sequence's own tokens are not masked."""
    if MASKED:
        kept = tl.load(mask[0] + row * mask[1][0] + t * mask[1][1], mask=own, other=0)
        own = own & (kept != 0)
    return own


@triton.jit
def _tap(weight, c, w, CHANNELS_):
    """Return the weights [1, len(c)] of one tap in float32."""
    places = weight[0] + c.to(tl.int64) * weight[1][0] + w * weight[1][1]
    return tl.load(places, mask=c < CHANNELS_, other=0).to(tl.float32)[None, :]


@triton.jit
def _store(places, value, inside):
    """Write float32 values, rounded to the dtype that is pointed to."""
    DTYPE: tl.constexpr = places.dtype.element_ty
    tl.store(places, narrow(value, DTYPE).to(DTYPE), mask=inside)


@triton.jit
def _load_inputs(
    x, mask, state, row, p, begin, end, sequence, c, CHANNELS_, W: tl.constexpr,
    MASKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Return the inputs [T, len(c)] at places p of a row in float32; 0 where nothing is."""
    channel = c < CHANNELS_
    here = _kept(mask, row, p, (p >= begin) & (p < end), MASKED)
    inside = here[:, None] & channel[None, :]
    found = tl.load(_places(x, row, p, c), mask=inside, other=0).to(tl.float32)
    if STATE:
        r = p - begin + W - 1
        before = (p < begin) & (r >= 0)
        inside = before[:, None] & channel[None, :]
        found += tl.load(_places(state, sequence, r, c), mask=inside, other=0).to(tl.float32)
    return found


@triton.jit
def _before_activation(
    x, weight, bias, mask, state, row, t, begin, end, sequence, c, CHANNELS_,
    W: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Return y [T, len(c)] at tokens t."""
    y = tl.zeros([t.shape[0], c.shape[0]], tl.float32)
    if BIAS:
        places = bias[0] + c.to(tl.int64) * bias[1][0]
        y += tl.load(places, mask=c < CHANNELS_, other=0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        x_ = _load_inputs(
            x, mask, state, row, t - (W - 1) + w, begin, end, sequence, c, CHANNELS_, W,
            MASKED, STATE,
        )  # fmt: skip
        y += x_ * _tap(weight, c, w, CHANNELS_)
    return y


@triton.jit
def forward_kernel(
    x, weight, bias, mask, state, o, table, CHANNELS_,
    T: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    MASKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Write a tile [T, BC] of o."""
    row, t, begin, end, sequence = _block_of(table, tl.program_id(0), T)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    y = _before_activation(
        x, weight, bias, mask, state, row, t, begin, end, sequence, c, CHANNELS_, W, BIAS,
        MASKED, STATE,
    )  # fmt: skip
    if SILU:
        y = y * tl.sigmoid(y)
    own = t < end
    y = tl.where(_kept(mask, row, t, own, MASKED)[:, None], y, 0.0)
    _store(_places(o, row, t, c), y, own[:, None] & (c < CHANNELS_)[None, :])


@triton.jit
def final_state_kernel(
    x, mask, state, final, bounds, CHANNELS_,
    T: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Write the last W - 1 inputs of a sequence: final [sequences, W - 1, C], contiguous."""
    sequence = tl.program_id(0).to(tl.int64)
    row, begin = tl.load(bounds + 3 * sequence), tl.load(bounds + 3 * sequence + 1)
    end = tl.load(bounds + 3 * sequence + 2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    r = tl.arange(0, T).to(tl.int64)
    p = end - (W - 1) + r
    x_ = _load_inputs(
        x, mask, state, row, p, begin, end, sequence, c, CHANNELS_, W, MASKED, STATE
    )  # fmt: skip
    places = final + (sequence * (W - 1) + r)[:, None] * CHANNELS_ + c[None, :]
    _store(places, x_, (r < W - 1)[:, None] & (c < CHANNELS_)[None, :])


@triton.jit
def before_activation_kernel(
    x, weight, bias, mask, state, grad, dy, parts, table, CHANNELS_,
    T: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    MASKED: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Write dy [B, N, C] in float32 and a block's parts [blocks, W + 1, C] of dweight and dbias."""
    block = tl.program_id(0).to(tl.int64)
    row, t, begin, end, sequence = _block_of(table, block, T)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    channel, own = c < CHANNELS_, t < end
    inside = _kept(mask, row, t, own, MASKED)[:, None] & channel[None, :]
    dy_ = tl.load(_places(grad, row, t, c), mask=inside, other=0).to(tl.float32)
    if SILU:
        y = _before_activation(
            x, weight, bias, mask, state, row, t, begin, end, sequence, c, CHANNELS_, W, BIAS,
            MASKED, STATE,
        )  # fmt: skip
        s = tl.sigmoid(y)
        dy_ = tl.where(inside, dy_ * s * (1 + y * (1 - s)), 0.0)
    tl.store(_places(dy, row, t, c), dy_, mask=own[:, None] & channel[None, :])
    to = parts + block * (W + 1) * CHANNELS_ + c
    for w in tl.static_range(W):
        x_ = _load_inputs(
            x, mask, state, row, t - (W - 1) + w, begin, end, sequence, c, CHANNELS_, W,
            MASKED, STATE,
        )  # fmt: skip
        tl.store(to + w * CHANNELS_, tl.sum(tl.where(inside, x_ * dy_, 0.0), axis=0), mask=channel)
    tl.store(to + W * CHANNELS_, tl.sum(dy_, axis=0), mask=channel)


@triton.jit
def _heard(
    weight, dy, grad_state, row, p, begin, end, sequence, c, CHANNELS_, W: tl.constexpr
):  # fmt: skip
    """Return the gradient [T, len(c)] of the inputs at places p, from begin - W + 1 on."""
    channel = c < CHANNELS_
    r = p - end + W - 1
    last = (r >= 0) & (r < W - 1)
    places = grad_state + (sequence * (W - 1) + r)[:, None] * CHANNELS_ + c[None, :]
    dx = tl.load(places, mask=last[:, None] & channel[None, :], other=0).to(tl.float32)
    for w in tl.static_range(W):
        t = p + (W - 1) - w
        inside = ((t >= begin) & (t < end))[:, None] & channel[None, :]
        dy_ = tl.load(_places(dy, row, t, c), mask=inside, other=0)
        dx += dy_ * _tap(weight, c, w, CHANNELS_)
    return dx


@triton.jit
def inputs_gradient_kernel(
    weight, dy, grad_state, mask, dx, table, CHANNELS_,
    T: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write a tile [T, BC] of dx; 0 at masked tokens."""
    row, t, begin, end, sequence = _block_of(table, tl.program_id(0), T)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    found = _heard(weight, dy, grad_state, row, t, begin, end, sequence, c, CHANNELS_, W)
    own = t < end
    found = tl.where(_kept(mask, row, t, own, MASKED)[:, None], found, 0.0)
    _store(_places(dx, row, t, c), found, own[:, None] & (c < CHANNELS_)[None, :])


@triton.jit
def state_gradient_kernel(
    weight, dy, grad_state, d_initial, bounds, CHANNELS_,
    T: tl.constexpr, BC: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the initial state [sequences, W - 1, C], contiguous."""
    sequence = tl.program_id(0).to(tl.int64)
    row, begin = tl.load(bounds + 3 * sequence), tl.load(bounds + 3 * sequence + 1)
    end = tl.load(bounds + 3 * sequence + 2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    r = tl.arange(0, T).to(tl.int64)
    found = _heard(
        weight, dy, grad_state, row, begin - (W - 1) + r, begin, end, sequence, c, CHANNELS_, W
    )  # fmt: skip
    places = d_initial + (sequence * (W - 1) + r)[:, None] * CHANNELS_ + c[None, :]
    _store(places, found, (r < W - 1)[:, None] & (c < CHANNELS_)[None, :])
