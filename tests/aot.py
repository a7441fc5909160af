"""Compiles every kernel ahead of time, without a GPU, and prints what came out: one JSON line a kernel and GPU.

Run on its own (`python tests/aot.py 90`): the interpreter and the compiler cannot share a process.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bpc_calib.backends.triton import pipeline
from bpc_calib.backends.triton.arguments import Strided
from bpc_calib.backends.triton.attend import AttendShape, attend_kernel, reduce_kernel
from bpc_calib.backends.triton.compact import compact_kernel
from bpc_calib.backends.triton.encode import encode_kernel, greedy_kernel
from bpc_calib.backends.triton.guard import guard_kernel
from bpc_calib.backends.triton.narrow import fine_kernel, middle_kernel, upper_kernel
from bpc_calib.backends.triton.prep import PrepShape, prep_kernel
from bpc_calib.backends.triton.score import ScoreShape, best_kernel, score_kernel

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INTEGERS = {"length", "k", "recent", "sink", "share_up", "share_down", "count", "blocks", "width", "splits", "n"}
FLOATS = {"scaling", "scale"}
STRIDES = ("_b", "_b", "_b")  # of `Strided`, each divisible
TYPES = {  # of what each pointer points at; those of the model's dtype are in DTYPED
    "values": "i8", "rounded": "i8", "scale": "fp32", "codes": "i8", "gain": "u8", "valid": "u1", "indices": "i64",
    "lengths": "i32", "worst": "i32", "matrix": "fp32", "gram": "fp32", "metric": "fp32", "mean": "fp32",
    "error": "fp32", "part": "fp32", "weight": "fp32", "largest": "fp32", "scores": "fp32",
    "squared_norm": "fp32",
}  # fmt: skip


def signature(kernel, constants, changes):
    """The types, constants and hints under which the runtime would compile it for aligned tensors."""
    types, fixed, hints = {}, {}, {}

    def typed(name, place):
        """The type of one pointer or number; its constant and its hint are kept under its place."""
        if name in constants:
            fixed[place] = constants[name]
            return "constexpr"
        stride = re.search(r"_[br]$", name)
        if name in changes:
            kind = changes[name]
        elif name in INTEGERS or stride:
            kind = "i32"
        elif name in FLOATS:
            kind = "fp32"
        else:
            kind = "*" + TYPES.get(name, "i32")
        if kind.startswith("*") or stride:
            hints[place] = [["tt.divisibility", 16]]
        return kind

    for place, name in enumerate(kernel.arg_names):
        group = kernel.fn.__annotations__.get(name)
        fields = getattr(group, "_fields", None)
        if group is Strided:
            types[name] = Strided(*(typed(full, (place, i)) for i, full in enumerate((name, *STRIDES))))
        elif fields is not None:
            names = [f"{name}_b" if field == "b" else field for field in fields]
            types[name] = group(*(typed(full, (place, i)) for i, full in enumerate(names)))
        else:
            types[name] = typed(name, (place,))
    return types, fixed, hints


def compiled(kernel, arch, constants, changes=None, **options):
    """Registers, stack, shared memory and SASS of a kernel, and how many of its instructions matter here."""
    source = ASTSource(kernel, *signature(kernel, constants, changes or {}))
    options = {"num_warps": 4, "enable_fp_fusion": True} | options
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _tool("-res-usage", file.name)
        sass = _tool("-sass", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "triton": triton.__version__,
        "constants": {name: str(value) for name, value in spread(constants).items()},
        "registers": registers,
        "stack": stack,
        "warps": options["num_warps"],
        "shared": made.metadata.shared,
        "instructions": len(re.findall(r"/\*[0-9a-f]{4,}\*/ +(?!NOP)", sass)),
        "int8_mma": len(re.findall(r"\b(?:IMMA|IGMMA|UTCIMMA)|mma\.\S*\.s8", sass + made.asm["ptx"])),
        "cp_async": made.asm["ptx"].count("cp.async"),
    }


def spread(constants):
    """With the fields of a shape in place of it."""
    shape = constants.get("shape")
    return constants if shape is None else constants | shape._asdict()


def _tool(*arguments):
    return subprocess.run([TOOLS / "cuobjdump", *arguments], capture_output=True, text=True, check=True).stdout


EXACT = {"enable_fp_fusion": False}
GROUPS = [  # heads, bits, group, gain
    (1, 64, "relative", True), (4, 64, "relative", True), (5, 32, "max", False), (8, 128, "relative", True),
    (7, 64, "sum", True), (16, 64, "relative", False), (16, 128, "relative", True), (4, 64, "max", False),
]  # fmt: skip


def everything(arch):
    """Every kernel under the settings that change it."""
    for dtype, dim in (*(("bf16", dim) for dim in (8, 64, 80, 96, 128, 256)), ("fp16", 128)):
        typed = dict.fromkeys(("query", "keys", "values", "out", "projection"), f"*{dtype}")
        yield from of_the_model(arch, typed, dim, full=(dtype, dim) == ("bf16", 128))
    for bits in (32, 64, 128):
        constants = {"H": bits, "BLOCK": pipeline.HASHED}
        yield compiled(greedy_kernel, arch, constants, {"codes": "*i32"}, num_warps=8, **EXACT)
    for heads, bits, group, gain in GROUPS:
        yield from of_the_codes(arch, heads, bits, group, gain)
    yield compiled(fine_kernel, arch, {"BLOCK": pipeline.COUNTED})
    for blocks in (1, 256, 2048):
        yield compiled(compact_kernel, arch, {"BLOCKS_UP": blocks, "BLOCK": pipeline.COUNTED})
    yield compiled(guard_kernel, arch, {"BLOCK": pipeline.GUARDED})


def of_the_model(arch, typed, dim, *, full):
    """The kernels that read queries, keys or values."""
    up = max(16, triton.next_power_of_2(dim))
    for chunk, missing in ((64, "lengths"), (256, "lengths"), (256, "indices"))[0 if full else 1 :]:
        shape = AttendShape(H_KV=8, G=4, D=dim, D_UP=up, CHUNK=chunk, BLOCK=pipeline.LISTED)
        constants = {"shape": shape, missing: None}
        yield compiled(attend_kernel, arch, constants, typed | {"scale": "fp32"}, num_stages=3)
    yield compiled(reduce_kernel, arch, {"D": dim, "D_UP": up, "SPLITS_UP": 64, "BLOCK": 16}, typed)
    for bits in (32, 64, 128) if full else (64,):
        for missing in ((), ("metric", "mean")) if full else ((),):
            constants = {"H_KV": 8, "D": dim, "H": bits, "PART": pipeline.PART, "BLOCK": pipeline.HASHED}
            constants |= dict.fromkeys(missing)
            yield compiled(encode_kernel, arch, constants, typed | {"codes": "*i32"}, num_warps=8, **EXACT)
    shapes = [(4, 64, ("lengths", "ks", "bounds"))]
    if full:
        shapes.append((4, 64, ()))
    if dim == 256:
        shapes.append((16, 128, ()))  # the widest
    for heads, bits, missing in shapes:
        middle = pipeline.middle_bins("relative", heads, bits, True)
        shape = PrepShape(
            H_KV=8, G=heads, G_UP=heads, H=bits, D=dim, D_UP=up, GROUP="relative", GAIN=True, MIDDLE=middle
        )
        constants = {"shape": shape} | dict.fromkeys(missing)
        types = typed | {"scale": "*fp32"}
        warps = pipeline.prep_warps(bits, dim)
        yield compiled(prep_kernel, arch, constants, types, num_warps=warps, **EXACT)


def of_the_codes(arch, heads, bits, group, gain):
    """The kernels that read codes and scores."""
    shape = ScoreShape(
        H_KV=8, G=heads, G_UP=triton.next_power_of_2(heads), H=bits, GROUP=group, TIGHT=bits != 32,
        PACK=pipeline.packed(heads, bits), BLOCK=pipeline.scored(heads),
    )  # fmt: skip
    constants = {"shape": shape} | ({} if gain else {"gain": None})
    for missing in ({"valid": None}, {}):
        if group == "relative":
            yield compiled(best_kernel, arch, constants | missing)
        yield compiled(score_kernel, arch, constants | missing)
    bins = pipeline.middle_bins(group, heads, bits, gain)
    sizes = {"MIDDLE": bins}
    if bins > 1:
        yield compiled(middle_kernel, arch, sizes | {"BLOCK": pipeline.COUNTED})
    yield compiled(upper_kernel, arch, sizes, num_warps=8)


if __name__ == "__main__":
    for report in everything(int(sys.argv[1])):
        print(json.dumps(report), flush=True)
