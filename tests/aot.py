"""Compiles what run time compiles, for a GPU that is not here, and prints what came out: one JSON line a kernel.

    python tests/aot.py 90                every case
    python tests/aot.py 86 dense          one case, by its name

The entry points of `pipeline` run on tensors that nobody fills, and Triton compiles what it is asked to launch. Runs on
its own: the interpreter and the compiler cannot share a process.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from ptx import driver, lints

from bpc_calib.backends.triton import pipeline
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.rules import Rules
from bpc_calib.method.state import Rows, State

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NO_FLOAT64 = 100  # from this capability on Triton's compiler fails at products of float64


@dataclass(frozen=True)
class Case:
    """A call's arguments; the defaults are those of the usual static step."""

    entries: str = "choose sparse"
    dtype: str = "bfloat16"
    dim: int = 128
    heads: int = 4
    bits: int = 64
    nibbles: bool = False  # codes are nibbles instead of signs
    group: str = "relative"
    gain: bool = True
    valid: bool = False
    forced: bool = False  # recent and first tokens
    safeguard: bool = False
    strided: bool = False  # codes with room between them
    centred: bool = True  # a codebook with a metric and a mean
    batch: int = 1
    tokens: int = 131072
    k: int = 2621
    new: int = 1  # newest tokens that attend to everything
    page: int = 16  # tokens of a page
    eight_bits: bool = False  # keys and values in pages are float8_e4m3fn


# Each kernel, and the settings that change its code most.
SOME = {
    "usual": Case("choose sparse encode append"),
    "dense": Case("dense", dim=256),
    "drafts": Case("dense", new=17),
    "largest": Case(dim=256, heads=16, bits=128),
    "float32": Case("choose sparse encode", dtype="float32", heads=5, group="max", gain=False, bits=32, centred=False),
    "padding": Case("choose", heads=7, valid=True, forced=True, safeguard=True, strided=True),
    "gram": Case("gram"),
    "long lists": Case("sparse", k=20000),
    "pages": Case("pages", batch=2),
}
MORE = {
    **{f"head_dim {dim}": Case("choose sparse dense encode append", dim=dim) for dim in (8, 64, 80, 96, 256)},
    **{
        f"{dtype}, head_dim {dim}": Case("choose sparse dense encode append", dtype=dtype, dim=dim)
        for dtype in ("float16", "float32", "float64")
        for dim in (64, 128, 256)
    },
    **{
        f"{heads} heads, {bits} bits, {group}, gain {gain}": Case(
            "choose encode gram append", heads=heads, bits=bits, group=group, gain=gain, centred=gain
        )
        for heads, bits, group, gain in (
            (1, 64, "relative", True), (5, 32, "max", False), (8, 128, "relative", True), (7, 64, "max", True),
            (16, 64, "relative", False), (16, 128, "relative", True), (4, 64, "max", False), (16, 32, "max", True),
        )
    },
    **{f"{dtype}, largest": Case(dtype=dtype, dim=256, heads=16, bits=128) for dtype in ("float32", "float64")},
    "padding, forced tokens": Case("choose", valid=True, forced=True),
    "padding, no forced tokens": Case("choose", valid=True),
    "padding, 16 heads": Case("choose", heads=16, valid=True, forced=True, safeguard=True),
    "safeguard, 128 bits": Case("choose", bits=128, safeguard=True, forced=True),
    "own projections": Case("choose encode append", batch=2),
    "few tokens": Case("choose sparse dense", tokens=300, k=20),
    "many tokens": Case("choose sparse", tokens=524288, k=10485),
    "most tokens": Case("choose", tokens=4 << 20, k=20000),
    "dense, short": Case("dense", tokens=4096),
    **{
        f"drafts, {heads} heads, {new} tokens, {dtype}, head_dim {dim}": Case(
            "dense", heads=heads, new=new, dtype=dtype, dim=dim
        )
        for heads, new, dtype, dim in (
            (4, 2, "bfloat16", 128), (4, 5, "bfloat16", 128), (7, 8, "bfloat16", 128), (4, 17, "float16", 64),
            (4, 8, "bfloat16", 256), (7, 8, "float16", 96), (4, 8, "float32", 128), (4, 8, "float32", 64),
            (4, 4, "float32", 256), (4, 4, "float64", 128),
        )
    },
    **{f"pages, head_dim {dim}": Case("pages", dim=dim, page=64) for dim in (64, 256)},
    "nibbles": Case("choose encode append", nibbles=True),
    "nibbles, largest": Case("choose encode append", nibbles=True, dim=256, heads=16, bits=128),
    "nibbles, float32": Case("choose encode append", nibbles=True, dtype="float32", heads=5, bits=32, centred=False),
    "nibbles, float32, largest": Case(
        "choose encode append", nibbles=True, dtype="float32", dim=256, heads=16, bits=128
    ),
    "pages of 8 bits": Case("pages", eight_bits=True, forced=True),
    "pages of 8 bits, float16": Case("pages", eight_bits=True, dtype="float16", dim=256),
    "pages, largest": Case("pages", dim=256, heads=16, bits=128),
    "pages, one head of 32 bits": Case("pages", heads=1, bits=32, gain=False, group="max", page=32),
}  # fmt: skip


