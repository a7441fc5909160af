"""The PTX emulator: every fault that it must report, and its instructions against numpy and torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from ptx.block import Compiled
from ptx.emulation import Emulation
from ptx.program import Fault

HERE = Path(__file__).parent
FRAME = """
.version 8.8
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry sample({parameters})
.reqntid {threads}
{{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<99>;
	{loads}
	mov.u32 %r90, %tid.x;
	mul.wide.u32 %rd90, %r90, 4;
	shl.b32 %r91, %r90, 2;
	add.s32 %r92, %r91, global_smem;
{body}
	ret;
}}
"""  # %rd0, %rd1 ... are the tensors; %r90 the thread, %rd90 and %r91 its offset of 4 bytes, %r92 that in shared memory
LATER = """
	xor.b32 %r1, %r90, 63;
	shl.b32 %r1, %r1, 2;
	add.s32 %r1, %r1, global_smem;
"""  # %r1 is the place in shared memory of a thread of the other warp


def text(body, count, threads=64):
    loads = "\n".join(f"\tld.param.b64 %rd{i}, [sample_param_{i}];" for i in range(count))
    parameters = ", ".join(f".param .u64 .ptr .global .align 1 sample_param_{i}" for i in range(count))
    return FRAME.format(parameters=parameters, threads=threads, loads=loads, body=body)


def run(body, *tensors, grid=1, threads=64, emulation=None, shared=1024):
    compiled = Compiled(text(body, len(tensors), threads))
    (emulation or Emulation()).run(compiled, (grid, 1, 1), list(tensors), shared)


def numbers(count=64):
    return torch.arange(count, dtype=torch.int32)


EXCHANGE = f"""
	st.shared.b32 [%r92], %r90;
	bar.sync 0;
	{LATER}
	ld.shared.b32 %r2, [%r1];
	add.s64 %rd2, %rd0, %rd90;
	st.global.b32 [%rd2], %r2;
"""
COPY = """
	add.s64 %rd2, %rd0, %rd90;
	cp.async.ca.shared.global [%r92], [%rd2], 4;
	cp.async.commit_group;
	cp.async.wait_group 0;
	ld.shared.b32 %r2, [%r92];
	st.global.b32 [%rd2], %r2;
"""
LOOP = """
	setp.lt.u32 %p1, %r90, 40;
	mov.u32 %r1, 0;
	mov.u32 %r2, 0;
	selp.b32 %r3, 5, 2, %p1;
$again:
	add.s32 %r1, %r1, %r90;
	add.s32 %r2, %r2, 1;
	setp.lt.u32 %p2, %r2, %r3;
	@%p2 bra $again;
	@!%p1 bra $skip;
	add.s32 %r1, %r1, 1000;
$skip:
	st.shared.b32 [%r92], %r1;
	bar.sync 0;
	ld.shared.b32 %r4, [%r92];
	add.s64 %rd2, %rd0, %rd90;
	st.global.b32 [%rd2], %r4;
