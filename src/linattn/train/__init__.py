"""Training of language models: `Settings`, `train`, and what a run writes."""

from linattn.train.loop import Run, train
from linattn.train.settings import Settings

__all__ = ["Run", "Settings", "train"]