def launched(case: Case) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls of a case, by their names."""
    dtype, rows, tokens = getattr(torch, case.dtype), (case.batch, 8), case.tokens
    words, entries = -(-case.bits // 64), case.entries.split()
    stored = entries not in (["choose"], ["pages"])
    query = torch.empty(*rows, case.heads, case.dim, dtype=dtype)
    keys, values = (torch.empty(*rows, tokens if stored else 1, case.dim, dtype=dtype) for _ in range(2))
    own = rows if case.batch > 1 and entries != ["pages"] else rows[1:]
    metric, mean = torch.eye(case.dim).expand(*own, -1, -1), torch.zeros(*own, case.dim)
    centred = {"metric": metric, "mean": mean if stored else None} if case.centred else {}
    size = 4 * case.bits if case.nibbles else case.bits
    codebook = make_codebook(torch.randn(*own, size, case.dim), dtype, nibbles=case.nibbles, **centred)
    rules = Rules(
        group=case.group, gain=case.gain, safeguard=0.1 * case.safeguard, recent=8 * case.forced, sink=4 * case.forced
    )
    sequences = Rows(torch.full((case.batch,), tokens), torch.full((case.batch, 1), case.k), tokens, case.k)

    def choose() -> object:
        state = State(
            keys, values, torch.empty(*rows, tokens, words + case.strided, dtype=torch.int64)[..., :words],
            torch.empty(*rows, tokens, dtype=torch.uint8),
            worst=torch.empty(*rows, 3000, dtype=torch.int32) if case.safeguard else None,
        )  # fmt: skip
        valid = torch.ones(case.batch, tokens, dtype=torch.bool) if case.valid else None
        return pipeline.choose(query, codebook, state, replace(sequences, valid=valid), rules)

    def gram() -> object:
        products = torch.empty(8, 100, case.bits)
        return pipeline.encode_gram(products, torch.empty(8, case.bits, case.bits), torch.empty(8, 100))

    def append() -> object:
        gain, error = torch.empty(*rows, tokens, dtype=torch.uint8), torch.empty(*rows, tokens)
        codes = torch.empty(*rows, tokens, words, dtype=torch.int64)
        new, at = keys[:, :, :1].contiguous(), torch.tensor([tokens - 1])
        state = State(keys, values, codes, gain if case.gain else None, error)
        pipeline.append(state, codebook, new, new, at)
        pipeline.append(State(keys, values), None, new, new, at)

    def pages() -> object:
        count = tokens // case.page
        codes = torch.empty(count, rows[1], case.page, words, dtype=torch.int64)
        content = torch.float8_e4m3fn if case.eight_bits else dtype
        cache = torch.empty(count, case.page, rows[1], 2 * case.dim, dtype=content).transpose(1, 2)
        state = State(
            cache[..., : case.dim], cache[..., case.dim :], codes,
            torch.empty(count, rows[1], case.page, dtype=torch.uint8),
            scales=(torch.ones(1), torch.ones(1)) if case.eight_bits else None,
        )  # fmt: skip
        for new in (1, 9):
            pipeline.hash_into(codebook, torch.empty(1, rows[1], new, case.dim, dtype=dtype), state, torch.arange(new))
        table = torch.zeros(case.batch, count, dtype=torch.int32)
        return pipeline.sparse_decode(query, codebook, state, replace(sequences, block_table=table), rules)

    listed = torch.empty(*rows, case.k, dtype=torch.int64)
    calls = {
        "choose": choose,
        "sparse": lambda: pipeline.attend(query, State(keys, values), sequences, listed),
        "dense": lambda: pipeline.dense_decode(
            query.repeat(1, 1, case.new, 1), State(keys, values), sequences, new=case.new
        ),
        "encode": lambda: (pipeline.encode_with(codebook, keys[:, :, :1]), pipeline.encode_with(codebook, keys)),
        "append": append,
        "gram": gram,
        "pages": pages,
    }
    yield from ((entry, calls[entry]) for entry in entries)


def everything(arch: int, cases: dict[str, Case]) -> Iterator[dict[str, object]]:
    """A report of each kernel that the cases launch, once; and of each call that fails."""
    limit = driver.SHARED[arch]
    driver.SHARED[arch] = 1 << 30  # so that a kernel that asks for too much is reported like all others
    found: list[driver.Launch] = []
    driver.install(arch, found.append)
    seen: set[str] = set()
    for name, case in cases.items():
        if case.dtype == "float64" and arch >= NO_FLOAT64:
            continue
        for entry, call in launched(case):
            common = {"arch": arch, "case": name, "entry": entry, "dtype": case.dtype, "dim": case.dim}
            try:
                call()
            except Exception as error:  # whatever the compiler raises: the other calls are still worth knowing
                lines = str(error).strip().splitlines() or [""]
                yield {"failed": f"{type(error).__name__}: {lines[0]}", **common, "arguments": asdict(case)}
            for launch in found:
                if (made := launch.kernel.metadata.hash) not in seen:
                    seen.add(made)
                    yield {**common, **report(launch.kernel), "shared_limit": limit}
            found.clear()


def report(kernel: "triton.compiler.CompiledKernel") -> dict[str, object]:
    """Registers, stack and shared memory of a kernel, and how many of its instructions matter here."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        words = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert resources is not None, usage
    ptx = kernel.asm["ptx"]
    return {
        "kernel": kernel.metadata.name,
        "lints": lints.found_in(kernel),
        "triton": triton.__version__,
        "constants": _constants(kernel.src),
        "registers": int(resources[1]),
        "stack": int(resources[2]),
        "warps": kernel.metadata.num_warps,
        "shared": kernel.metadata.shared,
        "loops": len(re.findall(r"scf\.(?:for|while)\b", kernel.asm["ttgir"])),
        "cp_async": ptx.count("cp.async"),
    }


def _constants(source: "triton.compiler.ASTSource") -> dict[str, str]:
    """What is compiled in, by name; the fields of a shape, which is one argument, by theirs."""
    named: dict[str, str] = {}
    for place, value in source.constants.items():
        name = ".".join([source.fn.arg_names[place[0]], *map(str, place[1:])])
        fields = value._asdict() if hasattr(value, "_asdict") else {name: value}
        named |= {field: str(each) for field, each in fields.items()}
    return named


def chosen(words: list[str]) -> dict[str, Case]:
    everything = SOME | MORE
    return {word: everything[word] for word in words} or everything


if __name__ == "__main__":
    for line in everything(int(sys.argv[1]), chosen(sys.argv[2:])):
        print(json.dumps(line), flush=True)
