"""Many trials: every mixer at every size, learning rate and seed; the best rate of each counts."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from linattn._validation import reject, require_positive_int
from linattn.evaluate import trial
from linattn.evaluate.settings import Settings
from linattn.train.record import whole, write_json

BASELINE = "softmax"
Result = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What to compare.

    Attributes:
        settings: what all trials share.
        mixers: each a mixer, "metala"; a hybrid, "convolution+metala"; either with options in
            JSON of the last one named, "metala:key=true,kernel_size=null". Softmax is always
            among them.
        sizes: of hidden_size; none: that of the settings.
        rates: learning rates; none: that of the settings.
        seeds: how many, from that of the settings on.
        softmax: options of the model where softmax attention is all there is, as learned positions.
    """

    settings: Settings
    mixers: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    seeds: int = 1
    softmax: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_positive_int("seeds", self.seeds)
        if not self.mixers:
            reject("mixer", "none", "at least one")
        self.trials()  # refuses what a trial would, before the first one runs

    def trials(self) -> list[tuple[str, Settings]]:
        """Return every trial with the text of its mixer.

        Seeds are the outer loop, so that a sweep that was cut compares all there is.
        """
        mixers = list(dict.fromkeys(self.mixers))
        if not any(text.partition(":")[0] == BASELINE for text in mixers):
            mixers.append(BASELINE)
        sizes = dict.fromkeys(self.sizes or (self.settings.configuration().hidden_size,))
        rates = dict.fromkeys(self.rates or (self.settings.learning_rate,))
        planned: dict[str, tuple[str, Settings]] = {}  # what is said twice runs once
        for seed in range(self.seeds):
            for text in mixers:
                for size in sizes:
                    for rate in rates:
                        found = self._settings(text, size, rate, self.settings.seed + seed)
                        planned.setdefault(found.name(), (text, found))
        return list(planned.values())

    def _settings(self, text: str, size: int, rate: float, seed: int) -> Settings:
        mixer, options = variant(text)
        own_model = self.softmax if mixer == (BASELINE,) else {}
        model = {**self.settings.model, **own_model, "hidden_size": size}
        merged = dict(model.get("mixer_options") or {})
        for name, own in options.items():
            merged[name] = {**merged.get(name, {}), **own}
        # Options of mixers that this trial has not would only make another folder's name.
        model["mixer_options"] = {name: own for name, own in merged.items() if name in mixer}
        return replace(self.settings, mixer=mixer, learning_rate=rate, seed=seed, model=model)


def variant(text: str) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """Return the mixers of a text, and options by mixer: convolution+metala:key=true.

    Raises:
        ValueError: no name, or a text that is no NAME=VALUE.
    """
    names, colon, rest = text.partition(":")
    mixers = tuple(names.split("+"))
    form = "NAME+NAME..., with or without :OPTION=VALUE,..."
    if not all(mixers):
        reject("mixer", repr(text), form)
    options: dict[str, Any] = {}
    for pair in rest.split(",") if colon else []:
        option, equals, value = pair.partition("=")
        if not equals:
            reject("mixer", repr(text), form)
        try:
            options[option] = json.loads(value)
        except json.JSONDecodeError:
            options[option] = value
    return mixers, {mixers[-1]: options} if options else {}


def run(
    sweep: Sweep, output: Path, jobs: int = 1, tell: trial.Tell | None = None
) -> Iterator[Result]:
    """Yield what every trial came to, as soon as it has ended; finished ones are not repeated.

    Args:
        sweep: what to run.
        output: a folder below it for each trial.
        jobs: trials at a time, each in a process with its share of the threads if more than one.
        tell: of a single job, called after every step.

    Raises:
        RuntimeError: a process ended without a result.
    """
    require_positive_int("jobs", jobs)
    trials = sweep.trials()
    if jobs == 1:
        for text, settings in trials:
            yield {**trial.run(settings, output / settings.name(), tell), "mixer": text}
        return
    threads = max(1, torch.get_num_threads() // jobs)
    running: list[subprocess.Popen[str]] = []

    def one(text: str, settings: Settings) -> Result:
        folder = output / settings.name()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "result.json").exists():
            write_json(folder / "settings.json", asdict(settings))
            command = [sys.executable, "-m", "linattn.evaluate.process", str(folder), str(threads)]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            running.append(process)
            _, words = process.communicate()
            if process.returncode != 0:
                last = "\n".join(words.strip().splitlines()[-3:])
                raise RuntimeError(f"{folder.name} ended with status {process.returncode}: {last}")
        return {**trial.run(settings, folder), "mixer": text}

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, *each) for each in trials]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:  # also where the caller stops early
            for future in waiting:
                future.cancel()
            for process in running:
                process.kill()


