"""`linattn report`: the JSON files of many evaluations as one Markdown page with their pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linattn._validation import reject
from linattn.evaluate import sweep
from linattn.train.record import whole

Found = dict[str, Any]


def report(folders: list[Path], page: Path, title: str = "Evaluations") -> list[Path]:
    """Write a page of all results below folders; return the files it is made of.

    A trial whose sweep is there too is not told again. Pictures are linked relative to the page.

    Raises:
        ValueError: a folder that is missing, no result, or a file that is none.
    """
    if page.is_dir():
        reject("output", f"{page}, a folder", "a file to write")
    found: list[tuple[Path, Found]] = []
    for folder in folders:
        if not folder.is_dir():
            reject("folder", folder, "an existing folder")
        for path in sorted(folder.rglob("*.json")):
            content = _read(path)
            if content is not None and path not in {p for p, _ in found}:
                found.append((path, content))
    swept = {path.parent for path, content in found if content["kind"] == "sweep"}
    told = [
        (path, content)
        for path, content in found
        if content["kind"] != "trial" or path.parent.parent not in swept
    ]
    if not told:
        reject("folder", [str(folder) for folder in folders], "results of linattn eval or train")
    lines = [f"# {title}", ""]
    for path, content in _runs_together(told):
        heading, write = KINDS[content["kind"]]
        name = content.get("task") or content.get("name") or path.parent.name
        try:
            table = write(content)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError):
            reject("folder", f"{path}, which is damaged", "whole results")
        lines += [f"## {heading}: {name}", "", *table, ""]
        for picture in sorted(path.parent.glob("*.png")):
            link = os.path.relpath(picture, page.parent).replace(os.sep, "/")
            lines += [f"![{picture.stem}]({link})", ""]
        about = [f"{content[key]}" for key in ("date", "machine") if key in content]
        about += [f"{key} {content[key]}" for key in ("threads", "torch") if key in content]
        lines += [f"{', '.join(about)}; from `{path.name}` of `{path.parent.name}`.", ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    whole(page, lambda beside: beside.write_text("\n".join(lines), encoding="utf-8"))
    return [path for path, _ in told]


def _read(path: Path) -> Found | None:
    """Return a result; None for JSON of another kind, as a model's configuration."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        reject("folder", f"{path}, which is no JSON", "whole results")
    if not isinstance(content, dict):
        return None
    if path.name == "run.json" and "held_out_bits_per_byte" in content:
        return {**content, "kind": "run"}
    return content if content.get("kind") in KINDS else None


def _runs_together(told: list[tuple[Path, Found]]) -> list[tuple[Path, Found]]:
    """Return the results with all training runs of one folder as one."""
    groups: dict[Path, tuple[Path, Found]] = {}
    for path, content in told:
        if content["kind"] != "run":
            groups[path] = (path, content)
            continue
        above = path.parent.parent
        if above not in groups:
            groups[above] = (path, {**content, "name": above.name, "rows": []})
        groups[above][1]["rows"].append({**content, "folder": path.parent.name})
    return list(groups.values())


def markdown(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Return a table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def number(value: Any, digits: int = 3) -> str:
    """Return a number in words, nothing for None."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def _sweep(content: Found) -> list[str]:
    return sweep.table(content["rows"])


def _trial(content: Found) -> list[str]:
    row = {
        "mixer": "+".join(content["settings"]["mixer"]), "seeds": 1,
        "dim": content["settings"]["model"].get("hidden_size", ""),
        "learning_rate": content["settings"]["learning_rate"],
        **{key: content[key] for key in ("parameters", "state_bytes", "steps", "seconds")},
        "tests": [{"accuracy_deviation": None, "all_right_deviation": None, **test}
                  for test in content["tests"]],
    }  # fmt: skip
    return sweep.table([row])


def _run(content: Found) -> list[str]:
    names = ("held_out_bits_per_byte", "parameters", "step", "tokens_per_second")
    rows = [
        [row["folder"], "+".join(row["settings"]["mixer"]), *(number(row[name]) for name in names)]
        for row in content["rows"]
    ]
    return markdown(["run", "mixer", *(name.replace("_", " ") for name in names)], rows)


def _perplexity(content: Found) -> list[str]:
    names = ("perplexity", "bits_per_byte", "context", "stride", "tokens")
    return markdown(
        ["model", *(name.replace("_", " ") for name in names)],
        [[row["model"], *(number(row[name]) for name in names)] for row in content["rows"]],
    )


def _recall(content: Found) -> list[str]:
    cells = content["cells"]
    lengths = list(dict.fromkeys(cell["length"] for cell in cells))
    rows = []
    for depth in dict.fromkeys(cell["depth"] for cell in cells):
        own = {cell["length"]: cell for cell in cells if cell["depth"] == depth}
        texts = [f"{100 * own[n]['exact']:.0f}" if n in own else "" for n in lengths]
        rows.append(["anywhere" if depth is None else f"{depth:g}", *texts])
    return markdown(["depth \\ length; exact [%]", *map(str, lengths)], rows)


def _concentration(content: Found) -> list[str]:
    names = ("entropy", "relative_entropy", "spectral_gap", "singular_value", "clipped")
    rows = [
        [row["model"], row["map"], str(row["head"]), *(number(row[name]) for name in names)]
        for row in content["rows"]
    ]
    return markdown(["model", "map", "head", *(name.replace("_", " ") for name in names)], rows)


def _harness(content: Found) -> list[str]:
    rows = [[row["task"], row["metric"], number(row["value"])] for row in content["rows"]]
    return markdown(["task", "metric", "value"], rows)


KINDS: dict[str, tuple[str, Callable[[Found], list[str]]]] = {
    "sweep": ("Mixers on", _sweep),
    "trial": ("A trial", _trial),
    "run": ("Language models", _run),
    "perplexity": ("Perplexity", _perplexity),
    "recall": ("Recall", _recall),
    "concentration": ("Attention maps", _concentration),
    "lm-eval": ("lm-eval", _harness),
}
