"""The studies of the evaluations, each a command of `linattn eval`.

    python benchmarks/evaluations.py mqar metala-on-mqar dropout-listops dropout-digits

Finished trials are not repeated. Everything goes below --output, a folder for each study;
`linattn report` makes a page of it.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

MIXERS = ["metala", "gla", "gated_delta_net", "delta_net", "linear", "retention"]
MIXERS += ["mamba2:key_dim=32"]
# In front a gated convolution as in Based, without which those that carry none cannot begin.
MQAR = "eval mqar --setting cpu --dim 32 --dim 64 --dim 128"
ABLATIONS = ["metala", "metala:augmentation=null", "metala:kernel_size=null", "metala:key=true"]
# *Making Linear Attention Usable*, ablation of dropout: nothing, on the output, the stand-in.
DROPOUT = [
    "linear", "linear:dropout=0.1,dropout_mode=output", "linear:dropout=0.1", "softmax",
    "softmax:dropout=0.1",
]  # fmt: skip
# The published 2-layer shape, without any dropout but the mixer's own.
SMALL = (
    "--setting nystromformer --set dropout=0.0 --learning-rate 1e-3 --weight-decay 0 --warm-up 100"
)


def mixers(names: list[str]) -> str:
    """Return the options for these mixers."""
    return " ".join(f"--mixer {name}" for name in names)


STUDIES: dict[str, str] = {
    "mqar": f"{MQAR} {mixers(['convolution+' + name for name in MIXERS])}",
    "metala-on-mqar": f"{MQAR} {mixers(ABLATIONS)}",
    "dropout-listops": f"eval listops {SMALL} --data shortest=20,longest=150 --examples 10000 "
    f"--steps 2000 --evaluate-every 200 --seeds 3 {mixers(DROPOUT)}",
    "dropout-digits": "eval digits --set hidden_size=64 --set num_attention_heads=2 "
    "--set learned_positions=true --learning-rate 1e-3 --weight-decay 0 --steps 1500 --rows 64 "
    f"--evaluate-every 100 --stop-at 1 --seeds 3 {mixers(DROPOUT)}",
    "passkey": "eval passkey --setting cpu --mixer metala --mixer gated_delta_net",
    "copy": "eval copy --setting short-to-long --mixer metala --mixer gated_delta_net",
    "induction-heads": "eval induction-heads --setting short-to-long --mixer metala "
    "--mixer gated_delta_net --mixer mamba2",
}


def main(
    studies: Annotated[list[str], typer.Argument(help=f"Some of {', '.join(STUDIES)}.")],
    output: Annotated[Path, typer.Option(help="A folder for each below it.")] = Path(
        "runs/evaluations"
    ),
    jobs: Annotated[int, typer.Option(help="Trials at a time.")] = 2,
) -> None:
    """Run studies one after another."""
    for study in studies:
        if study not in STUDIES:
            raise typer.BadParameter(f"studies: got {study!r}; expected some of {list(STUDIES)}")
    for study in studies:
        words = STUDIES[study].split()
        command = [sys.executable, "-m", "linattn", *words, "--jobs", str(jobs)]
        print(f"{study}: linattn {' '.join(words)}", flush=True)
        status = subprocess.run([*command, "--output", str(output / study)], check=False).returncode
        if status != 0:
            raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