def summarise(results: list[Result]) -> list[Result]:
    """Return a row for every mixer and size, at the rate of the best mean validation score.

    A row has mean and standard deviation over the seeds of each test set's accuracy.
    """
    groups: dict[tuple[str, int], dict[float, list[Result]]] = {}
    for r in results:
        key = (r["mixer"], r["settings"]["model"]["hidden_size"])
        groups.setdefault(key, {}).setdefault(r["settings"]["learning_rate"], []).append(r)
    rows = []
    for (mixer, dim), rates in groups.items():
        rate = max(rates, key=lambda x: statistics.mean(r["validation"] or 0.0 for r in rates[x]))
        own = rates[rate]
        tests = [
            {"data": sets[0]["data"], **_statistics(sets)}
            for sets in zip(*(r["tests"] for r in own), strict=True)
        ]
        rows.append({
            "mixer": mixer, "dim": dim, "learning_rate": rate, "seeds": len(own),
            "parameters": own[0]["parameters"], "state_bytes": own[0]["state_bytes"],
            "steps": statistics.mean(r["steps"] for r in own),
            "seconds": statistics.mean(r["seconds"] for r in own), "tests": tests,
            "diverged": sum(bool(r.get("diverged")) for r in own),
        })  # fmt: skip
    return rows


def _statistics(sets: tuple[Result, ...]) -> Result:
    found: Result = {}
    for name in ("accuracy", "all_right"):
        values = [s[name] for s in sets if name in s]
        if values:
            found[name] = statistics.mean(values)
            found[f"{name}_deviation"] = statistics.stdev(values) if len(values) > 1 else None
    return found


def write(results: list[Result], output: Path, draw: Callable[..., Any]) -> list[Result]:
    """Write results.json, results.md and accuracy.png; return the rows."""
    rows = summarise(results)
    task = results[0]["settings"]["task"]
    write_json(output / "results.json", {"kind": "sweep", "task": task, "rows": rows,
               **{k: results[-1][k] for k in trial.about()}})  # fmt: skip
    lines = "\n".join(table(rows)) + "\n"
    whole(output / "results.md", lambda path: path.write_text(lines))
    whole(output / "accuracy.png", lambda path: draw(rows, task, path))
    return rows


def labels(rows: list[Result]) -> list[str]:
    """Return each test set in words: the options in which it differs from another."""
    sets = [test["data"] for test in rows[0]["tests"]]
    known = dict.fromkeys(name for options in sets for name in options)
    names = [n for n in known if len({str(options.get(n)) for options in sets}) > 1]
    found = [", ".join(f"{n} {options[n]}" for n in names if n in options) for options in sets]
    return [text or "as by default" for text in found] if len(sets) > 1 else found


def cells(row: Result) -> list[str]:
    """Return a row's texts, in the order of `columns`."""
    state = "" if row["state_bytes"] is None else f"{row['state_bytes']:,}"
    diverged = f" ({row['diverged']} diverged)" if row.get("diverged") else ""
    texts = [row["mixer"] + diverged, str(row["dim"]), f"{row['parameters']:,}", state]
    texts += [f"{row['learning_rate']:g}", str(row["seeds"]), f"{row['steps']:,.0f}"]
    for test in row["tests"]:
        for name in ("accuracy", "all_right"):
            if name in test:
                spread = test[f"{name}_deviation"]
                more = "" if spread is None else f" \u00b1 {100 * spread:.1f}"
                texts.append(f"{100 * test[name]:.1f}{more}")
    return texts


def columns(rows: list[Result]) -> list[str]:
    """Return the names of the columns."""
    names = ["mixer", "dim", "parameters", "state [bytes]", "rate", "seeds", "steps"]
    for label, test in zip(labels(rows), rows[0]["tests"], strict=True):
        of = f"{label}: " if label else ""
        names.append(f"{of}accuracy [%]")
        if "all_right" in test:
            names.append(f"{of}all right [%]")
    return names


def table(rows: list[Result]) -> list[str]:
    """Return the rows as Markdown, the best of each size first."""
    names = columns(rows)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    ordered = sorted(rows, key=lambda r: (r["dim"], -r["tests"][0]["accuracy"]))
    return [*lines, *("| " + " | ".join(cells(row)) + " |" for row in ordered)]


def read(folder: Path) -> Settings:
    """Return the settings of a trial's folder, as `run` wrote them for its process."""
    return settings_of(json.loads((folder / "settings.json").read_text()))


def settings_of(found: dict[str, Any]) -> Settings:
    """Return the settings that JSON has made lists of."""
    found = dict(found)
    for name in ("mixer", "train", "test"):
        found[name] = tuple(found[name])
    return Settings(**found)
