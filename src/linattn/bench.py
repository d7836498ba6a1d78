"""The benchmark: time and peak memory against N, D and H, each case in a process of its own.

`run` yields rows as they are measured; `write_csv`, `slopes`, `crossover` and the pictures of
`linattn._bench_plot` are made from rows alone, so that `linattn plot` can make them again.
"""

from __future__ import annotations

import csv
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from linattn._backends import backends
from linattn._bench_methods import METHODS, Problem
from linattn._bench_process import one_pass
from linattn._validation import reject

BOTH = "forward+backward"
PASSES = ("forward", BOTH)
# The paper's shape, then what its reviewers asked for: ViT-B, DiT-S, and a wide head.
SHAPES = ((16, 32), (12, 64), (6, 64), (8, 128))


@dataclass(frozen=True)
class Config:
    """What to measure."""

    methods: tuple[str, ...] = tuple(METHODS)
    shapes: tuple[tuple[int, int], ...] = SHAPES  # (H, D)
    lengths: tuple[int, ...] = (256, 1024, 4096)
    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 0  # 0: torch's own choice
    backend: str = "auto"
    decay: str = "none"
    delta: bool = False
    causal: bool = True
    memory_limit_gib: float = 3.0
    time_limit_s: float = 60.0  # for a pass of a case
    repeat_s: float = 0.15  # spent on repeats of a pass
    keep_memory: bool = True  # on a CPU, between repeats; glibc alone would give it back

    def __post_init__(self) -> None:
        for name, choices in (
            ("methods", tuple(METHODS)),
            ("dtype", ("float64", "float32", "bfloat16", "float16")),
            ("device", ("cpu", "cuda")),
            ("decay", ("none", "head", "token", "channel")),
        ):
            value = getattr(self, name)
            for item in value if isinstance(value, tuple) else (value,):
                if item not in choices:
                    reject(name, repr(item), f"one of {choices}")
        for name in ("methods", "shapes", "lengths"):
            if not getattr(self, name):
                reject(name, "nothing", "at least one")
        if min(self.lengths) < 1 or self.batch < 1 or min(min(s) for s in self.shapes) < 1:
            reject("lengths, batch or shapes", "a size below 1", "sizes >= 1")
        for name in ("memory_limit_gib", "time_limit_s", "repeat_s"):
            if not 0 < getattr(self, name) < math.inf:  # NaN neither
                reject(name, getattr(self, name), "a number > 0")
        if self.threads < 0:
            reject("threads", self.threads, "0, torch's own choice, or a number of threads")
        if self.backend != "auto":
            found = backends().get(self.backend)
            if found is None:
                reject("backend", repr(self.backend), f"one of {('auto', *backends())}")
            if not found.available:
                reject("backend", repr(self.backend), f"an available one: {found.reason}")
        if not self.causal and (self.decay != "none" or self.delta):
            reject("decay", "a decay or delta rule with causal=False", "causal=True")
        if self.device == "cuda" and not torch.cuda.is_available():
            reject("device", "'cuda'", "'cpu': torch finds no CUDA device here")

    def problems(self) -> Iterator[Problem]:
        """Yield every case, lengths innermost."""
        for H, D in self.shapes:
            for method in self.methods:
                for N in sorted(self.lengths):
                    yield Problem(
                        method, self.batch, N, H, D, self.dtype, self.device, self.backend,
                        self.decay, self.delta, self.causal,
                    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One pass of one case. Times in seconds; status "ok", "out of memory", "skipped: ...", ..."""

    method: str
    passed: str  # "forward" or "forward+backward"
    B: int
    N: int
    H: int
    D: int
    dtype: str
    status: str
    best_s: float = math.nan
    median_s: float = math.nan
    repeats: int = 0
    peak_bytes: float = math.nan
    extra_memory_ratio: float = math.nan
    matmul_fraction: float = math.nan


def run(config: Config, matmul_flops: float = math.nan) -> Iterator[tuple[Problem, list[Row]]]:
    """Yield each case with its rows, as soon as it is measured.

    `matmul_flops` is the machine's own rate, for the achieved fraction of linattn's rows.
    After a case that took too long or too much memory, larger N of that method are skipped.
    """
    failed: dict[tuple[str, int, int], str] = {}
    for problem in config.problems():
        key = (problem.method, problem.H, problem.D)
        if key in failed:
            found: dict[str, dict[str, Any]] = {}
            status = f"skipped: {failed[key]}"
        else:
            found, status = _one_case(problem, config)
            if status != "ok":
                failed[key] = f"{status} at N={problem.N}"
        rows = []
        for name in PASSES:
            about = (problem.method, name, problem.B, problem.N, problem.H, problem.D)
            if name in found:
                result = found[name]
                rate = problem.flops()[name] / result["best_s"] / matmul_flops
                result["matmul_fraction"] = rate if problem.method == "linattn" else math.nan
                rows.append(Row(*about, problem.dtype, "ok", **result))
            else:
                rows.append(Row(*about, problem.dtype, status))
        yield problem, rows


def _one_case(problem: Problem, config: Config) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the results of each pass that finished, and "ok" or what went wrong."""
    found: dict[str, dict[str, Any]] = {}
    for passed in PASSES:
        message = one_pass(
            problem, passed, config.threads or torch.get_num_threads(), config.memory_limit_gib,
            config.time_limit_s, config.repeat_s, config.keep_memory,
        )  # fmt: skip
        if "error" in message:
            return found, message["error"]
        found[passed] = message
    return found, "ok"


def matmul_rate(dtype: str, device: str, threads: int = 0) -> float:
    """Return the machine's own FLOP/s at [64, 128, 64] x [64, 64, 128], best of many."""
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    a = torch.randn(64, 128, 64).to(device, getattr(torch, dtype))
    b = torch.randn(64, 64, 128).to(device, getattr(torch, dtype))
    best, stop = math.inf, time.perf_counter() + 1.0
    while time.perf_counter() < stop:
        start = time.perf_counter()
        torch.bmm(a, b)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(before)
    return 2 * 64 * 128 * 64 * 128 / best


def environment(config: Config) -> dict[str, str]:
    """Return what the numbers depend on: machine, threads, versions, commit, date."""
    from linattn import __version__

    commit = ""
    try:
        here = Path(__file__).parent
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() if done.returncode == 0 else ""
    except OSError:
        pass  # no git: an installed package has no commit
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(config.device),
        "threads": str(config.threads or torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "linattn": __version__,
        "commit": commit,
    }


def machine(device: str = "cpu") -> str:
    """Return the name of the processor or GPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    name = platform.processor() or platform.machine()
    if cpuinfo.exists():
        lines = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return f"{name}, {os.cpu_count()} cores"


def write_csv(rows: list[Row], about: dict[str, str], path: Path) -> None:
    """Write all rows at once, by way of a file beside it, so that a kill leaves the last whole."""
    names = [f.name for f in fields(Row)] + list(about)
    beside = path.with_suffix(".tmp")
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({**asdict(row), **about} for row in rows)
    beside.replace(path)


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a file that `write_csv` wrote.

    Raises:
        ValueError: a column is missing.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [f.name for f in fields(Row) if f.name not in (reader.fieldnames or ())]
        if missing:
            reject("csv", f"{path} without the columns {missing}", "a file of `linattn bench`")
        kinds = {"int": int, "float": float, "str": str}
        return [
            Row(**{f.name: kinds[str(f.type)](line[f.name]) for f in fields(Row)})
            for line in reader
        ]


def slope(rows: list[Row], value: str = "best_s") -> float:
    """Return the slope of log(value) against log(N), by least squares; NaN below two points."""
    points = [(math.log(r.N), math.log(getattr(r, value))) for r in rows if r.status == "ok"
              and getattr(r, value) > 0]  # fmt: skip
    if len({x for x, _ in points}) < 2:
        return math.nan
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return above / sum((x - mean_x) ** 2 for x, _ in points)


def crossover(rows: list[Row], H: int, D: int, passed: str) -> str:
    """Return one sentence: from which measured N on linattn is faster than softmax attention."""
    times: dict[str, dict[int, float]] = {"linattn": {}, "softmax": {}}
    for r in rows:
        if (r.H, r.D, r.passed, r.status) == (H, D, passed, "ok") and r.method in times:
            times[r.method][r.N] = r.best_s
    both = sorted(times["linattn"].keys() & times["softmax"].keys())
    where = f"H={H} D={D}, {passed}:"
    if not both:
        return f"{where} no N with both linattn and softmax."
    wins = [N for N in both if all(
        times["linattn"][M] < times["softmax"][M] for M in both if M >= N)]  # fmt: skip
    last = both[-1]
    ratio = times["softmax"][last] / times["linattn"][last]
    if not wins:
        return f"{where} softmax is faster up to N={last}; linattn takes {1 / ratio:.1f}x its time."
    since = "from the smallest N measured" if wins[0] == both[0] else "from the first measured N"
    return f"{where} linattn is faster {since} = {wins[0]}; {ratio:.1f}x at N={last}."
