"""How large the project is: files, lines, words, options, names. Runs in this checkout, or in another tree.

python benchmarks/size.py --root PATH
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PACKAGES = {"bpc_artifacts": "artifacts", "bpc_calib": "bpc_calib", "bpc_cli": "cli"}
SURFACE = """
import bpc_artifacts, bpc_calib, typer
from bpc_cli.main import app
root = typer.main.get_command(app)
for name, command in [("bpc", root), *root.commands.items()]:
    print(f"options of {name}:", sum(each.param_type_name == "option" for each in command.params))
for package in (bpc_artifacts, bpc_calib):
    print(f"public names of {package.__name__}:", len(package.__all__))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    root = parser.parse_args().root.resolve()
    files = sorted(tracked(root))
    code = [path for path in files if path.suffix == ".py"]
    tests = [path for path in code if path.relative_to(root).parts[0] == "tests"]
    print("files:", len(files))
    print("lines of Python outside tests:", sum(lines(path) for path in code if path not in tests))
    for folder, count in sorted(Counter(path.relative_to(root).parts[0] for path in code).items()):
        print(f"  {folder}: {sum(lines(path) for path in code if root / folder in path.parents)} lines, {count} files")
    pages = (root / "docs").glob("*.md"), [root / f"{page}.md" for page in ("README", "CONTRIBUTING", "CHANGELOG")]
    print("lines of tests:", sum(map(lines, tests)))
    docs, other = (sum(len(path.read_text().split()) for path in each) for each in pages)
    print(f"words of documents: {docs + other} ({docs} in docs)")
    modules = {path: name(root, path) for path in code if path.relative_to(root).parts[0] in PACKAGES.values()}
    importers = Counter(found for path in modules for found in imported(path, set(modules.values())))
    print(
        f"modules of the packages: {len(modules)}, under 50 lines: {sum(lines(path) < 50 for path in modules)}, ",
        end="",
    )
    print("with one importer:", sum(importers[each] == 1 for each in modules.values()))
    print(surface(root), end="")


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def tracked(root: Path) -> list[Path]:
    """The files of git, or of an unpacked archive all files."""
    found = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False).stdout
    every = [root / word for word in found.split("\0") if word] or list(root.rglob("*"))
    return [path for path in every if path.is_file() and "__pycache__" not in path.parts]


def name(root: Path, path: Path) -> str:
    folder, *rest = path.relative_to(root).with_suffix("").parts
    package = next(package for package, source in PACKAGES.items() if source == folder)
    return ".".join([package, *rest]).removesuffix(".__init__")


def imported(path: Path, modules: set[str]) -> set[str]:
    """The modules of the packages that a file imports, at any level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def surface(root: Path) -> str:
    """What the commands and the packages offer, as a process says that imports them from this tree."""
    with tempfile.TemporaryDirectory() as folder:  # with the packages under the names by which they are imported
        for package, source in PACKAGES.items():
            Path(folder, package).symlink_to(root / source)
        given = os.environ | {"PYTHONPATH": folder}
        return subprocess.check_output([sys.executable, "-c", SURFACE], env=given, cwd=folder, text=True)


if __name__ == "__main__":
    main()
