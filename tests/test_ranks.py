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

from bpc_artifacts import load
from bpc_calib import BPCError, InputError, WorkError, describe, make_plan
from bpc_calib.calibration.positions import early_keys
from bpc_calib.calibration.projecting import fit_layers
from bpc_calib.calibration.ranks import Ranks, layers_of, samples_of
from bpc_calib.calibration.stored import read_keys, total_moments
from bpc_calib.models.loading import load_config
from bpc_cli.opening import LoadOptions, open_model
from bpc_cli.ranks import own_device

FAULTY = Path(__file__).with_name("rank_with_fault.py")
SAMPLES = 10  # three groups, the last one of two samples: one rank of two has more than the other
BOUND = 60.0  # seconds from a fault to the end: a promise, not a speed


@pytest.fixture
def words(model_folder, text_folder):
    return ["calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", SAMPLES, "--bits", 32, "--json"]


@pytest.fixture
def whole(bpc, words, tmp_path):
    """The file that one process writes, as bytes; `whole("--seed", 1)` has other options."""

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
def start(words, tmp_path):
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


@pytest.mark.slow  # processes
def test_two_ranks_measure_needs(start, whole, tmp_path):
    words = ["-m", tiny.save(tmp_path / "long" / "tiny-llama", max_position_embeddings=2048)]
    words += ["--samples", 4, "--sequence-length", 1024]
    code, _, errors = end(start(2, *words, "-o", "a.safetensors"))
    assert (code, errors) == (0, [])
    assert load(tmp_path / "a.safetensors").has_needs
    assert (tmp_path / "a.safetensors").read_bytes() == whole(*words)


@pytest.mark.slow  # another number of ranks
@pytest.mark.rare
def test_four_ranks_write_the_same_file(start, whole, tmp_path):
    assert end(start(4, "-o", "a.safetensors"))[0] == 0
    assert (tmp_path / "a.safetensors").read_bytes() == whole()


@pytest.mark.slow  # minutes: torchrun waits half a minute for a stopped process
@pytest.mark.parametrize(
    ("fault", "error", "then"),
    [
        ("0:keys:1:kill", r"torchrun has ended the run \(SIGTERM\)", 2),
        pytest.param("1:layers:0:kill", r"torchrun has ended the run \(SIGTERM\)", 1, marks=pytest.mark.rare),
        pytest.param("1:keys:2:stop", r"waited \d+ s for rank 1 \(dead, stopped or stuck\)", 1, marks=pytest.mark.rare),
        pytest.param(
            "0:layers:1:stop", r"waited \d+ s for rank 0 \(dead, stopped or stuck\)", 2, marks=pytest.mark.rare
        ),
        pytest.param("1:keys:1:hang", r"waited \d+ s for rank 1 \(dead, stopped or stuck\)", 3, marks=pytest.mark.rare),
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
    assert errors == ["Error: bits must be 32, 64 or 128, not 33 (bpc calibrate --help lists the options)"]


ARRAYS = ("projection", "residual", "metric", "mean")


@pytest.mark.slow  # processes; tests/test_tensor_parallel.py compares keys and moments in every push
@pytest.mark.parametrize(
    ("ranks", "family"),
    [(2, "llama"), *(pytest.param(*each, marks=pytest.mark.rare) for each in ((4, "llama"), (2, "phi3")))],
)
def test_ranks_that_shard_the_model_write_the_projections_of_one_process(bpc, start, words, tmp_path, ranks, family):
    """Four ranks have each of the two KV heads twice.

    Shards of a model round otherwise, by some 1e-6 of numbers of about 1. That turns a few signs of the fit, which has
    some 1,000 keys here, so some numbers of a projection differ by 1e-2.
    """
    words[2] = model = tiny.save(tmp_path / family, family)
    assert bpc(*words, "-o", tmp_path / "whole.safetensors", "--keep-work").code == 0
    code, _, errors = end(start(ranks, "--tensor-parallel", "-o", "a.safetensors", "--keep-work"))
    assert (code, errors) == (0, [])
    alone, shared = load(tmp_path / "whole.safetensors"), load(tmp_path / "a.safetensors")
    assert all(shared.metadata[name] == alone.metadata[name] for name in ("model", "algorithm", "calibration"))
    for layer, expected in alone.layers.items():
        apart = {name: abs(getattr(shared.layers[layer], name) - getattr(expected, name)) for name in ARRAYS}
        print(f"layer {layer}: { ({name: float(each.max()) for name, each in apart.items()}) }")
        assert max(apart["metric"].max(), apart["mean"].max()) < 1e-5
        assert apart["residual"].max() < 1e-2
        other_heads = abs(expected.projection[::-1] - expected.projection)
        assert apart["projection"].mean() < other_heads.mean() / 10
    journals = [
        json.loads((tmp_path / f"{name}.safetensors.work" / "journal.json").read_text()) for name in ("whole", "a")
    ]
    assert journals[0]["weights"] == journals[1]["weights"]
    # One process makes of the keys of the ranks what the ranks have made of them.
    plan, work = (
        make_plan(describe(load_config(str(model))[0]), samples=SAMPLES, bits=32),
        tmp_path / "a.safetensors.work",
    )
    for layer, fitted in shared.layers.items():
        keys = [read_keys(work, [layer], samples) for samples in (plan.fitted, plan.held_out)]
        moments = total_moments(work, plan, [layer])
        (again,) = fit_layers(*keys, moments, plan, torch.device("cpu"), centring=early_keys(plan))
        assert all((getattr(again.layer, name) == getattr(fitted, name)).all() for name in ARRAYS)


@pytest.mark.slow  # processes
@pytest.mark.rare
@pytest.mark.parametrize("fault", ["1:keys:2:kill", "0:keys:2:stop"])
def test_a_rank_with_a_shard_of_the_model_that_is_gone_ends_the_run(start, tmp_path, fault):
    assert end(start(2, "--tensor-parallel", "-o", "whole.safetensors"))[0] == 0
    code, out, errors = end(start(2, "--tensor-parallel", "-o", "a.safetensors", fault=fault))
    assert time.time() - float((tmp_path / "fault").read_text()) < BOUND
    assert code != 0
    assert out == ""
    (line,) = errors
    assert line.endswith("a.safetensors.work, and the same command goes on, with the same number of ranks")
    assert end(start(1, "-o", "a.safetensors"))[2][0].startswith(
        "Error: a.safetensors.work has the work of another calibration (model.ranks: 2 in the work folder, 1 now): "
    )
    code, out, errors = end(start(2, "--tensor-parallel", "-o", "a.safetensors"))
    assert (code, errors) == (0, [])
    assert json.loads(out)["reused"]["samples"] == 2
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_one_process_has_nobody_to_shard_a_model_with(bpc, words):
    ran = bpc(*words, "--tensor-parallel")
    assert ran.code == 2
    assert ran.err.startswith("Error: --tensor-parallel shards a model over several processes: start them with ")


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
@pytest.mark.rare
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
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.rare), 1])
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


