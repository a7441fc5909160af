"""Tasks of lm_eval by name, and the data that some of them make for a length and a tokenizer, such as RULER's."""

import contextlib
import functools
import io
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bpc_calib.errors import InputError

__all__ = ["HarnessTask", "check", "prepare"]

Managers = Callable[[Path | None], Any]


@dataclass(frozen=True)
class HarnessTask:
    """A task that lm_eval can run: `tasks` and `manager` as `lm_eval.simple_evaluate` takes them.

    `tokens` is the length that its prompts were made for; None: the task has prompts of its own.
    """

    name: str
    tokens: int | None
    tasks: list[Any]
    manager: Any


def check(tasks: Sequence[str]) -> None:
    """Raise `InputError` if lm_eval is not installed or does not know a task."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as fault:
        raise InputError("tasks of lm_eval need the package lm_eval: pip install 'bpc-calib[eval]'") from fault
    managers = _managers({})
    for task in tasks:
        _find(task, managers)


def prepare(tasks: Sequence[str], tokenizer: Any, lengths: Sequence[int], seed: int) -> list[HarnessTask]:
    """Return the tasks in their order; a task that makes its data stands there once per length.

    The data of a length are those that lm_eval makes with the metadata `tokenizer` and `max_seq_lengths`, and with all
    its seeds set to `seed`. They are made once, so that every method gets the same prompts.

    Raises:
        InputError: a task is unknown, or its data cannot be loaded or made; the message names it.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        metadata: dict[str, Any] = {"tokenizer": folder}
        managers = _managers(metadata)
        for task in tasks:
            name, manager = _find(task, managers)
            for length in lengths:
                metadata["max_seq_lengths"] = [length]  # the manager reads this when it loads a task
                loaded = _load(task, name, manager, seed)
                if not any(callable(getattr(each.config, "custom_dataset", None)) for each in loaded):
                    found.append(HarnessTask(task, None, [name], manager))
                    break
                found.append(HarnessTask(task, length, loaded, manager))
    return found


def _managers(metadata: dict[str, Any]) -> Managers:
    """Return a function of a folder with the user's tasks, or None for those of lm_eval, to its `TaskManager`.

    Each is made once, because lm_eval reads every task's file for that, which takes seconds.
    """
    from lm_eval.tasks import TaskManager

    @functools.cache
    def make(folder: Path | None) -> Any:
        if folder is None:
            return TaskManager(metadata=metadata)
        return TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)

    return make


def _find(task: str, managers: Managers) -> tuple[str, Any]:
    """Return the name of a task and the `TaskManager` that has it; FOLDER/NAME.yaml is a task of the user's."""
    path = Path(task)
    if path.suffix == ".yaml":
        if not path.is_file():
            raise InputError(f"{task}: there is no such file")
        manager = managers(path.parent)
        name, fault = path.stem, f"{task} does not define a task named {path.stem!r}"
    else:
        manager, name = managers(None), task
        fault = f"lm_eval has no task {task!r}: `lm_eval ls tasks` lists its tasks"
    if not manager.match_tasks([name]):
        raise InputError(fault)
    return name, manager


def _load(task: str, name: str, manager: Any, seed: int) -> list[Any]:
    """Return the tasks of this name, with their data; what lm_eval prints meanwhile is left out."""
    # This module keeps a random state: import it anew, as in a run of lm_eval alone.
    sys.modules.pop("lm_eval.tasks.ruler.cwe_utils", None)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return list(manager.load([name])["tasks"].values())
    except Exception as fault:  # a missing package or file, no network
        reason = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        raise InputError(f"lm_eval:{task}: its data cannot be loaded: {reason}") from fault
