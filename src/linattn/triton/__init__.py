"""The Triton backend: kernels for GPUs, over chunks of 64 tokens.

    states.py          what every chunk adds to the state, then the scan from chunk to chunk
    outputs.py         what every query reads: of the state before its chunk, and in its chunk
    additive.py        forward and backward of the additive recurrence, made of the two
    log_decay.py       the gradient of a decay of one number a token
    pairs.py           the weights in a chunk written out, for one decay a channel
    channel_decay.py   the additive recurrence made of these
    triangular.py      the system of the delta rule, and the scan that solves it
    delta.py           the delta rule
    step.py            one token
    convolution.py     the short causal convolution; taps.py its kernels
    numerics.py        products, rounding and decays that all share; tiles.py reads and writes
    layout.py          chunks and sizes; passes.py and weights.py launch what is shared

All but the scans run over every chunk at once, so that a few heads of a long sequence fill a GPU.
Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), which is for tests.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MOST_CHANNELS = 256  # Dk and Dv: a column of states fits the registers of a program
MOST_HEADS = 65535  # the second dimension of a grid


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on tensors of a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_status: tuple[bool, str] | None = None


def load() -> tuple[bool, str]:
    """Return whether the kernels can run here, and on what or why not."""
    global _status
    if _status is None:
        _status = _load()
    return _status


load._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in linattn.cpu


def _load() -> tuple[bool, str]:
    import torch

    if importlib.util.find_spec("triton") is None:
        return False, "the package triton is not installed: pip install 'linattn[triton]'"
    import triton

    if is_interpreted():
        return True, f"triton {triton.__version__} in its interpreter, for tests only"
    if torch.cuda.is_available():
        return True, f"triton {triton.__version__} on {torch.cuda.get_device_name()}"
    return False, f"triton {triton.__version__} finds no GPU here"


def require_supported(name: str, x: Tensor, *channels: int, heads: int = 1) -> None:
    """Refuse what the kernels do not take.

    Raises:
        TypeError: float64.
        ValueError: more than 256 channels or 65535 heads.
    """
    from linattn._validation import reject

    wanted = 'with backend="triton" torch.float32, torch.bfloat16 or torch.float16'
    if str(x.dtype) == "torch.float64":
        reject(name, x.dtype, wanted, kind=TypeError)
    if max(channels, default=0) > MOST_CHANNELS:
        expected = f'Dk and Dv up to {MOST_CHANNELS} with backend="triton"'
        reject(name, f"{max(channels)} channels", expected)
    if heads > MOST_HEADS:
        reject("heads", heads, f'up to {MOST_HEADS} with backend="triton"')
