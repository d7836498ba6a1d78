"""The command line, the benchmark's rows and the demo, on small sizes."""

import csv

import torch
from typer.testing import CliRunner

from linattn import bench, demo
from linattn.cli import app
from linattn.models.byte_language_model import ByteLanguageModel, Configuration
from linattn.tasks import standard_library

runner = CliRunner()


def test_info_and_check():
    text = runner.invoke(app, ["info"]).output
    assert "chunked" in text
    assert "not part of this version" in text
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


def test_slope_and_crossover():
    def row(method, N, seconds):
        return bench.Row(method, "forward", 1, N, 2, 4, "float32", "ok", seconds)

    rows = [row("linattn", n, n * 1.0) for n in (10, 100, 1000)]
    rows += [row("softmax", n, n * n / 50) for n in (10, 100, 1000)]
    assert abs(bench.slope(rows[:3]) - 1) < 1e-9
    assert abs(bench.slope(rows[3:]) - 2) < 1e-9
    assert "the first measured N = 100; 20.0x at N=1000" in bench.crossover(rows, 2, 4, "forward")


def test_bad_flags_are_named():
    for flags, words in (
        (["--method", "flash"], ["methods", "flash", "quadratic"]),
        (["--shape", "8by64"], ["8by64", "HxD"]),
        (["--decay", "token", "--no-causal"], ["decay", "causal=False"]),
        (["--length", "0"], ["below 1"]),
    ):
        result = runner.invoke(app, ["bench", *flags])
        assert result.exit_code == 2
        assert all(word in result.output for word in words), result.output
    assert runner.invoke(app, ["plot", "nowhere.csv"]).exit_code == 2


def test_bigram_entropy_by_hand():
    # abab...: each byte tells the next. aabb repeated: either of two follows, evenly.
    text = torch.tensor(list(b"ab" * 50), dtype=torch.uint8)
    assert abs(standard_library.bigram_entropy(text)) < 1e-9
    text = torch.tensor(list(b"aabb" * 5000), dtype=torch.uint8)
    assert abs(standard_library.bigram_entropy(text) - 1) < 1e-3


def test_corpus_is_repeatable_and_split_by_file():
    a, b = standard_library.load(), standard_library.load()
    assert torch.equal(a.train, b.train)
    assert a.train.numel() > 5 * a.held_out.numel() > 100_000


def test_recurrent_decode_equals_the_whole_pass():
    model = ByteLanguageModel(Configuration(layers=2, dim=32, heads=2, hidden=48)).eval()
    made = model.generate(b"import ", 40, temperature=0)
    tokens = list(b"import ")
    for token in made:
        logits = model(torch.tensor([tokens]))
        assert int(logits[0, -1].argmax()) == token
        tokens.append(token)


def test_demo_writes_all_its_files(tmp_path):
    small = Configuration(layers=1, dim=16, heads=2, hidden=16)
    demo.run(minutes=0.02, output=tmp_path, configuration=small, rows=2, length=64)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"model.safetensors", "run.json", "loss.png"}
