"""`make gpu` keeps what was measured, whatever breaks: errors, crashes, hangs, a spoiled CUDA context, signals."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
POISON = "CUDA error: an illegal memory access was encountered"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """The scripts import each other by plain name."""
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def part():
    """Run a part whose process is this program, after a row, with what its libraries print."""
    from gpu_suite import part

    good = """print('a warning'); print('{"what": "good", "median": 1}', flush=True)\n"""

    def run(program, seconds=20.0):
        return part([sys.executable, "-c", "import os, subprocess, sys, time\n" + good + program], seconds)

    return run


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import not_there", "exit 1: .*ModuleNotFoundError: No module named 'not_there'"),
        ("print('far', file=sys.stderr, flush=True); os._exit(9)", "exit 9: far"),
        ("print('in test_x', file=sys.stderr, flush=True); time.sleep(60)", "ran out of its 4 s: in test_x"),
    ],
)
def test_a_part_that_breaks_keeps_its_rows_and_says_why(part, program, said):
    made = part("""print('{"what": "half a r', end="", flush=True)\n""" + program, 4.0)
    assert made["rows"] == [{"what": "good", "median": 1}]
    assert made["status"] == "failed"
    assert re.match(said, made["fault"])


@pytest.mark.parametrize(
    ("row", "status"), [({"exact": True}, "measured"), ({"exact": False}, "failed"), ({"failed": 2}, "failed")]
)
def test_a_row_can_fail_its_part(part, row, status):
    made = part(f"print({json.dumps(row)!r})")
    assert (made["status"], "fault" in made) == (status, False)


def test_what_a_part_started_ends_with_it(part, tmp_path):
    program = f"p = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'id')!r}, 'w').write(str(p.pid))"
    part(program + "\ntime.sleep(60)", 3.0)
    child = int((tmp_path / "id").read_text())
    for _ in range(50):
        if not running(child):
            break
        time.sleep(0.1)
    assert not running(child)


def running(number: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False


@pytest.fixture
def counted(tmp_path):
    """The row of these tests."""
    from gpu_suite import counted

    def run(text):
        file, xml = tmp_path / "test_drawn.py", tmp_path / "tests.xml"
        file.write_text("import pytest\n" + textwrap.dedent(text))
        words = ["-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, f"--junitxml={xml}", file]
        subprocess.run(
            [sys.executable, "-m", "pytest", *map(str, words)], cwd=tmp_path, capture_output=True, check=False
        )
        return counted(xml)

    return run


def test_tests_are_counted_and_failures_named(counted):
    row = counted(f"""
        @pytest.fixture
        def broken(): raise OSError("no disk")
        def test_good(): pass
        def test_first(): raise RuntimeError({POISON!r})
        def test_later(broken): pass
        def test_other(): pytest.skip("no GPU")
        """)
    assert [row[kind] for kind in ("passed", "failed", "skipped")] == [1, 2, 1]
    assert row["note"].startswith("test_drawn::test_first, test_drawn::test_later; first: ")
    assert POISON in row["note"]
    assert row["note"].endswith("failures after it say nothing")
    assert "note" not in counted("def test_good(): pass")


def test_a_file_of_tests_that_cannot_be_imported_has_failed(counted):
    row = counted("import not_there")
    assert (row["passed"], row["failed"]) == (0, 1)


def test_too_little_memory_is_no_failure():
    from gpu_times import attempted

    def short():
        yield {"what": "first"}
        raise torch.OutOfMemoryError("2 GB")

    first, row = attempted("large", short)
    assert first == {"what": "first"}
    assert row == {"what": "large", "median": None, "note": "not measured: OutOfMemoryError: 2 GB"}
    (row,) = attempted("wrong", lambda: [{}[0]])
    assert row["failed"] == 1


def test_earlier_parts_are_kept_from_the_same_code_and_gpu(tmp_path):
    from gpu_suite import earlier

    def result(gpu="H200", commit="abc", sources="1"):
        machine = {"commit": commit, "gpu": gpu, "versions": {"torch": "2.13.0"}}
        parts = {"tests": {"status": "measured"}, "a part of an older suite": {"status": "measured"}}
        return {"machine": machine, "sources": sources, "tiny": False, "parts": parts}

    def kept(old, now):
        path = tmp_path / "suite.json"
        path.write_text(old if isinstance(old, str) else json.dumps(old))
        return earlier(path, now)

    assert kept(result(), result(commit="abc-dirty")) == {"tests": {"status": "measured"}}
    for other in (result(gpu="A100"), result(commit="abd"), result(sources="2")):
        assert kept(result(), other) == {}
    for broken in ("", "[]", '{"machine": 1}'):
        assert kept(broken, result()) == {}
    assert earlier(tmp_path / "none.json", result()) == earlier(None, result()) == {}


def test_a_signal_ends_the_running_part_and_leaves_the_finished_ones(tmp_path):
    words = [sys.executable, str(BENCHMARKS / "gpu_suite.py"), "--tiny", "--parts", "tests", "calibrate"]
    environment = os.environ | {"BPC_TEST_MARK": str(tmp_path)}  # inherited by every process of the suite
    with subprocess.Popen(
        [*words, "-o", str(tmp_path / "suite.json")], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env=environment,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert next(line for line in process.stderr if line.startswith("Calibration: up to"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    parts = json.loads((tmp_path / "suite.json").read_text())["parts"]
    assert parts["tests"]["seconds"] > 0
    assert (parts["calibrate"]["status"], parts["calibrate"]["fault"]) == ("failed", "a signal ended it")
    assert parts["decode"] == {"status": "not measured"}
    marked = [path for path in Path("/proc").glob("[0-9]*/environ") if str(tmp_path).encode() in _read(path)]
    assert not marked


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
