"""Shared fixtures: a tiny model folder, a text folder, and the command line."""

import json
import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# The libraries read these during their import. No test in this process talks to the Hub, and the command line is as
# quiet here as in its own process, although the libraries are already imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

# With `--emulate` the kernels are compiled and run from their PTX, on the CPU even where there is a GPU.
if any(word.split("=")[0] == "--emulate" for word in sys.argv):
    os.environ |= {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}

import torch

# Without a GPU the kernels run in Triton's interpreter; the definition of a kernel reads this variable.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import pytest
import tiny
from processes import started
from typer.testing import CliRunner


def pytest_addoption(parser):
    parser.addoption("--emulate", type=int, metavar="ARCH", help="run Triton's kernels from their PTX, 90 for sm_90")
    parser.addoption("--emulate-all", action="store_true", help="with --emulate, also the tests that are not marked so")
    parser.addoption("--emulate-order", default="random", help="of blocks: random, reversed or ascending")
    parser.addoption("--emulate-seed", type=int, default=0, help="of the random order of blocks and of atomics")


def pytest_configure(config):
    # A shell has a job in the background ignore Ctrl-C, and so would the processes that tests start to interrupt them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests choose among few tokens, where it does not pay; those of the switch-over ask `switch_over` itself.
    from bpc_calib.runtime.layers import GrowingLayer

    config.switch_over, GrowingLayer.switch_over = GrowingLayer.switch_over, lambda layer, keys: 0
    if config.option.emulate:
        from ptx.emulation import emulate

        from bpc_calib.backends import dispatch, limits

        dispatch.unfit = limits.unfit = lambda device: None  # the CPU stands in for a GPU
        config.emulation = emulate(config.option.emulate, config.option.emulate_order, config.option.emulate_seed)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by `slow`
def pytest_collection_modifyitems(config, items):
    """With `--emulate`, only tests of kernels: those marked `emulated`, or all.

    Without it, Triton's interpreter runs them in `make test-all` alone: a push runs the marked ones from their PTX,
    which says more and takes less time.
    """
    if config.option.emulate:
        kept = [item for item in items if emulated(item, every=config.option.emulate_all)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    elif os.environ["TRITON_INTERPRET"] == "1":
        for item in items:
            if emulated(item, every=True):
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.rare)


def emulated(item, *, every):
    """Whether a test is one of kernels, and is marked; `emulated(shape=["one head"])` is for these values alone."""
    values = item.callspec.params if hasattr(item, "callspec") else {}
    if item.path.name not in ("test_kernels.py", "test_paged_kernels.py") and values.get("pipeline") != "triton":
        return False
    marks = item.iter_markers("emulated")
    return every or any(all(values[name] in chosen for name, chosen in each.kwargs.items()) for each in marks)


@pytest.fixture(autouse=True)
def forget_tensors(request):
    """The emulator keeps the tensors of a test until its end."""
    yield
    if emulation := getattr(request.config, "emulation", None):
        emulation.watched.clear()


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

    yield run
    logging.getLogger("bpc_calib").setLevel(logging.WARNING)  # later tests read warnings, too


@pytest.fixture
def bpc_process(tmp_path):
    """Run the command line in a new process, in an empty folder: `bpc_process("--version", HF_HOME=...)`."""

    def run(*words: object, cwd: Path = tmp_path, **environment: str) -> Ran:
        done = started("from bpc_cli.main import main; main()", *words, folder=cwd, environment=environment)
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


COMMANDS = """
import json, sys
from typer.testing import CliRunner
from bpc_cli.main import app
answers = []
for words in json.loads(sys.argv[1]):
    ran = CliRunner().invoke(app, words)
    answers.append([ran.exit_code, ran.stdout, ran.stderr])
print(json.dumps(answers))
"""


@pytest.fixture(scope="session")
def one_process():
    """Run commands one after the other in one new process: `one_process([words, ...], folder, HF_HOME=...)`.

    A process reads the address of the Hub when it starts, and its start takes seconds.
    """

    def run(commands: Iterable[Iterable[object]], folder: Path, **environment: str) -> list[Ran]:
        words = json.dumps([list(map(str, each)) for each in commands])
        done = started(COMMANDS, words, folder=folder, environment=environment)
        assert done.returncode == 0, done.stderr
        return [Ran(*answer) for answer in json.loads(done.stdout)]

    return run
