"""Every example of the documents runs, and prints what they say."""

import re
import shlex
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import hub
import pytest
import test_hub
import tiny

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
NOT_RUN = ("pip install ", "make ")  # what they do is the setting of the tests themselves


def examples(page: str) -> list[tuple[str, str, str]]:
    """In order: ("python", code, "") and ("console", command, the output shown below it)."""
    found = []
    for language, block in re.findall(
        r"^```(console|python)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    ):
        if language == "python":
            found.append((language, block, ""))
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((language, command, output))
    return found


def assert_same(shown: str, printed: str) -> None:
    """Equal but for times, memory and the last digits that a processor may round its own way."""
    number = re.compile(r"\d+\.\d+")
    for expected, line in zip(shown.splitlines(), printed.splitlines(), strict=True):
        if "peak memory" in expected:
            assert "peak memory" in line
            continue
        assert number.sub("#", line) == number.sub("#", expected)
        for ours, theirs in zip(number.findall(expected), number.findall(line), strict=True):
            assert float(theirs) == pytest.approx(float(ours), abs=0.02)


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    """A folder with what the examples name, and a Hub that has the model and the corpora they name."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    tiny.write_playground(folder)
    texts = [tiny.prose(4000, seed=i) for i in range(4)]
    test_hub.json_lines(folder / "mails.jsonl", "body", texts)
    repositories = folder / "repositories"
    models, datasets = test_hub.make_repositories(repositories)
    for path in (repositories / "sets").rglob("*.*"):
        if path.suffix == ".parquet":
            test_hub.parquet(path, texts * 8)
        else:
            test_hub.json_lines(path, "content" if "parrot" in str(path) else "text", texts * 8)
    with hub.serve(models, datasets, revisions=test_hub.PINNED) as server:
        yield folder, test_hub.environment(server.url, repositories / "home") | {"HF_TOKEN": "hf_alice"}


def run_python(block: str, folder: Path) -> None:
    """Run a block; one that begins with the name of a file is also that file."""
    if named := re.match(r"# (\w+\.py)\n", block):
        (folder / named[1]).write_text(block)
    ran = subprocess.run([sys.executable, "-c", block], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for line in block.splitlines():
        if match := re.search(r"print\(.*\)  # ([^:]+)", line):
            assert match[1] in ran.stdout


def kind_of(example: tuple[str, str, str]) -> str:
    """Return "code" of Python, or the program that a command starts."""
    language, command, _ = example
    return "code" if language == "python" else command.split()[0]


def check_commands(group: list[tuple[str, str, str]], playground, one_process) -> None:
    """Run commands of `bpc` that follow each other; each must succeed and print what is shown below it."""
    folder, environment = playground
    commands = [shlex.split(example)[1:] for _, example, _ in group]
    for (_, example, shown), ran in zip(group, one_process(commands, folder, **environment), strict=True):
        assert ran.code == 0, f"{example}: {ran.err}"
        if shown:
            assert_same(shown, ran.out)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page != "README.md")) for page in PAGES]
)
def test_examples_run_in_order(page, playground, one_process):
    folder, _ = playground
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.json")]:  # of other pages
        old.unlink()
    for kind, group in groupby(examples(page), key=kind_of):
        if kind == "bpc":
            check_commands(list(group), playground, one_process)
            continue
        for _, example, shown in group:
            if kind == "code":
                run_python(example, folder)
            elif kind == "python":
                command = [sys.executable, *shlex.split(example)[1:]]
                printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
                assert_same(shown or printed, printed)
            else:
                assert example.startswith(NOT_RUN), example


@pytest.mark.parametrize("page", PAGES)
def test_a_page_with_commands_that_do_not_run_here_says_why(page):
    text = (ROOT / page).read_text()
    first = re.search(r"^```(?!console|python|$)|^    (?:bpc|python|make|pip|torchrun|BPC_\w+)[ =]", text, re.MULTILINE)
    if first:
        assert re.search(r"<!-- not run: .+ -->", text[: first.start()]), first[0]


def test_the_errors_of_the_troubleshooting_page_exist():
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", (ROOT / "docs/troubleshooting.md").read_text())
    sources = [path.read_text() for room in ("artifacts", "bpc_calib", "cli") for path in (ROOT / room).rglob("*.py")]
    joined = re.sub(r'"\s*\n\s*f?"', "", "".join(sources))  # texts over several lines
    assert len(quoted) > 20
    assert [line for line in quoted if line not in joined] == []


def test_the_page_of_models_lists_the_families_that_are_tested():
    rows = re.findall(r"^\| (`.*?) \|.*(?:real|random) weights", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == {*tiny.FAMILIES, "gemma3"}  # the latter as a whole: its language model alone


def test_the_reference_lists_every_public_name():
    import bpc_artifacts
    import bpc_calib

    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    # The functions of a backend, which `find` returns.
    step = {
        "bpc_calib.backends.protocol.Backend",
        *(f"bpc_calib.method.step.{name}" for name in ("append", "sparse_decode", "dense_decode")),
    }
    assert step <= set(listed)
    public = [f"{room.__name__}.{name}" for room in (bpc_artifacts, bpc_calib) for name in room.__all__]
    assert sorted({*listed, "bpc_artifacts.BPCError"} - step) == sorted(public)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = ROOT / page if not path else (ROOT / page).parent / path
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
