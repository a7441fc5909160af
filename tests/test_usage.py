"""Wrong usage: refused at once, in one line with exit status 2, and whatever is wrong, nothing is written."""

import inspect
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
import test_artifact
import typer

from bpc_artifacts import save
from bpc_cli.main import app

COMMANDS = typer.main.get_command(app).commands
NEEDED = {  # what makes a command complete
    "calibrate": ["-m", "demo"],
    "inspect": ["a.safetensors"],
    "generate": ["-m", "demo", "-p", "x"],
    "chat": ["-m", "demo"],
    "serve": ["-m", "demo", "-a", "a.safetensors"],
    "eval": ["-m", "demo"],
    "push": ["a.safetensors", "org/name", "--yes"],
    "pull": ["org/name"],
}
BAD_TEXT = {  # by parameter; what none of these refuses is a name, a path or a text
    "artifact": [],
    "batch_sizes": ["", "x", "0", "1,-1", "9" * 5000],
    "budget": ["", "x", "0", "-1", "1.5", "101%", "%", "nan", "inf", "-0.1", "sNaN", "1e999999999999999999999"],
    "budgets": ["", ",", "2%,x", "0", "nan"],
    "corpus": [],
    "dense_layers": ["x", "-1", "0,,1", "0.5", "9" * 5000],
    "device": ["", "toaster", "cuda:", "cuda:-1", "cuda:x", "meta"],
    "evaluation": [],
    "file": [],
    "files": [],
    "html": [],
    "kv_device": ["", "disk", "disk:", "gpu", "CPU", "/tmp"],
    "learn_corpus": [],
    "lengths": ["", "x", "0", "-5", "1.5"],
    "method": ["", "best"],
    "methods": ["", "best", "bpc"],
    "model": [],
    "output": [],
    "parts": ["", "layers"],
    "plot": [],
    "prompt": ["", " "],
    "prompt_cache": [],
    "prompt_file": [],
    "repository": ["", "name"],
    "revision": [],
    "session": [],
    "shape": ["", "8x128", "llama-9", "0x128x4", "8x127x4"],
    "system": [],
    "tasks": ["", "no-task"],
    "text_field": [],
    "work_dir": [],
}
EXCLUSIVE = [
    "bench -m demo --shape 2x64x2",
    "bench --crossover --parts layer",
    "bench --crossover --lengths 64",
    "bench --revision main",
    "calibrate -m demo --device cpu --device-map auto",
    "calibrate -m demo --samples 1 --sequence-length 8",
    "calibrate -m demo --bits 128 --keys-per-head 100",
    "calibrate -m demo --tensor-parallel",
    "doctor --revision main",
    "eval -m demo --tasks text --lengths 64",
    "eval -m demo --preset hard --budgets 3 --methods window",
    "generate -m demo -p x --prompt-file y",
    "generate -m demo -p x --top-p 0.5",
    "generate -m demo -p x --raw --system y",
    "generate -m demo -p x --exact --check 9",
    "generate -m demo -p x --draft 4",
    "chat -m demo --fallback 0.9",
    "chat -m demo --top-p 0.5",
    "inspect a b c",
    "inspect a b --plot c.png",
    "inspect a --plot c.doc",
    "inspect a b --evaluation c",
    "inspect a --budget 64",
    "inspect a --html c.png --plot c.png",
    "push a.safetensors org/name",
    f"push a.safetensors org/name --yes --revision {'a' * 40}",
    "pull org/name@main --revision main",
    "pull org/name@",
    "serve -m demo -a online",
    "serve -m demo -a a --additional-config {}",
]


def kind_of(annotation):
    """The type of a parameter, without what may be left out or repeated."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(each for each in get_args(annotation) if each is not type(None))
    return get_args(annotation)[0] if get_origin(annotation) is list else annotation


KINDS = {  # by command and parameter
    name: {each.name: kind_of(each.annotation) for each in inspect.signature(registered.callback).parameters.values()}
    for name, registered in zip(COMMANDS, app.registered_commands, strict=True)
}


def bad_values(command: str, parameter: str) -> list[str]:
    """What an option refuses without a look at a file or a model."""
    kind = KINDS[command][parameter]
    if kind is int:
        return ["", "x", "-1", "1.5", "9" * 5000]
    if kind is float:
        return ["", "x", "-1", "nan", "inf"]
    if get_origin(kind) is Literal:
        return ["", "x"]
    return BAD_TEXT[parameter]


def wrong_usage() -> list[list[str]]:
    """Every option of every command with bad values, without its value, and given as what it is not."""
    found = []
    for name, command in COMMANDS.items():
        start = [name, *NEEDED.get(name, [])]
        if name != "serve":  # passes on what it does not know
            found += [[*start, "--nonsense"], [*start, "-Z"]]
        for parameter in command.params:
            option = max(parameter.opts, key=len)
            if parameter.param_type_name == "argument":
                continue
            if parameter.is_flag:
                found.append([*start, f"{option}=yes"])
                continue
            found.append([*start, option])
            found += [[*start, f"{option}={value}"] for value in bad_values(name, parameter.name)]
    return found + [words.split() for words in EXCLUSIVE]


HEAVY = ("torch", "numpy", "transformers", "datasets", "matplotlib")
SCRIPT = f"""
import json, sys
from typer.testing import CliRunner
from bpc_cli.main import app
for words in json.load(sys.stdin):
    ran = CliRunner().invoke(app, words)
    print(json.dumps([ran.exit_code, ran.stdout, ran.stderr, [m for m in {HEAVY} if m in sys.modules]]))
