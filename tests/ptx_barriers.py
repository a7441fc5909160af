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
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import make_encoder
from bpc_calib.method.selection import worst_first

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
    cached = Cached(encoded.codes, encoded.gain, worst=worst_first(encoded.error))
    indices = pipeline.choose(query, projection, cached, 60, Choice(0.1, recent=2, safeguard=0.2))
    hashed = pipeline.encode_with(make_encoder(projection, keys.dtype), keys[:, :, :70])
    return [indices, pipeline.sparse_attention(query, keys, keys, indices), hashed.codes]


def differs(expected: list[torch.Tensor]) -> bool:
    """Whether the emulator reports a fault, or the result is another."""
    try:
        return not all(map(torch.equal, step(), expected))
    except Fault:
        return True


if __name__ == "__main__":
    main()
