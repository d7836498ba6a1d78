"""The models in training: packed rows, Trainer, LoRA, checkpointing, compiled, loaded again."""

import pytest
import torch
from tiny import KINDS, SOME, config, model, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from linattn.models import LinattnConfig, LinattnForCausalLM, LinattnModel
from linattn.models.tokenizers import byte_tokenizer

kinds = pytest.mark.parametrize("kind", KINDS)
some = pytest.mark.parametrize("kind", SOME)


def close(a, b, tolerance=1e-3):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@kinds
def test_packed_rows_equal_separate_sequences(kind):
    """Cases D8 and E6: logits, loss and gradients, however the bounds are given."""
    m, lengths = model(kind), [5, 1, 33, 3]
    x = tokens(1, 42)
    bounds = torch.tensor([0, 5, 6, 39, 42])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    parts = x.split(lengths, 1)
    logits = torch.cat([m(part, use_cache=False).logits for part in parts], 1)
    losses = [m(part, labels=part).loss * (part.shape[1] - 1) for part in parts if part.numel() > 1]
    loss = sum(losses) / (42 - 4)
    wanted = torch.autograd.grad(loss, list(m.parameters()), allow_unused=True)
    for how in ({"cu_seq_lens_q": bounds}, {"position_ids": positions}):
        out = m(x, labels=x, **how)
        close(out.logits, logits)
        close(out.loss, loss)
        found = torch.autograd.grad(out.loss, list(m.parameters()), allow_unused=True)
        for a, b in zip(found, wanted, strict=True):
            close(a, b)


@some
def test_a_collator_of_transformers_packs(kind):
    from transformers import DataCollatorWithFlattening

    m = model(kind)
    rows = [{"input_ids": tokens(n).tolist()} for n in (7, 4, 12)]
    batch = DataCollatorWithFlattening(return_tensors="pt")(rows)
    apart = [torch.tensor([row["input_ids"]]) for row in rows]
    losses = [m(x, labels=x).loss * (x.shape[1] - 1) for x in apart]
    close(m(**batch).loss, sum(losses) / (23 - 3))


def test_packing_that_no_mixer_could_keep_apart_is_refused():
    m, x = model("metala"), tokens(2, 6)
    again = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1)
    with pytest.raises(ValueError, match="position_ids: got 2 rows that start again"):
        m(x, position_ids=again)
    bounds = torch.tensor([0, 3, 6])
    with pytest.raises(ValueError, match="cu_seqlens: got input_ids with B = 2 rows"):
        m(x, cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match="last value of 6; expected N = 5"):
        m(x[:1, :5], cu_seq_lens_q=bounds)
    out = m(x[:1], use_cache=True)
    with pytest.raises(ValueError, match="cu_seq_lens_q: got packed sequences with a cache"):
        m(x[:1], cu_seq_lens_q=bounds, cache=out.cache)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="cu_seq_lens_q: got packed sequences with padding"):
        m(x[:1], cu_seq_lens_q=bounds, attention_mask=mask)


@some
def test_checkpointing_gives_the_same_gradients(kind):
    m, x = model(kind).train(), tokens(2, 20)
    grads = []
    for again in (False, True):
        if again:
            m.gradient_checkpointing_enable()
        grads.append(torch.autograd.grad(m(x, labels=x).loss, list(m.parameters())))
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-5)


@pytest.mark.parametrize("kind", ["metala", "retention", "hybrid"])
def test_compiled_whole_and_exported(kind):
    """Case D20."""
    m, x = model(kind), tokens(2, 64)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    for n in (64, 65, 66):
        x = tokens(2, n)
        loss, expected = compiled(x, labels=x).loss, m(x, labels=x).loss
        close(loss, expected)
        close(
            torch.autograd.grad(loss, m.lm_head.weight)[0],
            torch.autograd.grad(expected, m.lm_head.weight)[0],
        )
    with torch.no_grad():
        program = torch.export.export(m, (x,), {"use_cache": False})
        close(program.module()(x, use_cache=False).logits, m(x, use_cache=False).logits)


