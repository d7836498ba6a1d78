"""A trial in a process of its own: python -m linattn.evaluate.process FOLDER THREADS."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from linattn.evaluate import sweep, trial


def main(folder: Path, threads: int) -> None:
    """Run the trial whose settings.json lies in the folder."""
    torch.set_num_threads(threads)
    trial.run(sweep.read(folder), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
