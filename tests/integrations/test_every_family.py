"""Every family of transformers that calls what has an adapter: the same results, accelerated."""

import ast
import copy
import importlib
from pathlib import Path

import pytest
import torch
import transformers
from budget import FACTOR, excess, noise, results
from tiny_families import DENSE, FAMILIES, tiny, tokens

import linattn
from linattn.integrations import patches
from linattn.integrations import transformers as adapters

families = pytest.mark.parametrize("family", FAMILIES)
# Their scan begins with several tokens behind a filled cache as if it were empty, whoever runs it.
MAMBA_1 = ("mamba", "falcon_mamba", "jamba", "zamba")
BEFORE_5_25 = tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (5, 25)
# Why packed sequences are refused, by family: transformers tells their layers too little.
REFUSED = {
    **dict.fromkeys((*MAMBA_1, "inkling"), "does not tell (causal|mamba)"),
    **({"mamba2": "does not tell (causal|mamba)"} if BEFORE_5_25 else {}),
    "granitemoehybrid": "softmax attention of granitemoehybrid mixes",
    "glm5_next": "softmax attention of glm5_next mixes",
}  # fmt: skip
PAD = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}


def test_every_family_of_the_installed_transformers_is_known():
    assert set(patches.families()) == set(FAMILIES)


@families
def test_every_function_around_an_adapted_one_is_known(family):
    """Or the layers that call it, and so what has an adapter, would not know of the switch."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    known = {*patches.ADAPTED, *patches.AROUND, *patches.LEFT}
    for found in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(found, ast.FunctionDef) and found.name not in known:
            names = {node.id for node in ast.walk(found) if isinstance(node, ast.Name)}
            assert names.isdisjoint(known), found.name


@families
def test_logits_loss_and_every_gradient_agree(family, monkeypatch):
    """No further off than what the last bit of the weights makes of them, within a factor."""
    model, x = tiny(family), tokens(2, 37)
    calls = []
    for name in (*patches.ADAPTED, *patches.WHOLE.values()):
        adapter = getattr(adapters, name)

        def counted(*args, adapter=adapter, name=name, **kwargs):
            calls.append(name)
            return adapter(*args, **kwargs)

        monkeypatch.setattr(adapters, name, counted)
    before, most = noise(model, x)
    assert not calls
    report = linattn.accelerate(model)
    assert report.changed
    ratio, worst = excess(results(model, x), before, most)
    assert ratio <= FACTOR, (worst, ratio)
    assert calls
    calls.clear()
    linattn.decelerate(model)
    assert torch.equal(results(model, x)["logits"], before["logits"])
    assert not calls


@families
def test_greedy_tokens_agree(family):
    """32 of them, with a cache, one row padded on the left."""
    model, x = tiny(family), tokens(2, 12)
    mask = torch.ones_like(x)
    mask[0, :4], x[0, :4] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 32, **PAD}
    plain = model.generate(x, **options)
    with linattn.accelerated(model):
        assert torch.equal(model.generate(x, **options), plain)


@families
def test_beams_agree(family):
    model, x = tiny(family), tokens(2, 9)
    options = {"attention_mask": torch.ones_like(x), "max_new_tokens": 8, "num_beams": 3, **PAD}
    plain = model.generate(x, **options)
    with linattn.accelerated(model):
        assert torch.equal(model.generate(x, **options), plain)


# transformers before 5.25 refuses it where states cannot go back. Its own cache of Zamba fails, and
# MiniMax has one of another kind.
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("minimax", "zamba")])
def test_assisted_generation_agrees(family):
    """Guessed tokens that the model would not have said are taken back, in the states too."""
    model, x = tiny(family), tokens(1, 12).repeat(1, 2)

    def generate():
        try:
            return model.generate(x, prompt_lookup_num_tokens=3, max_new_tokens=16, **PAD).tolist()
        except ValueError as error:
            assert BEFORE_5_25
            return str(error)

    plain = generate()
    with linattn.accelerated(model):
        assert generate() == plain


@families
def test_many_tokens_behind_a_filled_cache_agree(family):
    model, x = tiny(family), tokens(1, 30)

    def both_parts():
        first = model(x[:, :11], use_cache=True)
        return model(x[:, 11:], cache=first.cache, use_cache=True).logits

    plain, whole = both_parts(), model(x, use_cache=False).logits
    with linattn.accelerated(model):
        fast = both_parts()
    # The plain form's own difference between two ways to the same logits is rounding too.
    rounding = 0 if family in MAMBA_1 else FACTOR * (plain - whole[:, 11:]).norm()
    allowed = rounding + 1e-5 * plain.norm()
    assert (fast - plain).norm() <= allowed


def decoded(model, embeds):
    """Return the logits of three tokens, each a call, behind a cache of the others."""
    cache = model(inputs_embeds=embeds[:, :-3], use_cache=True).cache
    steps = [
        model(inputs_embeds=embeds[:, t : t + 1], use_cache=True, cache=cache).logits
        for t in range(embeds.shape[1] - 3, embeds.shape[1])
    ]
    return torch.cat(steps, 1)


@families
def test_decoding_with_gradients_on_agrees(family):
    """Without no_grad the cache holds recorded states, which no step may overwrite."""
    model = tiny(family)
    embeds = model.get_input_embeddings()(tokens(1, 12)).detach().requires_grad_()
    with torch.no_grad():
        wanted = decoded(model, embeds)
    linattn.accelerate(model)
    torch.testing.assert_close(decoded(model, embeds), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["inkling", "inkling2", "lfm2", "lfm2_moe", "lfm3"])
def test_gradients_through_a_cache_agree(family):
    """In the families whose plain step has any; the states of others are changed in place."""
    model = tiny(family)
    embeds = model.get_input_embeddings()(tokens(1, 12)).detach().requires_grad_()

    def gradient():
        return torch.autograd.grad(decoded(model, embeds).square().sum(), embeds)[0]

    wanted = gradient()
    linattn.accelerate(model)
    torch.testing.assert_close(gradient(), wanted, rtol=1e-3, atol=1e-5 * wanted.abs().max().item())
    assert wanted[:, :9].abs().max() > 0.01 * wanted.abs().max()  # through the cache


@families
def test_bfloat16_is_as_near_to_float32_as_the_plain_form(family):
    """By the median token of 8 rows: a router of experts may choose otherwise in some."""
    model, x = tiny(family, **DENSE.get(family, {})), tokens(8, 37)
    half = copy.deepcopy(model)
    wide = model._keep_in_fp32_modules_strict or ()
    for name, tensor in (*half.named_parameters(), *half.named_buffers()):
        if tensor.is_floating_point() and not any(keep in name for keep in (*wide, "inv_freq")):
            tensor.data = tensor.data.bfloat16()
    exact = copy.deepcopy(half).float()(x, use_cache=False).logits

    def error():
        off = (half(x, use_cache=False).logits.float() - exact).norm(dim=-1)
        return (off / exact.norm(dim=-1)).median().item()

    plain = error()
    with linattn.accelerated(half):
        assert error() <= 1.5 * plain + 2**-9


def flattened(lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": max(lengths),
        "max_length_k": max(lengths), "use_cache": False,
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
    }  # fmt: skip


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in REFUSED])
def test_a_packed_training_batch_equals_the_separate_sequences(family):
    """As DataCollatorWithFlattening makes it: logits, loss and all gradients."""
    model, lengths = tiny(family), (8, 1, 12)
    x = tokens(1, sum(lengths))
    linattn.accelerate(model)
    labels = x.clone()
    labels[0, [0, 8, 9]] = -100  # the first of a sequence follows nothing
    out = model(x, labels=labels, **flattened(lengths))
    out.loss.backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits, losses = [], 0.0
    for part in x.split(lengths, dim=1):
        alone = model(part, use_cache=False).logits
        logits.append(alone)
        losses += torch.nn.functional.cross_entropy(alone[0, :-1], part[0, 1:], reduction="sum")
    (losses / (sum(lengths) - len(lengths))).backward()
    separate = torch.cat(logits, dim=1)
    assert (out.logits - separate).norm() <= 1e-4 * separate.norm()
    for name, p in model.named_parameters():
        if p.grad is not None and "router" not in name:
            assert (packed[name] - p.grad).norm() <= 1e-3 * p.grad.norm() + 1e-6, name


@pytest.mark.parametrize("family", REFUSED)
def test_packed_sequences_are_refused_where_a_layer_is_not_told(family):
    model = tiny(family)
    linattn.accelerate(model)
    with pytest.raises(ValueError, match=f"cu_seq_lens_q: got packed.*{REFUSED[family]}"):
        model(tokens(1, 20), **flattened((8, 12)))
