"""The command line, the benchmark's rows and the demo, on small sizes."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linattn import _bench_plot, bench
from linattn.cli import app
from linattn.cli.bench import run_bench

runner = CliRunner()


def test_info_and_check():
    text = runner.invoke(app, ["info"]).output
    assert "chunked" in text
    assert "triton" in text
    assert runner.invoke(app, ["check"]).exit_code == 0


def test_bench_writes_rows_and_pictures_and_plot_draws_them_again(tmp_path):
    sizes = ["--length", "64", "--length", "128", "--shape", "2x16"]
    result = runner.invoke(app, ["bench", *sizes, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "faster" in result.output
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert len(rows) == 4 * 2 * 2
    assert all(r["status"] == "ok" and r["machine"] and r["torch"] for r in rows)
    (tmp_path / "time.png").unlink()
    assert runner.invoke(app, ["plot", str(tmp_path / "bench.csv")]).exit_code == 0
    assert (tmp_path / "time.png").stat().st_size > 1000


def test_out_of_memory_and_overtime_are_rows():
    config = bench.Config(("naive",), ((8, 64),), (16, 8192, 9000), memory_limit_gib=0.8)
    rows = [row for _, new in bench.run(config) for row in new]
    assert [r.status for r in rows[:2]] == ["ok", "ok"]
    assert rows[3].status == "out of memory"
    assert rows[5].status == "skipped: out of memory at N=8192"
    config = bench.Config(("quadratic",), ((8, 64),), (4096,), time_limit_s=0.01)
    ((_, rows),) = bench.run(config)
    assert rows[1].status == "over 0.01 s"


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C reaches a process group")
def test_ctrl_c_keeps_the_rows_that_are_finished(tmp_path):
    sizes = ["--length", "64", "--length", "128", "--method", "linattn", "--method", "softmax"]
    shapes = [x for H in range(1, 200) for x in ("--shape", f"{H}x8")]
    command = [sys.executable, "-m", "linattn", "bench", *sizes, *shapes]
    bench_process = subprocess.Popen(
        [*command, "--output", str(tmp_path)], start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    stop = time.monotonic() + 180
    while not (tmp_path / "bench.csv").exists() and time.monotonic() < stop:
        time.sleep(0.05)
    os.killpg(bench_process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    output, _ = bench_process.communicate(timeout=180)  # plots too, beside other tests
    assert bench_process.returncode == 130, output
    assert "interrupted: what was measured is kept" in output
    assert "Traceback" not in output
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert 0 < len(rows) < 400
    assert all(r["status"] == "ok" for r in rows)
    assert (tmp_path / "time.png").exists()


def is_interrupt_blocked():
    raise SystemExit(int(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])))


BLOCKED = """
import multiprocessing
from linattn._bench_process import _interrupts_held
from test_command_line import is_interrupt_blocked

if __name__ == "__main__":
    worker = multiprocessing.get_context("forkserver").Process(target=is_interrupt_blocked)
    with _interrupts_held():
        worker.start()
    worker.join()
    raise SystemExit(10 + worker.exitcode)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are blocked on POSIX")
def test_the_first_worker_too_is_born_with_ctrl_c_blocked(tmp_path):
    """Case: what multiprocessing starts beside it unblocked the signal again."""
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED)
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    assert subprocess.run([sys.executable, str(script)], env=path, check=False).returncode == 11


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_python_drops_ends_the_bench(tmp_path, monkeypatch):
    class Destroyed:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)  # Python prints "Exception ignored" and goes on

    def rows(config, rate):
        for problem in config.problems():
            if problem.N == 256:
                Destroyed()
            yield problem, [bench.Row("linattn", "forward", 1, problem.N, 1, 8, "float32", "ok", 1)]

    monkeypatch.setattr(bench, "run", rows)
    config = bench.Config(("linattn",), ((1, 8),), (128, 256, 512))
    assert not run_bench(config, tmp_path)
    assert [row.N for row in bench.read_csv(tmp_path / "bench.csv")] == [128, 256]


def test_slope_and_crossover():
    def row(method, N, seconds):
        return bench.Row(method, "forward", 1, N, 2, 4, "float32", "ok", seconds)

    rows = [row("linattn", n, n * 1.0) for n in (10, 100, 1000)]
    rows += [row("softmax", n, n * n / 50) for n in (10, 100, 1000)]
    assert abs(bench.slope(rows[:3]) - 1) < 1e-9
    assert abs(bench.slope(rows[3:]) - 2) < 1e-9
    assert "the first measured N = 100; 20.0x at N=1000" in bench.crossover(rows, 2, 4, "forward")


def test_bad_flags_are_named(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xfe\x00")
    for flags, words in (
        (["--threads", "-1"], ["threads", "-1", "0"]),
        (["--memory-limit", "nan"], ["memory_limit_gib", "nan"]),
        (["--time-limit", "inf"], ["time_limit_s", "inf"]),
        (["--backend", "zzz"], ["backend", "zzz", "chunked"]),
        (["--backend", "reverse"], ["backend", "reverse", "triton"]),
        (["--output", str(file)], ["output", "File"]),
        (["--output", str(file / "x")], ["output", "Not a"]),
        (["--method", "flash"], ["methods", "flash", "quadratic"]),
        (["--shape", "8by64"], ["8by64", "HxD"]),
        (["--shape", "²x4"], ["²x4", "HxD"]),
        (["--decay", "token", "--no-causal"], ["decay", "causal=False"]),
        (["--length", "0"], ["below 1"]),
    ):
        result = runner.invoke(app, ["bench", *flags])
        assert result.exit_code == 2
        assert all(word in result.output for word in words), result.output
    assert runner.invoke(app, ["plot", "nowhere.csv"]).exit_code == 2
    for path in (file, tmp_path):
        result = runner.invoke(app, ["plot", str(path)])
        assert result.exit_code == 2
        assert "csv: got" in result.output


def test_plot_takes_a_file_that_was_cut_anywhere(tmp_path):
    """Case: the last row was a forward without its forward+backward."""
    rows = [
        bench.Row(method, passed, 1, n, 2, 4, "float32", "ok", 1.0, 100)
        for method in ("linattn", "softmax")
        for n in (10, 100)
        for passed in ("forward", "forward+backward")
    ]
    for count in range(1, len(rows) + 1):
        assert len(_bench_plot.tables(rows[:count])) == 1
        assert all(path.exists() for path in _bench_plot.pictures(rows[:count], tmp_path))
