"""How long a launch takes on an H100 by its machine code: a model, not a measurement.

    time = FIXED + max(waves x latency of one block, issue of all instructions, bytes)

- The latency of one block: that of one warp with a scheduler for itself (`clocks`), or the time that the warps of
  the block need to take turns.
- Waves: how often the GPU fills with blocks, by registers, shared memory and warps.
- Issue: one instruction per clock and scheduler, of simple integers one per two clocks, with blocks spread evenly.
- Bytes: what the loads and stores name, and at most the tensors. Tensors that this step made are in L2.

Left out: contended atomics, partly used sectors, bank conflicts, L1 and branches not taken: every instruction counts.

For one warp, instructions issue in order. The compiler writes into each how many clocks the next one waits, which
covers results of known latency, and which barriers it waits for; results of unknown latency open a barrier when they
are done. So only the latencies of `WAITS` are assumed, and the rest is in the code.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from kernel_code import RULES, Code, Instruction, Loop, Span, code, loops, ptx_loops, usage

__all__ = ["CONSTANTS", "FIXED", "HBM", "L2_KEEPS", "cost"]

CLOCK = 1.755e9  # Hz; assumed under load (data sheets: boost 1.755 of the PCIe card, 1.98 of SXM)
MULTIPROCESSORS = 132  # H100 SXM, NVIDIA's data sheet
SCHEDULERS = 4  # of a multiprocessor; each issues one instruction of a warp per clock (H100 white paper)
FIXED = 2.2e-6  # s; assumed: of a kernel that follows another in a CUDA graph, launch 1.3 and ramp and drain 0.9
HBM = 0.9 * 3.35e12  # bytes/s; data sheet, and assumed that kernels reach 90 %
L2 = 5.5e12  # bytes/s; assumed, as microbenchmarks of H100 report
L2_KEEPS = 25 << 20  # bytes; half of the H100's 50 MB: a larger tensor is assumed to have left
COLD, WARM = 0.65e-6, 0.30e-6  # s; assumed: a round trip to memory, and to L2 of a GPU at work
WAITS = {  # clocks until a result is there, as microbenchmarks of Volta to Hopper report, rounded
    "shared": 30,
    "shuffle": 25,
    "product": 33,
    "other": 20,  # special functions, conversions, system registers, and reading operands from registers
    "together": 30,  # until all warps have come to a barrier
    "near": 35,  # global memory that the kernel has fetched to L1 before, with a prefetch: loads in loops after it
}
KINDS = {  # by the beginning of an instruction whose result takes an unknown time
    ("LDG.", "LD.", "ATOMG"): "load", ("LDS", "ATOMS"): "shared", ("SHFL", "REDUX"): "shuffle",
    ("HMMA", "IMMA", "QMMA", "DMMA", "HGMMA", "IGMMA"): "product",
}  # fmt: skip
REGISTERS, SHARED, WARPS, BLOCKS = 65536, 228 << 10, 64, 32  # of a multiprocessor, compute capability 9.0
CONSTANTS = {
    "clock": CLOCK, "multiprocessors": MULTIPROCESSORS, "schedulers": SCHEDULERS, "fixed_seconds": FIXED,
    "hbm_bytes_per_second": HBM, "l2_bytes_per_second": L2, "l2_keeps_bytes": L2_KEEPS, "cold_load_seconds": COLD,
    "warm_load_seconds": WARM, **{f"{name}_clocks": n for name, n in WAITS.items()},
}  # fmt: skip


def cost(launch: Any, tokens: int, rows: int, cold: int, warm: int, working: float = 1.0) -> dict[str, Any]:
    """Of a `ptx.driver.Launch` that can read `cold` bytes of tensors from memory, and `warm` bytes from L2.

    `working` is the share of its blocks that do not leave at once.
    Instructions, barriers and shuffles are those that a warp executes, `per_key` those of all threads per key and KV
    head; times are in microseconds, `least_microseconds` as if every load were there at once.
    """
    metadata, assembly = launch.kernel.metadata, launch.kernel.asm
    made = code(assembly["cubin"])
    registers, stack = usage(assembly["cubin"])
    notes = timed_loops(made, launch, tokens)
    counts = made.executed()
    blocks, warps = math.ceil(working * math.prod(launch.grid)), metadata.num_warps
    turns = max(counts["all"], 2 * counts["half"]) * warps / SCHEDULERS  # clocks to issue all of a block
    latency = max(clocks(made, (COLD if cold else WARM) * CLOCK, WARM * CLOCK), turns) / CLOCK
    without = max(clocks(made, 0, 0), turns) / CLOCK
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256 * warps)
    fits = min(BLOCKS, WARPS // warps, by_registers, SHARED // (metadata.shared + 1024))
    waves = -(-blocks // (MULTIPROCESSORS * max(1, fits)))
    issue = -(-blocks // MULTIPROCESSORS) * turns / CLOCK
    named = int(counts["bytes"] * 32 * warps * blocks)
    from_memory = min(cold, named)
    from_l2 = min(warm, named - from_memory)
    memory = from_memory / HBM + from_l2 / L2
    return {
        "kernel": metadata.name, "grid": launch.grid, "warps": warps, "registers": registers, "shared": metadata.shared,
        "stack": stack, "instructions": round(counts["all"]),
        "per_key": round(counts["all"] * 32 * warps * blocks / (tokens * rows), 2), "loops": _shown(made, made.whole),
        "barriers": round(counts["barrier"]), "shuffles": round(counts["shuffle"]), "waves": waves,
        "latency": _us(latency), "latency_without_loads": _us(without), "issue": _us(issue),
        "bytes": from_memory + from_l2, "memory": _us(memory),
        "microseconds": _us(FIXED + max(waves * latency, issue, memory)),
        "least_microseconds": _us(FIXED + max(waves * without, issue, memory)), "notes": notes,
    }  # fmt: skip


def _shown(made: Code, span: Span) -> list[dict[str, float]]:
    found = []
    for inner in span.inner:
        counts = made.executed(inner)
        found.append({"trips": round(inner.trips, 2)} | {n: round(counts[n]) for n in ("all", "barrier", "shuffle")})
        found += _shown(made, inner)
    return found


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def timed_loops(made: Code, launch: Any, tokens: int) -> list[str]:
    """Write the trips of every loop into `made`; return what is not certain."""
    assembly, name = launch.kernel.asm, launch.kernel.metadata.name
    notes: list[str] = []
    source = loops(assembly["ttir"], launch.arguments, launch.grid, tokens)
    _ruled(source, name, dict(launch.kernel.src.constants), notes)
    in_ptx = ptx_loops(assembly["ptx"])
    _pair(in_ptx, source, name, [])  # in PTX nothing is unrolled but what has vanished
    _pair(made.whole, source, name, notes)
    _unroll(made.whole, in_ptx)
    return notes


def _ruled(found: list[Loop], name: str, constants: dict[Any, Any], notes: list[str]) -> None:
    for place, loop in enumerate(found):
        if loop.trips is None:
            rule = RULES.get((name, place))
            loop.trips = rule(constants) if rule else 1
            if rule is None:
                notes.append(f"loop {place} of {name} has no known bounds: taken once; see kernel_code.RULES")
        _ruled(loop.inner, name, constants, notes)


def _pair(span: Span, source: list[Loop], name: str, notes: list[str]) -> None:
    """Give the loops of machine code the trips of those of the source, in order.

    The assembler dissolves the shortest loops of constant bounds, and leaves loops for the rest of a division: those
    are the smallest, and run once here.
    """
    left = list(source)
    while len(left) > len(span.inner):
        fewest = min(left, key=lambda loop: (not loop.constant, loop.trips or 0))
        place = left.index(fewest)
        left[place : place + 1] = [] if fewest.constant or not fewest.inner else fewest.inner
    by_size = sorted(span.inner, key=lambda inner: inner.first - inner.last)
    kept = [inner for inner in span.inner if inner in by_size[: len(left)]]
    if len(kept) < len(span.inner):
        notes.append(f"{len(span.inner) - len(kept)} loops of {name} are not in its source: taken once")
    for inner, loop in zip(kept, left, strict=True):
        inner.trips, inner.source = loop.trips or 0, loop
        _pair(inner, loop.inner, name, notes)


def _unroll(span: Span, in_ptx: Span) -> None:
    """Divide trips by how many rounds of a loop of PTX one round in machine code holds, by what both must contain."""
    pairs = [(a, b) for a in span.inner for b in in_ptx.inner if a.source is b.source is not None]
    for inner, same in pairs:
        _unroll(inner, same)
        if inner.anchors and same.anchors and inner.trips:
            rounds = max(1, round(inner.anchors / same.anchors))
            # The assembler unrolls by powers of two; anything else is a loop that PTX lists in several pieces.
            inner.trips /= rounds if rounds & (rounds - 1) == 0 else 1


@dataclass
class _State:
    first: float  # clocks of a load from global memory up to the first wait for one, in each pass through a loop
    later: float  # clocks of all others
    now: float = 0
    open_until: dict[int, float] = field(default_factory=dict)
    loading: set[int] = field(default_factory=set)  # barriers of loads
    fetched: bool = False  # lines of memory are on their way to L1
    copies: list[float] = field(default_factory=list)  # when each group of asynchronous copies is there
    waited: bool = False  # for a load, in this pass
    looping: bool = False


def clocks(code: Code, first: float, later: float) -> float:
    """Of the whole kernel."""
    state = _State(first, later)
    _pass(code, code.whole, state)
    return state.now


def _pass(code: Code, span: Span, state: _State) -> None:
    """Go once through a span; through the loops in it as often as they run, each like its second pass."""
    inner = {each.first: each for each in span.inner}
    state.waited, state.looping = False, span is not code.whole
    place = span.first
    while place <= span.last:
        loop = inner.get(place)
        if loop is None:
            _issue(code.instructions[place], state)
            place += 1
            continue
        if loop.trips > 0:
            _pass(code, loop, state)
        if loop.trips > 1:
            began = state.now
            _pass(code, loop, state)
            state.now += (loop.trips - 2) * (state.now - began)
        state.waited, state.looping = True, span is not code.whole
        place = loop.last + 1


def _issue(instruction: Instruction, state: _State) -> None:
    for barrier in instruction.waits:
        if state.open_until.get(barrier, 0) > state.now:
            state.now = state.open_until[barrier]
            state.waited |= barrier in state.loading
    name = instruction.name
    load = state.later if state.waited else state.first
    if state.looping and state.fetched:
        load = WAITS["near"]
    state.fetched |= name.startswith("CCTL") and "PF1" in name
    if name.startswith("LDGDEPBAR"):
        state.copies.append(state.now + load)
    elif name.startswith("DEPBAR") and "SB0" in instruction.text:
        after = int(instruction.text.rsplit(",", 1)[-1].strip(), 16)  # so many of the latest may be under way
        if len(state.copies) > after:
            state.now = max(state.now, state.copies[-1 - after])
            state.waited = True
    elif name.startswith("BAR."):
        state.now += WAITS["together"]
    kind = next((kind for beginnings, kind in KINDS.items() if name.startswith(beginnings)), "other")
    for barrier in instruction.sets:
        state.open_until[barrier] = state.now + (load if kind == "load" else WAITS[kind])
        (state.loading.add if kind == "load" else state.loading.discard)(barrier)
    for barrier in instruction.reads:
        state.open_until[barrier] = state.now + WAITS["other"]
        state.loading.discard(barrier)
    state.now += instruction.stall
