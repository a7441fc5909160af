"""Runs one block: all threads at one instruction step together, and those farthest behind go first."""

from typing import Any, NamedTuple

import numpy as np

from ptx.accesses import ACCESSES
from ptx.arithmetic import ARITHMETIC
from ptx.bits import BITS
from ptx.groups import GROUPS
from ptx.matrices import MATRICES
from ptx.memory import Clock, Global, Shared
from ptx.moves import MOVES
from ptx.operands import Operands, Step
from ptx.program import Fault, Instruction, Program
from ptx.warps import WARPS

__all__ = ["Block", "Compiled"]

STEPS = ARITHMETIC | BITS | MOVES | ACCESSES | WARPS | MATRICES | GROUPS
# Order memory for the hardware; here all is in order. The fences of a proxy, too.
NOTHING = {"fence", "membar", "griddepcontrol", "nop"}
MOST_JUMPS = 1_000_000
PLAIN, JUMP, EXIT, BARRIER = range(4)


class Line(NamedTuple):
    """One instruction, ready to run."""

    kind: int
    step: Step | None
    guard: int  # the place of the predicate, or -1
    negated: bool
    target: int  # of a jump


class Compiled:
    """A program whose instructions are functions."""

    def __init__(self, ptx: str) -> None:
        self.program = Program(ptx)
        self.operands = Operands(self.program)
        self.lines = [self._line(each) for each in self.program.code]
        units = [_unit(each) for each in self.program.code if each.opcode[0] in ("ld", "st", "atom", "red", "ldmatrix")]
        self.grain = min([4, *units])  # bytes of the smallest access

    def _line(self, instruction: Instruction) -> Line:
        try:
            guard = -1 if instruction.guard is None else self.operands.predicate(instruction.guard)[0]
            kind, step, target = self._decoded(instruction)
        except Fault as fault:
            # raised when it is reached: what never runs does no harm
            kind, step, target = PLAIN, _unknown(str(fault)), 0
        except (ValueError, KeyError, IndexError) as fault:
            kind, step, target = PLAIN, _unknown(f"unknown form ({type(fault).__name__} {fault})"), 0
        return Line(kind, step, guard, instruction.negated, target)

    def _decoded(self, instruction: Instruction) -> tuple[int, Step | None, int]:
        name, *parts = instruction.opcode
        if name == "bra":
            return JUMP, None, self.program.labels[instruction.operands[0]]
        if name in ("ret", "exit"):
            return EXIT, None, 0
        if name in ("bar", "barrier"):
            if parts == ["warp", "sync"]:
                return PLAIN, _nothing, 0
            if set(parts) <= {"sync", "cta", "aligned"} and instruction.operands == ("0",):
                return BARRIER, None, 0
            raise Fault("unknown barrier")
        if name in NOTHING:
            return PLAIN, _nothing, 0
        if name not in STEPS:
            raise Fault("unknown instruction")
        return PLAIN, STEPS[name](instruction, self.operands), 0


def _unit(instruction: Instruction) -> int:
    kind = instruction.opcode[-1]
    return int(kind[1:]) // 8 if instruction.opcode[1] != "param" and kind[1:].isdigit() else 4


def _unknown(what: str) -> Step:
    def step(block: Any, mask: Any) -> None:
        raise Fault(what)

    return step


def _nothing(block: Any, mask: Any) -> None:
    pass


class Block:
    """One block after the other of a launch. `parameters` are arrays [1] of 64 bits, or of float32."""

    def __init__(
        self, compiled: Compiled, memory: Global, shared: Shared, clock: Clock, parameters: list[Any], seed: int
    ) -> None:
        self.compiled, self.memory, self.shared, self.clock = compiled, memory, shared, clock
        self.random = np.random.default_rng(seed)
        threads = compiled.program.threads
        self.parameters = [np.repeat(each, threads) for each in parameters]

    def run(self, index: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        """Raises Fault at the first thing that is wrong."""
        operands, threads = self.compiled.operands, self.compiled.program.threads
        self.registers = list(operands.constants)
        for axis, number, size in zip("xyz", index, grid, strict=True):
            for name, value in ((f"%ctaid.{axis}", number), (f"%nctaid.{axis}", size)):
                if name in operands.places:
                    self.registers[operands.places[name]] = np.full(threads, value, np.uint32)
        self.copies: list[Any] = []  # asynchronous ones since the last group, and the groups under way
        self.groups: list[list[Any]] = []
        self.jumps, self.at = 0, 0
        self.clock.begin_block()
        # Where threads stand, and the mask of those that stand there; None is all threads.
        self.ready: dict[int, Any] = {0: None}
        self.waiting: dict[int, Any] = {}
        try:
            while self.ready or self.waiting:
                if not self.ready:
                    self.clock.barrier()
                    self.ready, self.waiting = self.waiting, {}
                at = min(self.ready)
                mask = self.ready.pop(at)
                self._advance(at, mask, min(self.ready, default=len(self.compiled.lines)))
        except Fault as fault:
            raise Fault(self._told(str(fault), index)) from None
        except (TypeError, AttributeError, ValueError) as error:
            unset = "a register that nothing wrote, or a fault of the emulator"
            raise Fault(self._told(f"{unset} ({error})", index)) from error

    def _told(self, what: str, index: tuple[int, int, int]) -> str:
        program = self.compiled.program
        instruction = program.code[min(self.at, len(program.code) - 1)]
        return f"{program.name}, block {index}, {instruction.source}: {what}; {instruction.text}"

    def _advance(self, at: int, mask: Any, limit: int) -> None:
        """Runs some threads until they jump apart, wait, end, or meet those that stand at `limit`."""
        lines, registers = self.compiled.lines, self.registers
        count = np.count_nonzero
        while at < limit:
            self.at = at
            kind, step, guard, negated, target = lines[at]
            active = mask
            if guard >= 0:
                held = ~registers[guard] if negated else registers[guard]
                active = held if mask is None else held & mask
                taken = count(active)
                if not taken:
                    at += 1
                    continue
                if taken == (len(active) if mask is None else count(mask)):
                    active = mask
            if kind == PLAIN:
                step(self, active)
                at += 1
                continue
            if kind == JUMP:
                self._count_jump()
                if active is mask:
                    at = target
                    continue
                self._stand(self.ready, target, active)
                self._stand(self.ready, at + 1, ~active if mask is None else mask & ~active)
                return
            if kind == BARRIER:
                self._stand(self.waiting, at + 1, active)
            if active is not mask:  # the others go on
                self._stand(self.ready, at + 1, ~active if mask is None else mask & ~active)
            return
        if at < len(lines):
            self._stand(self.ready, at, mask)

    def _count_jump(self) -> None:
        self.jumps += 1
        if self.jumps > MOST_JUMPS:
            raise Fault("it does not end")

    @staticmethod
    def _stand(where: dict[int, Any], at: int, mask: Any) -> None:
        if at in where:
            mask = where[at] | mask
            if mask.all():
                mask = None
        where[at] = mask
