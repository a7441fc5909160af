"""What a decoding step of one layer would take on an H100, by the machine code of its kernels: a model.

    python benchmarks/kernel_cost.py --output kernel_cost.json

Nothing here is measured. A step runs with Triton's compiler and a stand-in for the CUDA driver, so no GPU is needed:
its launches are recorded with their compiled code, and `launch_cost` says what each would take. An operation of torch
that launches a kernel takes the fixed cost alone, for it moves a few bytes. Dense attention is its bytes alone: keys
and values once, at the rate of memory.

The column `us` takes every load from memory or L2; `least` takes loads as free, as if all were in L1: the truth lies
between. The order of sizes and what dominates them is worth something; a difference of 10 % is not.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported: this script compiles them

import json
import sys
from collections import Counter
from typing import Any

import report
from launch_cost import CONSTANTS, FIXED, HBM, L2_KEEPS, cost
from recorded_step import Recorder, Shape, record
from torch import Tensor

COLUMNS = "launch grid warps registers shared instructions per_key barriers shuffles in_loops least us".split()


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072, 524288])
    parser.add_argument("--budget", type=float, default=0.02)
    parser.add_argument("--json", action="store_true", help="print the result as JSON in place of tables")
    arguments = report.parse(parser, lengths=[2048])
    steps = [step(Shape(length, arguments.budget)) for length in arguments.lengths]
    if arguments.json:
        print(json.dumps(steps))
    else:
        for each in steps:
            show(each)
    for note in sorted({note for each in steps for row in each["launches"] for note in row["notes"]}):
        print(f"warning: {note}", file=sys.stderr)
    shape = {"kv_heads": 8, "group": 4, "head_dim": 128, "bits": 64, "batch": 1, "dtype": "bfloat16"}
    report.write(
        arguments.output,
        {"model": "H100, not measured", "constants": CONSTANTS, "shape": shape, "steps": steps},
    )


def step(shape: Shape) -> dict[str, Any]:
    """All launches of a step, and sums of them."""
    recorder = record(shape)
    launches = [each for each in recorder.events if not isinstance(each, str)]
    operations = [each for each in recorder.events if isinstance(each, str)]
    costs = [cost(each, shape.tokens, shape.kv_heads, *reached(each, recorder)) for each in launches]
    kernels = sum(each.microseconds for each in costs)
    torchs = 1e6 * FIXED * len(operations)
    dense = 2 * shape.tokens * shape.kv_heads * shape.dim * 2
    return {
        "tokens": shape.tokens,
        "budget": shape.budget,
        "launches": [each.as_row() for each in costs],
        "torch_operations": dict(Counter(operations)),
        "launched": len(launches) + len(operations),
        "kernel_microseconds": round(kernels, 2),
        "torch_microseconds": round(torchs, 2),
        "microseconds": round(kernels + torchs, 2),
        "least_microseconds": round(sum(each.least_microseconds for each in costs) + torchs, 2),
        "dense_microseconds_by_bytes": round(1e6 * dense / HBM, 2),
    }


def reached(launch: Any, recorder: Recorder) -> tuple[int, int]:
    """Bytes of a launch's tensors in memory, and in L2: those of this step that fit half of it."""
    cold = warm = 0
    for tensor in {id(each): each for each in launch.arguments if isinstance(each, Tensor)}.values():
        size = tensor.numel() * tensor.element_size()
        if recorder.is_made(tensor) and size <= L2_KEEPS:
            warm += size
        else:
            cold += size
    return cold, warm


def show(step: dict[str, Any]) -> None:
    """Print the table of a step."""
    table = [COLUMNS, *(_cells(row) for row in step["launches"])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"{step['tokens']:,} tokens, budget {step['budget']}: a model of an H100, nothing is measured")
    for first, *others in table:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))
    print("torch:", ", ".join(f"{count} {name}" for name, count in step["torch_operations"].items()))
    print(
        f"{step['launched']} launches, {len(step['launches'])} of Triton: {step['microseconds']:.1f} us, of them torch "
        f"{step['torch_microseconds']:.1f}; with free loads {step['least_microseconds']:.1f}; "
        f"dense by bytes {step['dense_microseconds_by_bytes']:.1f}\n"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    inside = "; ".join(
        f"{loop['trips']:g} x ({loop['all']} instr, {loop['barrier']} bar, {loop['shuffle']} shfl)"
        for loop in row["loops"]
    )
    numbers = (f"{row[name]:g}" for name in ("warps", "registers", "shared", "instructions", "per_key"))
    counts = (f"{row[name]:g}" for name in ("barriers", "shuffles"))
    times = (f"{row[name]:.2f}" for name in ("least_microseconds", "microseconds"))
    return [row["kernel"], "x".join(map(str, row["grid"][:2])), *numbers, *counts, inside or "-", *times]


if __name__ == "__main__":
    main()
