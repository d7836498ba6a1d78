"""Triton kernels on a GPU: right, how fast, how much memory.

    python benchmarks/gpu.py                     on the GPU of this machine, in under 8 minutes
    python benchmarks/gpu.py --device cpu        in Triton's interpreter: whether this script runs

First every kind of call against the token loop. Then forward, and forward with backward, of the
Triton kernels, the chunked backend, torch's flash attention and, where installed, FLA's kernels, on
the same tensors in turns; the median of several counts. FLOPs are those of the recurrence by chunks
of 64, 2 N H (Dk Dv 2 + 64 (Dk + Dv)) forward and 3 times that with backward, for softmax attention
those of its causal half. Beside them this GPU's own matmul rate and copy rate, measured in the same
run. Writes gpu.csv with the chip and all versions.
"""

import csv
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

if "--device" in sys.argv and "cpu" in sys.argv:  # read when the kernels are defined
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import typer
from rich.console import Console
from torch import Tensor

import linattn
from linattn.testing import Case, compare, make_inputs
from linattn.train.record import whole

console = Console(markup=False)
CHUNK = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "affine": {"bias": 1.5, "normalize": True},
    "head": {"decay": "head"},
    "token": {"decay": "token"},
    "channel": {"decay": "channel"},
    "delta": {"delta": True},
    "delta token": {"delta": True, "decay": "token"},
    "delta channel": {"delta": True, "decay": "channel"},
    "every token": {"causal": False},
}
TIMED = ("plain", "token", "channel", "delta token", "delta channel")
SHAPES = ((1, 8192, 8, 64), (1, 8192, 8, 128), (4, 4096, 16, 128), (1, 65536, 8, 64))


@dataclass
class Row:
    """A method in one shape."""

    method: str
    kind: str
    dtype: str
    shape: str
    what: str
    milliseconds: float
    tflops: float
    gb_per_second: float  # of the inputs and outputs, each once a pass
    peak_mib: float  # above what the inputs and outputs take
    matmul_tflops: float
    copy_gb_per_second: float
    machine: str
    versions: str


def check(seconds: float) -> int:
    """Compare every kind in every dtype with the token loop; return how many are wrong."""
    wrong, start = 0, time.monotonic()
    for kind, options in KINDS.items():
        for name, dtype in DTYPES.items():
            if time.monotonic() - start > seconds:
                console.print(f"stopped after {seconds:.0f} s")
                return wrong
            for more in ({"N": 130, "Dk": 40, "Dv": 64}, {"lengths": (5, 0, 70), "mask": True}):
                case = {"B": 1, "heads": (2, 1, 2), "state": True, **options, **more}
                found = compare(make_inputs(Case(**case, dtype=dtype)), "triton")
                wrong += bool(found)
                for line in found:
                    console.print(f"WRONG {kind} {name} {more}: {line}")
    return wrong


