"""Which backends exist, which of them work here, and which one a call gets."""

from __future__ import annotations

from dataclasses import dataclass

from linattn._validation import reject

NAMES = ("reference", "chunked", "cpu", "triton")


@dataclass(frozen=True)
class Backend:
    """One backend as this machine sees it: whether it can run, and why or why not."""

    name: str
    available: bool
    reason: str


def backends() -> dict[str, Backend]:
    """Return every backend by name, with whether it is available here and the reason.

    Example:
        >>> linattn.backends()["chunked"].available
        True
    """
    from linattn import cpu, triton  # their libraries are loaded now, and not with the package

    found = (
        Backend("reference", True, "plain torch, any device; the definition, slow"),
        Backend("chunked", True, "plain torch, any device"),
        Backend("cpu", *cpu.load()),
        Backend("triton", *triton.load()),
    )
    return {backend.name: backend for backend in found}


def choose(backend: str, device: str) -> str:
    """Return the backend that a call runs on; a named one that cannot do it is an error."""
    if not isinstance(backend, str):
        reject("backend", type(backend).__name__, f"a str of {('auto', *NAMES)}", kind=TypeError)
    if backend == "auto":
        from linattn import cpu

        return "cpu" if device == "cpu" and cpu.load()[0] else "chunked"
    if backend not in NAMES:
        reject("backend", repr(backend), f"one of {('auto', *NAMES)}")
    status = backends()[backend]
    if not status.available:
        raise RuntimeError(f"backend {backend!r} is not available here: {status.reason}")
    if backend == "cpu" and device != "cpu":
        reject("backend", f"'cpu' with tensors on {device}", "tensors on a CPU, or another backend")
    if backend == "triton":
        from linattn import triton

        if device == "cpu" and not triton.is_interpreted():
            reject(
                "backend", "'triton' with tensors on cpu", "tensors on a GPU, or another backend"
            )
    return backend
