"""What linear_attention refuses, and in which words: the argument, what it got, what it needs."""

import inspect

import pytest
import torch

import linattn
from linattn import linear_attention

B, N, H, D = 2, 8, 4, 6
X = torch.randn(B, N, H, D)
G = -torch.rand(B, N, H)


def call(q=X, k=X, v=X, *gates, **options):
    return linear_attention(q, k, v, *gates, **options)


BAD = {
    "no tensor": (lambda: call([1.0]), TypeError, ["q", "list", "torch.Tensor"]),
    "rank": (lambda: call(X[0]), ValueError, ["q", "[8, 4, 6]", "[B, N, H, D]"]),
    "integers": (lambda: call(X.int(), X.int(), X.int()), TypeError, ["q", "int32", "float64"]),
    "mixed": (lambda: call(X, X.double()), TypeError, ["k", "float64", "float32"]),
    "short v (E2)": (lambda: call(v=X[:, :5]), ValueError, ["v", "[2, 5, 4, 6]", "[2, 8]"]),
    "other Dk (E2)": (lambda: call(k=X[..., :5]), ValueError, ["k", "[2, 8, 4, 5]", "Dk = 6"]),
    "heads": (lambda: call(k=X[:, :, :3]), ValueError, ["k", "3 heads", "divides H = 4"]),
    "no heads": (lambda: call(k=X[:, :, :0]), ValueError, ["k", "at least one head"]),
    "gate as [B, H, N] (E2)": (
        lambda: call(X, X, X, G.transpose(1, 2)),
        ValueError,
        ["log_decay", "[2, 4, 8]", "[B, N, H] = [2, 8, 4]"],
    ),
    "gate rank": (
        lambda: call(X, X, X, G[0]),
        ValueError,
        ["log_decay", "[8, 4]", "[H] = [4]", "[B, N, H, Dk] = [2, 8, 4, 6]"],
    ),
    "gate dtype": (lambda: call(X, X, X, G.double()), TypeError, ["log_decay", "float64"]),
    "growing": (
        lambda: call(X, X, X, torch.tensor([-1.0, 0.5, 0, 0])),
        ValueError,
        ["log_decay", "0.5", "<= 0"],
    ),
    "beta [B, N, 1] (E2)": (
        lambda: call(X, X, X, None, G[..., :1]),
        ValueError,
        ["beta", "[2, 8, 1]", "[2, 8, 4]"],
    ),
    "beta dtype": (lambda: call(X, X, X, None, G.half()), TypeError, ["beta", "float16"]),
    "affine delta": (lambda: call(X, X, X, None, G, bias=1.0), ValueError, ["bias", "beta"]),
    "normalised delta": (
        lambda: call(X, X, X, None, G, normalize=True),
        ValueError,
        ["normalize", "beta"],
    ),
    "affine channels": (
        lambda: call(X, X, X, -X.abs(), bias=1.0),
        ValueError,
        ["bias", "[B, N, H, Dk]"],
    ),
    "decay both ways": (
        lambda: call(X, X, X, G, causal=False),
        ValueError,
        ["log_decay", "causal=False"],
    ),
    "delta both ways": (
        lambda: call(X, X, X, None, G, causal=False),
        ValueError,
        ["beta", "causal=False"],
    ),
    "scale": (lambda: call(scale="1"), TypeError, ["scale", "str", "float"]),
    "scale inf": (lambda: call(scale=float("inf")), ValueError, ["scale", "inf", "finite"]),
    "bias": (lambda: call(bias=True), TypeError, ["bias", "bool", "float"]),
    "causal": (lambda: call(causal=1), TypeError, ["causal", "int", "True or False"]),
    "mask dtype": (lambda: call(mask=torch.ones(B, N)), TypeError, ["mask", "float32", "bool"]),
    "mask shape": (
        lambda: call(mask=torch.ones(B, 1, dtype=torch.bool)),
        ValueError,
        ["mask", "[2, 1]", "[2, 8]"],
    ),
    "state heads (E2)": (
        lambda: call(initial_state=torch.zeros(B, 2, D, D)),
        ValueError,
        ["initial_state", "[2, 2, 6, 6]", "[2, 4, 6, 6]"],
    ),
    "affine state": (
        lambda: call(normalize=True, initial_state=torch.zeros(B, H, D, D)),
        ValueError,
        ["initial_state", "Dk + 1", "[2, 4, 7, 7]"],
    ),
    "16-bit state": (
        lambda: call(initial_state=torch.zeros(B, H, D, D, dtype=torch.bfloat16)),
        TypeError,
        ["initial_state", "bfloat16", "float32"],
    ),
    "out_state with gradients": (
        lambda: call(X.clone().requires_grad_(), out_state=torch.zeros(B, H, D, D)),
        ValueError,
        ["out_state", "no_grad"],
    ),
    "packed rows": (
        lambda: call(cu_seqlens=torch.tensor([0, 8])),
        ValueError,
        ["cu_seqlens", "B = 2", "B = 1"],
    ),
    "backend": (lambda: call(backend="cuda"), ValueError, ["backend", "cuda", "chunked"]),
    "missing backend": (lambda: call(backend="triton"), RuntimeError, ["triton", "not available"]),
    "misspelt (E3)": (
        lambda: call(output_final_sate=True),
        TypeError,
        ["output_final_sate"],
    ),
}
for _bad, _words in {
    (1, 8): ["first value of 1", "0"],
    (0, 7): ["last value of 7", "N = 8"],
    (0, 99): ["last value of 99", "N = 8"],
    (0, 5, 3, 8): ["5 then 3", "never fall"],
    (0,): ["[1]", "[S + 1]"],
}.items():
    BAD[f"cu_seqlens {_bad} (E2)"] = (
        lambda b=_bad: call(X[:1], X[:1], X[:1], cu_seqlens=torch.tensor(b)),
        ValueError,
        ["cu_seqlens", *_words],
    )
BAD["cu_seqlens dtype"] = (
    lambda: call(X[:1], X[:1], X[:1], cu_seqlens=torch.tensor([0.0, 8.0])),
    TypeError,
    ["cu_seqlens", "float32", "int32"],
)


@pytest.mark.parametrize("name", BAD)
def test_refused_in_clear_words(name):
    bad, kind, fragments = BAD[name]
    with pytest.raises(kind) as error:
        bad()
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)


def test_signature():
    """Cases E3 and E5: the design's names, order and defaults; no **kwargs in anything public."""
    parameters = inspect.signature(linear_attention).parameters
    names = "q k v log_decay beta causal scale bias normalize mask initial_state return_state"
    assert list(parameters) == [*names.split(), "out_state", "cu_seqlens", "backend"]
    assert parameters["normalize"].default is False
    for name in linattn.__all__:
        public = getattr(linattn, name)
        if inspect.isfunction(public):
            kinds = {p.kind for p in inspect.signature(public).parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD not in kinds
