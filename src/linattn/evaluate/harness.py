"""lm-eval's tasks on a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linattn._validation import reject
from linattn.evaluate import models


def harness(
    path: Path, tasks: list[str], *, include: Path | None = None, limit: int | None = None,
    shots: int | None = None, rows: int = 8,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return rows of task, metric, value and standard error, as lm-eval (pip install) has them.

    Args:
        path: a language model, as in `linattn.evaluate.models.load`.
        tasks: names that lm-eval knows, or of YAML files in `include`.
        include: a folder of task files.
        limit: examples of each task; None: all.
        shots: examples in front of each; None: the task's own.
        rows: of a batch.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: no such model, folder or task.
    """
    try:
        from lm_eval import simple_evaluate  # type: ignore[import-untyped]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]
        from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"these tasks need lm-eval ({error}): pip install lm-eval") from None
    if include is not None and not include.is_dir():
        reject("include", include, "a folder of task files")
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown or not tasks:
        reject("task", unknown, "names of lm-eval's tasks, or of those in the include folder")
    model, tokenizer = models.load(path)
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=rows)
    try:
        found = simple_evaluate(
            wrapped, tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=shots
        )
    except (OSError, RuntimeError) as error:  # a data set that cannot be had, most likely
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        reject("task", f"{tasks} ({first})", "tasks whose data are here or can be downloaded")
    scores: list[dict[str, Any]] = []
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, _, of = key.partition(",")
            if isinstance(value, float | int) and of and not metric.endswith("_stderr"):
                deviation = metrics.get(f"{metric}_stderr,{of}")
                scores.append({"task": task, "metric": metric, "value": value, "error": deviation})
    return scores
