"""The structure of the project: allowed imports, sizes of functions, documented public names."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bpc_artifacts
import bpc_calib

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "artifacts": {"bpc_artifacts"},
    "bpc_calib": {"bpc_artifacts", "bpc_calib"},
    "cli": {"bpc_artifacts", "bpc_calib", "bpc_cli"},
}
# For each subpackage and module of `bpc_calib`, the others that it may import; CONTRIBUTING.md shows this table.
ROOMS = {
    "errors": set(),
    "compat": {"errors"},
    "demo": set(),
    "extras": set(),
    "hub": {"errors"},
    "method": {"errors"},
    "text": {"errors", "hub"},
    "models": {"errors", "extras", "hub", "compat", "demo"},
    "backends": {"errors", "compat", "method"},
    "calibration": {"errors", "compat", "method", "models", "text", "backends"},
    "runtime": {"errors", "compat", "method", "models", "backends"},
    "evaluation": {"errors", "extras", "compat", "method", "models", "text", "backends", "runtime"},
    "bench": {"errors", "compat", "method", "models", "backends", "runtime"},
    "serving": {"errors", "method", "models", "backends"},
    "sharing": {"errors", "hub", "method", "evaluation"},
}
# The only modules of `backends` that other subpackages may import.
OPEN_BACKENDS = {"dispatch", "limits", "linear", "pages", "sizes", "switch_over"}
TIMES_STAGES = Path("bench/stages.py")  # times parts of a step, which no backend offers
# What the help of the commands shows, and what they check their options with: none of the large libraries.
CHEAP = {
    "bpc_artifacts.errors",
    "bpc_artifacts.replacing",
    "bpc_calib.bench.settings",
    "bpc_calib.calibration.numbers",
    "bpc_calib.calibration.projection_method",
    "bpc_calib.errors",
    "bpc_calib.evaluation.methods",
    "bpc_calib.evaluation.settings",
    "bpc_calib.evaluation.tasks",
    "bpc_calib.method.budget",
    "bpc_calib.method.defaults",
    "bpc_calib.method.numbers",
    "bpc_calib.runtime.kv_device",
    "bpc_calib.sharing.names",
    "bpc_calib.text.known_corpora",
}
MOST_PARAMETERS = 12
MOST_COMMAND_LINES = 60


def imported(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports at any level; `from a import b` yields a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, file
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("folder", list(MAY_IMPORT))
def test_imports_point_down_only(folder):
    for file in (ROOT / folder).rglob("*.py"):
        for name in imported(file):
            top = name.split(".")[0]
            assert not top.startswith("bpc_") or top in MAY_IMPORT[folder], f"{file}: {name}"
            if folder == "artifacts":
                assert top not in {"torch", "transformers", "datasets"}, f"{file}: {name}"


def test_subpackages_import_only_what_the_table_allows():
    package = ROOT / "bpc_calib"
    assert {path.stem for path in package.iterdir() if path.suffix in ("", ".py") and path.name[0] != "_"} == set(ROOMS)
    for room, allowed in ROOMS.items():
        for file in [package / f"{room}.py", *(package / room).rglob("*.py")]:
            for name in imported(file) if file.exists() else ():
                parts = name.split(".")
                if parts[0] != "bpc_calib":
                    continue
                assert len(parts) > 1, f"{file} imports the whole package"
                assert parts[1] in allowed | {room}, f"{file}: {name}"
                if parts[1] == "backends" and room != "backends":
                    opened = parts[2] in OPEN_BACKENDS or file == package / TIMES_STAGES
                    assert opened, f"{file}: {name}"


def functions(folder: str) -> Iterator[tuple[Path, ast.FunctionDef]]:
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield file, node


@pytest.mark.parametrize("folder", ["artifacts", "bpc_calib", "cli", "benchmarks", "training"])
def test_no_function_has_many_parameters(folder):
    for file, node in functions(folder):
        parameters = node.args
        names = [each.arg for each in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)]
        count = len(names) + bool(parameters.vararg) + bool(parameters.kwarg) - (names[:1] in (["self"], ["cls"]))
        operator = file.name == "ops.py" and file.parent.name == "triton"  # torch operators cannot take a dataclass
        assert count <= MOST_PARAMETERS or operator, f"{file}: {node.name} has {count} parameters"


def test_commands_are_short():
    commands = [
        node for _, node in functions("cli") if any(ast.unparse(each) == "command" for each in node.decorator_list)
    ]
    assert len(commands) >= 6
    for node in commands:
        first = node.body[1] if ast.get_docstring(node) else node.body[0]
        lines = (node.end_lineno or 0) - first.lineno + 1
        assert lines <= MOST_COMMAND_LINES, f"{node.name} has a body of {lines} lines"


def test_large_libraries_are_imported_at_the_top_only_where_needed():
    for folder in MAY_IMPORT:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                    forbidden = {"transformers", "datasets", "huggingface_hub", "matplotlib", "rich", "lm_eval"}
                    forbidden |= {"torch", "bpc_calib", "bpc_artifacts"} if folder == "cli" else set()
                    if file.name in (
                        "cache.py",
                        "layers.py",
                        "saved_cache.py",
                    ):  # imported only at the first use of BPCCache
                        forbidden -= {"transformers"}
                    assert module in CHEAP or (module or "").split(".")[0] not in forbidden, f"{file}: {module}"


@pytest.mark.parametrize("module", sorted(CHEAP))
def test_what_the_command_line_begins_with_imports_nothing_large(module):
    script = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_the_newest_section_of_the_changelog_is_of_this_version():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version
    assert newest
    assert newest[1] in ("Unreleased", version[1])


@pytest.mark.parametrize("package", [bpc_artifacts, bpc_calib])
def test_public_names_exist_and_functions_and_classes_are_documented(package):
    for name in package.__all__:
        found = getattr(package, name)
        if callable(found):
            written = vars(found).get("__doc__") if isinstance(found, type) else found.__doc__  # not that of a parent
            assert written, f"{name} has no docstring"
            assert not written.startswith(f"{name}("), f"{name} has the docstring that dataclasses write"
