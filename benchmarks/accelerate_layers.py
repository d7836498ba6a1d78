"""Layers of transformers' models at their published sizes, before and after `accelerate`.

    python benchmarks/accelerate_layers.py --output runs/accelerate

One linear layer each of the size of Qwen3-Next (16 key and 32 value heads of 128), Mamba-2 1.3B,
Kimi-Linear and Mamba 1.4B. Both ways run in turns in one process, the best of a few counts. Writes
layers.csv.
"""

import copy
import csv
import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import (
    DynamicCache,
    KimiLinearConfig,
    Mamba2Config,
    MambaConfig,
    Qwen3NextConfig,
)
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.utils import logging

import linattn
from linattn.bench import machine
from linattn.train.record import whole

TWO = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
LAYERS: dict[str, tuple[type, Any]] = {
    "Qwen3-Next": (Qwen3NextGatedDeltaNet, Qwen3NextConfig(**TWO)),
    "Mamba-2 1.3B": (
        Mamba2Mixer,
        Mamba2Config(num_hidden_layers=1, hidden_size=2048, num_heads=64, n_groups=1),
    ),
    "Kimi-Linear": (KimiLinearDeltaAttention, KimiLinearConfig(**TWO)),
    "Mamba 1.4B": (MambaMixer, MambaConfig(num_hidden_layers=1, hidden_size=2048)),
}
REPEATS = {"prefill": 3, "decode": 30, "training": 2}


def run(layer: torch.nn.Module, config: Any, what: str, N: int, dtype: torch.dtype) -> float:
    """Return the seconds of a pass over N tokens, of one token behind them, or of a step."""
    x = torch.randn(1, N, config.hidden_size, dtype=dtype)
    if what == "training":
        layer.train()
        x.requires_grad_()
        start = time.perf_counter()
        layer(x).sum().backward()
        return time.perf_counter() - start
    layer.eval()
    with torch.inference_mode():
        if what == "prefill":
            start = time.perf_counter()
            layer(x)
            return time.perf_counter() - start
        cache = DynamicCache(config=config)
        layer(x[:, :64], cache=cache)
        start = time.perf_counter()
        layer(x[:, :1], cache=cache)
        return time.perf_counter() - start


def main(
    output: Annotated[Path, typer.Option(help="Folder.")] = Path("runs/accelerate"),
    tokens: Annotated[int, typer.Option(help="Of the prefill and the training step.")] = 2048,
    layer: Annotated[list[str] | None, typer.Option(help="Some of the layers.")] = None,
) -> None:
    """Time every layer in float32 and bfloat16."""
    logging.set_verbosity_error()
    output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    print(f"{machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, dtype in itertools.product(layer or LAYERS, (torch.float32, torch.bfloat16)):
        kind, config = LAYERS[name]
        torch.manual_seed(0)
        plain = kind(config, 0).to(dtype)
        fast = copy.deepcopy(plain)
        for what, repeats in REPEATS.items():
            best = {"plain": float("inf"), "linattn": float("inf")}
            for _ in range(repeats):
                best["plain"] = min(best["plain"], run(plain, config, what, tokens, dtype))
                with linattn.accelerated(fast):
                    best["linattn"] = min(best["linattn"], run(fast, config, what, tokens, dtype))
            row = {
                "layer": name, "dtype": str(dtype).removeprefix("torch."), "what": what,
                "plain_ms": 1e3 * best["plain"], "linattn_ms": 1e3 * best["linattn"],
                "ratio": best["plain"] / best["linattn"], "machine": machine(),
                "threads": torch.get_num_threads(), "torch": torch.__version__,
            }  # fmt: skip
            rows.append(row)
            print(f"{name:14s} {row['dtype']:9s} {what:9s} {row['plain_ms']:9.1f} ms "
                  f"{row['linattn_ms']:8.1f} ms {row['ratio']:6.1f}x", flush=True)  # fmt: skip

            def write(path: Path) -> None:
                with path.open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)

            whole(output / "layers.csv", write)


if __name__ == "__main__":
    typer.run(main)
