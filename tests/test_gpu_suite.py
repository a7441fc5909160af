"""`make gpu` gives results whatever breaks: crashes, hangs, a spoiled CUDA context, too little memory, signals."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
POISON = "CUDA error: an illegal memory access was encountered"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """The scripts import each other by plain name."""
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def watched(tmp_path):
    """Watch a part whose steps are these, by name."""
    from gpu_part import watch

    script = tmp_path / "part.py"
    script.write_text(
        textwrap.dedent(f"""
        import argparse, os, sys, time
        from pathlib import Path
        sys.path.insert(0, {str(BENCHMARKS)!r})
        import gpu_part
        gpu_part.uses_cuda = lambda: True

        def missing(emit):
            raise ValueError("too little")

        STEPS = {{
            "good": lambda emit: emit({{"what": "good", "median": 1}}),
            "better": lambda emit: emit({{"what": "better", "median": 2}}),
            "raises": missing,
            "crashes": lambda emit: os._exit(9),
            "hangs": lambda emit: time.sleep(60),
            "spoils": lambda emit: (emit({{"what": "spoils", "exact": False, "note": {POISON!r}}}), os._exit(1)),
        }}
        parser = argparse.ArgumentParser()
        parser.add_argument("names", nargs="*")
        parser.add_argument("--rows", type=Path)
        parser.add_argument("--start", type=int)
        parser.add_argument("--seconds")
        arguments = parser.parse_args()
        gpu_part.run_steps([(name, STEPS[name]) for name in arguments.names], arguments.rows, arguments.start)
        """)
    )

    def watched(*names, seconds=20.0):
        return watch([sys.executable, str(script), *names], tmp_path / "rows.json", seconds, own_group=True)

    return watched


@pytest.mark.parametrize(("bad", "said"), [("raises", "ValueError: too little"), ("crashes", "exit 9")])
def test_what_breaks_in_a_step_costs_this_step(watched, bad, said):
    made = watched("good", bad, "better")
    assert [row["what"] for row in made.rows] == ["good", bad, "better"]
    assert made.rows[1]["failed"] == 1
    assert made.rows[1]["note"].startswith(said)
    assert (made.fault, made.stopped) == (None, False)


def test_a_spoiled_context_ends_the_process_but_not_the_part(watched):
    made = watched("spoils", "good", "spoils", "better")
    assert [row["what"] for row in made.rows] == ["spoils", "good", "spoils", "better"]
    assert made.fault is None


def test_a_step_that_hangs_leaves_time_for_the_others(watched):
    made = watched("hangs", "better", seconds=8.0)
    assert [row["what"] for row in made.rows] == ["hangs", "better"]
    assert made.rows[0]["note"].startswith("stopped after")


def test_a_part_that_runs_out_of_time_keeps_its_rows(watched):
    made = watched("good", "hangs", seconds=4.0)
    assert made.rows == [{"what": "good", "median": 1}]
    assert made.fault == "ran out of its 4 s in: hangs"
    assert made.stopped


def test_a_part_that_cannot_be_imported_says_so(tmp_path):
    from gpu_part import watch

    made = watch([sys.executable, "-c", "import not_there"], tmp_path / "rows.json", 20.0)
    assert made.rows == []
    assert made.fault == "exit 1: ModuleNotFoundError: No module named 'not_there'"


@pytest.fixture
def tested(tmp_path):
    """The row of a file with these tests."""
    from gpu_tests import command, run_tests

    def tested(text, seconds=60.0):
        file = tmp_path / "test_drawn.py"
        file.write_text("import os, time, pytest\npytestmark = pytest.mark.gpu\n" + textwrap.dedent(text))
        return run_tests("drawn", command("--rootdir", str(tmp_path), str(file)), seconds, tmp_path, lambda row: None)

    return tested


def test_a_poisoned_file_of_tests(tested):
    row = tested(f"""
        def test_good(): pass
        def test_first(): raise RuntimeError({POISON!r})
        def test_later(): raise RuntimeError({POISON!r})
        """)
    assert [row[kind] for kind in ("passed", "failed", "errors", "skipped")] == [1, 2, 0, 0]
    assert "a CUDA error spoiled the process" in row["note"]
    assert "test_drawn.py::test_first, " in row["note"]
    assert row["note"].endswith(f"RuntimeError: {POISON}")


def test_a_test_that_hangs_or_kills_the_process_is_named(tested):
    row = tested("def test_good(): pass\ndef test_hangs(): time.sleep(90)", seconds=12.0)
    assert (row["passed"], row["errors"]) == (1, 1)
    assert row["note"].endswith("test_drawn.py::test_hangs")
    row = tested("def test_good(): pass\ndef test_dies(): os._exit(7)")
    assert (row["passed"], row["errors"]) == (1, 1)
    assert row["note"].startswith("exit 7 in ")
    assert row["note"].endswith("test_drawn.py::test_dies")


def test_the_tests_that_matter_run_first():
    from gpu_tests import files

    found = files(tiny=False)
    assert found[:2] == ["tests/test_kernels.py::test_a_step_in_a_cuda_graph", "tests/test_gpu.py"]
    assert {"tests/test_kernels.py", "tests/test_backends.py"} < set(found)
    assert all((ROOT / each.split("::")[0]).is_file() for each in found)


def test_too_little_memory_is_foreseen():
    from gpu_part import lacking

    assert lacking(5, 5) is None
    assert lacking(10**11, 63 * 10**9) == "not measured: it needs 100.0 GB and 63.0 GB are free"


def test_the_longest_context_that_fits_is_decoded(monkeypatch):
    """Half a million tokens beside 17 GB of weights need a large GPU; a `DynamicCache` in a graph needs them twice."""
    import gpu_times

    from bpc_calib.bench import decode
    from bpc_calib.bench.random_models import shape_config

    class Model:
        config, dtype = shape_config("llama-3.1-8b"), torch.bfloat16

    def longest(bytes_free):
        monkeypatch.setattr(decode, "available_memory", lambda device: bytes_free)
        return next((each for each in gpu_times.DECODED[1] if gpu_times._fits(Model, each) is None), None)

    assert longest(139_000_000_000 - 17_000_000_000) == 524_288  # an H200
    assert gpu_times._fits(Model, 524_288, copies=2).startswith("not measured: decoding 2 x 524,288 tokens")
    assert longest(63_000_000_000) in (262_144, 393_216)  # what 80 GB leave beside the weights
    assert longest(1_000_000_000) is None


def test_parts_are_merged_from_the_same_code_and_gpu(tmp_path):
    from gpu_suite import merged

    def result(gpu="H200", commit="abc", sources="1", **statuses):
        machine = {"commit": commit, "gpu": gpu, "versions": {"torch": "2.13.0"}}
        parts = {name: {"status": statuses.get(name, "not measured")} for name in ("tests", "kernels")}
        return {"machine": machine, "sources": sources, "tiny": False, "parts": parts}

    def statuses(earlier, now):
        path = tmp_path / "suite.json"
        path.write_text(earlier if isinstance(earlier, str) else json.dumps(earlier))
        return [part["status"] for part in merged(path, now, ["kernels"])["parts"].values()]

    earlier, now = result(tests="measured", kernels="failed"), result(commit="abc-dirty")
    assert statuses(earlier, now) == ["measured", "not measured"]
    for other in (result(gpu="A100"), result(commit="abd"), result(sources="2")):
        assert statuses(earlier, other) == ["not measured", "not measured"]
    for broken in ("", "[]", '{"machine": 1}'):
        assert statuses(broken, now) == ["not measured", "not measured"]
    assert merged(tmp_path / "none.json", now, []) is now
    assert merged(None, now, []) is now


def test_a_signal_leaves_results_and_no_process(tmp_path):
    words = [sys.executable, str(BENCHMARKS / "gpu_suite.py"), "--tiny", "--parts", "calibrate"]
    words += ["-o", str(tmp_path / "suite.json"), "--logs", str(tmp_path / "logs")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Calibration: up to")
        while not (tmp_path / "logs" / "calibrate-0.log").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    part = json.loads((tmp_path / "suite.json").read_text())["parts"]["calibrate"]
    assert (part["status"], part["fault"]) == ("not measured", "a signal ended it")
    if Path("/proc/self/cmdline").exists():
        commands = [_command(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert not [each for each in commands if str(tmp_path).encode() in each]


def _command(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""
