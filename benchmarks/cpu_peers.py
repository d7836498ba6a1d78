"""The `cpu` backend beside the public options and the machine's matmul rate, in one command.

    python benchmarks/cpu_peers.py --output runs/cpu_peers

Each case runs in a process of its own with a limit on its memory; inside, everything that is
compared runs in turn on the same tensors, and minima and medians of the turns are kept. Outputs are
fresh tensors. Writes rows.csv (every time) and report.md (the tables of docs/cpu.md). About 15
minutes with nothing else running; `--only` takes some of the sections.

FLOPs of a token and head: forward 4 D^2 + 128 D, backward 10 D^2 + 384 D (whole squares of a chunk
of 32), for every implementation and every kind of decay: only times decide.
"""

from __future__ import annotations

import csv
import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from _peer_cases import RUN
from _peers import KINDS
from rich.console import Console

from linattn import bench

MEMORY = 12 << 30
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 16384)
SECTIONS: dict[str, list[dict[str, Any]]] = {
    "kinds": [
        {"kind": kind, "D": D, "dtype": dtype}
        for dtype in ("float32", "bfloat16") for D in (64, 128) for kind in KINDS
    ],
    "relative": [{"D": D, "dtype": dtype} for dtype in ("float32", "bfloat16") for D in (64, 128)],
    "softmax": [{"N": N, "dtype": dtype} for dtype in ("float32", "bfloat16") for N in LENGTHS],
    "threads": [{"kind": kind} for kind in ("none", "token")],
    "decode": [{"kind": kind} for kind in ("token", "delta token")],
    "convolution": [{"N": N, "dtype": dtype} for dtype in ("float32", "bfloat16")
                    for N in (1, 4096)],
}  # fmt: skip


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Return the tables, one a section."""
    lines = [
        ", ".join(f"{n} {about[n]}" for n in ("date", "machine", "threads", "torch", "commit"))
    ]
    for section in RUN:
        mine = [r for r in rows if r["section"] == section]
        if not mine:
            continue
        first = {"relative": "none", "threads": "1 thread"}.get(section, "linattn cpu")
        lines += [
            "",
            f"## {section}",
            "",
            f"| case | pass | method | best | median | over {first} | of matmul rate |",
            "|" + "---|" * 7,
        ]
        for r in mine:
            base = next(
                (
                    b
                    for b in mine
                    if (b["case"], b["pass"], b["method"]) == (r["case"], r["pass"], first)
                ),
                r,
            )
            if "error" in r:
                cells = [r["error"], "", "", ""]
            else:
                fraction = r.get("of matmul rate", math.nan)
                cells = [
                    f"{r['best'] * 1e3:.3g} ms",
                    f"{r['median'] * 1e3:.3g} ms",
                    f"{r['best'] / base['best']:.2f}" if "best" in base else "",
                    "" if math.isnan(fraction) else f"{fraction:.2f}",
                ]
            lines.append("| " + " | ".join([r["case"], r["pass"], r["method"], *cells]) + " |")
    return "\n".join(lines) + "\n"


def one_case(section: str, case: str) -> None:
    """Run one case here and print its rows as JSON."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    print(json.dumps(RUN[section](**json.loads(case))))


def main(
    output: Annotated[Path, typer.Option(help="Folder for rows.csv and report.md.")] = Path(
        "runs/cpu_peers"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Sections: " + ", ".join(RUN))] = None,
    case: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the cpu backend beside its peers."""
    sections = only or list(RUN)
    for section in sections:
        if section not in RUN:
            raise typer.BadParameter(
                f"got {section}; expected one of {tuple(RUN)}", param_hint="--only"
            )
    if case is not None:
        return one_case(sections[0], case)
    console, rows = Console(), list[dict[str, Any]]()
    about = bench.environment(bench.Config(backend="cpu"))
    output.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for arguments in SECTIONS[section]:
            name = " ".join(f"{k}={v}" for k, v in arguments.items())
            command = [sys.executable, __file__, "--only", section, "--case", json.dumps(arguments)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                console.print(
                    f"{section} {name}: {done.stderr.strip().splitlines()[-1]}", style="red"
                )
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            rows += [{"section": section, "case": name, **row} for row in found]
            console.print(
                f"{section} {name}: "
                + ", ".join(
                    f"{r['pass']} {r['method']} {r.get('best', math.nan) * 1e3:.3g} ms"
                    for r in found
                ),
                highlight=False,
            )
            with (output / "rows.csv").open("w", newline="") as file:
                names = list(dict.fromkeys(n for r in rows for n in r))
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(rows)
            (output / "report.md").write_text(report(rows, about))
    console.print(f"tables: {output / 'report.md'}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
