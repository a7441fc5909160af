"""Builds the kernels of a CPU, and is the build backend of pip (see pyproject.toml), which holds all metadata.

The kernels are one library with a plain C interface, so it serves every version of Python and of torch;
`bpc_calib/backends/cpu/native.py` loads it. Where it cannot be built, the installation succeeds without it.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Extension, build_meta, setup
from setuptools.build_meta import (  # what pip calls, beside the two functions below
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

__all__ = [
    "build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable", "get_requires_for_build_sdist",
    "get_requires_for_build_wheel", "prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel",
]  # fmt: skip

SOURCES = Path("bpc_calib/backends/cpu/native")
LIBRARY = Path("bpc_calib/backends/cpu/libbpc_cpu.so")
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
# The results must be those of plain torch to the last bit, so no sum may be contracted or reordered.
FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -fno-trapping-math -Wno-psabi"
AVX2 = "-mavx2 -mfma -mf16c -mbmi -mbmi2 -mpopcnt -mlzcnt"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512"
# Each file and its own flags. `base` comes before the others: of a function that several files have, such as one of the
# standard library, the linker takes the first, which must run on every processor.
FILES = {"main": "", "base": ""} | ({"avx2": AVX2, "avx512": AVX512, "zen4": AVX512} if MACHINE == "x86_64" else {})
# So that the library needs no C++ library where it runs, and shows no part of its own. Not every linker knows them.
CLOSED = "-static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL -Wl,--gc-sections"
# What zig compiles for: by default it would be this processor alone.
ZIG = {"linux": f"{MACHINE}-linux-gnu.2.17", "darwin": f"{MACHINE}-macos"}


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What pip installs before it builds."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *missing_compiler()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """What pip installs before it builds for an editable installation."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *missing_compiler()]


def missing_compiler() -> list[str]:
    """The package with a C++ compiler where there is none."""
    offered = sys.platform in ZIG and MACHINE in ("x86_64", "aarch64")
    return ["ziglang>=0.13"] if offered and not compiler() else []


def compiler() -> list[str]:
    """The command that compiles C++: `$CXX` if it is set, else what there is; nothing on Windows."""
    if sys.platform == "win32":
        return []
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    if found := next(filter(shutil.which, ("c++", "g++", "clang++")), None):
        return [found]
    if find_spec("ziglang") and sys.platform in ZIG:
        return [sys.executable, "-m", "ziglang", "c++", "-target", ZIG[sys.platform], "-fomit-frame-pointer"]
    return []


def build() -> Path:
    """The library, in a folder of this compiler and these flags; compiles what is older than a source.

    Raises:
        OSError: It cannot be built.
    """
    if not (found := compiler()):
        raise OSError("there is no C++ compiler that setup.py can use")
    command = [*found, *shlex.split(FLAGS), *shlex.split(os.environ.get("ARCHFLAGS", ""))]
    settings = repr((command, FILES, CLOSED))
    folder = Path("build", f"native-{hashlib.sha256(settings.encode()).hexdigest()[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    changed = max(each.stat().st_mtime for each in SOURCES.iterdir())

    def compiled(name: str) -> Path:
        target = folder / f"{name}.o"
        if older(target, changed):
            make(target, [*command, *FILES[name].split(), "-c", str(SOURCES / f"{name}.cpp")])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, FILES))
    library = folder / LIBRARY.name
    if older(library, max(each.stat().st_mtime for each in objects)):
        link = [*command, "-shared", "-pthread", *map(str, objects)]
        try:
            make(library, [*link, *CLOSED.split()])
        except OSError:
            make(library, [*link, "-s"])
    return library


def older(target: Path, time: float) -> bool:
    return not target.exists() or target.stat().st_mtime < time


def make(target: Path, command: list[str]) -> None:
    """Run a command that writes a file; no other process sees a part of it."""
    part = target.with_suffix(f".{os.getpid()}{target.suffix}")
    done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{shlex.join(command)}\n{done.stderr}")
    part.replace(target)


class BuildLibrary(build_ext):
    """Puts the library where a module of Python would lie."""

    def run(self) -> None:
        try:
            self.library = build()
        except OSError as fault:
            if self.inplace and not self.editable_mode:  # nothing else was asked for
                raise SystemExit(f"error: {fault}") from None
            self.warn(f"the kernels of a CPU are not built, plain torch will do their work, slowly: {fault}")
            self.extensions = []
            for folder in (self.build_lib, *([""] if self.editable_mode else [])):
                Path(folder, LIBRARY).unlink(missing_ok=True)  # that of other sources
        super().run()

    def build_extension(self, ext: Extension) -> None:
        self.mkpath(str(Path(self.build_lib, LIBRARY).parent))
        self.copy_file(str(self.library), str(Path(self.build_lib, LIBRARY)))

    def get_ext_filename(self, fullname: str) -> str:
        return f"{Path(*fullname.split('.'))}.so"


class AnyPython(bdist_wheel):
    """A wheel for one kind of machines and every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":  # so setuptools runs it
    sources, headers = (sorted(map(str, SOURCES.glob(pattern))) for pattern in ("*.cpp", "*.h"))
    setup(
        ext_modules=[Extension(".".join(LIBRARY.with_suffix("").parts), sources, depends=headers)],
        cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
    )
