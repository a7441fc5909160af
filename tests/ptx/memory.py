"""Memory that knows who touched it last: global memory as the storages of tensors, and the shared memory of a block.

A stamp of an access is `time * 128 + who`. Time goes on at every barrier, every block and every launch and never back,
so a stamp tells by its size whether the access was before the last barrier, in another block or in another launch.
"""

from typing import Any

import numpy as np

from ptx.operands import UNSIGNED
from ptx.program import Fault

__all__ = ["Clock", "Global", "Segment", "Shared"]

ATOMIC, SEVERAL = 32, 64  # who: a warp of 32, whether by an atomic, and whether there were several of them
IN_FLIGHT = -1  # the stamp of bytes that an asynchronous copy may change at any time


class Clock:
    """The time; stamps of accesses are int64 [threads]."""

    def __init__(self) -> None:
        self.time = 0
        self.launch = self.block = self.now = 0  # the first stamps of this launch, block and stretch between barriers
        self.stamps: Any = None

    def begin_launch(self, warp: Any) -> None:
        self.warp, self.seen, self.released = warp, {}, {}
        self.barrier()
        self.launch = self.block = self.now

    def begin_block(self) -> None:
        self.barrier()
        self.block, self.seen = self.now, {}

    def barrier(self) -> None:
        self.time += 1
        self.now = self.time << 7
        self.stamps = self.now + self.warp

    # Blocks wait for each other by atomics: what a block did before it released a word, another one that acquires the
    # word later may rely on. `seen` holds up to which time, by word.
    def release(self, words: Any) -> None:
        for word in np.unique(words).tolist():
            self.released[word] = self.released.get(word, frozenset()) | {
                (self.block, self.now + 127),
                *self.seen.items(),
            }

    def acquire(self, words: Any) -> None:
        for word in np.unique(words).tolist():
            for block, until in self.released.get(word, ()):
                self.seen[block] = max(until, self.seen.get(block, 0))

    def unordered(self, stamps: Any) -> Any:
        """Which accesses were by other blocks of this launch, without an order between them and now."""
        found = (stamps >= self.launch) & (stamps < self.block)
        if self.seen and found.any():
            for block, until in self.seen.items():
                found &= ~((stamps >= block) & (stamps <= until))
        return found


