"""Drops every barrier of every kernel in turn, and prints how many of these faults the emulator sees: one JSON line.

python tests/ptx_barriers.py 90
"""

import json
import os
import re
import sys

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported

import torch
from drawn import cache, draw
from ptx import driver
from ptx.block import Compiled
from ptx.emulation import emulate
from ptx.program import Fault

from bpc_calib.backends.triton import pipeline
from bpc_calib.method.codebook import make_codebook
from bpc_calib.method.rules import Rules
from bpc_calib.method.selection import worst_first
from bpc_calib.method.state import State, alike

BARRIER = re.compile(r"^\s*bar\.sync[^;]*;", re.MULTILINE)


def main() -> None:
    arch = int(sys.argv[1])
    emulation = emulate(arch)
    barriers: dict[str, int] = {}
    dropped: tuple[str, int] = "", 0  # a kernel, and which of its barriers

    def launch(one: driver.Launch) -> None:
        name, ptx = one.kernel.metadata.name, one.kernel.asm["ptx"]
        found = list(BARRIER.finditer(ptx))
        barriers[name] = len(found)
        if name == dropped[0] and dropped[1] < len(found):
            first, last = found[dropped[1]].span()
            without = Compiled(ptx[:first] + ptx[last:])
            emulation.run(without, one.grid, one.arguments, one.kernel.metadata.shared)
        else:
            emulation.launch(one)

    driver.install(arch, launch)
    expected = step()
    seen = {}
    for name, count in dict(barriers).items():
        seen[name] = 0
        for number in range(count):
            dropped = name, number
            seen[name] += differs(expected)
    print(json.dumps({"barriers": barriers, "seen": seen}))


def step() -> list[torch.Tensor]:
    """What every kernel of a step makes."""
    projection, encoded = cache(1, 2, 1100, 64, 64)
    query, keys = draw(1, 2, 4, 64, seed=3), draw(1, 2, 1100, 64, seed=2)
    codebook, rules = make_codebook(projection, keys.dtype), Rules(scaling=0.1, recent=2, safeguard=0.2)
    state = State(keys, keys, encoded.codes, encoded.gain, worst=worst_first(encoded.error))
    out, indices = pipeline.sparse_decode(query, codebook, state, alike(keys, 60), rules)
    return [indices, out, pipeline.encode_with(codebook, keys[:, :, :70]).codes]


def differs(expected: list[torch.Tensor]) -> bool:
    """Whether the emulator reports a fault, or the result is another."""
    try:
        return not all(map(torch.equal, step(), expected))
    except Fault:
        return True


if __name__ == "__main__":
    main()
