"""What holds bit for bit beyond `test_invariants`: gradients, single channels, packing, masks."""

from dataclasses import replace

import pytest
import torch

from linattn.testing import relative_error
from operator_calls import (
    CAUSAL,
    KINDS,
    any_backend,
    bit_equal,
    fast,
    has_tokens,
    inputs_of,
    kinds,
    leaves_of,
    pick,
    with_gradients,
)


def loss_on_both(o, state):
    return o.square().sum() + state.sum()


@fast
@kinds
@pytest.mark.parametrize("N", [1, 70, 200])
def test_a_row_and_its_gradients_do_not_depend_on_other_rows(backend, kind, N):
    size = {"N": N, "B": 3, "heads": (2, 1, 2), "Dk": 16, "Dv": 24, "state": True}
    a = inputs_of(kind, **size, dtype=torch.float32)
    b = inputs_of(kind, **size, dtype=torch.float32, seed=1, strength=50.0)
    for name, x in b.tensors.items():
        if x.dim() == 1:
            b.tensors[name] = a.tensors[name]
        else:
            x[1] = a.tensors[name][1]
    (o, S, grads), (o2, S2, grads2) = (with_gradients(x, backend, loss_on_both) for x in (a, b))
    assert bit_equal([o[1], S[1]], [o2[1], S2[1]])
    for name, g in grads.items():
        assert g.dim() == 1 or torch.equal(g[1], grads2[name][1]), name