def test_logits_to_keep_hidden_states_and_embeddings():
    m, x = model("metala"), tokens(2, 9)
    logits = m(x).logits
    assert torch.equal(m(x, logits_to_keep=2).logits, logits[:, -2:])
    assert torch.equal(m(x, logits_to_keep=torch.tensor([0, 4])).logits, logits[:, [0, 4]])
    out = m(x, output_hidden_states=True)
    assert [h.shape for h in out.hidden_states] == [(2, 9, 32)] * 3
    assert torch.equal(m(inputs_embeds=m.model.embed_tokens(x)).logits, logits)


@kinds
def test_lora_adapts_every_projection_and_merges_exactly(kind):
    """Case D17."""
    peft = pytest.importorskip("peft")
    x = tokens(2, 20)
    plain = model(kind)
    names = sorted(
        {n.rsplit(".", 1)[1] for n, p in plain.model.layers.named_modules()
         if isinstance(p, torch.nn.Linear) and not n.rsplit(".", 1)[1].isdigit()}
    )  # fmt: skip
    m = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=names))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        m(input_ids=x, labels=x).loss.backward()
        optimizer.step()
    adapters = {n: p for n, p in m.named_parameters() if "lora_" in n}
    assert len(adapters) >= 2 * 2 * 4  # the feed-forward part has three, a mixer at least one
    assert all(p.grad.abs().sum() > 0 for p in adapters.values())
    m.eval()
    logits = m(input_ids=x).logits
    close(m.merge_and_unload()(x).logits, logits)


