"""The switch: copied, pickled, nested, compiled or subclassed, on is on and off is off."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_families import tiny, tokens

import linattn
from linattn.integrations import marks
from linattn.integrations import transformers as adapters


def model_and_logits():
    """Return a model, tokens, and its logits plain and accelerated."""
    model, x = tiny("mamba2"), tokens(1, 40)
    plain = model(x).logits
    with linattn.accelerated(model):
        fast = model(x).logits
    assert not torch.equal(fast, plain)
    return model, x, plain, fast


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_inside_a_with_statement_is_in_none(way):
    model, x, plain, _ = model_and_logits()
    with linattn.accelerated(model):
        other = way(model)
        assert torch.equal(other(x).logits, plain)
    linattn.decelerate()
    linattn.accelerate(tiny("mamba2"))
    assert torch.equal(other(x).logits, plain)


def test_decelerate_inside_a_with_statement_is_not_undone_by_another_model():
    model, x, plain, fast = model_and_logits()
    with linattn.accelerated(model):
        linattn.decelerate()
        linattn.accelerate(tiny("mamba2"))
        assert torch.equal(model(x).logits, plain)
        linattn.accelerate(model)
    assert torch.equal(model(x).logits, fast)


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_end_of_a_with_statement_ends_no_later_one(everywhere):
    model, x, plain, fast = model_and_logits()
    given = None if everywhere else model
    first, second = linattn.accelerated(given), linattn.accelerated(given)
    first.__enter__()
    linattn.decelerate(given)
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(model(x).logits, fast)
    second.__exit__(None, None, None)
    assert torch.equal(model(x).logits, plain)


def test_a_with_statement_leaves_no_mark():
    model, *_ = model_and_logits()
    assert not any(marks.MARK in vars(part) for part in model.modules())


LOAD = """
import pickle, sys, torch, linattn
sys.path.insert(0, sys.argv[2])
from tiny_families import tiny, tokens

torch.manual_seed(0)
x = torch.randint(3, 96, (1, 40))
model = pickle.load(open(sys.argv[1], "rb"))
before = model(x).logits
linattn.accelerate(tiny("mamba2"))
assert torch.equal(model(x).logits, before)
linattn.accelerate(model)
fast = model(x).logits
linattn.decelerate(model)
assert not torch.equal(model(x).logits, fast)
print(torch.equal(before, fast))
"""


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("on", [False, True])
def test_a_pickled_model_is_in_another_process_what_it_was(on, earlier, tmp_path):
    """Case: whether it was accelerated hung on how often either process had switched."""
    for _ in range(earlier):
        linattn.decelerate()
    model = tiny("mamba2")
    linattn.accelerate(model)
    if not on:
        linattn.decelerate()
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(model))
    command = [sys.executable, "-c", LOAD, str(path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(on)


def test_a_subclass_of_a_layer_is_accelerated_and_reported():
    from transformers.models.mamba2 import modeling_mamba2

    class Mine(modeling_mamba2.Mamba2Mixer):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model, x, plain, fast = model_and_logits()
    model.backbone.layers[0].mixer.__class__ = Mine
    report = linattn.accelerate(model)
    assert torch.equal(model(x).logits, fast)
    assert report.left["backbone.layers.0.mixer"].startswith("its class has another forward")
    linattn.decelerate(model)
    assert torch.equal(model(x).logits, plain)


@pytest.mark.slow
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_model_compiled_with_stand_ins_in_place_notices_the_switch(everywhere):
    """Case: torch.compile guards no key that `__dict__.get` does not find."""
    model, x, _, fast = model_and_logits()
    linattn.accelerate(tiny("mamba2"))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager")
        first = compiled(x, use_cache=False).logits
        with linattn.accelerated(None if everywhere else model):
            assert torch.equal(compiled(x, use_cache=False).logits, fast)
        assert torch.equal(compiled(x, use_cache=False).logits, first)
        _ = linattn.accelerate_transformers() if everywhere else linattn.accelerate(model)
        assert torch.equal(compiled(x, use_cache=False).logits, fast)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "kimi_linear", "minimax", "lfm2"])
def test_what_is_meant_for_the_loss_or_attention_is_passed_by(family):
    model, x = tiny(family), tokens(1, 20)
    labels = x.clone()
    labels[:, :5] = -1
    told = {"labels": labels, "ignore_index": -1, "use_cache": False}
    shifted = {**told, "shift_labels": labels.roll(-1, 1), "token_type_ids": torch.zeros_like(x)}
    wanted = [model(x, **given).loss for given in (told, shifted)]
    linattn.accelerate(model)
    for given, loss in zip((told, shifted), wanted, strict=True):
        torch.testing.assert_close(model(x, **given).loss, loss, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="sorted: got bool"):
        model(x, sorted=True, use_cache=False)


@pytest.mark.parametrize("model", ["x", [torch.nn.Linear(1, 1)], torch.nn.Linear])
@pytest.mark.parametrize("switch", ["accelerate", "decelerate", "accelerated"])
def test_only_models_are_switched(switch, model):
    def call():
        found = getattr(linattn, switch)(model)
        with found:  # of `accelerated` alone: nothing is looked at before
            pass

    with pytest.raises(TypeError, match=r"model: got (str|list|Linear); expected a model of"):
        call()


def test_a_step_in_float64_takes_a_state_in_float32():
    x, A, B = torch.randn(2, 16).double(), -torch.ones(16, 4), torch.randn(2, 4).double()
    state, wide = torch.randn(2, 16, 4), torch.empty(2, 16, 4).double()
    wide.copy_(state)
    found = adapters.mamba_selective_state_update(state, x, x, A, B, B, dt_softplus=True)
    wanted = adapters.mamba_selective_state_update(wide, x, x, A, B, B, dt_softplus=True)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(state.double(), wide, rtol=1e-6, atol=1e-6)


def test_derivatives_that_the_operators_lack_are_refused_in_words():
    model, x = tiny("mamba2"), tokens(1, 20)
    linattn.accelerate(model)
    weight = next(model.backbone.layers[0].mixer.parameters())
    loss = model(x, labels=x, use_cache=False).loss
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"accelerate, linattn\.decelerate"):
        grad.square().sum().backward()