"""


def test_warps_exchange_over_a_barrier():
    out = numbers() * 0
    run(EXCHANGE, out)
    assert torch.equal(out, numbers() ^ 63)


def test_threads_part_and_meet_again():
    out = numbers()
    run(LOOP, out)
    assert torch.equal(out, torch.where(numbers() < 40, numbers() * 5 + 1000, numbers() * 2))


def test_an_asynchronous_copy():
    out = numbers()
    run(COPY, out)
    assert torch.equal(out, numbers())


def address(offset="%rd90", tensor="%rd0"):
    return f"\tadd.s64 %rd2, {tensor}, {offset};\n"


FAULTS = {
    "shared race": (EXCHANGE.replace("bar.sync 0;", ""), "reads what another warp wrote, with no barrier"),
    "write after read": (
        EXCHANGE + "\tst.shared.b32 [%r92], 7;",
        "writes where another warp reads",
    ),
    "write after write": (
        f"\tst.shared.b32 [%r92], %r90;\n{LATER}\tst.shared.b32 [%r1], %r90;",
        "two warps write different values",
    ),
    "shared, not written": (f"{LATER}\tld.shared.b32 %r2, [%r1];", "a read of what this block never wrote"),
    "shared, out of bounds": ("\tst.shared.b32 [%r92+1000], %r90;", "out of bounds of 1024 bytes, in shared memory"),
    "shared, misaligned": ("\tst.shared.b32 [%r92+2], %r90;", "misaligned"),
    "out of bounds by one": (address() + "\tld.global.b32 %r2, [%rd2+4];", "4 bytes at 256, out of bounds"),
    "before the tensor": ("\tmov.b64 %rd2, 64;\n\tst.global.b32 [%rd2], %r90;", "in no tensor, far out of bounds"),
    "misaligned": ("\tld.global.b64 %rd3, [%rd0+4];", "8 bytes at 4, misaligned"),
    "lanes differ": ("\tst.global.b32 [%rd0], %r90;", "lanes of one instruction store different values"),
    "global race": (
        address() + "\tst.global.b32 [%rd2], 9;\n\txor.b32 %r1, %r90, 63;\n\tmul.wide.u32 %rd3, %r1, 4;\n"
        "\tadd.s64 %rd4, %rd0, %rd3;\n\tld.global.b32 %r2, [%rd4];",
        "reads what another warp wrote, with no barrier",
    ),
    "copy before its wait": (
        COPY.replace("cp.async.wait_group 0;", ""), "a read of what an asynchronous copy brings, before its wait",
    ),
    "copy of a later group": (
        COPY.replace("wait_group 0", "wait_group 1"), "a read of what an asynchronous copy brings, before its wait",
    ),
    "copy without a barrier": (
        COPY.replace("ld.shared.b32 %r2, [%r92]", f"{LATER}\tld.shared.b32 %r2, [%r1]"), "no barrier between them",
    ),
    "unknown instruction": ("\tfrobnicate.b32 %r1, %r90;", "unknown instruction; frobnicate"),
    "unknown part": ("\tadd.sat.s32 %r1, %r90, 1;", "unknown part sat"),
    "unset register": ("\tadd.s32 %r1, %r2, 1;", "a register that nothing wrote"),
    "endless": ("$around:\n\tbra $around;", "does not end"),
    "half a warp shuffles": (
        "\tsetp.lt.u32 %p1, %r90, 16;\n\t@%p1 shfl.sync.bfly.b32 %r1, %r90, 16, 31, -1;", "does not take part",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(name, monkeypatch):
    monkeypatch.setattr("ptx.block.MOST_JUMPS", 1000)
    body, message = FAULTS[name]
    with pytest.raises(Fault, match=message) as raised:
        run(body, numbers())
    assert str(raised.value).startswith("sample, block (0, 0, 0)")


def test_what_never_runs_does_no_harm():
    run("\tsetp.lt.u32 %p1, %r90, 0;\n\t@%p1 bra $there;\n\tret;\n$there:\n\tfrobnicate.b32 %r1;", numbers())


OF_BLOCKS = {
    "one reads, one writes": "\tmov.u32 %r1, %ctaid.x;\n\tsetp.eq.s32 %p1, %r1, 0;\n"
    "\t@%p1 st.global.b32 [%rd0], 9;\n\t@!%p1 ld.global.b32 %r2, [%rd0];",
    "both write": "\tmov.u32 %r1, %ctaid.x;\n\tst.global.b32 [%rd0], %r1;",
}


@pytest.mark.parametrize("order", ["random", "reversed", "ascending"])
@pytest.mark.parametrize("name", OF_BLOCKS)
def test_blocks_that_depend_on_their_order(name, order):
    for seed in range(3):
        with pytest.raises(Fault, match=r"another block|two blocks"):
            run(OF_BLOCKS[name], numbers() + 5, grid=2, emulation=Emulation(order, seed))


def test_blocks_may_add_to_one_number_and_wait_for_the_last():
    """Each block leaves a number and counts itself; the last of them adds up what all left."""
    left, count, out = numbers(4), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    body = """
	mov.u32 %r1, %ctaid.x;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd4, %rd0, %rd3;
	add.s32 %r2, %r1, 10;
	setp.eq.s32 %p1, %r90, 0;
	@%p1 st.global.b32 [%rd4], %r2;
	@%p1 atom.global.gpu.acq_rel.add.u32 %r3, [%rd1], 1;
	setp.ne.s32 %p2, %r3, 3;
	@%p2 ret;
	@!%p1 ret;
	ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd0];
	add.s32 %r4, %r4, %r5;
	add.s32 %r4, %r4, %r6;
	add.s32 %r4, %r4, %r7;
	st.global.b32 [%rd2], %r4;
