"""Progress: plain lines without a terminal, few and with what is left; bars on a terminal; nothing with --quiet."""

import os
import pty
import subprocess
import sys

import pytest

from bpc_cli.console import duration_text
from bpc_cli.progress import StageTimes, progress_lines


@pytest.fixture
def told():
    """Lines of a run whose clock is set by hand: `step(seconds, name, done, total)` returns what was printed."""
    now, lines = [0.0], []
    hear = progress_lines(lines.append, lambda: now[0])

    def step(seconds, name, done, total=None, what=""):
        now[0] = seconds
        hear(name, done, total, what)
        said = lines.copy()
        lines.clear()
        return said

    return step


def test_a_short_stage_prints_its_end_alone(told):
    assert told(1, "Reading text", 1, 3) == told(2, "Reading text", 2, 3) == []
    assert told(3, "Reading text", 3, 3) == ["Reading text: done, 3 in 3.0 s"]


def test_a_long_stage_prints_a_line_a_minute_with_what_is_left(told):
    told(30, "Reading text", 1, 1)
    said = [line for done in range(1, 181) for line in told(30 + 5.5 * done, "Keys", done, 180)]
    assert said[0] == "Keys: 11 of 180 (1 min 0 s, about 15 min 30 s left)"  # 5.5 s per step
    assert said[-1] == "Keys: done, 180 in 16 min 30 s"
    assert len(said) == 17  # 16.5 minutes


def test_a_stage_that_says_when_it_begins_has_a_line_then(told):
    assert told(5, "Decomposing", 0, 1200) == ["Decomposing: 0 of 1,200"]
    assert told(64, "Decomposing", 0, 1200) == []
    assert told(65, "Decomposing", 0, 1200) == ["Decomposing: 0 of 1,200 (1 min 0 s)"]
    assert told(125, "Decomposing", 1000, 1200) == ["Decomposing: 1,000 of 1,200 (2 min 0 s, about 24 s left)"]


def test_work_of_an_earlier_run_does_not_count_as_speed(told):
    told(10, "Keys", 101, 180)
    assert told(70, "Keys", 107, 180) == ["Keys: 107 of 180 (1 min 0 s, about 12 min 10 s left)"]  # 10 s per step
    assert told(800, "Keys", 180, 180) == ["Keys: done, 79 of 180 in 13 min 10 s"]
    assert told(810, "Decomposing", 4, 4) == []  # nothing was left to do


def test_a_share_is_a_percentage_with_the_current_work(told):
    assert told(2, "Evaluating", 0.0, None, "needle") == ["Evaluating: 0 %, needle"]
    assert told(32, "Evaluating", 0.1, None, "needle") == []
    assert told(62, "Evaluating", 0.25, None, "text") == ["Evaluating: 25 % (1 min 0 s, about 3 min 0 s left), text"]
    assert told(63, "Evaluating", 1.0, None, "done") == ["Evaluating: done in 1 min 1 s"]
    assert told(63, "Evaluating", 1.0, None, "done") == []
    assert told(64, "Evaluating", 0.0, None, "again") == ["Evaluating: 0 %, again"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.9, "9.9 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (119.7, "2 min 0 s"), (5400, "1.5 h")],
)
def test_durations_are_rounded_once(seconds, text):
    assert duration_text(seconds) == text


def test_the_times_of_stages_count_the_steps_of_this_run():
    now = iter((2.0, 3.0, 5.0, 9.0, 10.0))
    times = StageTimes(0.0, lambda: next(now))
    times.add("load")
    for done in (100, 102, 104):
        times.add("keys", done)
    times.add("decompose", 0)
    assert times.seconds == {"load": 2, "keys": 7, "decompose": 1}
    assert times.steps == {"load": 0, "keys": 4, "decompose": 0}


def test_calibrate_tells_its_stages_on_stderr(bpc, model_folder, text_folder, tmp_path):
    words = ["calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", 4, "--bits", 32]
    ran = bpc(*words, "-o", tmp_path / "a.safetensors")
    assert [line.rsplit(" in ")[0] for line in ran.err.splitlines()] == [
        "Reading text: 0 of 4",
        "Reading text: done, 4",
        "Loading tiny-llama on cpu ...",
        "Loading tiny-llama on cpu: done",
        "Collecting keys: 0 of 4",
        "Collecting keys: done, 4",
        "Decomposing layers: 0 of 3",
        "Decomposing layers: done, 3",
    ]
    assert "tokens/s" in ran.out
    assert bpc(*words, "-o", tmp_path / "b.safetensors", "--quiet").err == ""


@pytest.mark.slow  # a process of its own; the bars are those of rich
def test_a_terminal_shows_bars(model_folder, text_folder, tmp_path):
    controller, terminal = pty.openpty()
    words = ["calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", 4, "--bits", 32]
    with subprocess.Popen(
        [sys.executable, "-c", "from bpc_cli.main import main; main()", *map(str, words)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    ) as process:
        os.close(terminal)
        seen = b""
        while True:
            try:
                read = os.read(controller, 1 << 16)
            except OSError:  # Linux: the process has closed the terminal
                break
            if not read:
                break
            seen += read
        assert process.wait() == 0
    os.close(controller)
    shown = seen.decode()
    assert "Collecting keys" in shown
    assert "100%" in shown
    assert "\x1b[" in shown
    assert ": done" not in shown
