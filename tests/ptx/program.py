"""PTX text as decoded instructions: opcode, operands, guard, and the line of the kernel that each one came from."""

import re
from typing import NamedTuple

__all__ = ["Fault", "Instruction", "Program", "listed"]

WIDTHS = {"pred": 0, "8": 1, "16": 2, "32": 4, "64": 8}
NAME = re.compile(r"%?[A-Za-z_$][\w$]*")


class Fault(Exception):  # noqa: N818
    """What is wrong with a kernel, or what the emulator does not know."""


class Instruction(NamedTuple):
    """One instruction, its operands still text."""

    text: str
    opcode: tuple[str, ...]  # "ld.global.b32" is ("ld", "global", "b32")
    operands: tuple[str, ...]
    guard: str | None  # the register of `@%p1`
    negated: bool  # `@!%p1`
    source: str  # "score.py:174"


class Program:
    """One kernel: `code`, the places of its `labels`, its `parameters` (name and type), and its registers' widths."""

    def __init__(self, ptx: str) -> None:
        entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", ptx, re.S)
        if entry is None:
            raise Fault("no kernel in this PTX")
        self.name = entry.group(1)
        self.parameters = re.findall(r"\.param\s+\.(\w+)[^,]*?([\w$]+)\s*(?:,|$)", entry.group(2).strip())
        self.threads = int(re.search(r"\.reqntid\s+(\d+)", entry.group(3)).group(1))
        self.files = {number: name.rsplit("/", 1)[-1] for number, name in re.findall(r'\.file\s+(\d+)\s+"(.*?)"', ptx)}
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.widths: dict[str, int] = {}  # bytes, by register or by "%r" of %r1, %r2 ...; 0 is a predicate
        self._scopes: list[dict[str, str]] = [{}]
        self._made = 0
        self._parse(ptx[entry.end() :])
        texts = [operand for each in self.code for operand in each.operands[_written(each) :]]
        self.read = {name for text in texts for name in NAME.findall(text)}  # registers that some instruction reads

    def _parse(self, body: str) -> None:
        source, pending = "", ""
        for line in body.split("\n"):
            line = re.sub(r"//.*", "", line).strip()
            if line.startswith(".loc"):
                number, row = line.split()[1:3]
                source = f"{self.files.get(number, number)}:{row}"
                continue
            *statements, pending = f"{pending} {line}".split(";")
            for statement in statements:
                self._statement(statement, source)
            pending = self._lead(pending)
            if not self._scopes:
                return

    def _lead(self, text: str) -> str:
        """The text behind the labels and braces that begin it."""
        while text := text.strip():
            if text[0] == "{":
                self._scopes.append({})
            elif text[0] == "}":
                self._scopes.pop()
                if not self._scopes:
                    return ""
            elif label := re.match(r"([\w$]+):(?!:)", text):
                self.labels[label.group(1)] = len(self.code)
                text = text[label.end() :]
                continue
            else:
                break
            text = text[1:]
        return text

    def _statement(self, text: str, source: str) -> None:
        text = self._lead(text)
        if not text or not self._scopes or text.startswith(".pragma"):
            return
        if text.startswith(".reg"):
            self._declare(text)
            return
        for scope in self._scopes[1:]:
            text = NAME.sub(lambda found, scope=scope: scope.get(found.group(), found.group()), text)
        match = re.match(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text, re.S)
        if match is None:
            raise Fault(f"{self.name}: cannot read {text!r}")
        negated, guard, opcode, operands = match.groups()
        parts = tuple(opcode.replace("::", "_").split("."))
        self.code.append(Instruction(text, parts, tuple(listed(operands)), guard, bool(negated), source))

    def _declare(self, text: str) -> None:
        kind, names = re.match(
            r"\.reg\s+\.(?:pred|[a-z])?(\w+)\s+(.*)$", text.replace(".pred", ".xpred"), re.S
        ).groups()
        for name in names.split(","):
            name = re.sub(r"<\d+>", "", name.strip())
            if len(self._scopes) > 1:  # a block of inline assembly, which may be there many times
                self._made += 1
                self._scopes[-1][name] = name = f"{name}$${self._made}"
            self.widths[name] = WIDTHS[kind]

    def width(self, register: str) -> int | None:
        """Bytes of a register, 0 for a predicate, None where the name is not a register."""
        found = self.widths.get(register)
        return self.widths.get(re.sub(r"\d+$", "", register)) if found is None else found


def listed(text: str) -> list[str]:
    """Operands between commas, but for those within braces and brackets: "{a, b}, [c]" is ["{a, b}", "[c]"]."""
    return [each.strip() for each in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if each.strip()]


def _written(instruction: Instruction) -> int:
    """How many of the first operands are only written."""
    return 0 if instruction.opcode[0] in ("st", "red", "bra", "wgmma", "cp", "stmatrix") else 1