"""
    run(body, left, count, out, grid=4)
    assert (count.item(), out.item()) == (4, 46)
    with pytest.raises(Fault, match="another block"):
        run(body.replace("acq_rel", "relaxed"), left, count * 0, out, grid=4)


def test_a_tensor_that_nobody_wrote():
    emulation = Emulation()
    made = emulation.empty(torch.empty)(64, dtype=torch.int32)
    assert (made == -77).all()
    read = address() + "\tld.global.b32 %r2, [%rd2];"
    with pytest.raises(Fault, match="a read of what nobody wrote, in a tensor"):
        run(read, made, emulation=emulation)
    run(address() + "\tst.global.b32 [%rd2], %r90;", made, emulation=emulation)
    run(read, made, emulation=emulation)
    other = emulation.empty(torch.empty)(64)
    assert other.isnan().all()
    run(read, other.zero_(), emulation=emulation)


A, B, C = (np.random.RandomState(seed).randint(0, 2**32, 64, dtype=np.uint64).astype(np.uint32) for seed in range(3))
HALVES = (np.arange(64, dtype=np.float32) - 32) / 4


def single(x):
    return x.view(np.float32)


def python(function):
    return np.array([function(*map(int, each)) & 0xFFFFFFFF for each in zip(A, B, C, strict=True)], np.uint32)


def signed(x):
    return x - 2**32 if x >> 31 else x


def byte(x, y, i):
    value = (x | y << 32) >> 8 * (i & 7) & 255
    return (255 if value > 127 else 0) if i & 8 else value


LANE = np.arange(64) % 32
INSTRUCTIONS = {  # what becomes of A, B and C, which are %r1, %r2 and %r3
    "prmt.b32 %r4, %r1, %r2, 0x5410;": python(lambda a, b, c: a & 0xFFFF | (b & 0xFFFF) << 16),
    "prmt.b32 %r4, %r1, %r2, %r3;": python(lambda a, b, c: sum(byte(a, b, c >> 4 * j & 15) << 8 * j for j in range(4))),
    "lop3.b32 %r4, %r1, %r2, %r3, 0xe8;": A & B | A & C | B & C,
    "lop3.b32 %r4, %r1, %r2, %r3, 0x96;": A ^ B ^ C,
    "shf.l.wrap.b32 %r4, %r1, %r2, %r3;": python(lambda a, b, c: (b << 32 | a) << (c & 31) >> 32),
    "shf.r.wrap.b32 %r4, %r1, %r2, 7;": python(lambda a, b, c: (b << 32 | a) >> 7),
    "shf.r.clamp.b32 %r4, %r1, %r2, 99;": B,
    "bfe.u32 %r4, %r1, 5, 9;": A >> np.uint32(5) & np.uint32(511),
    "bfe.s32 %r4, %r1, 5, 9;": python(lambda a, b, c: (a >> 5 & 255) - (a >> 5 & 256)),
    "bfi.b32 %r4, %r1, %r2, 8, 8;": A % 256 << 8 | B & np.uint32(0xFFFF00FF),
    "mul.hi.u32 %r4, %r1, %r2;": python(lambda a, b, c: a * b >> 32),
    "mul.hi.s32 %r4, %r1, %r2;": python(lambda a, b, c: signed(a) * signed(b) >> 32),
    "mad.lo.s32 %r4, %r1, %r2, %r3;": A * B + C,
    "div.s32 %r4, %r1, 1000;": python(lambda a, b, c: int(signed(a) / 1000)),
    "rem.s32 %r4, %r1, 1000;": python(lambda a, b, c: signed(a) - int(signed(a) / 1000) * 1000),
    "shl.b32 %r4, %r1, 32;": A * 0,
    "shr.s32 %r4, %r1, 40;": (A.view(np.int32) >> 31).view(np.uint32),
    "popc.b32 %r4, %r1;": python(lambda a, b, c: bin(a).count("1")),
    "clz.b32 %r4, %r1;": python(lambda a, b, c: 32 - a.bit_length()),
    "brev.b32 %r4, %r1;": python(lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
    "dp4a.s32.u32 %r4, %r1, %r2, %r3;": (
        (A.view(np.int8).reshape(-1, 4).astype(np.int64) * B.view(np.uint8).reshape(-1, 4)).sum(1) + C
    ).astype(np.uint32),
    "max.s16x2 %r4, %r1, %r2;": np.maximum(A.view(np.int16), B.view(np.int16)).view(np.uint32),
    "cvt.rni.s32.f32 %r4, %r5;": np.array([round(float(x)) for x in HALVES], np.int32).view(np.uint32),
    "cvt.rzi.s32.f32 %r4, %r5;": HALVES.astype(np.int32).view(np.uint32),
    "fma.rn.f32 %r4, %r5, %r5, %r5;": (HALVES * HALVES + HALVES).view(np.uint32),
    "cvt.rn.bf16x2.f32 %r4, %r5, %r5;": (HALVES.view(np.uint32) >> 16) * np.uint32(65537),
    "setp.gtu.f32 %p1, %r5, 0f00000000; selp.b32 %r4, %r1, %r2, %p1;": np.where(HALVES > 0, A, B),
    "setp.lt.and.s32 %p1|%p2, %r1, 0, %p0; selp.b32 %r4, 1, 0, %p2;": ((A < 2**31) & (LANE % 3 == 0)).astype(np.uint32),
    "shfl.sync.bfly.b32 %r4, %r1, 5, 31, -1;": A[np.arange(64) ^ 5],
    "shfl.sync.idx.b32 %r4, %r1, 3, 31, -1;": A[np.arange(64) // 32 * 32 + 3],
    "shfl.sync.up.b32 %r4, %r1, 3, 0, -1;": np.where(LANE < 3, A, np.roll(A, 3)),
    "shfl.sync.down.b32 %r4|%p1, %r1, 3, 31, -1;": np.where(LANE > 28, A, np.roll(A, -3)),
    "shfl.sync.idx.b32 %r4, %r1, 1, 0x1c1f, -1;": A[np.arange(64) // 4 * 4 + 1],
    "vote.sync.ballot.b32 %r4, %p0, -1;": np.full(64, sum(1 << i for i in range(0, 32, 3)), np.uint32),
    "redux.sync.add.s32 %r4, %r90, -1;": np.repeat(np.array([496, 1520], np.uint32), 32),
}


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_an_instruction(instruction):
    tensors = [torch.from_numpy(each.view(np.int32).copy()) for each in (A, B, C, HALVES)]
    body = "".join(
        f"\tadd.s64 %rd{20 + i}, %rd{i}, %rd90;\n\tld.global.b32 %r{number}, [%rd{20 + i}];\n"
        for i, number in enumerate((1, 2, 3, 5))
    )
    body += "\tand.b32 %r30, %r90, 31;\n\trem.u32 %r31, %r30, 3;\n\tsetp.eq.s32 %p0, %r31, 0;\n\t"
    run(f"{body}{instruction}\n\tst.global.b32 [%rd20], %r4;", *tensors)
    assert torch.equal(tensors[0], torch.from_numpy(INSTRUCTIONS[instruction].view(np.int32)))


@pytest.mark.parametrize("arch", [80, 90])
def test_compiled_kernels(arch, tmp_path):
    """Matrix products against torch, and a barrier left out; in a process that does not interpret."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(HERE / "ptx_samples.py"), str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_prefetch_changes_nothing_but_must_be_in_a_tensor():
    out = numbers()
    run("\tadd.s64 %rd2, %rd0, 252;\n\tprefetch.global.L1 [%rd2];", out)
    assert torch.equal(out, numbers())
    with pytest.raises(Fault, match="out of bounds"):
        run("\tadd.s64 %rd2, %rd0, 256;\n\tprefetch.global.L1 [%rd2];", out)


@pytest.mark.slow
def test_the_emulator_sees_barriers_that_the_kernels_lack():
    """Nearly all: a few are there twice over, and one less of them does no harm."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(HERE / "ptx_barriers.py"), "90"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout)
    assert len(made["barriers"]) >= 9
    for kernel, count in made["barriers"].items():
        assert made["seen"][kernel] >= min(count, max(1, count // 2)), kernel
    assert sum(made["seen"].values()) >= 0.9 * sum(made["barriers"].values()), made