"""


def test_wrong_usage_exits_2_in_one_line_before_a_large_library_is_imported(tmp_path):
    cases = wrong_usage()
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(answers) == len(cases) > 300
    for words, (code, out, err, imported) in zip(cases, answers, strict=True):
        one_line = err.startswith("Error: ") and err.endswith(" --help lists the options)\n") and err.count("\n") == 1
        assert (code, out, imported, one_line) == (2, "", [], True), (words, err)
    assert list(tmp_path.iterdir()) == []


def test_every_text_option_is_known_here():
    texts = {name for kinds in KINDS.values() for name, kind in kinds.items() if kind in (str, Path)}
    assert texts == set(BAD_TEXT)


# What cannot be opened, read, written or found, or is something else; each is wrong for every option of its kind.
BAD_PATHS = ["none/x", ".", "note.txt", "note.txt/x", "pipe", "x" * 5000, "a\x1b[31m\n/b", "\udcff/x", "\u202e/x"]
BAD_FILES = ["", "link", "unread.safetensors", "org/none", *BAD_PATHS]
BAD_MODELS = ["a b", "./none", "/dev/null", "a.safetensors", "x//y", "é/✗", *BAD_FILES]
BAD_ARTIFACTS = ["demo", "org/none@", *BAD_FILES]
WRONG = {
    "artifact": BAD_ARTIFACTS,
    "corpus": ["", "pg20", "x=none", "empty", "pipe", "x" * 5000, "\udcff"],
    "evaluation": ["", *BAD_PATHS],
    "file": BAD_ARTIFACTS,
    "files": BAD_ARTIFACTS,
    "html": ["", *BAD_PATHS],
    "model": BAD_MODELS,
    "output": [*BAD_PATHS, "/dev/null"],
    "plot": ["a.png/x.png", "none/x.png", "note.txt", "x" * 5000 + ".png"],
    "prompt_cache": ["", *BAD_PATHS],
    "prompt_file": ["", *(path for path in BAD_PATHS if path != "note.txt"), "binary.txt", "empty.txt"],
    "repository": ["", "name", "a/b/c", "org/none", "x" * 500 + "/y", "é/✗", "../x"],
    "revision": ["", "none", "\udcff", "x" * 500],
    "session": ["", *BAD_PATHS],
}
SET = {  # options that change nothing about whether a command may run
    "--json": None, "--quiet": None, "--seed": "3", "--budget": "5%", "--min-tokens": "64", "--dense-layers": "none",
    "--lengths": "300", "--repeats": "1", "--samples": "16", "--dtype": "float32",
}  # fmt: skip


def draw(rng: random.Random) -> list[str]:
    """A command line with at least one mistake."""
    name = rng.choice(list(COMMANDS))
    words = [name, *NEEDED.get(name, [])]
    params = COMMANDS[name].params
    options = {max(each.opts, key=len): each for each in params if each.param_type_name == "option"}
    for option in [each for each in SET if each in options and rng.random() < 0.3]:
        words += [option] if SET[option] is None else [option, SET[option]]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mistake = rng.randrange(8)
        if mistake == 0 and name != "serve":
            words += rng.choice((["--nonsense"], ["-Z"], ["--budgett=3"], ["--✗"], ["x\udcff", "y", "z"]))
        elif mistake == 1 and name in NEEDED:
            words = [words[0], *words[1 + len(NEEDED[name]) :]] + ["--html"] * (name == "inspect")
        elif mistake == 2:
            words += rng.choice([each.split()[1:] for each in EXCLUSIVE if each.split()[0] == name] or [["--seed"]])
        else:
            named = [each for each in params if not getattr(each, "is_flag", False) and each.name in KINDS[name]]
            chosen = rng.choice([each for each in named if values_of(name, each.name)])
            value = rng.choice(values_of(name, chosen.name))
            if chosen.param_type_name == "argument":
                place = 1 if chosen.name in ("file", "files") or name == "pull" else 2
                words[place : place + 1] = [value]
            else:
                words.append(f"{max(chosen.opts, key=len)}={value}")
    return words


def values_of(command: str, parameter: str) -> list[str]:
    """Wrong values of an option or argument, which need a look at a file or the model or not."""
    if parameter in WRONG and KINDS[command][parameter] in (str, Path):
        return WRONG[parameter]
    return [] if KINDS[command][parameter] is typer.Context else bad_values(command, parameter)


@pytest.fixture
def untidy(tmp_path, monkeypatch):
    """A folder with what may be mistaken for something else."""
    save(test_artifact.artifact(), tmp_path / "a.safetensors")
    (tmp_path / "unread.safetensors").write_bytes(b"no artifact, in case that root runs this")
    (tmp_path / "unread.safetensors").chmod(0)
    (tmp_path / "note.txt").write_text("A note.")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\0\xff")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    """The size of every file and folder, and when it was written."""
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def test_bad_invocations_end_in_a_line_and_write_nothing(bpc, untidy):
    before = state(untidy)
    for seed in range(300):
        words = draw(random.Random(seed))
        ran = bpc(*words)
        lines = ran.err.splitlines()
        assert (ran.code in (1, 2), ran.out, len(lines) <= 3) == (True, "", True), (seed, words, ran)
        assert lines[-1].startswith("Error: "), (seed, words, ran)
        assert "Error: unexpected" not in ran.err, (seed, words, ran)
        assert state(untidy) == before, (seed, words)
