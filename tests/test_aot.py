"""What the compiler makes of the kernels for GPUs that are not here; and what they may not contain."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bpc_calib.backends import triton as kernels

HERE = Path(__file__).parent
GPUS = {80: "A100", 90: "H100 and H200", 100: "B200"}
# The most registers that a kernel may take under any setting; 255 is where the compiler begins to spill.
REGISTERS = {
    "prep_kernel": 128, "best_kernel": 200, "score_kernel": 200, "guard_kernel": 40, "middle_kernel": 64,
    "upper_kernel": 64, "fine_kernel": 224, "compact_kernel": 112, "attend_kernel": 200, "reduce_kernel": 80,
    "encode_kernel": 240, "greedy_kernel": 184,
}  # fmt: skip
# Of the shape measured most: 4 heads, 64 bits, head_dim 128.
USUAL = {"prep_kernel": 96, "best_kernel": 112, "score_kernel": 152, "attend_kernel": 128, "encode_kernel": 224}
SHARED = 99 * 1024  # bytes a block may take on the smallest of today's GPUs


# One of them in every push: all go through the same passes, and differ in what those have to spend.
TARGETS = [pytest.param(arch, marks=[pytest.mark.slow] * (arch != 90)) for arch in GPUS]


@pytest.mark.parametrize("arch", TARGETS)
def test_what_the_compiler_makes(arch, tmp_path):
    """In one test, so that tests run side by side do not compile twice; in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(HERE / "aot.py"), str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    stays_within_its_registers(reports)
    scores_by_int8_products(reports)
    loads_listed_rows_ahead(reports)


def stays_within_its_registers(reports):
    assert {report["kernel"] for report in reports} == set(REGISTERS)
    for report in reports:
        assert report["stack"] == 0, report
        assert report["registers"] <= REGISTERS[report["kernel"]], report
        constants = report["constants"]
        usual = (constants.get("G", "4"), constants.get("H", "64"), constants.get("D", "128")) == ("4", "64", "128")
        if usual:
            assert report["registers"] <= USUAL.get(report["kernel"], 255), report
        if constants.get("indices") != "None":  # the dense form is a baseline of benchmarks
            assert report["shared"] <= SHARED, report


def scores_by_int8_products(reports):
    found = [report for report in reports if report["kernel"] in ("best_kernel", "score_kernel")]
    assert len(found) >= 14
    assert all(report["int8_mma"] > 0 for report in found)


def loads_listed_rows_ahead(reports):
    looping = [each for each in reports if each["kernel"] == "attend_kernel" and each["constants"]["CHUNK"] == "256"]
    assert len(looping) >= 12
    assert all(report["cp_async"] > 0 for report in looping)


def test_products_of_floats_go_through_the_wrapper():
    """The interpreter multiplies the raw bits of 16-bit floats, silently; integers it gets right."""
    files = sorted(Path(kernels.__file__).parent.glob("*.py"))
    assert len(files) > 8
    for file in files:
        for call in raw_products(ast.parse(file.read_text())):
            assert file.name == "language.py", f"{file.name}:{call.lineno}: tl.dot; take language.dot"


def test_the_lint_sees_a_raw_product():
    assert raw_products(ast.parse("x = tl.dot(a, b)"))
    assert raw_products(ast.parse("x = triton.language.dot(a, b, out_dtype=tl.float32)"))
    assert not raw_products(ast.parse("x = tl.dot(a, b, c, out_dtype=tl.int32)"))
    assert not raw_products(ast.parse("x = dot(a, b)"))


def raw_products(tree):
    """Calls of Triton's own `dot` that are not of integers."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("dot", "dot_scaled")
        and not any(word.arg == "out_dtype" and ast.unparse(word.value) == "tl.int32" for word in node.keywords)
    ]
