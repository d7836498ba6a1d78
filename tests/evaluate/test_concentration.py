"""Implicit maps and how concentrated they are, against maps written down whole."""

import math

import pytest
import torch

from linattn.evaluate import concentration as module
from linattn.evaluate.attention_map import record, whole
from linattn.evaluate.concentration import concentration
from linattn.models import LinattnConfig, LinattnForCausalLM, LinattnForSequenceClassification
from linattn.models.mixers import MIXERS
from linattn.ops import linear_attention

N = 24


def model(mixer, kind=LinattnForCausalLM, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "initializer_range": 0.3}  # fmt: skip
    return kind(LinattnConfig(mixer=mixer, **{**sizes, **changes}))


def maps_of(mixer, **changes):
    tokens = torch.randint(40, (1, changes.pop("tokens", N)))
    return record(model(mixer, **changes), {"input_ids": tokens})


@pytest.mark.parametrize("mixer", [m for m in MIXERS if m != "convolution"])
def test_the_map_is_the_derivative_of_the_operators_output(mixer):
    """Row i of P is d o_i / d v, whatever the recurrence."""
    (found,) = maps_of(mixer)
    P = whole(found)
    assert found.causal
    assert P.triu(1).abs().max() == 0
    if mixer == "softmax":
        torch.testing.assert_close(P.sum(-1), torch.ones(2, N))
        return
    v = torch.randn(1, N, found.heads, 3, requires_grad=True)
    arguments = (found.q, found.k, v, found.log_decay, found.beta)
    o = linear_attention(*arguments, **found.options, backend="reference")
    for head, token in ((0, 0), (1, 5), (0, N - 1)):
        (gradient,) = torch.autograd.grad(o[0, token, head, 1], v, retain_graph=True)
        torch.testing.assert_close(P[head, token], gradient[0, :, head, 1], rtol=1e-4, atol=1e-5)
        gradient[0, :, head, 1] = 0
        assert gradient.abs().max() == 0  # of its own head and channel alone


def test_a_few_tokens_are_recorded_too():
    """They take the decoding kernel's way."""
    torch.manual_seed(3)
    tokens, m = torch.randint(40, (1, N)), model("metala")
    short, long = (record(m, {"input_ids": tokens[:, :n]}) for n in (9, N))
    assert len(short) == 1
    torch.testing.assert_close(whole(short[0]), whole(long[0])[:, :9, :9], rtol=1e-4, atol=1e-6)


def test_blocks_of_columns_make_the_whole_map():
    for mixer in ("metala", "softmax", "gated_delta_net", "linear"):
        (found,) = maps_of(mixer)
        parts = torch.cat([found.columns(i, min(i + 7, N)) for i in range(0, N, 7)], -1)
        torch.testing.assert_close(parts, whole(found), rtol=1e-4, atol=1e-6)


def dense(P, causal):
    """All of a head's numbers from its definition."""
    above = P.clamp(min=0)
    shares = above / above.sum(-1, keepdim=True)
    rows = -torch.special.xlogy(shares, shares).sum(-1)
    seen = torch.arange(1, len(P) + 1) if causal else torch.full((len(P),), len(P))
    relative = (rows / seen.log())[1 if causal else 0 :]
    values = torch.linalg.eigvals(shares).abs().sort(descending=True).values
    centred = shares - shares.mean(0)
    return {
        "entropy": rows.mean(), "relative_entropy": relative.mean(),
        "clipped": (-P.clamp(max=0)).sum() / P.abs().sum(), "row_sum": P.sum(-1).mean(),
        "second_eigenvalue": values[1], "spectral_gap": 1 - values[1],
        "singular_value": torch.linalg.svdvals(centred)[0],
    }  # fmt: skip


class Given:
    """A map that is written down."""

    def __init__(self, P, causal):
        self.P, self.causal = P[None], causal
        self.heads, self.tokens = 1, P.shape[-1]

    def columns(self, first, last):
        return self.P[:, :, first:last]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("iterated", [False, True])
def test_every_number_is_its_definition(causal, iterated, monkeypatch):
    """Also where the map is never whole: eigenvalues and singular values by iteration."""
    torch.manual_seed(1)
    P = torch.randn(N, N, dtype=torch.double) + 0.5
    P = P.tril() if causal else P
    P[:, 0] = P[:, 0].abs() + 0.1  # no empty row
    if iterated:
        monkeypatch.setattr(module, "DENSE", 0)
    found = concentration(Given(P, causal), block=5)
    for name, wanted in dense(P, causal).items():
        assert getattr(found, name)[0] == pytest.approx(float(wanted), rel=1e-3, abs=1e-6), name
    assert found.empty_rows == [0.0]


@pytest.mark.parametrize("base", [2.0, 10.0])
def test_known_maps(base):
    even = concentration(Given(torch.ones(8, 8), False), base=base)
    assert even.entropy[0] == pytest.approx(math.log(8, base))
    assert even.relative_entropy[0] == pytest.approx(1)
    assert even.spectral_gap[0] == pytest.approx(1)  # all rows alike
    assert even.singular_value[0] == pytest.approx(0, abs=1e-9)
    itself = concentration(Given(torch.eye(8), True), base=base)
    assert itself.entropy[0] == pytest.approx(0)
    assert itself.spectral_gap[0] == pytest.approx(0)
    minus = -torch.eye(8)
    minus[:, 0] = 1
    minus[3] = -1
    found = concentration(Given(minus.tril(), True))
    assert found.empty_rows == [1 / 8]
    assert found.entropy[0] == pytest.approx(0)


def test_a_first_row_that_is_left_out_is_not_the_first_eigenvalue():
    P = torch.tensor([[-1.0, 0, 0], [1, 1, 0], [1, 1, 2]])
    found = concentration(Given(P, True))
    assert found.second_eigenvalue[0] == pytest.approx(0.5)  # diagonal 0, 1/2, 1/2
    P = torch.tensor([[-1.0, 0, 0], [0, 1, 0], [1, 1, 2]])
    assert concentration(Given(P, True)).second_eigenvalue[0] == pytest.approx(0.5)


def test_bidirectional_layers_have_a_map_for_each_direction():
    kind = LinattnForSequenceClassification
    tokens = {"input_ids": torch.randint(40, (1, N))}
    assert len(record(model("metala", kind, bidirectional=True), tokens)) == 2
    (found,) = record(model("linear", kind, bidirectional=True), tokens)
    assert not found.causal
    torch.testing.assert_close(whole(found).sum(-1), torch.ones(2, N))
    (found,) = record(model("softmax", kind, bidirectional=True), tokens)
    assert not found.causal
    assert whole(found)[0, 0, 1:].min() > 0


def test_bad_input_is_named():
    m = model("metala")
    with pytest.raises(ValueError, match="inputs: got 2 rows"):
        record(m, {"input_ids": torch.ones(2, 5, dtype=torch.long)})
    with pytest.raises(ValueError, match="inputs: got one token"):
        record(m, {"input_ids": torch.ones(1, 1, dtype=torch.long)})
    with pytest.raises(ValueError, match="model: got layers without a map"):
        record(model("convolution"), {"input_ids": torch.ones(1, 5, dtype=torch.long)})
    with pytest.raises(ValueError, match="model: got Linear; expected a model of this library"):
        record(torch.nn.Linear(2, 2), {})
    with pytest.raises(ValueError, match="base: got 1"):
        concentration(Given(torch.eye(4), True), base=1.0)
    with pytest.raises(ValueError, match="attention: got 1 tokens"):
        concentration(Given(torch.eye(1), True))
