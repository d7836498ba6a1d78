"""Compile every Triton kernel ahead of time, without a GPU, and look at what came out.

    python tools/triton_compile.py                    all targets, dtypes and widths
    python tools/triton_compile.py --target sm_90     some of them

The library's own host code runs on meta tensors with a driver that has no device, and each launch
becomes a compilation, so the signatures are the real ones. Prints and writes (CSV) registers,
spilled bytes, shared memory and tensor-core instructions of each kernel. Fails on shared memory
beyond what a block of the target has, and on spills beyond tools/triton_spills.csv.
"""

import concurrent.futures
import csv
import itertools
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # pinned: its default changes from 3.9 to 3.10

import torch
import triton
import typer
from rich.console import Console
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from linattn.testing import Case, make_inputs
from linattn.train.record import whole

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # bytes a block may have
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = (32, 64, 96, 128, 256)
KINDS = {
    "plain": {},
    "affine token": {"bias": 1.5, "normalize": True, "decay": "token"},
    "every token": {"bias": 1.5, "normalize": True, "causal": False},
    "channel": {"decay": "channel"},
    "delta": {"delta": True},
    "delta token": {"delta": True, "decay": "token"},
    "delta channel": {"delta": True, "decay": "channel"},
    "convolution": {},
}
ALLOWED = Path(__file__).with_name("triton_spills.csv")


@dataclass
class Row:
    """A compiled kernel."""

    target: str
    dtype: str
    width: int
    kind: str
    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core_instructions: int


class _Driver:
    """What launching asks of a driver, for a device that is not there."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # What was compiled is kept by device: another number for each target.
        return list(TARGETS.values()).index(self.target)

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(target: str, dtype: str, width: int, kind: str) -> list[Row]:
    """Return the kernels of one kind of call, forward, backward and step."""
    triton.runtime.driver.set_active(_Driver(TARGETS[target]))
    found: dict[str, Any] = {}

    def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[f"{len(found):02d} {self.__name__}"] = compiled

    run, JITFunction.run = JITFunction.run, launch
    hip, torch.version.hip = torch.version.hip, "6" if target == "gfx942" else None
    try:
        _call(kind, width, DTYPES[dtype])
    finally:
        JITFunction.run, torch.version.hip = run, hip
    return [
        Row(target, dtype, width, kind, name, *_measures(target, compiled))
        for name, compiled in found.items()
    ]


def _call(kind: str, width: int, dtype: torch.dtype) -> None:
    """Run the host's side of a kind of call on meta tensors."""
    from linattn.triton import additive, convolution, delta, step

    def meta(x: torch.Tensor) -> torch.Tensor:
        return x.to("meta")

    if kind == "convolution":
        x, weight, bias = (torch.empty(s, dtype=dtype, device="meta")
                           for s in ((1, 300, width), (width, 4), (width,)))  # fmt: skip
        state = torch.empty(1, 3, width, dtype=dtype, device="meta")
        o, final = convolution.forward(x, weight, bias, True, None, state, None)
        convolution.backward(o, final, x, weight, bias, True, None, state, None)
        return
    inputs = make_inputs(Case(N=300, B=1, Dk=width, Dv=width, dtype=dtype, state=True,
                              **KINDS[kind]))  # type: ignore[arg-type] # fmt: skip
    x = {name: meta(y) for name, y in inputs.tensors.items()}
    q, k, v, g, beta = (x.get(name) for name in ("q", "k", "v", "log_decay", "beta"))
    options = {"scale": 0.1, **inputs.options}
    affine = (options["scale"], options["bias"], options["normalize"])
    if beta is None:
        rest = (q, k, v, g, None, x["initial_state"], None, *affine, options["causal"])
        o, state, saved = additive.forward(*rest, False)
        additive.backward(o, state, state, saved, *rest)
    else:
        rest = (q, k, v, g, beta, None, x["initial_state"], None, options["scale"])
        o, state, saved = delta.forward(*rest, False)
        delta.backward(o, state, state, saved, *rest)
    token = [None if y is None else y if y.dim() == 1 else y[:, :1] for y in (q, k, v, g, beta)]
    step.forward(*token, None, x["initial_state"], None, *affine)


