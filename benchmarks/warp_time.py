"""How long one warp takes for its instructions when it has a scheduler alone.

Instructions issue in order. The compiler writes into each how many clocks the next one waits, which covers results of
known latency, and which barriers it waits for; results of unknown latency open a barrier when they are done. So only
the latencies of `Latencies` are assumed, and the rest is in the code.
"""

from dataclasses import dataclass, field

from sass import Code, Instruction, Span

__all__ = ["Latencies", "clocks"]


@dataclass(frozen=True)
class Latencies:
    """Clocks from issue to result."""

    first: float  # global memory: loads up to the first wait for one, in each pass through a loop
    later: float  # global memory: all others
    shared: float
    shuffle: float
    product: float
    near: float  # global memory that the kernel has fetched to L1 before, with a prefetch: loads in loops after it
    other: float  # special functions, conversions, system registers, and reading operands from registers
    together: float  # until all warps have come to a barrier


@dataclass
class _State:
    now: float = 0
    open_until: dict[int, float] = field(default_factory=dict)
    loading: set[int] = field(default_factory=set)  # barriers of loads
    fetched: bool = False  # lines of memory are on their way to L1
    copies: list[float] = field(default_factory=list)  # when each group of asynchronous copies is there
    waited: bool = False  # for a load, in this pass
    looping: bool = False


def clocks(code: Code, latencies: Latencies) -> float:
    """Of the whole kernel."""
    state = _State()
    _pass(code, code.whole, state, latencies)
    return state.now


def _pass(code: Code, span: Span, state: _State, latencies: Latencies) -> None:
    """Go once through a span; through the loops in it as often as they run, each like its second pass."""
    inner = {each.first: each for each in span.inner}
    state.waited, state.looping = False, span is not code.whole
    place = span.first
    while place <= span.last:
        loop = inner.get(place)
        if loop is None:
            _issue(code.instructions[place], state, latencies)
            place += 1
            continue
        if loop.trips > 0:
            _pass(code, loop, state, latencies)
        if loop.trips > 1:
            began = state.now
            _pass(code, loop, state, latencies)
            state.now += (loop.trips - 2) * (state.now - began)
        state.waited, state.looping = True, span is not code.whole
        place = loop.last + 1


def _issue(instruction: Instruction, state: _State, latencies: Latencies) -> None:
    for barrier in instruction.waits:
        if state.open_until.get(barrier, 0) > state.now:
            state.now = state.open_until[barrier]
            state.waited |= barrier in state.loading
    name = instruction.name
    loads = latencies.later if state.waited else latencies.first
    if state.looping and state.fetched:
        loads = latencies.near
    state.fetched |= name.startswith("CCTL") and "PF1" in name
    if name.startswith("LDGDEPBAR"):
        state.copies.append(state.now + loads)
    elif name.startswith("DEPBAR") and "SB0" in instruction.text:
        after = int(instruction.text.rsplit(",", 1)[-1].strip(), 16)  # so many of the latest may be under way
        if len(state.copies) > after:
            state.now = max(state.now, state.copies[-1 - after])
            state.waited = True
    elif name.startswith("BAR."):
        state.now += latencies.together
    for barrier in instruction.sets:
        state.open_until[barrier] = state.now + _latency(name, latencies, loads)
        if name.startswith(("LDG.", "LD.", "ATOMG")):
            state.loading.add(barrier)
        else:
            state.loading.discard(barrier)
    for barrier in instruction.reads:
        state.open_until[barrier] = state.now + latencies.other
        state.loading.discard(barrier)
    state.now += instruction.stall


def _latency(name: str, latencies: Latencies, loads: float) -> float:
    if name.startswith(("LDG.", "LD.", "ATOMG")):
        return loads
    if name.startswith(("LDS", "ATOMS")):
        return latencies.shared
    if name.startswith(("SHFL", "REDUX")):
        return latencies.shuffle
    if name.startswith(("HMMA", "IMMA", "QMMA", "DMMA", "HGMMA", "IGMMA")):
        return latencies.product
    return latencies.other
