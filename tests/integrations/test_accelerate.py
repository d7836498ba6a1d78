"""transformers' models before and after `accelerate`: the same results, and no trace after."""

import concurrent.futures
import copy
import importlib
import inspect
import pickle
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from budget import results
from tiny_families import tiny, tokens

import linattn
from linattn.integrations import calls, marks, patches
from linattn.integrations import transformers as adapters


def test_gradient_checkpointing_recomputes_on_the_same_path():
    model, x = tiny("qwen3_next").train(), tokens(2, 20)
    linattn.accelerate(model)
    wanted = results(model, x)
    model.gradient_checkpointing_enable()
    found = results(model, x)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-5)


def test_the_switch_is_idempotent_and_leaves_no_trace():
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    own = {name: getattr(module, name) for name in patches.ADAPTED if hasattr(module, name)}
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
    assert set(report.changed) == set(patches.families())
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


def test_a_copy_of_an_accelerated_model_is_accelerated():
    model, x = tiny("mamba"), tokens(1, 20)
    linattn.accelerate(model)
    other = copy.deepcopy(model)
    assert torch.equal(other(x).logits, model(x).logits)
    linattn.decelerate(model)
    assert marks.MARK in vars(other.backbone.layers[0].mixer)
    assert marks.MARK not in vars(model.backbone.layers[0].mixer)
    assert set(model.state_dict()) == set(other.state_dict())


def test_a_pickled_model_comes_back_as_it_was():
    """As DataLoader's and torch.save's users do; `kernels` finds its wrapped functions by name."""
    model, x = tiny("mamba2"), tokens(1, 40)
    plain = model(x).logits
    linattn.accelerate(model)
    fast = model(x).logits
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other(x).logits, fast)
    linattn.decelerate()
    assert torch.equal(other(x).logits, plain)
    assert torch.equal(pickle.loads(pickle.dumps(other))(x).logits, plain)


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


def test_decelerate_leaves_no_mark_that_a_later_accelerate_wakes():
    model, other, x = tiny("mamba2"), tiny("mamba2"), tokens(1, 40)
    wanted = model(x).logits
    linattn.accelerate(model)
    assert not torch.equal(model(x).logits, wanted)
    linattn.decelerate()
    linattn.accelerate(other)  # puts stand-ins where the model has its own forwards
    assert torch.equal(model(x).logits, wanted)
    linattn.accelerate(model)
    assert not torch.equal(model(x).logits, wanted)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_with_statement_ends_when_its_last_thread_has_left(everywhere):
    model, x = tiny("mamba2"), tokens(1, 40)
    plain = model(x).logits
    linattn.accelerate(model)
    fast = model(x).logits
    linattn.decelerate()
    entered, left = threading.Barrier(2), threading.Event()

    def first():
        with linattn.accelerated(None if everywhere else model):
            entered.wait(60)
        left.set()

    def second():
        with linattn.accelerated(None if everywhere else model):
            entered.wait(60)
            left.wait(60)
            return model(x).logits

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        inside = [pool.submit(first), pool.submit(second)][1].result()
    assert torch.equal(inside, fast)
    assert torch.equal(model(x).logits, plain)


def test_a_with_statement_inside_an_accelerated_model_changes_nothing():
    model, x = tiny("mamba2"), tokens(1, 40)
    linattn.accelerate(model)
    fast = model(x).logits
    with linattn.accelerated(model), linattn.accelerated(model):
        assert torch.equal(model(x).logits, fast)
    assert torch.equal(model(x).logits, fast)


@pytest.mark.parametrize("taps", [8, 9, 16])
def test_convolutions_of_any_width(taps):
    """The operator takes 8 taps; wider ones run in torch."""
    model, x = tiny("mamba", conv_kernel=taps), tokens(2, 20)
    pad = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    wanted, told = results(model, x), model.generate(x, max_new_tokens=12, **pad)
    linattn.accelerate(model)
    found = results(model, x)
    for name, y in wanted.items():
        atol = 1e-4 * y.abs().max().item()
        torch.testing.assert_close(found[name], y, rtol=1e-3, atol=atol)
    assert torch.equal(model.generate(x, max_new_tokens=12, **pad), told)


@pytest.mark.slow
def test_whole_graphs_compile_with_position_ids():
    """Traced positions have no values to look at."""
    model, x = tiny("qwen3_next"), tokens(2, 20)
    linattn.accelerate(model)
    positions = torch.arange(20).expand(2, -1)
    wanted = model(x, position_ids=positions, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(x, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, wanted)
