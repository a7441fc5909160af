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
GPUS = {
    80: "A100", 86: "RTX 3090 and A10", 89: "RTX 4090 and L40", 90: "H100 and H200", 100: "B200", 120: "RTX 5090",
}  # fmt: skip
# The most registers that a kernel may take under any setting; 255, that of all others, is where the compiler spills.
REGISTERS = {
    "append_kernel": 255, "query_kernel": 255, "score_kernel": 128, "rank_kernel": 168, "guard_kernel": 40,
    "middle_kernel": 128, "fine_kernel": 128, "compact_kernel": 128, "attend_kernel": 208, "reduce_kernel": 128,
    "encode_kernel": 255, "greedy_kernel": 184, "nibbles_kernel": 64,
}  # fmt: skip
WIDE = ("float32", "float64")  # may take every register
# In the usual step: 4 heads, 64 bits, head_dim 128.
USUAL = {
    "append_kernel": 216, "query_kernel": 64, "score_kernel": 64, "rank_kernel": 96, "middle_kernel": 64,
    "fine_kernel": 80, "compact_kernel": 104, "attend_kernel": 128, "encode_kernel": 248,
}  # fmt: skip

# A push compiles the widest attentions, for a GPU with the least shared memory, and runs kernels from their PTX;
# `make test-slow` compiles the usual and the largest steps for the H100; `make test-all` every setting, seven minutes
# for each GPU.
RUNS = [
    "86,dense,drafts",
    pytest.param("90,usual,long lists,largest", marks=pytest.mark.slow),
    *(pytest.param(str(arch), marks=[pytest.mark.slow, pytest.mark.rare]) for arch in GPUS),
]


@pytest.mark.parametrize("run", RUNS)
def test_what_the_compiler_makes(run, tmp_path):
    """In one test, so that tests run side by side do not compile twice; in a process that does not interpret."""
    words = run.split(",")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(HERE / "aot.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["arch"] for report in reports} == {int(words[0])}
    faults = [f"{fault}: {report}" for report in reports for fault in faults_of(report)]
    assert not faults, "\n".join(faults)
    if "dense" not in words:
        loads_rows_ahead(reports)


def faults_of(report):
    """What is wrong with one kernel, in words."""
    if "failed" in report:
        return [report["failed"]]
    name, registers = report["kernel"], report["registers"]
    most = 255 if report["dtype"] in WIDE else REGISTERS.get(name, 255)
    most = min(most, USUAL.get(name, 255)) if report["case"] == "usual" else most
    faults = [f"{registers} registers, more than {most}"] * (registers > most)
    if report["stack"] > spilled(report):
        faults.append(f"spills {report['stack']} bytes")
    if report["shared"] > report["shared_limit"]:
        faults.append(f"asks for {report['shared']} bytes of shared memory, and {report['shared_limit']} are there")
    return faults + report["lints"]


def spilled(report):
    """The most bytes that a kernel may put aside, each thread."""
    if report["dtype"] == "float64":  # served to be right, not to be fast
        return 1 << 16
    if report["dtype"] == "float32":
        return 32
    # There the assembler gives up one register for one more block.
    return 8 if report["arch"] in (86, 89, 120) else 0


def loads_rows_ahead(reports):
    """Attention over several blocks of rows in 16 bits copies them asynchronously, but for rows of a few bytes."""
    looping = [
        report
        for report in reports
        if report["kernel"].startswith("attend")
        and report["loops"]
        and report["dtype"] not in WIDE
        and report["dim"] >= 64
    ]
    assert len(looping) >= 2
    assert all(report["cp_async"] > 0 for report in looping), looping


def test_every_launch_says_whether_products_and_sums_may_fuse():
    """Triton fuses by default, which changes results: each launch says what it wants."""
    launches, lines = 0, []
    trees = {file.name: ast.parse(file.read_text()) for file in sorted(Path(kernels.__file__).parent.glob("*.py"))}
    deciding = set().union(*(deciding_in(tree) for tree in trees.values()))  # files import them by their names
    for name, tree in trees.items():
        launches += len(list(launches_of(tree)))
        lines += [f"{name}:{call.lineno}: {ast.unparse(call.func)}" for call in undecided(tree, deciding)]
    assert not lines, "without enable_fp_fusion: " + ", ".join(lines)
    assert launches >= 8


def test_the_lint_sees_a_launch_that_does_not_decide_on_fusion():
    assert undecided(ast.parse("a_kernel[grid](x, num_warps=4)"))
    assert undecided(ast.parse("other = {'num_warps': 4}\na_kernel[(1, 2)](x, **other)"))
    assert not undecided(ast.parse("a_kernel[grid](x, enable_fp_fusion=True)"))
    assert not undecided(ast.parse("exact = {'enable_fp_fusion': False}\na_kernel[grid](x, **exact)"))
    assert not undecided(
        ast.parse("exact = dict(enable_fp_fusion=False)\ndef f():\n more = {**exact}\n a_kernel[grid](x, **more)")
    )


def launches_of(tree):
    """Calls of the form `kernel[grid](...)`."""
    for node in ast.walk(tree):
        launch = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        if launch and ast.unparse(node.func.value).endswith("_kernel"):
            yield node


def undecided(tree, imported=frozenset()):
    """Launches without `enable_fp_fusion`, by keyword or in a dictionary with a name."""
    deciding = deciding_in(tree, imported)
    return [
        call
        for call in launches_of(tree)
        if not any(
            word.arg == "enable_fp_fusion" or (word.arg is None and decides(word.value, deciding))
            for word in call.keywords
        )
    ]


def deciding_in(tree, imported=frozenset()):
    """Names of dictionaries that hold `enable_fp_fusion`."""
    deciding = set(imported)
    for _ in range(3):  # dictionaries may be made of others
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and decides(node.value, deciding):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                deciding |= {ast.unparse(target) for target in targets}
    return deciding


def decides(value, deciding):
    """Whether a dictionary holds `enable_fp_fusion`; `deciding` are names of those that do."""
    if isinstance(value, ast.Name | ast.Attribute):
        return ast.unparse(value) in deciding
    if isinstance(value, ast.BinOp):
        return decides(value.left, deciding) or decides(value.right, deciding)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
        return any(word.arg == "enable_fp_fusion" or decides(word.value, deciding) for word in value.keywords)
    return isinstance(value, ast.Dict) and any(
        decides(each, deciding) if key is None else ast.unparse(key) == "'enable_fp_fusion'"
        for key, each in zip(value.keys, value.values, strict=True)
    )


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
