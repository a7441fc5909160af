"""Calibration on several ranks: real processes of torchrun on 127.0.0.1, and what each of them does."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import tiny
import torch

from bpc_calib import describe, make_plan
from bpc_calib.calibration.ranks import layers_of, samples_of
from bpc_calib.calibration.watching import patience
from bpc_cli.calibration_ranks import on_own_device
from bpc_cli.opening import LoadOptions

FAULTY = Path(__file__).with_name("rank_with_fault.py")
SAMPLES = 10  # three groups, the last one of two samples: one rank of two has more than the other
BOUND = 60.0  # seconds from a fault to the end: a promise, not a speed


@pytest.fixture
def words(model_folder, text_folder):
    return ["calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", SAMPLES, "--bits", 32, "--json"]


@pytest.fixture
def whole(bpc, words, tmp_path):
    """The file that one process writes, as bytes; `whole("--codes", "product")` has other options."""

    def whole(*more):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as torchrun does
        try:
            ran = bpc(*words, *more, "-o", tmp_path / "whole.safetensors", "--force")
        finally:
            torch.set_num_threads(threads)
        assert ran.code == 0, ran.err
        return (tmp_path / "whole.safetensors").read_bytes()

    return whole


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(words, tmp_path, fitting_kernels):
    """Start `bpc calibrate` under torchrun in a folder; a fault is RANK:STAGE:STEP:KIND."""
    started = []

    def start(ranks, *more, fault=None, cwd=tmp_path, launch=()):
        launch = launch or ("--master-addr", "127.0.0.1", "--master-port", free_port())
        program = ["-m", "bpc_cli"] if fault is None else [FAULTY]
        command = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, *launch, *program, *words, *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "BPC_FAULT": fault or ""}
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def end(process):
    """Wait for a run; return its status, its output, and the errors that are ours."""
    out, err = process.communicate(timeout=240)
    print(err)
    assert "Exception ignored" not in err
    return process.returncode, out, re.findall(r"^Error: .*$", err, re.MULTILINE)


def test_two_ranks_write_the_file_of_one_process(start, whole, tmp_path):
    code, out, errors = end(start(2, "-o", "a.safetensors"))
    assert (code, errors) == (0, [])
    assert json.loads(out)["reused"] == {"samples": 0, "layers": 0}  # one document, of rank 0
    assert (tmp_path / "a.safetensors").read_bytes() == whole()
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "whole.safetensors"}


@pytest.mark.slow  # other numbers of ranks, and another fit
@pytest.mark.parametrize(("ranks", "options"), [(4, ()), (2, ("--codes", "product"))])
def test_any_ranks_write_the_same_file(start, whole, tmp_path, ranks, options):
    assert end(start(ranks, *options, "-o", "a.safetensors"))[0] == 0
    assert (tmp_path / "a.safetensors").read_bytes() == whole(*options)


@pytest.mark.slow  # minutes: torchrun waits half a minute for a stopped process
@pytest.mark.parametrize(
    ("fault", "error", "then"),
    [
        ("1:keys:2:kill", r"torchrun has ended the run \(SIGTERM\)", 2),
        ("0:keys:1:kill", r"torchrun has ended the run \(SIGTERM\)", 1),
        ("1:layers:0:kill", r"torchrun has ended the run \(SIGTERM\)", 1),
        ("1:keys:2:stop", "rank 1 has not answered for 15 s, so it is dead or stopped", 1),
        ("0:layers:1:stop", "rank 0 has not answered for 15 s, so it is dead or stopped", 2),
        ("1:keys:1:hang", "rank 1 has made no progress for 0 min", 3),
    ],
)
def test_a_rank_that_is_gone_ends_the_run_and_others_go_on(start, whole, tmp_path, fault, error, then):
    code, out, errors = end(start(2, "-o", "a.safetensors", fault=fault))
    seconds = time.time() - float((tmp_path / "fault").read_text())
    print(f"{fault}: {seconds:.1f} s to the end")
    assert seconds < BOUND
    assert code != 0
    assert out == ""
    (line,) = errors
    assert re.search(error, line)
    assert "the finished work is in a.safetensors.work, and the same command goes on, with any number of ranks" in line
    finished = len(list((tmp_path / "a.safetensors.work" / "samples").glob("*.safetensors")))
    assert finished == (SAMPLES if "layers" in fault else finished) > 0
    code, out, errors = end(start(then, "-o", "a.safetensors"))
    assert (code, errors) == (0, [])
    assert finished - 1 <= json.loads(out)["reused"]["samples"] <= finished
    assert (tmp_path / "a.safetensors").read_bytes() == whole()
    assert not (tmp_path / "a.safetensors.work").exists()


@pytest.mark.slow  # processes
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_said_once(start, tmp_path, rank):
    code, out, errors = end(start(2, "-o", "a.safetensors", fault=f"{rank}:keys:1:error"))
    assert (code, out) == (1, "")
    assert errors == ["Error: the moon is full: wait until it wanes"]
    assert (tmp_path / "a.safetensors.work" / "journal.json").exists()


@pytest.mark.slow  # processes
def test_an_interrupt_is_said_once(start, tmp_path):
    process = start(2, "-o", "a.safetensors", fault="1:keys:1:hang")
    while not (tmp_path / "fault").exists():
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # torchrun passes it on
    code, out, (line,) = end(process)
    assert code != 0
    assert out == ""
    assert line.startswith("Error: interrupted: the finished work is in a.safetensors.work")


@pytest.mark.slow  # processes
def test_an_error_of_all_ranks_is_said_once(start):
    code, out, errors = end(start(3, "-o", "a.safetensors", "--bits", 33))
    assert (code, out) == (1, "")
    assert errors == ["Error: bits must be 32, 64 or 128, not 33"]


def machines(port):
    """The options of torchrun on each of two machines; docs/scaling.md has them."""
    shared = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port)
    return [(*shared, "--node-rank", 0), (*shared, "--node-rank", 1)]


@pytest.mark.slow  # processes
def test_two_machines(start, whole, tmp_path):
    (tmp_path / "second").mkdir()
    both = [
        start(ranks, "-o", "a.safetensors", "--work-dir", tmp_path / "work", cwd=cwd, launch=launch)
        for ranks, cwd, launch in zip((2, 1), (tmp_path, tmp_path / "second"), machines(free_port()), strict=True)
    ]
    first, second = map(end, both)
    assert (first[0], first[2]) == (0, [])
    assert second == (0, "", [])
    assert (tmp_path / "a.safetensors").read_bytes() == whole()
    assert not (tmp_path / "work").exists()
    assert list((tmp_path / "second").iterdir()) == []


@pytest.mark.slow  # processes
def test_two_machines_that_do_not_share_the_folder(start, tmp_path):
    (tmp_path / "second").mkdir()
    launches = zip((tmp_path, tmp_path / "second"), machines(free_port()), strict=True)
    both = [start(1, "-o", "a.safetensors", cwd=cwd, launch=launch) for cwd, launch in launches]
    first, second = map(end, both)
    assert first[:2] == (1, "")
    assert second[:2] == (1, "")
    (line,) = first[2] + second[2]
    assert f"rank 1 does not see the work folder of rank 0, {tmp_path}/a.safetensors.work" in line
    assert "give a --work-dir that all machines share" in line


@pytest.mark.slow  # processes
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_machine_ends_the_other(start, tmp_path, rank):
    launches = machines(free_port())
    both = [start(1, "-o", "a.safetensors", fault=f"{rank}:keys:1:kill", launch=launch) for launch in launches]
    ended = [end(process) for process in both]
    assert all(code != 0 for code, _, _ in ended)
    (line,) = ended[0][2] + ended[1][2]
    assert "the finished work is in a.safetensors.work, and the same command goes on" in line
    assert time.time() - float((tmp_path / "fault").read_text()) < BOUND


@pytest.mark.parametrize("samples", [1, 2, 5, 16, 180, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_sample_and_layer_has_one_rank_and_groups_stay_whole(samples, ranks):
    plan = make_plan(describe(tiny.config()), samples=samples, bits=32)
    assert [sample for group in plan.groups for sample in group] == list(range(samples))
    assert len(plan.groups) <= 64
    for finished in (set(), set(range(0, samples, 3)), set(range(samples // 2))):
        dealt = [samples_of(plan, finished, rank, ranks) for rank in range(ranks)]
        assert sorted(chain(*dealt)) == sorted(set(range(samples)) - finished)
        groups = [{sample // plan.group_size for sample in own} for own in dealt]
        assert sum(map(len, groups)) == len(set().union(*groups))
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
    layers = [layers_of(plan, {1}, rank, ranks) for rank in range(ranks)]
    assert sorted(chain(*layers)) == [0, 2]


def test_more_ranks_need_more_disk():
    plan = make_plan(describe(tiny.config()), samples=10, bits=32)
    model = plan.model
    moments = len(model.full_layers) * model.kv_heads * model.head_dim**2 * 8
    assert plan.work_bytes(2, ranks=4) - plan.work_bytes(2) == 3 * moments


def test_a_step_may_take_long_before_it_counts_as_stuck():
    assert patience(None) == 3600
    assert patience(5) == 600
    assert patience(500) == 5000


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    from bpc_calib import InputError
    from bpc_calib.calibration.ranks import Ranks

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert on_own_device(LoadOptions(), Ranks(3, 4)).device == "cuda:3"
    assert on_own_device(LoadOptions(), Ranks()).device == "auto"
    assert on_own_device(LoadOptions(device="cpu"), Ranks(3, 4)).device == "cpu"
    with pytest.raises(InputError, match="over all GPUs of a machine: start one rank per machine"):
        on_own_device(LoadOptions(device_map="auto"), Ranks(3, 4))
