"""Draws from the whole surface of the operator: any size, dtype, kind, layout, mask and packing."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linattn.testing import compare, nan_filled_empties
from operator_calls import KINDS, fast, inputs_of
from test_against_reference import strided

HEADS = [(1, 1, 1), (2, 2, 2), (4, 1, 2), (1, 3, 1), (2, 2, 6), (4, 4, 1), (5, 1, 5)]
LAYOUTS = ["heads first", "channels before tokens", "every second", "fused", "as it is"]


@st.composite
def calls(draw):
    """A call, and the output that the loss is on."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    packed = draw(st.booleans())
    lengths = draw(st.lists(st.integers(0, 80), min_size=1, max_size=5)) if packed else None
    # In few dimensions the delta rule erases a state down to the product of all 1 - beta, far below
    # rounding; the chunks find such a gradient as a difference: 1e-24 where it is 1e-37.
    channels = [5, 8, 17, 32] if KINDS[kind].get("delta") else [1, 2, 3, 5, 8, 17, 32]
    inputs = inputs_of(
        kind,
        N=draw(st.integers(0, 150)),
        Dk=draw(st.sampled_from(channels)),
        Dv=draw(st.sampled_from([1, 2, 4, 7, 16, 33])),
        heads=draw(st.sampled_from(HEADS)),
        B=draw(st.integers(0, 3)),
        strength=draw(st.sampled_from([0.0, 0.01, 1.0, 5.0, 40.0, 1000.0])),
        reset=draw(st.booleans()),
        state=draw(st.booleans()),
        mask=draw(st.booleans()),
        lengths=None if lengths is None else tuple(lengths),
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 3)),
    )
    if inputs.options["normalize"]:
        # Weights >= 1 and values < 1: dq is what v_j - o leaves, and where only rounding is left
        # (one token sees itself) the reference's own is of the size of the values over the weights.
        inputs.options["scale"] = 0.5
        inputs.tensors["v"] = inputs.tensors["v"] * 0.2
    elif draw(st.booleans()):
        inputs.options["scale"] = draw(st.sampled_from([0.1, 0.5]))
    how = draw(st.sampled_from(LAYOUTS))
    if how != "as it is":
        for name in ("q", "k", "v", "log_decay", "beta"):
            x = inputs.tensors.get(name)
            if x is not None and x.dim() >= 3 and x.numel():
                inputs.tensors[name] = strided(x, how)
    if packed:
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        inputs.options["cu_seqlens"] = inputs.options["cu_seqlens"].to(dtype)
    # Without tokens and without an initial state the final one is a constant.
    constant = inputs.tensors["q"].shape[1] == 0 and "initial_state" not in inputs.tensors
    return inputs, draw(st.sampled_from(["o", "both"] if constant else ["o", "state", "both"]))


@fast
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(call=calls())
def test_any_call_agrees_with_the_reference(backend, call):
    inputs, on = call
    with nan_filled_empties():
        wrong = compare(inputs, backend, on=on)
    assert not wrong, "\n".join(wrong)
