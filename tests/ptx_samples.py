"""Compiles small kernels and runs them in the emulator: `python tests/ptx_samples.py 90`.

On its own, since the interpreter and the compiler cannot share a process.
"""

import re
import sys

import torch
import triton
import triton.language as tl
from ptx.block import Compiled
from ptx.driver import install
from ptx.emulation import Emulation
from ptx.program import Fault

SUMS = {torch.int32: tl.int32, torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def product_kernel(
    a,
    b,
    out,
    a_stride,
    b_stride,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TURNED: tl.constexpr,
    SUM: tl.constexpr,
):
    """`out [M, N] = a [M, K] @ b [K, N]`, or with `b [N, K]` where it is turned."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * a_stride + k[None, :])
    if TURNED:
        right = tl.load(b + n[:, None] * b_stride + k[None, :]).T
    else:
        right = tl.load(b + k[:, None] * b_stride + n[None, :])
    made = tl.dot(left, right, out_dtype=SUM)
    tl.store(out + m[:, None] * N + n[None, :], made)


@triton.jit
def sums_kernel(x, out, n, BLOCK: tl.constexpr):
    """`out [BLOCK]`: the sums of `x` up to each place."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.cumsum(tl.load(x + at, mask=at < n, other=0), 0))


class Runs:
    """Runs what is launched; `change` first rewrites the PTX."""

    def __init__(self):
        self.emulation, self.change, self.seen = Emulation(), None, []

    def launch(self, launch):
        text = launch.kernel.asm["ptx"]
        self.seen.append(text)
        compiled = Compiled(text if self.change is None else self.change(text))
        self.emulation.run(compiled, launch.grid, launch.arguments, launch.kernel.metadata.shared)


def products(runs, arch):
    for dtype, shape, turned in (
        (torch.int8, (64, 32, 128), True),
        (torch.bfloat16, (64, 64, 64), True),
        (torch.bfloat16, (64, 64, 64), False),
        (torch.float16, (16, 32, 32), False),
        (torch.float32, (64, 16, 64), True),
        (torch.float64, (16, 16, 16), False),
    ):
        m, n, k = shape
        draw = torch.Generator().manual_seed(0)
        a, b = (torch.randint(-100, 100, size, generator=draw).to(dtype) for size in ((m, k), (n, k)))
        expected = a.double() @ b.double().mT
        b = b if turned else b.mT.contiguous()
        wide = {torch.int8: torch.int32, torch.float64: torch.float64}.get(dtype, torch.float32)
        out = torch.empty(m, n, dtype=wide)
        product_kernel[(1,)](a, b, out, a.stride(0), b.stride(0), m, n, k, turned, SUMS[wide], num_warps=4)
        # sums of integers below 2^24 are exact in each of the types
        assert torch.equal(out.double(), expected), (dtype, shape, turned)
        assert re.search(r"\bwgmma\.mma_async" if arch == 90 and m == 64 else r"\bmma\.sync", runs.seen[-1]), dtype


def faults(runs):
    x, out = torch.randint(0, 9, (256,), dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    sums_kernel[(1,)](x, out, 256, 256, num_warps=4)
    assert torch.equal(out, x.cumsum(0, dtype=torch.int32))
    barriers = runs.seen[-1].count("bar.sync")
    assert barriers >= 1
    for number in range(barriers):
        runs.change = lambda text, number=number: without(text, number)
        reported("no barrier between them", lambda: sums_kernel[(1,)](x, out, 256, 256, num_warps=4))
    runs.change = None
    reported("out of bounds", lambda: sums_kernel[(1,)](x[:250].clone(), out, 251, 256, num_warps=4))
    a, b = (torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(2))
    reported(
        "out of bounds",
        lambda: product_kernel[(1,)](a, b, a.float(), 65, 64, 64, 64, 64, False, tl.float32, num_warps=4),
    )


def without(text, number):
    """The PTX less one barrier."""
    parts = text.split("bar.sync")
    return "bar.sync".join(parts[: number + 1]) + "bar.warp.sync" + "bar.sync".join(parts[number + 1 :])


def reported(what, call):
    found = None
    try:
        call()
    except Fault as fault:
        found = str(fault)
    assert found is not None, f"nothing reported, but {what}"
    assert what in found, found
    assert re.search(r"\.py:\d+: ", found), found


if __name__ == "__main__":
    arch, runs = int(sys.argv[1]), Runs()
    install(arch, runs.launch)
    products(runs, arch)
    faults(runs)