def test_a_rank_that_does_not_come_is_named_and_the_end_has_one_report(monkeypatch):
    monkeypatch.setattr("bpc_calib.calibration.ranks.POLL", 0.01)
    monkeypatch.setattr("bpc_calib.calibration.ranks.LOADING", 0.05)
    store, steps = torch.distributed.HashStore(), []
    ranks = [Ranks(rank, 4, store) for rank in range(4)]

    def show():
        """Twenty steps of other ranks, and no more."""
        steps.append(1)
        return min(len(steps), 20)

    stuck = r"^waited 0 s for rank {} \(dead, stopped or stuck\): run the same command again$"
    with pytest.raises(WorkError, match=stuck.format("0, 1, 3")):
        ranks[2].barrier("keys", within=0.05)
    with pytest.raises(WorkError, match=stuck.format("1, 3")):
        ranks[0].barrier("keys", show, within=0.05)
    assert 24 <= len(steps) <= 28  # each step is worth another 0.05 s
    with pytest.raises(WorkError, match=stuck.format("0")):
        ranks[1].receive("work")
    ranks[0].broadcast("work", [1])
    assert ranks[1].receive("work") == [1]
    assert [rank.claim() for rank in ranks] == [True, False, False, False]
    for go_on in (lambda: ranks[3].add("keys", 1), lambda: ranks[3].receive("work")):
        with pytest.raises(WorkError, match="another rank has ended the run"):
            go_on()


def test_a_store_whose_process_has_ended_is_gone(monkeypatch):
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = Ranks(1, 2, torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False))
    assert ranks.add("keys", 2) == 2
    del server
    with pytest.raises(WorkError, match="torchrun's store is gone, so its machine or its process has ended: run"):
        ranks.barrier("keys")
    for local, claimed in (("0", True), ("1", False)):  # who else could say it on this machine
        monkeypatch.setenv("LOCAL_RANK", local)
        assert ranks.claim() is claimed


def test_a_step_may_take_long_before_it_counts_as_stuck():
    ranks = Ranks()
    assert ranks.patience("keys") == 3600
    with ranks.step("keys"):
        pass
    assert ranks.patience("keys") == 600
    ranks.slowest["keys"] = 500.0
    assert ranks.patience("keys") == 5000
    assert ranks.patience("layers") == 3600


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert own_device("auto", shared=False) == own_device("cuda", shared=True) == "cuda:3"
    assert own_device("cpu", shared=False) == "cpu"
    for name, shared in (("cuda:1", False), ("cuda:1", True), ("cpu", True)):  # transformers takes GPUs
        with pytest.raises(BPCError, match=f"--device {name}: under torchrun each process takes a GPU: leave it out"):
            own_device(name, shared=shared)
    with pytest.raises(InputError, match="over all GPUs of a machine: start one rank per machine"):
        open_model("demo", LoadOptions(device_map="auto"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BPCError, match="4 processes on this machine, which has 2 GPUs: --nproc-per-node 2"):
        own_device("auto", shared=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert own_device("auto", shared=True) == own_device("cpu", shared=True) == "cpu"
