"""The models under transformers: caches, generation, padding, beams."""

import pytest
import torch
from tiny import KINDS, SOME, model, tokens
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from linattn.models import LinattnForCausalLM

kinds = pytest.mark.parametrize("kind", KINDS)
some = pytest.mark.parametrize("kind", SOME)


def close(a, b, tolerance=1e-3):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def greedy(m, prompt, n):
    """Text by whole passes without a cache."""
    for _ in range(n):
        prompt = torch.cat([prompt, m(prompt, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return prompt


@kinds
def test_any_cut_with_a_cache_equals_one_pass(kind):
    """Cases D4 and D5: one token or many after a filled cache, dynamic and static."""
    m, x = model(kind), tokens(2, 20)
    whole = m(x, use_cache=False).logits
    for cuts in ((1, 19), (10, 5, 5), (19, 1), (7, 1, 1, 11)):
        for cache in (DynamicCache(config=m.config), StaticCache(m.config, max_cache_len=20)):
            parts = [m(piece, cache=cache).logits for piece in x.split(cuts, 1)]
            close(torch.cat(parts, 1), whole)


@kinds
def test_greedy_generation_with_left_padding_is_that_of_each_row_alone(kind):
    """Case D7: a prompt of 3 tokens and one of 12; the padding token changes nothing."""
    m = model(kind)
    short, long = tokens(1, 3), tokens(1, 12)
    expected = [greedy(m, short, 20)[0, 3:], greedy(m, long, 20)[0, 12:]]
    for pad in (0, 7):
        x = torch.cat([torch.cat([torch.full((1, 9), pad), short], 1), long])
        mask = torch.ones_like(x)
        mask[0, :9] = 0
        for cache in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
            made = m.generate(x, attention_mask=mask, max_new_tokens=20, do_sample=False, **cache)
            assert torch.equal(made[0, 12:], expected[0])
            assert torch.equal(made[1, 12:], expected[1])


@some
def test_beams_equal_a_search_without_a_cache(kind):
    """Case D14: a beam search by hand that reads the whole prefix at every step."""
    m, beams, steps = model(kind), 4, 8
    prompt = tokens(1, 5)
    made = m.generate(
        prompt, num_beams=beams, max_new_tokens=steps, do_sample=False, length_penalty=0.0,
        eos_token_id=None,
    )  # fmt: skip
    rows, scores = prompt, torch.zeros(1)
    for _ in range(steps):
        more = m(rows, use_cache=False).logits[:, -1].float().log_softmax(-1)
        scores, best = (scores[:, None] + more).flatten().topk(beams)
        rows = torch.cat([rows[best // 50], best[:, None] % 50], 1)
    assert torch.equal(made, rows[:1])


@some
def test_sampling_follows_the_seed(kind):
    m = model(kind)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(m.generate(tokens(1, 4) * 0 + 3, max_new_tokens=20, do_sample=True, top_p=0.9))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_conversation_goes_on_from_its_cache():
    """`generate` twice with one cache: the second prompt has many tokens and a filled cache."""
    for kind in SOME:
        m = model(kind)
        cache = DynamicCache(config=m.config)
        x = tokens(1, 6)
        first = m.generate(x, cache=cache, max_new_tokens=5, do_sample=False)
        again = torch.cat([first, tokens(1, 4)], 1)
        mask = torch.ones_like(again)  # or `generate` takes every token 0 for padding
        second = m.generate(
            again, attention_mask=mask, cache=cache, max_new_tokens=5, do_sample=False
        )
        assert torch.equal(second, greedy(m, again, 5))
    m, cache = model("metala"), DynamicCache(config=model("metala").config)
    m.generate(tokens(1, 6), cache=cache, max_new_tokens=5, do_sample=False)
    with pytest.raises(ValueError, match="input_ids: got 6 tokens with a cache that has seen 10"):
        m.generate(tokens(1, 6), cache=cache, max_new_tokens=5)


@kinds
def test_what_a_cache_holds_does_not_grow_and_is_float32(kind):
    """Cases D19 and E1: the state in float32 in a bfloat16 model too, of constant size."""
    m = model(kind).bfloat16()
    sizes = []
    for n in (12, 40):
        out = m(tokens(2, n), use_cache=True)
        linear = [i for i, t in enumerate(m.config.layer_types) if t == "linear_attention"]
        slots = [out.cache.layers[i] for i in linear]
        wanted = torch.bfloat16 if kind == "convolution" else torch.float32  # inputs, not sums
        assert all(s.recurrent_states[0].dtype == wanted for s in slots)
        sizes.append([s.recurrent_states[0].shape for s in slots])
    assert sizes[0] == sizes[1]


def test_two_thousand_steps_of_bfloat16_do_not_drift():
    """Case D19: weights rounded alike, so that what differs is the recurrence alone."""
    m = model("metala", initializer_range=0.1).bfloat16()
    exact = model("metala", initializer_range=0.1)
    exact.load_state_dict(m.state_dict())
    x = tokens(1, 2000)
    errors = []
    with torch.no_grad():
        wanted = exact(x).logits
        cache = DynamicCache(config=m.config)
        for t in range(2000):
            logits = m(x[:, t : t + 1], cache=cache).logits[:, -1].float()
            errors.append(((logits - wanted[:, t]).norm() / wanted[:, t].norm()).item())
    early, late = sum(errors[100:400]) / 300, sum(errors[-300:]) / 300
    assert late < 1.3 * early
    assert late < 0.05


@some
def test_training_after_and_through_a_cache(kind):
    """Cases D11 and D13: nothing in place, and gradients of a loss on parts are those of one."""
    m = model(kind).train()
    optimizer = torch.optim.SGD(m.parameters(), lr=1e-3)
    x = tokens(2, 12)
    for _ in range(2):
        optimizer.zero_grad()
        m(x, labels=x).loss.backward()
        optimizer.step()
    grads = []
    for cuts in ((12,), (5, 1, 6)):
        cache, parts = DynamicCache(config=m.config), []
        for piece in x.split(cuts, 1):
            parts.append(m(piece, cache=cache).logits)
        loss = torch.cat(parts, 1).square().mean()
        grads.append(torch.autograd.grad(loss, list(m.parameters()), allow_unused=True))
    for a, b in zip(*grads, strict=True):
        close(a, b)


def test_a_model_is_saved_whole_and_loaded_by_the_auto_classes(tmp_path):
    for kind in KINDS:
        m = model(kind)
        folder = tmp_path / kind.replace(" ", "_")
        m.save_pretrained(folder)
        assert (folder / "model.safetensors").exists()
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert type(loaded) is LinattnForCausalLM
        assert loaded.config.mixers == m.config.mixers
        for (name, a), (_, b) in zip(
            m.state_dict().items(), loaded.state_dict().items(), strict=True
        ):
            assert torch.equal(a, b), name
        x = tokens(1, 9)
        assert torch.equal(loaded(x).logits, m(x).logits)


def test_prefill_in_chunks_gives_the_same_tokens():
    for kind in ("metala", "hybrid", "softmax"):
        m, x = model(kind), tokens(1, 15)
        if not hasattr(DynamicCache(config=m.config).layers[0], "get_seq_length"):
            continue  # transformers before 5.25 does not count the tokens of a linear layer
        chunked = m.generate(x, max_new_tokens=6, do_sample=False, prefill_chunk_size=4)
        assert torch.equal(chunked, greedy(m, x, 6))


def test_assisted_generation_is_refused():
    """A recurrence does not go back to before the tokens that the model would not have said."""
    for kind in ("metala", "hybrid"):
        with pytest.raises(ValueError, match=r"assisted generation is not|records its past"):
            model(kind).generate(tokens(1, 6), max_new_tokens=4, prompt_lookup_num_tokens=2)


def test_a_cache_has_the_methods_of_contrastive_users():
    m = model("metala")
    cache = DynamicCache(config=m.config)
    m(tokens(2, 5), cache=cache)
    before = [s.clone() for layer in cache.layers for s in (layer.recurrent_states[0],)]
    cache.reorder_cache(torch.tensor([1, 0]))
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.recurrent_states[0], old.flip(0))
    cache.reset()
    x = tokens(2, 7)
    close(m(x, cache=cache).logits, m(x, use_cache=False).logits)
