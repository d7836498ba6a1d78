import sys
from pathlib import Path

import pytest
import torch

from linattn.train import loop

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _rate(monkeypatch):
    """The machine's rate takes a second to measure and says nothing here."""
    monkeypatch.setattr(loop, "matmul_rate", lambda dtype, device: 1e11)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(0)
    words = ["def ", "return ", "x", "y", " + ", "\n", "(", ")", "import os\n"]
    picks = torch.randint(len(words), (4000,), generator=generator)
    path.write_text("".join(words[i] for i in picks))
    return path
