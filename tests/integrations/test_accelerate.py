"""transformers' models before and after `accelerate`: the same results, and no trace after."""

import copy
import importlib
import subprocess
import sys
import warnings

import pytest
import torch
from tiny_families import FAMILIES, NOT_COMPARED, tiny

import linattn
from linattn.integrations import calls, switch
from linattn.integrations import transformers as adapters

families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def _put_back():
    yield
    linattn.decelerate()


def tokens(*shape):
    return torch.randint(3, 96, shape)


def test_every_family_of_the_installed_transformers_is_known():
    assert set(switch.families()) == set(FAMILIES) | set(NOT_COMPARED)
    assert not set(FAMILIES) & set(NOT_COMPARED)


def results(model, x):
    model.zero_grad()
    out = model(x, labels=x, use_cache=False)
    out.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), out.loss.detach(), gradients


@families
def test_logits_loss_and_every_gradient_agree(family, monkeypatch):
    """Against float64 the accelerated model is as good as the plain one, within a factor."""
    model, x = tiny(family), tokens(2, 37)
    calls = []
    for name in switch.ADAPTED:
        function = getattr(adapters, name)

        def counted(*args, function=function, name=name, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(adapters, name, counted)
    logits, loss, gradients = results(model, x)
    assert not calls
    report = linattn.accelerate(model)
    assert report.changed
    after = results(model, x)
    assert calls
    torch.testing.assert_close(after[0], logits, rtol=1e-3, atol=1e-3 * logits.abs().max().item())
    torch.testing.assert_close(after[1], loss, rtol=1e-4, atol=1e-5)
    assert after[2].keys() == gradients.keys()
    for name, wanted in gradients.items():
        error = (after[2][name] - wanted).norm()
        assert error <= 2e-3 * wanted.norm() + 1e-6, (name, error, wanted.norm())
    calls.clear()
    linattn.decelerate(model)
    assert torch.equal(results(model, x)[0], logits)
    assert not calls


@families
def test_generation_agrees(family):
    """Greedy with a cache, left padding, and many tokens behind a filled cache."""
    model, x = tiny(family), tokens(2, 12)
    mask = torch.ones_like(x)
    mask[0, :4], x[0, :4] = 0, 0
    options = {
        "max_new_tokens": 12, "do_sample": False, "attention_mask": mask, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    plain = model.generate(x, **options)
    with linattn.accelerated(model):
        fast = model.generate(x, **options)
        assert torch.equal(fast, plain)
    y = tokens(1, 30)
    if family in ("mamba", "falcon_mamba", "jamba"):  # their own scan takes it for a single step
        return
    first = model(y[:, :11], use_cache=True)
    second = model(y[:, 11:], cache=first.cache, use_cache=True).logits
    with linattn.accelerated(model):
        first = model(y[:, :11], use_cache=True)
        again = model(y[:, 11:], cache=first.cache, use_cache=True).logits
    torch.testing.assert_close(again, second, rtol=1e-3, atol=1e-3 * second.abs().max().item())


DENSE = {"kimi_linear": {"mlp_layer_types": ["dense"] * 4}}  # a router's choice is no rounding


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "kimi_linear"])
def test_beams_and_bfloat16(family):
    model, x = tiny(family, **DENSE.get(family, {})), tokens(2, 9)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None,
               "pad_token_id": 0}  # fmt: skip
    plain = model.generate(x, attention_mask=torch.ones_like(x), **options)
    linattn.accelerate(model)
    assert torch.equal(model.generate(x, attention_mask=torch.ones_like(x), **options), plain)
    linattn.decelerate(model)
    exact = model(x).logits
    half = copy.deepcopy(model).bfloat16()
    plain_error = (half(x).logits - exact).norm()
    linattn.accelerate(half)
    assert (half(x).logits - exact).norm() <= 2 * plain_error + 2**-8 * exact.norm()


def test_gradient_checkpointing_recomputes_on_the_same_path():
    model, x = tiny("qwen3_next").train(), tokens(2, 20)
    linattn.accelerate(model)
    _, _, wanted = results(model, x)
    model.gradient_checkpointing_enable()
    _, _, found = results(model, x)
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
    assert {"qwen3_next", "mamba2", "kimi_linear"} <= set(report.changed)
    assert "mamba.mamba_selective_scan" in report.left
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
