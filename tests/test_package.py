"""The shape of the house: which package may import which, and what the project says of itself."""

import ast
from pathlib import Path

import pytest

import bpc_artifacts
import bpc_calib
import bpc_calib.bench
import bpc_calib.evaluation

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "artifacts": {"bpc_artifacts"},
    "bpc_calib": {"bpc_artifacts", "bpc_calib"},
    "cli": {"bpc_artifacts", "bpc_calib", "bpc_cli"},
}


@pytest.mark.parametrize("folder", list(MAY_IMPORT))
def test_imports_point_down_only(folder):
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                top = name.split(".")[0]
                assert not top.startswith("bpc_") or top in MAY_IMPORT[folder], f"{file}: {name}"
                if folder == "artifacts":
                    assert top not in {"torch", "transformers", "datasets"}, f"{file}: {name}"


def test_only_what_needs_it_imports_the_large_libraries_at_the_top():
    for folder in MAY_IMPORT:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                    forbidden = {"transformers", "datasets", "huggingface_hub", "matplotlib", "rich", "lm_eval"}
                    forbidden |= {"torch", "bpc_calib", "bpc_artifacts"} if folder == "cli" else set()
                    if file.name in ("cache.py", "layers.py"):  # subclasses; imported when BPCCache is first asked for
                        forbidden -= {"transformers"}
                    assert (module or "").split(".")[0] not in forbidden, f"{file}: {module}"


@pytest.mark.parametrize("package", [bpc_artifacts, bpc_calib, bpc_calib.bench, bpc_calib.evaluation])
def test_public_names_exist_and_functions_and_classes_are_documented(package):
    for name in package.__all__:
        found = getattr(package, name)
        if callable(found):
            written = vars(found).get("__doc__") if isinstance(found, type) else found.__doc__  # not that of a parent
            assert written, f"{name} has no docstring"
            assert not written.startswith(f"{name}("), f"{name} has the docstring that dataclasses write"
