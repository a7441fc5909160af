"""Ways to damage a file: strategies of hypothesis for functions from bytes to bytes."""

import json
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from hypothesis import strategies as st

Damage = Callable[[bytes], bytes]

ODD: list[Any] = [
    None, True, "", "x" * 5000, "\x1b[31m", "\ud800", 0, -1, 1, 2**31, 2**63, 10**400, 0.5, 1e308, -1e-320, [], {},
    [[]] * 50, {"": {}}, [0] * 5000, "NaN", "../../etc/passwd", "\u202e",
]  # fmt: skip

_places = st.floats(0, 1, exclude_max=True)  # in parts of the file
_few = st.integers(1, 64)


def _flip(at: float, bit: int) -> Damage:
    def flip(blob: bytes) -> bytes:
        place = int(at * len(blob))
        return blob[:place] + bytes([blob[place] ^ 1 << bit]) + blob[place + 1 :] if blob else blob

    return flip


def _splice(at: float, count: int, put: bytes) -> Damage:
    """Replace `count` bytes."""
    return lambda blob: blob[: int(at * len(blob))] + put + blob[int(at * len(blob)) + count :]


def _repeat(at: float, count: int, times: int) -> Damage:
    def repeat(blob: bytes) -> bytes:
        place = int(at * len(blob))
        return blob[:place] + blob[place : place + count] * times + blob[place + count :]

    return repeat


bytes_of_any_file: st.SearchStrategy[Damage] = st.one_of(
    st.builds(_flip, _places, st.integers(0, 7)),
    st.builds(_splice, _places, st.integers(0, 4096), st.just(b"")),
    st.builds(_splice, _places, _few, st.binary(max_size=64)),
    st.builds(_splice, _places, st.just(1 << 30), st.just(b"")),  # the end is missing
    st.builds(_repeat, _places, _few, st.integers(2, 2000)),
)


def _length(value: int) -> Damage:
    """Another length of the safetensors header."""
    return lambda blob: struct.pack("<Q", value) + blob[8:]


def _deeper(depth: int) -> Damage:
    return lambda blob: _with_header(blob, b"[" * depth + b"]" * depth)


def _entry(pick: int, value: Any, seal: Callable[[dict[str, Any]], None], key: str) -> Damage:
    """Another value, or none at all, in the header's JSON or in that of the metadata; `seal` makes the hashes right."""

    def change(blob: bytes) -> bytes:
        header = json.loads(blob[8 : 8 + struct.unpack("<Q", blob[:8])[0]])
        metadata = json.loads(header["__metadata__"][key])
        places = [*_places_of(metadata), *_places_of({k: v for k, v in header.items() if k != "__metadata__"})]
        table, entry = places[pick % len(places)]
        if value is KeyError and isinstance(table, dict):
            del table[entry]
        else:
            table[entry] = None if value is KeyError else value
        seal(metadata)
        header["__metadata__"][key] = json.dumps(metadata)
        return _with_header(blob, json.dumps(header).encode())

    return change


def _number(at: float, bits: bytes, seal: Callable[[dict[str, Any]], None]) -> Damage:
    """Another number in the tensors."""

    def change(blob: bytes) -> bytes:
        start = 8 + struct.unpack("<Q", blob[:8])[0]
        place = start + int(at * (len(blob) - start)) // 4 * 4
        payload = blob[start:place] + bits + blob[place + 4 :]
        header = json.loads(blob[8:start])
        metadata = json.loads(header["__metadata__"]["bpc"]) | {"payload_sha256": sha256(payload).hexdigest()}
        seal(metadata)
        header["__metadata__"]["bpc"] = json.dumps(metadata)
        return _with_header(blob[:start] + payload, json.dumps(header).encode())

    return change


def _places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every table with one of its keys, and every list with one of its places."""
    pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, inner in pairs:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places_of(inner)


def _with_header(blob: bytes, header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + blob[8 + struct.unpack("<Q", blob[:8])[0] :]


def of_a_sealed_file(seal: Callable[[dict[str, Any]], None], key: str) -> st.SearchStrategy[Damage]:
    """Damage to a safetensors file whose metadata are JSON under this key."""
    values = st.one_of(st.just(KeyError), st.sampled_from(ODD))
    entries = st.builds(_entry, st.integers(0, 10**6), values, st.just(seal), st.just(key))
    return st.one_of(
        bytes_of_any_file,
        st.builds(_length, st.one_of(st.integers(0, 5000), st.sampled_from([2**63, 2**64 - 1, 1 << 20, 1 << 32]))),
        st.builds(_deeper, st.integers(1, 200_000)),
        entries,
        entries,  # twice as often: it gets furthest
    )


def of_an_artifact(seal: Callable[[dict[str, Any]], None]) -> st.SearchStrategy[Damage]:
    """Damage to a projection file."""
    numbers = st.builds(_number, _places, st.binary(min_size=4, max_size=4), st.just(seal))
    return st.one_of(of_a_sealed_file(seal, "bpc"), numbers)


@contextmanager
def little_memory(room: int) -> Iterator[None]:
    """In the block, this process may take at most `room` more bytes of address space."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
