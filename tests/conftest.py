"""Shared fixtures: a tiny model folder, a text folder, and the command line."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# The libraries read these during their import. No test in this process talks to the Hub, and the command line is as
# quiet here as in its own process, although the libraries are already imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch

# Without a GPU the kernels run in Triton's interpreter; the definition of a kernel reads this variable.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import pytest
import tiny
from typer.testing import CliRunner


class Ran(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "notes"
    (folder / "deeper").mkdir(parents=True)
    for i in range(4):
        (folder / "deeper" / f"part{i}.txt").write_text(tiny.prose(600, seed=i))
    (folder / "code.py").write_text("def f(x):\n    return x + 1\n" * 40)
    return folder


@pytest.fixture
def bpc(monkeypatch):
    """Run the command line in this process: `bpc("inspect", file)`; `stdin` is the piped input."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words: object, stdin: str | bytes = "") -> Ran:
        from bpc_cli.main import app

        result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def bpc_process(tmp_path):
    """Run the command line in a new process, in an empty folder: `bpc_process("--version", HF_HOME=...)`."""

    def run(*words: object, cwd: Path = tmp_path, **environment: str) -> Ran:
        done = subprocess.run(
            [sys.executable, "-c", "from bpc_cli.main import main; main()", *map(str, words)],
            capture_output=True,
            text=True,
            cwd=cwd,
            env=os.environ | {"COLUMNS": "100"} | environment,
            timeout=300,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run
