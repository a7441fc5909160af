"""The library of the kernels for a CPU: what it exports, the packages that hold it, and what serves without it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bpc_calib.backends.cpu import native

ROOT = Path(__file__).parent.parent
FOLDER = Path("bpc_calib/backends/cpu")
SOURCES = {"bpc_artifacts": "artifacts", "bpc_calib": "bpc_calib", "bpc_cli": "cli"}
COMPILED = re.compile(r"\.(so|pyc)$")


def test_the_library_exports_what_is_called():
    exported = set(re.findall(r"EXPORT .*?(bpc_\w+)\(", (ROOT / FOLDER / "native/main.cpp").read_text()))
    called = {name for file in (ROOT / FOLDER).glob("*.py") for name in re.findall(r"\.(bpc_\w+)", file.read_text())}
    assert exported == called
    assert all(hasattr(native.library(), name) for name in called)


def isa(library, **environment):
    """What a process says that loads nothing else, as the library chooses once."""
    code = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).bpc_isa; f.restype = ctypes.c_char_p; print(f().decode())"
    command = [sys.executable, "-c", code, str(library)]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def test_the_environment_selects_an_instruction_set():
    library = Path(native.__file__).with_name("libbpc_cpu.so")
    most = isa(library, BPC_ISA="")
    sets = ["base", "avx2", "avx512"]
    for each in (*sets, "zen4", "amx"):
        usual = min(each if each in sets else "avx512", most if most in sets else "avx512", key=sets.index)
        assert isa(library, BPC_ISA=each) == (each if each == most else usual)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A wheel and a source archive of a copy of this checkout, with what is compiled already."""
    folder, made = tmp_path_factory.mktemp("checkout") / "bpc", tmp_path_factory.mktemp("packages")
    others = shutil.ignore_patterns(".*", "build", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=others)
    for compiled in (ROOT / "build").glob("native-*"):
        shutil.copytree(compiled, folder / "build" / compiled.name)
    for command in (
        ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(made), "."],
        ["-c", "import setup, sys; setup.build_sdist(sys.argv[1])", str(made)],
    ):
        ran = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
    (wheel,), (archive,) = made.glob("*.whl"), made.glob("*.tar.gz")
    return wheel, archive


def test_the_wheel_serves_every_python(packages, tmp_path):
    wheel, _ = packages
    name, version, python, abi, machine = wheel.stem.split("-")
    assert (name, python, abi) == ("bpc_calib", "py3", "none")
    assert machine.startswith(("linux_", "macosx_"))
    with zipfile.ZipFile(wheel) as opened:
        assert {each.partition("/")[0] for each in opened.namelist()} == {*SOURCES, f"{name}-{version}.dist-info"}
        assert "bpc_calib/demo/model.safetensors" in opened.namelist()
        held = [each for each in opened.namelist() if each.startswith(f"{FOLDER}/") and not each.endswith(".py")]
        assert held == [f"{FOLDER}/libbpc_cpu.so"]
        library = opened.extract(held[0], tmp_path)
    assert isa(library) == native.isa()


def test_the_source_archive_holds_what_the_tests_need_and_nothing_compiled(packages):
    _, archive = packages
    with tarfile.open(archive) as opened:
        held = {each.partition("/")[2] for each in opened.getnames()}
    folders = (*SOURCES.values(), "benchmarks", "docs", "tests", "training")
    files = [*ROOT.glob("*.md"), *(each for folder in folders for each in (ROOT / folder).rglob("*") if each.is_file())]
    needed = {each.relative_to(ROOT).as_posix() for each in files if not COMPILED.search(each.name)}
    assert needed | {"CITATION.cff", "LICENSE", "Makefile", "mkdocs.yml", "pyproject.toml", "setup.py"} <= held
    assert [each for each in held if COMPILED.search(each)] == []


SERVED = """
import torch
from bpc_calib.backends import dispatch
from bpc_calib.errors import InputError
keys = torch.randn(1, 1, 5, 16)
for _ in range(2):
    print(dispatch.find(keys).__name__)
print(dispatch.backend(torch.device("cpu")))
import os
os.environ["BPC_BACKEND"] = dispatch.compiled(torch.device("cpu"))
try:
    dispatch.backend(torch.device("cpu"))
except InputError as fault:
    print(fault)
"""


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (None, r"the kernels for CPUs are not built \(install a C\+\+ compiler, then bpc-calib again\)"),
        (b"of another machine", "the kernels for CPUs cannot be loaded: .*"),
    ],
    ids=["none", "damaged"],
)
def test_without_the_library_torch_serves_with_one_warning(tmp_path, library, said):
    others = shutil.ignore_patterns("*.so", "__pycache__")
    for package, source in (("bpc_calib", "bpc_calib"), ("bpc_artifacts", "artifacts")):
        shutil.copytree(ROOT / source, tmp_path / package, ignore=others)
    if library is not None:
        (tmp_path / FOLDER / "libbpc_cpu.so").write_bytes(library)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    environment.pop("BPC_BACKEND", None)
    command = [sys.executable, "-c", SERVED]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.fullmatch(f"{said}; plain torch decodes instead, slowly\n", ran.stderr)
    assert re.fullmatch(f"(bpc_calib.backends.plain\n){{2}}torch\nBPC_BACKEND=\\w+: {said}\n", ran.stdout)
