"""The operators inside of transformers' layers at published sizes, plain and on linattn.

    python benchmarks/accelerate_operators.py --output runs/accelerate

Short convolution and recurrence without the projections around them: 2048 tokens from nothing, and
one token behind a state. Both ways run in turns in one process, the best of a few. Writes
operators.csv.
"""

import csv
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.utils import logging

from linattn.bench import machine
from linattn.integrations import transformers as adapters
from linattn.train.record import whole

Work = Callable[[Any], object]  # takes the functions: of a modeling file, or the adapters


def convolution(channels: int, N: int, dtype: torch.dtype) -> Work:
    """Return the short convolution with SiLU, several tokens or one."""
    x = torch.randn(1, N, channels).to(dtype).transpose(1, 2)  # as a projection gives it
    weight = torch.randn(channels, 4).to(dtype)
    state = torch.randn(1, channels, 4).to(dtype)
    if N > 1:
        return lambda f: f.causal_conv1d_fn(x, weight, None, activation="silu")
    return lambda f: f.causal_conv1d_update(x, state, weight, None, "silu")


def delta(K: int, V: int, N: int, dtype: torch.dtype, *, channel: bool) -> Work:
    """Return the gated delta rule of K key and V value heads of 128, in float32 as the layers."""
    q, k = (torch.randn(1, N, K, 128).to(dtype) for _ in range(2))
    v, beta = torch.randn(1, N, V, 128).to(dtype), torch.rand(1, N, V).to(dtype)
    g = -torch.rand(1, N, V, 128) if channel else -torch.rand(1, N, V)
    if not channel:  # the layer repeats keys for the plain form and for ours alike
        q, k = (x.repeat_interleave(V // K, dim=2) for x in (q, k))
    state = torch.randn(1, V, 128, 128) if N == 1 else None
    name = {True: "recurrent", False: "chunk"}[N == 1]
    name = f"{name}_kimi_delta_attention" if channel else f"torch_{name}_gated_delta_rule"
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return lambda f: getattr(f, name)(q, k, v, g=g, beta=beta, initial_state=state, **options)


def scan2(N: int, dtype: torch.dtype) -> Work:
    """Return Mamba-2's scan: 64 heads of 64 channels, 128 states."""
    x, dt = torch.randn(1, N, 64, 64).to(dtype), torch.randn(1, N, 64).to(dtype)
    A, D, bias = -torch.rand(64), torch.ones(64), torch.zeros(64)
    B, C = (torch.randn(1, N, 1, 128).to(dtype) for _ in range(2))
    if N > 1:
        return lambda f: f.mamba2_chunk_scan(
            x, dt, A, B, C, chunk_size=256, D=D, dt_bias=bias, dt_softplus=True,
            return_final_states=True,
        )  # fmt: skip
    state = torch.randn(1, 64, 64, 128)
    wide = [y[:, None].expand(64, 64) for y in (D, bias)]
    return lambda f: f.mamba2_selective_state_update(
        state, x[:, 0], dt[:, 0, :, None].expand(1, 64, 64), A[:, None, None].expand(64, 64, 128),
        B[:, 0], C[:, 0], D=wide[0], dt_bias=wide[1], dt_softplus=True,
    )  # fmt: skip


def scan1(N: int, dtype: torch.dtype) -> Work:
    """Return Mamba-1's scan: 4096 channels, 16 states."""
    x, z = (torch.randn(1, N, 4096).to(dtype).transpose(1, 2) for _ in range(2))
    dt = torch.randn(1, 4096, N).to(dtype)
    A = -torch.arange(1, 17).float().expand(4096, 16).contiguous()
    B, C = (torch.randn(1, N, 16).to(dtype).transpose(1, 2) for _ in range(2))
    D, bias = torch.ones(4096), torch.randn(4096) - 3
    if N > 1:
        return lambda f: f.mamba_selective_scan(
            x, dt, A, B, C, D=D, z=z, delta_bias=bias, delta_softplus=True, return_last_state=True
        )
    state = torch.randn(1, 4096, 16)
    return lambda f: f.mamba_selective_state_update(
        state, x[..., 0], dt[..., 0], A, B[..., 0], C[..., 0], D, z=z[..., 0], dt_bias=bias,
        dt_softplus=True,
    )  # fmt: skip


# The modeling file, and its operators for N tokens in a dtype.
LAYERS: dict[str, tuple[Any, Callable[[int, torch.dtype], list[Work]]]] = {
    "Qwen3-Next": (
        qwen,
        lambda N, t: [convolution(8192, N, t), delta(16, 32, N, t, channel=False)],
    ),
    "Kimi-Linear": (
        kimi,
        lambda N, t: [*(convolution(4096, N, t) for _ in range(3)),
                      delta(32, 32, N, t, channel=True)],
    ),
    "Mamba-2 1.3B": (mamba2, lambda N, t: [convolution(4352, N, t), scan2(N, t)]),
    "Mamba 1.4B": (mamba, lambda N, t: [convolution(4096, N, t), scan1(N, t)]),
}  # fmt: skip
REPEATS = {2048: (2, 5), 1: (50, 50)}  # of the plain form, of linattn's


def best(works: list[Work], functions: Any, repeats: int) -> float:
    """Return the least seconds of all works together."""
    times = []
    with torch.inference_mode():
        for _ in range(repeats):
            start = time.perf_counter()
            for work in works:
                work(functions)
            times.append(time.perf_counter() - start)
    return min(times)


def main(
    output: Annotated[Path, typer.Option(help="Folder.")] = Path("runs/accelerate"),
    layer: Annotated[list[str] | None, typer.Option(help="Some of the layers.")] = None,
) -> None:
    """Time the operators of every layer in float32 and bfloat16."""
    logging.set_verbosity_error()
    output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    print(f"{machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    kinds = itertools.product(layer or LAYERS, (torch.float32, torch.bfloat16), REPEATS)
    for name, dtype, N in kinds:
        torch.manual_seed(0)
        module, make = LAYERS[name]
        works = make(N, dtype)
        plain = best(works, module, REPEATS[N][0])
        ours = best(works, adapters, REPEATS[N][1])
        plain = min(plain, best(works, module, REPEATS[N][0]))
        rows.append({
            "layer": name, "dtype": str(dtype).removeprefix("torch."), "tokens": N,
            "plain_ms": 1e3 * plain, "linattn_ms": 1e3 * ours, "ratio": plain / ours,
            "machine": machine(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        })  # fmt: skip
        print(f"{name:14s} {rows[-1]['dtype']:9s} {N:5d} {1e3 * plain:9.3f} ms "
              f"{1e3 * ours:8.3f} ms {plain / ours:6.1f}x", flush=True)  # fmt: skip

        def write(path: Path) -> None:
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)

        whole(output / "operators.csv", write)


if __name__ == "__main__":
    typer.run(main)
