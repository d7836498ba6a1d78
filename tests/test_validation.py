"""What linear_attention refuses, in which words, by every backend, before anything is written."""

import pytest
import torch

import linattn
from linattn import linear_attention
from operator_calls import any_backend

B, N, H, DK, DV = 2, 6, 4, 3, 5


def arguments(**changes):
    x = {
        "q": torch.randn(B, N, H, DK),
        "k": torch.randn(B, N, H, DK),
        "v": torch.randn(B, N, H, DV),
    }
    return {**x, **changes}


def packed(**changes):
    return {name: x[:1] for name, x in arguments().items()} | changes


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


LONG = torch.int64
# name of the case: (arguments, exception, words of the message in order)
BAD = {
    # types
    "q a list": (arguments(q=[1.0]), TypeError, ["q: got list", "torch.Tensor"]),
    "k None": (arguments(k=None), TypeError, ["k: got NoneType", "torch.Tensor"]),
    "v a number": (arguments(v=1.0), TypeError, ["v: got float", "torch.Tensor"]),
    "log_decay a number": (arguments(log_decay=-1.0), TypeError, ["log_decay: got float"]),
    "beta a number": (arguments(beta=0.5), TypeError, ["beta: got float", "Tensor"]),
    "mask a list": (arguments(mask=[True]), TypeError, ["mask: got list", "Tensor"]),
    "state a list": (arguments(initial_state=[0.0]), TypeError, ["initial_state: got list"]),
    "out_state a list": (arguments(out_state=[0.0]), TypeError, ["out_state: got list"]),
    "cu_seqlens a list": (packed(cu_seqlens=[0, 6]), TypeError, ["cu_seqlens: got list"]),
    "causal an int": (arguments(causal=1), TypeError, ["causal: got int 1", "True or False"]),
    "normalize None": (arguments(normalize=None), TypeError, ["normalize: got NoneType", "True"]),
    "return_state str": (arguments(return_state="y"), TypeError, ["return_state: got str 'y'"]),
    "scale a str": (arguments(scale="1"), TypeError, ["scale: got str '1'", "a float"]),
    "scale a tensor": (arguments(scale=torch.ones(())), TypeError, ["scale: got Tensor", "float"]),
    "scale a bool": (arguments(scale=True), TypeError, ["scale: got bool True", "a float"]),
    "bias None": (arguments(bias=None), TypeError, ["bias: got NoneType", "a float"]),
    "backend None": (arguments(backend=None), TypeError, ["backend: got NoneType", "str"]),
    # values
    "scale nan": (arguments(scale=float("nan")), ValueError, ["scale: got nan", "finite"]),
    "scale inf": (arguments(scale=float("inf")), ValueError, ["scale: got inf", "finite"]),
    "bias -inf": (arguments(bias=float("-inf")), ValueError, ["bias: got -inf", "finite"]),
    "backend unknown": (arguments(backend="cuda"), ValueError, ["backend: got 'cuda'", "chunked"]),
    # ranks
    "q 3": (arguments(q=t(B, N, DK)), ValueError, ["q: got shape [2, 6, 3]", "[B, N, H, D]"]),
    "k 2": (arguments(k=t(B, N)), ValueError, ["k: got shape [2, 6]", "[B, N, H, D]"]),
    "v 5": (arguments(v=t(B, N, H, DV, 1)), ValueError, ["v: got shape", "[B, N, H, D]"]),
    "q no heads": (arguments(q=t(B, N, 0, DK)), ValueError, ["q: got shape", "one head"]),
    "v no channels": (arguments(v=t(B, N, H, 0)), ValueError, ["v: got shape", "one channel"]),
    "k of another B": (arguments(k=t(3, N, H, DK)), ValueError, ["k: got shape [3", "[2, 6]"]),
    # dtypes
    "q int": (arguments(q=t(B, N, H, DK, dtype=LONG)), TypeError, ["q: got torch.int64"]),
    "q complex": (
        arguments(q=t(B, N, H, DK, dtype=torch.complex64)), TypeError, ["q: got torch.complex64"],
    ),
    "k double": (arguments(k=t(B, N, H, DK).double()), TypeError,
                 ["k: got torch.float64", "torch.float32", "the dtype of q"]),
    "v half": (arguments(v=t(B, N, H, DV).half()), TypeError, ["v: got torch.float16", "float32"]),
    "log_decay double": (arguments(log_decay=t(H).double()), TypeError,
                         ["log_decay: got torch.float64", "torch.float32"]),
    "log_decay bf16": (arguments(log_decay=t(B, N, H).bfloat16()), TypeError,
                       ["log_decay: got torch.bfloat16", "torch.float32"]),
    "beta int": (arguments(beta=t(B, N, H, dtype=LONG)), TypeError, ["beta: got torch.int64"]),
    "mask float": (arguments(mask=t(B, N)), TypeError, ["mask: got torch.float32", "torch.bool"]),
    "mask int": (arguments(mask=t(B, N, dtype=LONG)), TypeError, ["mask: got torch.int64", "bool"]),
    "cu float": (packed(cu_seqlens=t(2)), TypeError, ["cu_seqlens: got torch.float32", "int32"]),
    "state double": (arguments(initial_state=t(B, H, DK, DV).double()), TypeError,
                     ["initial_state: got torch.float64", "torch.float32"]),
    "state fp16": (arguments(initial_state=t(B, H, DK, DV).half()), TypeError,
                   ["initial_state: got torch.float16", "torch.float32 or torch.bfloat16"]),
    "out_state half": (arguments(out_state=t(B, H, DK, DV).half()), TypeError,
                       ["out_state: got torch.float16", "torch.float32"]),
    # devices
    "k device": (arguments(k=t(B, N, H, DK, device="meta")), ValueError,
                 ["k: got device meta", "device cpu"]),
    "v device": (arguments(v=t(B, N, H, DV, device="meta")), ValueError, ["v: got device meta"]),
    "log_decay device": (arguments(log_decay=t(H, device="meta")), ValueError,
                         ["log_decay: got device meta", "device cpu, as q"]),
    "beta device": (arguments(beta=t(B, N, H, device="meta")), ValueError,
                    ["beta: got device meta", "cpu"]),
    "mask device": (arguments(mask=t(B, N, dtype=torch.bool, device="meta")), ValueError,
                    ["mask: got device meta", "cpu"]),
    "state device": (arguments(initial_state=t(B, H, DK, DV, device="meta")), ValueError,
                     ["initial_state: got device meta", "cpu"]),
    # layouts
    "q sparse": (arguments(q=t(B, N, H, DK).to_sparse()), ValueError,
                 ["q: got torch.sparse_coo", "dense"]),
    "v mkldnn": (arguments(v=t(B, N, H, DV).to_mkldnn()), ValueError,
                 ["v: got torch._mkldnn", "dense"]),
    "beta sparse": (arguments(beta=t(B, N, H).to_sparse()), ValueError,
                    ["beta: got torch.sparse_coo", "dense"]),
    "mask sparse": (arguments(mask=(t(B, N) > 0).to_sparse()), ValueError,
                    ["mask: got torch.sparse_coo", "dense"]),
    "state sparse": (arguments(initial_state=t(B, H, DK, DV).to_sparse()), ValueError,
                     ["initial_state: got torch.sparse_coo", "dense"]),
    # heads
    "q heads": (arguments(q=t(B, N, 3, DK)), ValueError, ["q: got 3 heads", "divides H = 4"]),
    "k heads": (arguments(k=t(B, N, 3, DK)), ValueError, ["k: got 3 heads", "divides H = 4"]),
    "v heads": (arguments(v=t(B, N, 6, DV)), ValueError, ["q: got 4 heads", "divides H = 6"]),
    # case E2
    "gate [B, H, N]": (arguments(log_decay=t(B, H, N)), ValueError,
                       ["log_decay: got shape [2, 4, 6]", "[B, N, H] = [2, 6, 4]"]),
    "gate [B, N]": (arguments(log_decay=t(B, N)), ValueError,
                    ["log_decay: got shape [2, 6]", "[H] = [4]", "[B, N, H, Dk] = [2, 6, 4, 3]"]),
    "gate a scalar": (arguments(log_decay=t()), ValueError, ["log_decay: got shape []", "[H]"]),
    "gate [N]": (arguments(log_decay=t(N)), ValueError, ["log_decay: got shape [6]", "[H] = [4]"]),
    "gate [B, N, H, 1]": (arguments(log_decay=t(B, N, H, 1)), ValueError,
                          ["log_decay: got shape [2, 6, 4, 1]", "[B, N, H, Dk] = [2, 6, 4, 3]"]),
    "gate [B, N, H, Dv]": (arguments(log_decay=t(B, N, H, DV)), ValueError,
                           ["log_decay: got shape [2, 6, 4, 5]", "[2, 6, 4, 3]"]),
    "gate of another B": (arguments(log_decay=t(1, N, H)), ValueError,
                          ["log_decay: got shape [1, 6, 4]", "[2, 6, 4]"]),
    "gate NaN": (arguments(log_decay=torch.tensor([-1.0, torch.nan, 0.0, -2.0])), ValueError,
                 ["log_decay: got", "nan", "<= 0"]),
    "gate positive": (arguments(log_decay=torch.tensor([-1.0, 0.0, 0.5, -2.0])), ValueError,
                      ["log_decay: got", "0.5", "<= 0"]),
    "beta [B, N, 1]": (arguments(beta=t(B, N, 1)), ValueError,
                       ["beta: got shape [2, 6, 1]", "[B, N, H] = [2, 6, 4]"]),
    "beta [B, H, N]": (arguments(beta=t(B, H, N)), ValueError,
                       ["beta: got shape [2, 4, 6]", "[B, N, H] = [2, 6, 4]"]),
    "beta [H]": (arguments(beta=t(H)), ValueError, ["beta: got shape [4]", "[B, N, H]"]),
    "v shorter": (arguments(v=t(B, N - 1, H, DV)), ValueError,
                  ["v: got shape [2, 5, 4, 5]", "[B, N] = [2, 6]"]),
    "k shorter": (arguments(k=t(B, N - 1, H, DK)), ValueError,
                  ["k: got shape [2, 5, 4, 3]", "[B, N] = [2, 6]"]),
    "k of another D": (arguments(k=t(B, N, H, DK + 1)), ValueError,
                       ["k: got shape [2, 6, 4, 4]", "Dk = 3"]),
    "state with fewer heads": (arguments(initial_state=t(B, 1, DK, DV)), ValueError,
                               ["initial_state: got shape [2, 1, 3, 5]", "[2, 4, 3, 5]"]),
    "state transposed": (arguments(initial_state=t(B, H, DV, DK)), ValueError,
                         ["initial_state: got shape [2, 4, 5, 3]", "[2, 4, 3, 5]"]),
    "state of one row": (arguments(initial_state=t(1, H, DK, DV)), ValueError,
                         ["initial_state: got shape [1, 4, 3, 5]", "[2, 4, 3, 5]"]),
    "state without the constant": (
        arguments(initial_state=t(B, H, DK, DV), bias=1.0), ValueError,
        ["initial_state: got shape [2, 4, 3, 5]", "[B, H, Dk + 1, Dv + 1]", "[2, 4, 4, 6]"],
    ),
    "state with the constant": (
        arguments(initial_state=t(B, H, DK + 1, DV + 1)), ValueError,
        ["initial_state: got shape [2, 4, 4, 6]", "[B, H, Dk, Dv]", "[2, 4, 3, 5]"],
    ),
    "out_state normalised": (arguments(out_state=t(B, H, DK, DV), normalize=True), ValueError,
                             ["out_state: got shape", "[2, 4, 4, 6]"]),
    "mask [N]": (arguments(mask=t(N, dtype=torch.bool)), ValueError,
                 ["mask: got shape [6]", "[B, N] = [2, 6]"]),
    "mask [B, N, 1]": (arguments(mask=t(B, N, 1, dtype=torch.bool)), ValueError,
                       ["mask: got shape [2, 6, 1]", "[B, N]"]),
    "cu B = 2": (arguments(cu_seqlens=torch.tensor([0, 6])), ValueError,
                 ["cu_seqlens: got q with B = 2", "B = 1"]),
    "cu falls": (packed(cu_seqlens=torch.tensor([0, 4, 2, 6])), ValueError,
                 ["cu_seqlens: got 4 then 2", "never fall"]),
    "cu past N": (packed(cu_seqlens=torch.tensor([0, 3, 7])), ValueError,
                  ["cu_seqlens: got a last value of 7", "N = 6"]),
    "cu past N inside": (packed(cu_seqlens=torch.tensor([0, 9, 6])), ValueError,
                         ["cu_seqlens: got 9 then 6", "never fall"]),
    "cu ends early": (packed(cu_seqlens=torch.tensor([0, 3, 5])), ValueError,
                      ["cu_seqlens: got a last value of 5", "N = 6"]),
    "cu starts late": (packed(cu_seqlens=torch.tensor([1, 6])), ValueError,
                       ["cu_seqlens: got a first value of 1", "0"]),
    "cu negative": (packed(cu_seqlens=torch.tensor([0, -1, 6])), ValueError,
                    ["cu_seqlens: got 0 then -1", "never fall"]),
    "cu one bound": (packed(cu_seqlens=torch.tensor([0])), ValueError,
                     ["cu_seqlens: got shape [1]", "[S + 1]"]),
    "cu 2 dimensions": (packed(cu_seqlens=torch.tensor([[0, 6]])), ValueError,
                        ["cu_seqlens: got shape [1, 2]", "[S + 1]"]),
    "a packed state per row": (
        packed(cu_seqlens=torch.tensor([0, 2, 6]), initial_state=t(1, H, DK, DV)), ValueError,
        ["initial_state: got shape [1, 4, 3, 5]", "[2, 4, 3, 5]"],
    ),
    # combinations without a definition
    "decay without causality": (arguments(causal=False, log_decay=t(H)), ValueError,
                                ["log_decay: got a decay with causal=False", "None"]),
    "beta without causality": (arguments(causal=False, beta=t(B, N, H)), ValueError,
                               ["beta: got a delta rule with causal=False", "None"]),
    "bias with beta": (arguments(bias=1.0, beta=t(B, N, H)), ValueError,
                       ["bias: got 1.0 with beta", "bias=0.0"]),
    "normalize with beta": (arguments(normalize=True, beta=t(B, N, H)), ValueError,
                            ["normalize: got True with beta", "normalize=False"]),
    "bias with channels": (arguments(bias=1.0, log_decay=t(B, N, H, DK)), ValueError,
                           ["bias: got 1.0 with log_decay [B, N, H, Dk]", "bias=0.0"]),
    "normalize with channels": (arguments(normalize=True, log_decay=t(B, N, H, DK)), ValueError,
                                ["normalize: got True with log_decay", "normalize=False"]),
}  # fmt: skip


