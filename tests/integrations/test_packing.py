"""Packed sequences in transformers' models: kept apart in every layer, or refused in words."""

import pytest
import torch
from tiny_families import tiny, tokens

import linattn
from linattn.integrations import transformers as adapters


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "olmo_hybrid"])
def test_packed_sequences_equal_separate_ones(family):
    """The plain form refuses them, or does not keep them apart."""
    model = tiny(family)
    linattn.accelerate(model)
    layer = next(m for m in model.modules() if hasattr(m, "conv1d"))
    x = torch.randn(1, 25, 32)
    cu_seqlens = torch.tensor([0, 9, 10, 25])
    packed = layer(x, cu_seq_lens_q=cu_seqlens)
    alone = [layer(x[:, i:j]) for i, j in ((0, 9), (9, 10), (10, 25))]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


def test_sequences_are_told_by_their_numbers_too():
    x, weight = torch.randn(1, 8, 20), torch.randn(8, 4)
    numbers = torch.tensor([[0] * 7 + [1] * 13])
    o = adapters.causal_conv1d_fn(x, weight, seq_idx=numbers)
    parts = [adapters.causal_conv1d_fn(x[..., i:j], weight) for i, j in ((0, 7), (7, 20))]
    torch.testing.assert_close(o, torch.cat(parts, -1))
    with pytest.raises(ValueError, match="seq_idx: got shape"):
        adapters.causal_conv1d_fn(x, weight, seq_idx=numbers[:, :5])


def packed(**changes):
    bounds = torch.tensor([0, 8, 20], dtype=torch.int32)
    position_ids = torch.cat([torch.arange(8), torch.arange(12)])[None]
    given = {"position_ids": position_ids, "cu_seq_lens_q": bounds, "use_cache": False, **changes}
    return {name: x for name, x in given.items() if x is not None}


HALVES = [
    ({"cu_seq_lens_q": None}, "position_ids: got a row of positions that start again"),
    ({"position_ids": None}, r"position_ids: got None; expected \[1, N\], from 0 on"),
    ({"use_cache": True}, "use_cache: got a cache with packed sequences"),
    ({"attention_mask": torch.ones(1, 20)}, "attention_mask: got a mask with packed"),
    (
        {"position_ids": torch.arange(20)[None]},
        r"cu_seq_lens_q: got packed sequences that begin at \[0, 8\]; expected .* at \[0\]",
    ),
    (
        {"position_ids": torch.cat([torch.arange(9), torch.arange(11)])[None]},
        r"begin at \[0, 8\]; expected the same as position_ids, which begin again at \[0, 9\]",
    ),
    (
        {"seq_idx": torch.tensor([[0] * 9 + [1] * 11])},
        r"seq_idx: got packed sequences that begin at \[0, 9\]",
    ),
]


@pytest.mark.parametrize(("changes", "message"), HALVES)
@pytest.mark.parametrize("everywhere", [False, True])
def test_packing_that_would_be_half_heard_is_refused(changes, message, everywhere):
    """Bounds keep states apart, positions without a mask or a cache attention."""
    model, x = tiny("qwen3_next"), tokens(1, 20)
    _ = linattn.accelerate_transformers() if everywhere else linattn.accelerate(model)
    model(x, **packed())
    with pytest.raises(ValueError, match=message):
        model(x, **packed(**changes))
    model(x)  # and nothing of it is remembered


@pytest.mark.parametrize("rows", [3, 4])
def test_positions_of_several_axes(rows):
    """Qwen3.5's [4, B, N], of which attention hears the first, and [3, B, N], which it does not."""
    model, x = tiny("qwen3_5"), tokens(1, 20)
    linattn.accelerate(model)
    given = packed()
    positions = given.pop("position_ids")[None].expand(rows, -1, -1)
    bounds = given.pop("cu_seq_lens_q")
    with pytest.raises(ValueError, match="position_ids: got a row of positions that start again"):
        model(x, position_ids=positions, **given)
    model(x, position_ids=torch.arange(20).expand(rows, 1, -1), **given)
    if rows == 3:
        with pytest.raises(ValueError, match=r"position_ids: got shape \[3, 1, 20\]; expected"):
            model(x, position_ids=positions, cu_seq_lens_q=bounds, **given)
        return
    found = model(x, position_ids=positions, cu_seq_lens_q=bounds, **given).logits
    alone = [model(x[:, i:j], use_cache=False).logits for i, j in ((0, 8), (8, 20))]
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-3, atol=1e-4)


def test_positions_behind_padding_and_of_several_rows_are_no_packing():
    model = tiny("qwen3_next")
    linattn.accelerate(model)
    mask = torch.ones(1, 6, dtype=torch.long)
    mask[0, :2] = 0
    model(tokens(1, 6), position_ids=torch.tensor([[1, 1, 0, 1, 2, 3]]), attention_mask=mask)
    model(tokens(2, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]] * 2))


def test_a_wide_convolution_refuses_packed_sequences():
    bounds = torch.tensor([0, 8, 20])
    with pytest.raises(ValueError, match="weight: got"):
        adapters.causal_conv1d_fn(
            torch.randn(1, 4, 20), torch.randn(4, 9), seq_idx=None, cu_seq_lens_q=bounds
        )
