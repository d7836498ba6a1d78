"""The native library itself: absent, broken, capped, and loaded once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import linattn
from linattn import cpu

CALL = """
import warnings, torch, linattn, linattn.cpu
linattn.cpu.__path__[:] = {folders}
x = torch.ones(1, 3, 1, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        o = linattn.linear_attention(x, x, x, scale=1.0)
print(o[0, :, 0, 0].tolist())
print(len(caught), *(w.message for w in caught))
print(linattn.backends()["cpu"])
"""


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not a library at all" * 100])
def test_d2_a_broken_library_gives_one_warning_and_the_chunked_backend(tmp_path, content):
    (tmp_path / "_library.so").write_bytes(content)
    code, (values, warned, status), _ = run(CALL.format(folders=[str(tmp_path)]))
    assert code == 0
    assert values == "[4.0, 8.0, 12.0]"
    assert warned.startswith("1 linattn: the native kernels, built for torch 2.10 and later")
    assert f"do not load under torch {linattn.cpu.torch.__version__}" in warned
    assert "available=False" in status
    assert "do not load" in status


def test_d2_without_the_library_the_chunked_backend_serves_in_silence(tmp_path):
    code, (values, warned, status), _ = run(CALL.format(folders=[str(tmp_path)]))
    assert code == 0
    assert values == "[4.0, 8.0, 12.0]"
    assert warned == "0"
    assert "were not built: no C++ compiler" in status


def test_the_oldest_torch_is_the_one_the_library_is_built_for():
    build = (Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    major, minor = cpu.OLDEST_TORCH.split(".")
    assert f"TORCH_TARGET_VERSION=0x{int(major):02x}{int(minor):02x}000000000000" in build
    assert (
        f'"torch>={cpu.OLDEST_TORCH}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    )


native = pytest.mark.skipif(not cpu.load()[0], reason="no native library")


@native
@pytest.mark.parametrize("cap", cpu.INSTRUCTION_SETS)
def test_the_instruction_set_can_be_capped(cap):
    code = "from linattn import cpu; print(cpu.load()[1])"
    status, (said,), _ = run(code, LINATTN_CPU_ISA=cap)
    assert status == 0
    order = cpu.INSTRUCTION_SETS
    widest = os.environ.get("LINATTN_CPU_ISA") or cpu.instruction_set()
    if order.index(cap) <= order.index(widest):
        assert said.startswith(f"C++ for {cap},")


def test_an_unknown_cap_is_an_error():
    status, _, error = run("from linattn import cpu; cpu.load()", LINATTN_CPU_ISA="sse9")
    if cpu.load()[0]:
        assert status != 0
        assert "LINATTN_CPU_ISA: got 'sse9'; expected one of" in error


@native
def test_no_path_of_the_build_is_in_the_library():
    library = next(
        Path(f) / "_library.so" for f in cpu.__path__ if (Path(f) / "_library.so").exists()
    )
    content = library.read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in content
    assert b"site-packages" not in content
