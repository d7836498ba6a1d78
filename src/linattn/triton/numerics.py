"""The arithmetic that all kernels share: products, rounding, cumulated decays.

Triton's interpreter takes bfloat16 for bare 16-bit integers and cuts off where it should round. So
every matrix product goes through `dot` and every narrowing through `narrow`, which in the
interpreter round by hand and multiply in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.triton import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())
# exp(-800) is 0 even in float64, in which decays are summed: exact behind a hard reset of -inf.
RESET = tl.constexpr(-800.0)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Round float32 x to a dtype; in the interpreter to bfloat16's values, held in float32."""
    if INTERPRETED:
        if DTYPE == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
        return x.to(DTYPE).to(tl.float32)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the float32 product of two float32 tiles that are rounded to a dtype first.

    For float16 to tf32, which has its digits and the range of float32: states and sums of weights
    go beyond 65504.
    """
    if DTYPE == tl.float16:
        return tl.dot(a, b, input_precision="ieee" if PRECISION == "ieee" else "tf32")
    return tl.dot(narrow(a, DTYPE), narrow(b, DTYPE), input_precision=PRECISION)


@triton.jit
def finite(g):
    """Return log-decays, -inf as RESET. A NaN stays one: tl.maximum would drop it."""
    return tl.where(g < RESET, RESET, g)


@triton.jit
def cumulate(g):
    """Return g_0 + ... + g_t for log-decays [C] in float64."""
    return tl.cumsum(finite(g.to(tl.float64)), axis=0)


@triton.jit
def total_of(g):
    """Return the sum of log-decays [C] in float64."""
    return tl.sum(finite(g.to(tl.float64)), axis=0)


@triton.jit
def fade(difference):
    """Return exp of a float64 difference of cumulated log-decays, in float32; it is <= 1."""
    return tl.exp(tl.where(difference > 0.0, 0.0, difference).to(tl.float32))