@fast
@pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, "values") for kind in CAUSAL]
    + [
        (kind, change)
        for kind in CAUSAL
        for change in ("gates", "all")
        if KINDS[kind].get("decay") in ("token", "channel")
    ],
)
@pytest.mark.parametrize(("N", "early"), [(70, 33), (130, 64), (130, 1), (20, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_tokens_do_not_move_a_bit_of_earlier_ones(backend, kind, change, N, early, dtype):
    """Outputs, and the gradients of a loss on the early outputs; nothing later gets a gradient.

    The later gate that changes becomes -30 or a hard reset, in all channels or in one.
    """
    decay = KINDS[kind].get("decay")
    options = {"N": N, "B": 1, "heads": (2, 1, 2), "state": True, "dtype": dtype}
    inputs, other = inputs_of(kind, **options), inputs_of(kind, **options, seed=1)

    def early_loss(o, S):
        return o[:, :early].square().sum()

    o, _, grads = with_gradients(inputs, backend, early_loss)
    gates = (-30.0, -torch.inf) if change != "values" else (None,)
    channels = (slice(None), slice(1, 2)) if decay == "channel" else (slice(None),)
    for gate, channel in [(gate, channel) for gate in gates for channel in channels]:
        changed = replace(inputs, tensors=dict(inputs.tensors))
        for name, x in inputs.tensors.items():
            if not has_tokens(name, x):
                continue
            x = x.clone()
            if name == "log_decay" and gate is not None:
                x[:, early][..., channel] = gate
                x[:, early + 2 :: 3][..., channel] = gate
            elif change != "gates":
                size = 100 if name == "v" else 1  # longer keys make the delta rule diverge
                x[:, early:] = size * other.tensors[name][:, early:]
            changed.tensors[name] = x
        o2, _, grads2 = with_gradients(changed, backend, early_loss)
        assert torch.equal(o[:, :early], o2[:, :early])
        for name, g in grads.items():
            if has_tokens(name, g):
                assert torch.equal(g[:, :early], grads2[name][:, :early]), name
                assert not grads2[name][:, early:].any(), name
            else:
                assert torch.equal(g, grads2[name]), name


@fast
@kinds
def test_packed_sequences_do_not_see_each_other(backend, kind):
    """Cases D8 and E6: changing the others changes no bit, states and gradients included."""
    lengths, here = (5, 1, 70, 0, 3), slice(6, 76)
    a = inputs_of(kind, lengths=lengths, state=True, dtype=torch.float32)
    b = inputs_of(kind, lengths=lengths, state=True, dtype=torch.float32, seed=1)
    for name, x in b.tensors.items():
        if x.dim() == 1:
            b.tensors[name] = a.tensors[name]
        elif name == "initial_state":
            x[2] = a.tensors[name][2]
        else:
            x[:, here] = a.tensors[name][:, here]
    (o, S, grads), (o2, S2, grads2) = (with_gradients(x, backend, loss_on_both) for x in (a, b))
    assert bit_equal([o[:, here], S[2]], [o2[:, here], S2[2]])
    for name, g in grads.items():
        if g.dim() > 1:
            of_sequence = (lambda x: x[2]) if name == "initial_state" else (lambda x: x[:, here])
            assert torch.equal(of_sequence(g), of_sequence(grads2[name])), name


@fast
@kinds
def test_packed_equals_separate_runs(backend, kind):
    """Case D8, without the reference: outputs, states and gradients of each on its own."""
    lengths = (5, 1, 70, 3)
    inputs = inputs_of(kind, lengths=lengths, state=True)
    o, S, grads = with_gradients(inputs, backend, loss_on_both)
    start = 0
    for i, n in enumerate(lengths):
        here = slice(start, start + n)
        one = pick(inputs, here)
        del one.options["cu_seqlens"]
        one.tensors["initial_state"] = inputs.tensors["initial_state"][i : i + 1]
        o1, S1, grads1 = with_gradients(one, backend, loss_on_both)
        assert relative_error(o1, o[:, here]) < 1e-12
        assert relative_error(S1, S[i : i + 1]) < 1e-12
        for name, g in grads1.items():
            if has_tokens(name, g):
                # dq of one normalised token is 0 but for rounding
                assert float((g - grads[name][:, here]).norm()) < 1e-11 * float(grads[name].norm())
            elif name == "initial_state":
                assert relative_error(g, grads[name][i : i + 1]) < 1e-10
        start += n


@fast
@kinds
def test_the_same_call_gives_the_same_bits(backend, kind):
    """Case E10."""
    inputs = inputs_of(kind, N=200, state=True, dtype=torch.float32)
    a, b = (with_gradients(inputs, backend, loss_on_both) for _ in range(2))
    assert bit_equal([*a[:2], *a[2].values()], [*b[:2], *b[2].values()])


@any_backend
@kinds
@pytest.mark.parametrize("junk", [1e30, torch.nan, -torch.inf])
@pytest.mark.parametrize("N", [1, 20])
def test_masked_values_do_not_matter(backend, kind, junk, N):
    """One-token steps and the reference too, with a first token that is masked."""
    inputs = inputs_of(kind, N=N, state=True, mask=True, dtype=torch.float32)
    mask = inputs.options["mask"]
    mask[0, 0] = False
    spoilt = replace(inputs, tensors=dict(inputs.tensors))
    for name, x in inputs.tensors.items():
        if has_tokens(name, x):
            spoilt.tensors[name] = x.clone()
            spoilt.tensors[name][~mask] = junk
    (o, S, grads), (o2, S2, grads2) = (
        with_gradients(x, backend, loss_on_both) for x in (inputs, spoilt)
    )
    assert bit_equal([o, S], [o2, S2])
    assert not o[~mask].any()
    for name, g in grads.items():
        assert torch.equal(g, grads2[name]), name
        assert not has_tokens(name, g) or not g[~mask].any(), name


@fast
@kinds
@pytest.mark.parametrize("N", [1, 70])
@pytest.mark.parametrize("upstream", [torch.nan, torch.inf])
def test_gradients_that_arrive_at_masked_outputs_do_not_matter(backend, kind, N, upstream):
    """The output there is a constant 0, so whatever a loss makes of it stops at it."""
    inputs = inputs_of(kind, N=N, mask=True)
    inputs.options["mask"][0, 0] = False
    leaves = leaves_of(inputs)
    o, _ = leaves.call(backend)
    grad = torch.randn_like(o)
    spoilt = grad.clone()
    spoilt[~inputs.options["mask"]] = upstream
    a, b = (
        torch.autograd.grad(
            o, list(leaves.tensors.values()), g, retain_graph=True, allow_unused=True,
            materialize_grads=True,
        )
        for g in (grad, spoilt)
    )  # fmt: skip
    assert bit_equal(a, b)


@any_backend
@kinds
@pytest.mark.parametrize("kept", [0, 1, 30])
def test_a_masked_token_is_not_there(backend, kind, kept):
    """Outputs and the final state are those of the sequence without it."""
    N = 70
    inputs = inputs_of(kind, N=N, B=1, state=True)
    there = torch.zeros(N, dtype=torch.bool)
    there[torch.randperm(N)[:kept]] = True
    o2, state2 = pick(inputs, there).call(backend)
    inputs.options["mask"] = there[None]
    o, state = inputs.call(backend)
    assert relative_error(o[:, there], o2) < 1e-12
    assert relative_error(state, state2) < 1e-12
