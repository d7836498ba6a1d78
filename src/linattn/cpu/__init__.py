"""The native CPU backend: C++ on torch's stable ABI, AVX2 or AVX-512 chosen at run time.

`additive.py` and `delta.py` make the outputs and hand everything to the library; the mathematics is
in the C++ files of the same names. The environment variable LINATTN_CPU_ISA, one of
INSTRUCTION_SETS, caps the instruction set.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

INSTRUCTION_SETS = ("generic", "avx2", "avx512", "avx512_bf16")
CHUNK = 32  # tokens; kChunk of decay.h
OLDEST_TORCH = "2.10"  # TORCH_TARGET_VERSION of CMakeLists.txt


_status: tuple[bool, str] | None = None


def load() -> tuple[bool, str]:
    """Load the library once; return whether it is there, and what there is or why not.

    A library that is there but cannot be loaded gives one warning, and is never asked again.
    """
    global _status
    if _status is None:
        _status = _load()
    return _status


# For torch.compile: call it when tracing, do not trace it (torch.compiler.assume_constant_result
# would do no more, but importing what it needs takes a second).
load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _load() -> tuple[bool, str]:
    found = [p for folder in __path__ for p in [Path(folder) / "_library.so"] if p.exists()]
    if not found:
        return False, "the native kernels were not built: no C++ compiler when this was installed"
    cap = os.environ.get("LINATTN_CPU_ISA")
    if cap is not None and cap not in INSTRUCTION_SETS:
        raise ValueError(f"LINATTN_CPU_ISA: got {cap!r}; expected one of {INSTRUCTION_SETS}")
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        reason = (
            f"the native kernels, built for torch {OLDEST_TORCH} and later, do not load under "
            f"torch {torch.__version__}: {error}"
        )
        warnings.warn(f"linattn: {reason}; the chunked backend is used", stacklevel=2)
        return False, reason
    return True, f"C++ for {instruction_set()}, on torch's threads"


def instruction_set() -> str:
    """Return the instruction set that the loaded library runs."""
    return INSTRUCTION_SETS[torch.ops.linattn_cpu.instruction_set()]


def segment(Dk: int) -> int:
    """Return after how many tokens a state is saved for backward, at least Dk.

    128 for small Dk: the states in between are made again, and stay in the second-level cache.
    """
    return -(-max(Dk, 128) // CHUNK) * CHUNK