def test_lora_finds_its_targets_without_being_told():
    peft = pytest.importorskip("peft")
    m = peft.get_peft_model(
        model("metala"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    assert sum("lora_A" in n for n, _ in m.named_parameters()) == 4


@pytest.mark.parametrize("kind", ["lightning", "metala", "hybrid"])
def test_three_steps_of_trainer_and_an_evaluation(kind, tmp_path):
    """Case D15: the last batch is short, and metrics are computed from the logits."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": x, "labels": x} for x in tokens(6, 12)]
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=2, per_device_eval_batch_size=4,
        eval_strategy="steps", eval_steps=3, report_to=[], use_cpu=True, save_steps=3,
    )  # fmt: skip
    m = model(kind, dropout=0.1)
    before = {n: p.clone() for n, p in m.named_parameters()}
    trainer = Trainer(
        m, arguments, train_dataset=rows, eval_dataset=rows,
        compute_metrics=lambda out: {"shape": float(out.predictions.shape == (6, 12, 50))},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[-2]["eval_shape"] == 1.0
    assert all(not torch.equal(p, before[n]) for n, p in m.named_parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    x = tokens(1, 5)
    assert torch.equal(loaded(x).logits, m.eval()(x).logits)


@kinds
@pytest.mark.parametrize("tied", [True, False])
def test_loading_leaves_every_weight_as_it_was_saved(kind, tied, tmp_path):
    """Case D16: also where a key is missing, and in bfloat16."""
    m = model(kind, tie_word_embeddings=tied)
    assert (m.lm_head.weight is m.model.embed_tokens.weight) is tied
    with torch.no_grad():
        for i, p in enumerate(m.parameters()):
            p.fill_(0.125 * (i + 1))
    state = m.state_dict()
    m.save_pretrained(tmp_path)
    loaded = LinattnForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), name
    loaded = LinattnForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name].bfloat16()), name

    special = ("A_log", "dt_bias", "D", "augmentation_weight", "convolution.weight", "log_decay",
               "slope", "norm_weight")  # fmt: skip
    gone = [n for n in state if n.endswith(special) and "layers.0." in n]
    kept = {n: v for n, v in state.items() if n not in gone and not (tied and "lm_head" in n)}
    m.save_pretrained(tmp_path / "less", state_dict=kept)
    loaded = LinattnForCausalLM.from_pretrained(tmp_path / "less").state_dict()
    fresh = LinattnForCausalLM(config(kind)).state_dict()
    for name, value in loaded.items():
        if name not in gone:
            assert torch.equal(value, state[name]), name
        elif name.endswith(("D", "augmentation_weight", "log_decay", "slope", "norm_weight")):
            assert torch.equal(value, fresh[name]), name
        elif name.endswith("A_log"):
            assert ((value >= -4.7) & (value <= 2.8)).all()
        else:
            assert value.isfinite().all()
            assert value.unique().numel() > 1


def test_the_auto_classes_know_the_models():
    c = AutoConfig.for_model("linattn", hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    assert type(c) is LinattnConfig
    assert type(AutoModel.from_config(c)) is LinattnModel
    assert type(AutoModelForCausalLM.from_config(c)) is LinattnForCausalLM


def test_first_weights_are_in_their_documented_ranges():
    m = LinattnForCausalLM(config("mamba2", initializer_range=0.02))
    assert abs(m.model.embed_tokens.weight.std() - 0.02) < 2e-3
    mixer = m.model.layers[0].mixer
    assert abs(mixer.in_proj.weight.std() - 0.02) < 2e-3
    assert ((mixer.A_log.exp() >= 1) & (mixer.A_log.exp() <= 16)).all()
    assert torch.equal(mixer.D, torch.ones(2))


def test_the_byte_tokenizer_is_the_bytes(tmp_path):
    t = byte_tokenizer()
    for text in ("def f(x):\n\treturn x", "naïve — 中文 🙂 ¡\xa0\x7f", "", " a  b "):
        assert t(text).input_ids == list(text.encode())
        assert t.decode(list(text.encode())) == text
    t.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("é\n").input_ids == list("é\n".encode())
    assert again.pad_token_id == again.eos_token_id == 0


def test_lm_eval_scores_a_saved_model(tmp_path):
    """The harness, on the log-likelihood of continuations, agrees with the model itself."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    m = model("hybrid", vocab_size=256)
    m.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    harness = huggingface.HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2)
    pairs = [("import", " os"), ("def f(x):", " return x"), ("a", "b")]
    found = harness.loglikelihood(
        [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    )
    for (context, text), (score, _) in zip(pairs, found, strict=True):
        x = torch.tensor([list((context + text).encode())])
        logs = m(x).logits.log_softmax(-1)[0, len(context) - 1 : -1]
        close(torch.tensor(score), logs.gather(1, x[0, len(context) :, None]).sum())


BAD = {
    "mixer": ({"mixer": "mamba"}, r"mixer: got 'mamba'; expected one of \('metala'"),
    "list": ({"mixer": ["gla", "gla", "gla"], "num_hidden_layers": 4}, "mixer: got 3 names"),
    "option": (
        {"mixer_options": {"gla": {"rank": 3}}},
        r"mixer_options: got 'rank' for 'gla'; expected some of \['key_dim'",
    ),
    "size": ({"hidden_size": 0}, "hidden_size: got 0; expected an int >= 1"),
    "dropout": ({"dropout": 1.0}, "dropout: got 1.0; expected a rate"),
    "pooling": ({"pooling": "max"}, "pooling: got 'max'; expected one of"),
    "misspelt": ({"num_layers": 3}, "num_layers: got an unknown option; expected one of"),
    "heads": ({"hidden_size": 30, "num_attention_heads": 4}, "dim: got 30"),
    "both ways": ({"bidirectional": True}, "bidirectional: got True; expected False"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configurations_are_named(name):
    changes, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        LinattnForCausalLM(LinattnConfig(**{"num_hidden_layers": 2, **changes}))


X = torch.ones(2, 8, dtype=torch.long)
ROW = torch.arange(8)[None]
CALLS = {
    "tokens": ({"input_ids": X + 60}, "input_ids: got tokens 61 to 61; expected 0 to vocab_size"),
    "negative": ({"input_ids": -X}, "input_ids: got tokens -1"),
    "floats": ({"input_ids": X.float()}, "input_ids: got torch.float32"),
    "long mask": ({"attention_mask": X.new_ones(2, 10)}, r"attention_mask: got shape \[2, 10\]"),
    "short mask": ({"attention_mask": X.new_ones(2, 7)}, r"attention_mask: got shape \[2, 7\]"),
    "one row": ({"attention_mask": X.new_ones(1, 8)}, r"attention_mask: got shape \[1, 8\]"),
    "added": ({"attention_mask": torch.zeros(2, 8)}, "attention_mask: got torch.float32"),
    "list": ({"attention_mask": [[1] * 8] * 2}, "attention_mask: got list"),
    "labels turned": ({"labels": X.T}, r"labels: got shape \[8, 2\]; expected \[2, 8\]"),
    "labels of floats": ({"labels": X.float()}, "labels: got torch.float32"),
    "moved labels": ({"shift_labels": X[:, 1:]}, r"shift_labels: got shape \[2, 7\]"),
    "both labels": ({"labels": X, "shift_labels": X}, "shift_labels: got both with labels"),
    "keep": ({"logits_to_keep": -1}, "logits_to_keep: got -1"),
    "keep true": ({"logits_to_keep": True}, "logits_to_keep: got True"),
    "positions": ({"position_ids": ROW[:, 1:]}, r"position_ids: got shape \[1, 7\]"),
    "positions of floats": ({"position_ids": ROW.float()}, "position_ids: got torch.float32"),
    "keys alone": ({"cu_seq_lens_k": torch.tensor([0, 8])}, "cu_seq_lens_k: got it without"),
    "other keys": (
        {"input_ids": X[:1], "cu_seq_lens_q": torch.tensor([0, 8]),
         "cu_seq_lens_k": torch.tensor([0, 3, 8])},
        r"cu_seq_lens_k: got \[0, 3, 8\]",
    ),
    "no cache": ({"cache": "no"}, "cache: got str"),
    "bare cache": ({"cache": DynamicCache()}, "cache: got 0 layers; expected 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["metala", "softmax", "hybrid"])
def test_bad_arguments_of_a_call_are_named(kind, name):
    changes, message = CALLS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        model(kind)(**{"input_ids": X, **changes})


def test_a_cache_of_another_model_is_refused():
    with pytest.raises(ValueError, match="cache: got 4 layers; expected 2"):
        model("metala")(X, cache=DynamicCache(config=config("metala", num_hidden_layers=4)))
    with pytest.raises(ValueError, match=r"cache: got a .* for layer 0, linear_attention"):
        model("metala")(X, cache=DynamicCache(config=config("softmax")))
    for kind in ("hybrid", "softmax", "metala"):
        m = model(kind)
        cache = m(X, use_cache=True).cache
        with pytest.raises(ValueError, match=r"attention_mask: got .*\[2, 1\] or \[2, 9\]"):
            m(X[:, :1], attention_mask=X.new_ones(2, 11), cache=cache)
        m(X[:, :1], attention_mask=X.new_ones(2, 9), cache=cache)


def test_labels_at_their_position():
    """shift_labels say what shall be said at a position; labels the tokens themselves."""
    m, x = model("metala"), tokens(2, 9)
    moved = torch.full_like(x, -100)
    moved[:, :-1] = x[:, 1:]
    assert torch.equal(m(x, shift_labels=moved).loss, m(x, labels=x).loss)


def test_layers_without_a_feed_forward_part():
    m = model("gla", intermediate_size=0)
    assert not any("feed_forward" in name for name, _ in m.named_parameters())
    layer, x = m.model.layers[0], torch.randn(1, 5, 32)
    close(layer(x, None, None, None, None), x + layer.mixer(layer.mixer_norm(x)))


def test_bad_calls_are_named():
    m = model("metala")
    with pytest.raises(ValueError, match="input_ids: got neither with inputs_embeds"):
        m()
    with pytest.raises(ValueError, match=r"attention_mask: got shape \[1, 1, 4, 4\]"):
        m(tokens(1, 4), attention_mask=torch.ones(1, 1, 4, 4))
    x = tokens(1, 4)
    with pytest.raises(TypeError, match="atention_mask: got an unknown argument"):
        m(x, atention_mask=torch.ones(1, 4))
    with pytest.raises(TypeError, match="output_hidden_state: got an unknown argument"):
        m.model(x, output_hidden_state=True)
    with pytest.raises(ValueError, match="output_attentions: got True"):
        m(x, output_attentions=True)
    learned = model("learned positions", max_position_embeddings=8)
    with pytest.raises(ValueError, match="position 8 with learned positions"):
        learned(tokens(1, 9))