@any_backend
@pytest.mark.parametrize("bad", BAD)
def test_bad_input(backend, bad):
    """Case E2 and design section 6, the same words whatever the backend."""
    call, kind, words = BAD[bad]
    call = {"backend": backend, **call}
    with pytest.raises(kind) as error:
        linear_attention(**call)
    assert error.type is kind
    message = str(error.value)
    position = 0
    for word in words:
        assert word in message[position:], message
        position = message.index(word, position)
    assert "; expected " in message


@pytest.mark.parametrize(
    "bad", [name for name, (call, *_) in BAD.items() if "out_state" not in call]
)
def test_bad_input_is_refused_before_anything_is_written(bad):
    call, kind, _ = BAD[bad]
    out = torch.full((B, H, DK, DV), 7.0)
    with pytest.raises(kind):
        linear_attention(**call, out_state=out)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize(
    "word", ["output_final_sate", "output_final_state", "head_first", "initial_states", "cu_seqlen"]
)
def test_a_misspelt_keyword_is_a_type_error(word):
    """Case E3."""
    with pytest.raises(TypeError, match=word):
        linear_attention(**arguments(), **{word: True})


def test_options_are_keywords_only():
    x = arguments()
    with pytest.raises(TypeError, match="positional"):
        linear_attention(x["q"], x["k"], x["v"], None, None, True)


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_a_named_backend_that_is_missing_says_why(name):
    """It never falls back."""
    status = linattn.backends()[name]
    if status.available:
        pytest.skip("available here")
    with pytest.raises(RuntimeError) as error:
        linear_attention(**arguments(), backend=name)
    assert name in str(error.value)
    assert status.reason
    assert status.reason in str(error.value)


@any_backend
def test_what_is_not_bad_is_accepted(backend):
    """Integers for numbers, an int32 cu_seqlens, gates of 0: no error where nothing is wrong."""
    o = linear_attention(**arguments(scale=1, bias=1, normalize=True), backend=backend)
    assert o.shape == (B, N, H, DV)
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)
    o = linear_attention(**packed(cu_seqlens=cu_seqlens, log_decay=t(H)), backend=backend)
    assert o.shape == (1, N, H, DV)
    for shape in ((0, N), (B, 0), (0, 0)):
        x = {n: t(*shape, H, D) for n, D in (("q", DK), ("k", DK), ("v", DV))}
        o, state = linear_attention(**x, return_state=True, backend=backend)
        assert o.shape == (*shape, H, DV)
        assert state.shape == (shape[0], H, DK, DV)
        assert not state.any()


@any_backend
def test_bounds_cannot_be_mapped(backend):
    q = torch.zeros(1, 4, 1, 2)
    bounds = torch.tensor([[0, 2, 4], [0, 1, 4]])
    with pytest.raises(ValueError, match=r"cu_seqlens: got bounds mapped by torch.vmap"):
        torch.vmap(lambda c: linear_attention(q, q, q, cu_seqlens=c, backend=backend))(bounds)
