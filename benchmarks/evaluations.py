"""The studies of the evaluations, each some commands of `linattn`.

    python benchmarks/evaluations.py mqar metala-on-mqar metala-on-text dropout-digits

What is finished is not repeated. Everything goes below --output, a folder for each study;
`linattn report` makes a page of it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

MIXERS = ["metala", "gla", "gated_delta_net", "delta_net", "linear", "retention"]
MIXERS += ["mamba2:key_dim=32"]
# In front a gated convolution as in Based, without which those that carry none cannot begin.
MQAR = "eval mqar --setting cpu"
DIMS = "--dim 32 --dim 64 --dim 128"
ABLATIONS = ["metala", "metala:augmentation=null", "metala:kernel_size=null", "metala:key=true"]
# *Making Linear Attention Usable*, ablation of dropout: nothing, on the output, the stand-in.
DROPOUT = [
    "linear", "linear:dropout=0.1,dropout_mode=output", "linear:dropout=0.1", "softmax",
    "softmax:dropout=0.1",
]  # fmt: skip
# The published 2-layer shape, without any dropout but the mixer's own.
SMALL = "--set num_hidden_layers=2 --set hidden_size=64 --set intermediate_size=128 "
SMALL += "--set num_attention_heads=2 --set learned_positions=true --weight-decay 0 --seeds 3 "
SMALL += "--learning-rate 1e-3 --stop-at 1"
TRAIN = "train --steps 300 --rows 4 --length 512 --evaluate-every 0 --held-out-rows 128 --sample 0"
RECALL = (
    " ".join(f"--length {n}" for n in (32, 64, 128, 256, 512)) + " --kind short-passkey"
)  # trained at 24 to 128


def mixers(names: list[str]) -> str:
    """Return the options for these mixers."""
    return " ".join(f"--mixer {name}" for name in names)


def options(variant: str) -> str:
    """Return the options of `linattn train` for a variant of MetaLA."""
    _, _, pair = variant.partition(":")
    name, _, value = pair.partition("=")
    inner = f'"{name}":{value}' if name else ""
    return f'--set mixer_options={{"metala":{{{inner}}}}}'


# Each command with its folder inside of the study's.
STUDIES: dict[str, list[tuple[str, str]]] = {
    "mqar": [
        ("", f"{MQAR} {DIMS} " + mixers([f"convolution+{name}" for name in MIXERS])),
        ("softmax", f"{MQAR} {DIMS} --mixer softmax --learning-rate 1e-3"),  # it wants less
    ],
    "metala-on-mqar": [("", f"{MQAR} --dim 64 {mixers(ABLATIONS)}")],
    "metala-on-text": [
        (f"{variant.replace(':', '-').replace('=', '-')}-{seed}",
         f"{TRAIN} --seed {seed} {options(variant)}")
        for seed in range(1) for variant in ABLATIONS
    ],
    "dropout-listops": [("", f"eval listops {SMALL} --data shortest=20,longest=100 --rows 32 "
                             f"--examples 10000 --steps 600 --evaluate-every 100 "
                             + mixers(DROPOUT))],
    "dropout-digits": [("", f"eval digits {SMALL} --steps 1500 --rows 64 --evaluate-every 100 "
                            + mixers(DROPOUT))],
    "passkey": [("", "eval passkey --setting cpu --mixer metala --mixer gated_delta_net")],
    "copy": [("", "eval copy --setting short-to-long --mixer metala --mixer gated_delta_net")],
    "induction-heads": [("", "eval induction-heads --setting short-to-long --mixer metala "
                             "--mixer gated_delta_net --mixer mamba2")],
}  # fmt: skip


def commands(study: str, output: Path, jobs: int) -> list[list[str]]:
    """Return the commands of a study that are not finished."""
    found = []
    for name, text in STUDIES[study]:
        folder = output / study / name
        words = [*text.split(), "--output", str(folder)]
        if words[0] == "eval":
            found.append([*words, "--jobs", str(jobs)])
        elif not (folder / "run.json").exists():
            found.append(words)
        elif not json.loads((folder / "run.json").read_text())["finished"]:
            resume = ["--resume"] if list(folder.glob("checkpoint-*/progress.json")) else []
            found.append([*words, *resume])
    return found


def maps(folder: Path, output: Path) -> list[list[str]]:
    """Return the commands for a heat map of the best trial of each mixer."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [
        ["eval", "recall", str(next(folder.glob(f"{row['mixer']}-*/result.json")).parent),
         *RECALL.split(), "--output", str(output / row["mixer"])]
        for row in rows
    ]  # fmt: skip


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
        waiting = commands(study, output, jobs)
        for words in waiting:
            run(study, words)
        if study == "passkey":
            for words in maps(output / study, output / "recall"):
                run(study, words)


def run(study: str, words: list[str]) -> None:
    """Run a command of `linattn`; end with it if it fails."""
    print(f"{study}: linattn {' '.join(words)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "linattn", *words], check=False).returncode
    if status != 0:
        raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