def clock(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the median seconds of a call, after three that do not count."""
    counts = []
    for i in range(repeats + 3):
        if device == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            seconds = first.elapsed_time(last) / 1e3
        else:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        if i >= 3 or device != "cuda":
            counts.append(seconds)
    return statistics.median(counts)


def ceilings(dtype: torch.dtype, device: str, repeats: int) -> tuple[float, float]:
    """Return this machine's matmul rate in TFLOP/s and its copy rate in GB/s."""
    n = 8192 if device == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    flops = 2 * n**3 / clock(lambda: a @ b, device, repeats)
    x = torch.empty(n * n, device=device)
    y = torch.empty_like(x)
    return flops / 1e12, 2 * x.numel() * 4 / clock(lambda: y.copy_(x), device, repeats) / 1e9


def methods(kind: str) -> dict[str, Callable[..., Tensor]]:
    """Return what computes a kind of call, by name: from q, k, v and gates to o."""

    def ours(backend: str) -> Callable[..., Tensor]:
        return lambda **x: linattn.linear_attention(**x, backend=backend)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return attention.transpose(1, 2)

    found = {"triton": ours("triton"), "chunked": ours("chunked")}
    if kind == "plain":
        found["softmax"] = flash
    if importlib.util.find_spec("fla") is not None:
        found.update(_fla(kind))
    return found


def _fla(kind: str) -> dict[str, Callable[..., Tensor]]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    by_kind: dict[str, Callable[..., Tensor]] = {
        "plain": lambda q, k, v: chunk_simple_gla(q, k, v)[0],
        "token": lambda q, k, v, log_decay: chunk_simple_gla(q, k, v, g=log_decay)[0],
        "channel": lambda q, k, v, log_decay: chunk_gla(q, k, v, g=log_decay)[0],
        "delta token": lambda q, k, v, log_decay, beta: chunk_gated_delta_rule(
            q, k, v, g=log_decay, beta=beta
        )[0],
        "delta channel": lambda q, k, v, log_decay, beta: chunk_kda(
            q, k, v, g=log_decay, beta=beta
        )[0],
    }
    return {"fla": by_kind[kind]} if kind in by_kind else {}


def measure(
    kind: str, name: str, shape: tuple[int, int, int, int], device: str, repeats: int,
    about: dict[str, Any],
) -> list[Row]:  # fmt: skip
    """Time every method of a kind in one shape."""
    (B, N, H, D), dtype, rows = shape, DTYPES[name], []
    case = Case(N=N, B=B, Dk=D, Dv=D, heads=(H, H, H), dtype=dtype, strength=0.1, **KINDS[kind])
    inputs = make_inputs(case).to(device)
    x = {n: t.requires_grad_() for n, t in inputs.tensors.items()}
    matmul, copy = ceilings(dtype, device, repeats)
    for method, call in methods(kind).items():
        flops = 2 * B * N * H * (2 * D * D + CHUNK * 2 * D)
        if method == "softmax":
            flops = 2 * B * H * N * N * D
        try:
            grad = torch.randn_like(call(**x))
            passes = {
                "forward": lambda call=call: _without_gradients(call, x),
                "forward+backward": lambda call=call, grad=grad: torch.autograd.grad(
                    call(**x), list(x.values()), grad
                ),
            }
            for times, (what, run) in zip((1, 3), passes.items(), strict=True):
                seconds = clock(run, device, repeats)
                moved = sum(t.numel() * t.element_size() for t in (*x.values(), grad))
                peak = _peak(run) if device == "cuda" else 0.0
                rows.append(Row(
                    method, kind, name, f"B{B} N{N} H{H} D{D}", what, 1e3 * seconds,
                    times * flops / seconds / 1e12, times * moved / seconds / 1e9, peak,
                    matmul, copy, **about,
                ))  # fmt: skip
        except torch.OutOfMemoryError:
            console.print(f"{method} {kind} {name} {shape}: out of memory")
            torch.cuda.empty_cache()
    return rows


def _without_gradients(call: Callable[..., Tensor], x: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return call(**x)


def _peak(run: Callable[[], Any]) -> float:
    """Return the most memory that a run takes beside what was there, in MiB."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _write(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu to test this script.")] = "cuda",
    output: Annotated[Path, typer.Option(help="Folder.")] = Path("runs/gpu"),
    seconds: Annotated[float, typer.Option(help="After this no other shape is begun.")] = 420.0,
    shape: Annotated[list[str] | None, typer.Option(help="Shapes BxNxHxD.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Some kinds of call.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Counts of each.")] = 10,
) -> None:
    """Check, then measure."""
    if device not in ("cuda", "cpu") or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"device: got {device!r}; expected cuda with a GPU, or cpu")
    start = time.monotonic()
    chip = torch.cuda.get_device_name() if device == "cuda" else "interpreter"
    about = {
        "machine": chip,
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, "
        f"linattn {linattn.__version__}",
    }
    console.print(f"{chip}, {about['versions']}")
    wrong = check(seconds / 4)
    console.print(f"checked: {wrong} wrong, {time.monotonic() - start:.0f} s")
    shapes = SHAPES if shape is None else [tuple(int(n) for n in s.split("x")) for s in shape]
    rows: list[Row] = []
    output.mkdir(parents=True, exist_ok=True)
    for sizes in shapes:
        for name in ("bfloat16", "float32"):
            for one in kind or TIMED:
                if time.monotonic() - start > seconds:
                    continue
                found = measure(one, name, sizes, device, repeats, about)
                rows += found
                whole(output / "gpu.csv", functools.partial(_write, rows))
                for r in found:
                    console.print(
                        f"{r.shape:22s} {r.dtype:9s} {r.kind:14s} {r.what:17s} {r.method:8s} "
                        f"{r.milliseconds:9.3f} ms {r.tflops:7.2f} of {r.matmul_tflops:6.1f} "
                        f"TFLOP/s {r.gb_per_second:6.0f} of {r.copy_gb_per_second:5.0f} GB/s "
                        f"{r.peak_mib:8.0f} MiB",
                        soft_wrap=True,
                    )
    console.print(f"{output / 'gpu.csv'}, {time.monotonic() - start:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