class Memory:
    """Bytes, and the last stamps of each unit of `grain` bytes. Addresses here are offsets, int64 [lanes]."""

    def __init__(self, data: Any, name: str, clock: Clock, grain: int) -> None:
        self.name, self.clock, self.grain = name, clock, grain
        self.views = {size: data[: len(data) // size * size].view(unit) for size, unit in UNSIGNED.items()}
        self.size = len(data)
        units = -(-len(data) // grain)
        self.wrote, self.read = np.zeros(units, np.int64), np.zeros(units, np.int64)

    def fault(self, what: str) -> None:
        raise Fault(f"{what}, in {self.name}")

    def places(self, at: Any, unit: int, count: int) -> tuple[Any, Any]:
        """The places of `count` units from each offset on: in the data, and in the stamps."""
        whole = unit * count  # a power of 2
        if at.min() < 0 or at.max() > self.size - whole:
            outside = at[(at < 0) | (at > self.size - whole)][0]
            self.fault(f"{whole} bytes at {outside}, out of bounds of {self.size} bytes")
        if np.bitwise_or.reduce(at) & (whole - 1):
            self.fault(f"{whole} bytes at {at[at & (whole - 1) != 0][0]}, misaligned")
        data = (at >> (unit.bit_length() - 1))[:, None]
        if count > 1:
            data = data + np.arange(count)
        if unit == self.grain:
            return data, data
        return data, (at >> (self.grain.bit_length() - 1))[:, None] + np.arange(whole // self.grain)

    def load(self, at: Any, unit: int, count: int, stamps: Any) -> Any:
        """Unsigned [lanes, count]."""
        data, marks = self.places(at, unit, count)
        wrote, mine = self.wrote[marks], stamps[:, None]
        self.check_written(wrote, marks)
        if wrote.max() >= self.clock.now and ((wrote >= self.clock.now) & (wrote & ~ATOMIC != mine)).any():
            self.fault("a warp reads what another warp wrote, with no barrier between them")
        self.remember_reads(marks, mine)
        return self.views[unit][data]

    def remember_reads(self, marks: Any, mine: Any) -> None:
        before = self.read[marks]
        self.read[marks] = mine
        if len(mine) > 32 or before.max() >= self.clock.now:  # perhaps by several warps
            several = (self.read[marks] != mine) | ((before >= self.clock.now) & (before != mine))
            if several.any():
                self.read[marks[several]] = self.clock.now + SEVERAL

    def check_written(self, wrote: Any, marks: Any, *, atomic: bool = False) -> None:
        """Raise if nobody wrote there, or somebody else did just now."""

    def check_store(self, marks: Any, mine: Any, changed: Any) -> None:
        """Raise if another warp reads there, or writes something else there, with no barrier between."""
        now, read, wrote = self.clock.now, self.read[marks], self.wrote[marks]
        if wrote.min() == IN_FLIGHT:
            self.fault("a store to where an asynchronous copy is under way")
        if read.max() >= now and ((read >= now) & (read != mine)).any():
            self.fault("a warp writes where another warp reads, with no barrier between them")
        if wrote.max() >= now and ((wrote >= now) & (wrote & ~ATOMIC != mine) & changed).any():
            self.fault("two warps write different values, with no barrier between them")

    def store(self, at: Any, values: Any, stamps: Any) -> Any:
        """Of unsigned values [lanes, count]; returns the places in the stamps."""
        unit = values.itemsize
        data, marks = self.places(at, unit, values.shape[1])
        view, mine = self.views[unit], stamps[:, None]
        changed = view[data] != values
        if unit != self.grain:
            changed = np.repeat(changed, unit // self.grain, axis=1)
        self.check_store(marks, mine, changed)
        view[data] = values
        if (view[data] != values).any():
            self.fault("lanes of one instruction store different values to one address")
        self.wrote[marks] = mine
        return marks

    def atomic(self, at: Any, unit: int, stamps: Any) -> tuple[Any, Any]:
        """The places in the data [lanes] and in the stamps, after the checks of an atomic access."""
        data, marks = self.places(at, unit, 1)
        mine, now = stamps[:, None], self.clock.now
        wrote, read = self.wrote[marks], self.read[marks]
        self.check_written(wrote, marks, atomic=True)
        if ((wrote >= now) & (wrote & ~ATOMIC != mine) & (wrote & ATOMIC == 0)).any():
            self.fault("an atomic where another warp wrote, with no barrier between them")
        if ((read >= now) & (read != mine)).any():
            self.fault("an atomic where another warp reads, with no barrier between them")
        self.wrote[marks] = mine | ATOMIC
        others = (self.wrote[marks] != mine | ATOMIC) | ((wrote >= now) & (wrote & ~ATOMIC != mine))
        self.wrote[marks[others]] = now + (SEVERAL | ATOMIC)
        return data[:, 0], marks


class Shared(Memory):
    """The shared memory of a block. Every block finds in it what was left there, and must not read it."""

    def __init__(self, size: int, clock: Clock, grain: int) -> None:
        garbage = np.random.RandomState(1).randint(0, 256, -(-size // 8) * 8).astype(np.uint8)
        super().__init__(garbage, "shared memory", clock, grain)
        self.size = size

    def check_written(self, wrote: Any, marks: Any, *, atomic: bool = False) -> None:
        if (least := wrote.min()) >= self.clock.block:
            return
        if least == IN_FLIGHT:
            self.fault("a read of what an asynchronous copy brings, before its wait")
        self.fault("a read of what this block never wrote")

    def begin_copy(self, at: Any, unit: int, count: int, stamps: Any) -> None:
        """From now until it lands, an asynchronous copy may change these bytes."""
        _, marks = self.places(at, unit, count)
        self.check_store(marks, stamps[:, None], np.ones(1, bool))
        self.wrote[marks] = IN_FLIGHT

    def land(self, at: Any, values: Any, stamps: Any) -> None:
        """Of a copy that was begun."""
        _, marks = self.places(at, values.itemsize, values.shape[1])
        self.wrote[marks] = 0
        self.store(at, values, stamps)


class Segment(Memory):
    """The storage of a tensor; `written` tells of each byte whether somebody wrote it, 255 or 0, or is None."""

    def __init__(self, data: Any, name: str, clock: Clock, grain: int, written: Any = None) -> None:
        super().__init__(data, name, clock, grain)
        self.written = None if written is None else written[: len(data) // grain * grain].view(UNSIGNED[grain])
        self.full = UNSIGNED[grain](2 ** (8 * grain) - 1)
        self.block_read = np.zeros_like(self.read)  # the first stamp of the block that read last

    def check_written(self, wrote: Any, marks: Any, *, atomic: bool = False) -> None:
        if self.written is not None and (self.written[marks] != self.full).any():
            self.fault("a read of what nobody wrote")
        if wrote.max() >= self.clock.launch:
            others = self.clock.unordered(wrote)
            if (others & (wrote & ATOMIC == 0) if atomic else others).any():
                self.fault("a block reads what another block of the launch wrote")

    def remember_reads(self, marks: Any, mine: Any) -> None:
        super().remember_reads(marks, mine)
        before, block = self.block_read[marks], self.clock.block
        self.block_read[marks] = block
        if before.max() >= self.clock.launch:
            several = (before >= self.clock.launch) & (before != block)
            self.block_read[marks[several]] = block + SEVERAL

    def check_store(self, marks: Any, mine: Any, changed: Any) -> None:
        if not changed.any():
            return
        super().check_store(marks[changed], np.broadcast_to(mine, marks.shape)[changed], np.ones(1, bool))
        wrote, read = self.wrote[marks], self.block_read[marks]
        if wrote.max() >= self.clock.launch and (self.clock.unordered(wrote) & changed).any():
            self.fault("two blocks of a launch write different values")
        others = (read >= self.clock.launch) & (read != self.clock.block) & changed
        if others.any() and not all(int(each) in self.clock.seen for each in np.unique(read[others])):
            self.fault("a block writes what another block of the launch reads")

    def store(self, at: Any, values: Any, stamps: Any) -> Any:
        marks = super().store(at, values, stamps)
        if self.written is not None:
            self.written[marks] = self.full
        return marks

    def atomic(self, at: Any, unit: int, stamps: Any) -> tuple[Any, Any]:
        data, marks = super().atomic(at, unit, stamps)
        others = self.block_read[marks]
        if ((others >= self.clock.launch) & (others != self.clock.block)).any():
            self.fault("an atomic where another block of the launch reads")
        return data, marks


class Global:
    """All tensors of a launch."""

    def __init__(self, segments: dict[int, Segment], clock: Clock) -> None:
        self.clock = clock
        self.bases = np.array(sorted(segments), np.int64)
        self.segments = [segments[base] for base in self.bases.tolist()]

    def parts(self, address: Any) -> list[tuple[Segment, Any, Any]]:
        """The lanes of each segment (None for all), and their offsets in it."""
        low, high = (int(np.searchsorted(self.bases, end, side="right")) - 1 for end in (address.min(), address.max()))
        if low < 0:
            raise Fault(f"address {address.min():#x} is in no tensor, far out of bounds")
        if low == high:
            return [(self.segments[low], slice(None), address - self.bases[low])]
        which = np.searchsorted(self.bases, address, side="right") - 1
        lanes = [(i, np.nonzero(which == i)[0]) for i in np.unique(which)]
        return [(self.segments[i], each, address[each] - self.bases[i]) for i, each in lanes]

    def load(self, address: Any, unit: int, count: int, stamps: Any) -> Any:
        parts = self.parts(address)
        if len(parts) == 1:
            return parts[0][0].load(parts[0][2], unit, count, stamps)
        found = np.empty((len(address), count), UNSIGNED[unit])
        for segment, lanes, at in parts:
            found[lanes] = segment.load(at, unit, count, stamps[lanes])
        return found

    def store(self, address: Any, values: Any, stamps: Any) -> None:
        for segment, lanes, at in self.parts(address):
            segment.store(at, values[lanes], stamps[lanes])