def _measures(target: str, compiled: Any) -> tuple[int, int, int, int]:
    """Return registers, spilled bytes, shared bytes and tensor-core instructions."""
    shared = int(compiled.metadata.shared)
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s*(\d+)", text)[1])
        spilled = int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)[1])
        return registers, spilled, shared, len(re.findall(r"\bv_mfma", text))
    ptx = compiled.asm["ptx"]
    used = re.search(r"\.target\s+(\S+)", ptx)[1].rstrip(",")
    ptxas = get_ptxas(TARGETS[target].arch).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        more = ["--regAllocOptLevel=2", f"--gpu-name={used}"]  # as Triton calls it
        command = [ptxas, "-v", *more, source, "-o", Path(folder) / "out"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"ptxas: {done.stderr}")
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr))
    return registers, spilled, shared, len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)", ptx))


Key = tuple[str, str, str, str]


def _key(row: Row) -> Key:
    """Return what spills are listed by: target, dtype, width and the kernel, whatever the call."""
    return row.target, row.dtype, str(row.width), row.kernel.split()[1]


def _allowed() -> dict[Key, int]:
    """Return the reviewed spills in bytes."""
    with ALLOWED.open() as file:
        return {(r[0], r[1], r[2], r[3]): int(r[4]) for r in list(csv.reader(file))[1:]}


def _accept(rows: list[Row]) -> None:
    """Write the most that each kernel of the rows spills to the list; others stay."""
    seen = {_key(row) for row in rows}
    most = {key: n for key, n in _allowed().items() if key not in seen}
    for row in rows:
        if row.spilled_bytes > 0:
            most[_key(row)] = max(most.get(_key(row), 0), row.spilled_bytes)
    with ALLOWED.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["target", "dtype", "width", "kernel", "spilled_bytes"])
        writer.writerows([*key, n] for key, n in sorted(most.items()))


def _write(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def main(
    target: Annotated[list[str] | None, typer.Option(help="Some of the targets.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Some of the dtypes.")] = None,
    width: Annotated[list[int] | None, typer.Option(help="Some of Dk = Dv.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Some kinds of call.")] = None,
    output: Annotated[Path, typer.Option(help="CSV file.")] = Path("runs/triton_compile.csv"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    accept: Annotated[
        bool, typer.Option(help="Take what spills into the list, for review.")
    ] = False,
) -> None:
    """Compile and check."""
    for name, given, known in (
        ("target", target, TARGETS), ("dtype", dtype, DTYPES), ("kind", kind, KINDS)
    ):  # fmt: skip
        for one in given or ():
            if one not in known:
                raise typer.BadParameter(f"{name}: got {one!r}; expected one of {list(known)}")
    cases = list(itertools.product(target or TARGETS, dtype or DTYPES, width or WIDTHS,
                                   kind or KINDS))  # fmt: skip
    rows: list[Row] = []
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        waiting = [pool.submit(compile_all, *case) for case in cases]
        for done in track(concurrent.futures.as_completed(waiting), total=len(waiting)):
            rows += done.result()
    rows.sort(key=lambda r: (r.target, r.dtype, r.width, r.kind, r.kernel))
    output.parent.mkdir(parents=True, exist_ok=True)
    whole(output, lambda path: _write(path, rows))
    if accept:
        _accept(rows)
    allowed, wrong = _allowed(), []
    for r in rows:
        name = (r.target, r.dtype, str(r.width), r.kind, r.kernel)
        if r.shared_bytes > SHARED[r.target]:
            wrong.append(f"{' '.join(name)}: {r.shared_bytes} bytes of shared memory")
        # Versions of the assembler differ by a few bytes.
        if r.spilled_bytes > allowed.get(_key(r), 0) + 16:
            wrong.append(f"{' '.join(name)}: {r.spilled_bytes} bytes spilled")
    console = Console(markup=False)
    for t in dict.fromkeys(r.target for r in rows):
        own = [r for r in rows if r.target == t]
        spilling = sum(r.spilled_bytes > 0 for r in own)
        cores = sum(r.tensor_core_instructions > 0 for r in own)
        console.print(
            f"{t}: {len(own)} kernels, {cores} with tensor cores, most registers "
            f"{max(r.registers for r in own)}, most shared memory "
            f"{max(r.shared_bytes for r in own)} bytes, {spilling} spill"
        )
    console.print(f"triton {triton.__version__}, {output}")
    if wrong:
        console.print("\n".join(wrong))
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
