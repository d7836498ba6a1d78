"""transformers' models before and after `accelerate`: the same results, and no trace after."""

import concurrent.futures
import copy
import importlib
import inspect
import subprocess
import sys
import warnings

import pytest
import torch
from budget import results
from tiny_families import tiny

import linattn
from linattn.integrations import calls, switch
from linattn.integrations import transformers as adapters


@pytest.fixture(autouse=True)
def _put_back():
    yield
    linattn.decelerate()


def tokens(*shape):
    return torch.randint(3, 96, shape)


def test_gradient_checkpointing_recomputes_on_the_same_path():
    model, x = tiny("qwen3_next").train(), tokens(2, 20)
    linattn.accelerate(model)
    wanted = results(model, x)
    model.gradient_checkpointing_enable()
    found = results(model, x)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-5)


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


def test_the_switch_is_idempotent_and_leaves_no_trace():
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    own = {name: getattr(module, name) for name in switch.ADAPTED if hasattr(module, name)}
    model = tiny("qwen3_next")
    first, second = linattn.accelerate(model), linattn.accelerate(model)
    assert first == second
    assert "causal_conv1d_fn" in str(first)
    other = tiny("qwen3_next")
    x = tokens(1, 9)
    wanted = other(x).logits
    assert torch.equal(other(x).logits, wanted)  # not accelerated: its own code
    linattn.decelerate()
    for name, function in own.items():
        assert getattr(module, name) is function
    assert not any(calls.original(type(m).forward) for m in model.modules())
    with linattn.accelerated():
        assert calls.active()
    assert not calls.active()


def test_all_models_at_once():
    report = linattn.accelerate_transformers()
    assert set(report.changed) == set(switch.families())
    assert report.left["mamba.mamba_inner_fn"].startswith("returns None")
    assert calls.active()
    linattn.decelerate()
    assert not calls.active()


def test_what_cannot_be_honoured_is_an_error():
    x, weight = torch.randn(1, 8, 20), torch.randn(8, 4)
    with pytest.raises(TypeError, match="initial_states: got Tensor"):
        adapters.causal_conv1d_fn(x, weight, initial_states=x)
    with pytest.raises(TypeError, match="model: got str"):
        linattn.accelerate("model")


def test_another_version_of_transformers_is_warned_of(monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", "6.1.0")
    with pytest.warns(UserWarning, match=r"6\.1\.0 is outside the tested range: from 5\.24"):
        linattn.accelerate(torch.nn.Linear(2, 2))
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = linattn.accelerate(torch.nn.Linear(2, 2))
    assert report.left == {"Linear": "it calls nothing that has an adapter"}


def test_importing_linattn_imports_no_transformers():
    code = "import sys, linattn; linattn.accelerated; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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


def test_positions_behind_padding_and_of_several_rows_are_no_packing():
    model = tiny("qwen3_next")
    linattn.accelerate(model)
    mask = torch.ones(1, 6, dtype=torch.long)
    mask[0, :2] = 0
    model(tokens(1, 6), position_ids=torch.tensor([[1, 1, 0, 1, 2, 3]]), attention_mask=mask)
    model(tokens(2, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]] * 2))


def test_a_copy_of_an_accelerated_model_is_accelerated():
    model, x = tiny("mamba"), tokens(1, 20)
    linattn.accelerate(model)
    other = copy.deepcopy(model)
    assert torch.equal(other(x).logits, model(x).logits)
    linattn.decelerate(model)
    assert calls.MARK in vars(other.backbone.layers[0].mixer)
    assert calls.MARK not in vars(model.backbone.layers[0].mixer)
    assert set(model.state_dict()) == set(other.state_dict())


def test_a_layer_whose_forward_was_replaced_is_reported():
    model = tiny("mamba2")
    mixer = model.backbone.layers[1].mixer
    mixer.forward = mixer.forward  # as hooks of other libraries do
    report = linattn.accelerate(model)
    assert report.left["backbone.layers.1.mixer"] == "its forward is not its class's own"
    assert "backbone.layers.0.mixer" not in report.left


def test_an_error_inside_a_layer_leaves_nothing_switched_on():
    model = tiny("mamba2")
    linattn.accelerate(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.backbone.layers[0].mixer(torch.randn(1, 5, 7))
    assert not calls.active()


def test_threads_know_only_their_own_model():
    model, other = tiny("mamba2"), tiny("mamba2")
    linattn.accelerate(model)
    x = tokens(1, 40)
    wanted = other(x).logits
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: (model if i % 2 else other)(x).logits, range(16)))
    assert all(torch.equal(y, wanted) for y in found[::2])
    assert not any(torch.equal(y, wanted) for y in found[1::2])


def test_a_signature_stays_what_it_was():
    """Trainer and generate look at it."""
    model = tiny("mamba")
    before = inspect.signature(type(model).forward)
    linattn.accelerate(model)
    assert inspect.signature(type(model).forward) == before


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "minimax"])
def test_under_torch_compile(family):
    """No graph break more than before, and a compiled model notices the switch."""
    model, x = tiny(family), tokens(2, 20)
    torch._dynamo.reset()

    def breaks():
        return torch._dynamo.explain(model)(x, use_cache=False).graph_break_count

    before, plain = breaks(), model(x, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager")
    first = compiled(x, use_cache=False).logits
    torch.testing.assert_close(first, plain)
    linattn.accelerate(model)
    fast = model(x, use_cache=False).logits
    assert not torch.equal(fast, plain)
    assert torch.equal(compiled(x, use_cache=False).logits, fast)
    linattn.decelerate(model)
    assert torch.equal(compiled(x, use_cache=False).logits, first)
    linattn.accelerate(model)
    torch._dynamo.reset()
    assert breaks() <= before
