"""`evaluate` and `bpc eval`: rows, errors, files. tests/test_demo.py tests retrieval, on a model trained for it."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from bpc_artifacts import ProjectionArtifact, save
from bpc_calib import BPCCache, InputError, enable
from bpc_calib.evaluation.comparison import HARD, Comparison, check, make_cache
from bpc_calib.evaluation.evaluate import evaluate
from bpc_calib.evaluation.methods import METHODS
from bpc_calib.evaluation.tasks import RULER
from bpc_calib.extras import install
from bpc_calib.text.corpora import open_corpus

LENGTHS = {"max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny-llama", **LENGTHS)


@pytest.fixture(scope="module")
def artifact(folder, tmp_path_factory):
    made = tiny.calibrated(tiny.model(**LENGTHS), tiny.tokenizer(), corpora=["demo"], samples=4, sequence_length=256)
    path = tmp_path_factory.mktemp("artifact") / "tiny.safetensors"
    save(made, path)
    return path, made


@pytest.fixture(scope="module")
def needs(artifact, tmp_path_factory):
    """The artifact with needs of its KV heads."""
    generator = torch.Generator().manual_seed(1)
    layers = {i: replace(layer, need=tiny.need(2, generator)) for i, layer in artifact[1].layers.items()}
    made = ProjectionArtifact(layers, artifact[1].metadata | {"format_version": 3})
    path = tmp_path_factory.mktemp("needs") / "needs.safetensors"
    save(made, path)
    return path, made


@pytest.fixture(scope="module")
def rows(artifact):
    model = tiny.model(**LENGTHS)
    enable(model)
    seen = []
    comparison = Comparison(
        tasks=["text", "needle"],
        lengths=[700],
        budgets=[0.1, 8],
        prompts=2,
        corpora=[open_corpus("demo-prose"), open_corpus("demo-code")],
        batch=1,
        forced=16,
        rules=HARD,
    )

    def progress(share, what):
        seen.append((share, what))

    found = evaluate(model, tiny.tokenizer(), artifact[1], comparison, progress=progress)
    return found, seen


def test_a_row_for_every_task_method_and_budget(rows):
    found, seen = rows
    keys = [(row["task"], row["method"], row["budget"]) for row in found]
    expected = [
        (task, name, budget)
        for task in ("text", "needle")
        for name, method in METHODS.items()
        if not method.learns
        for budget in ([0.1, 8] if method.takes_budget else [None])
    ]
    assert sorted(keys, key=str) == sorted(expected, key=str)
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert seen[0] == (0.0, "text, 700 tokens")


def test_the_metrics_of_text(rows):
    text = {(row["method"], row["budget"]): row for row in rows[0] if row["task"] == "text"}
    assert text["full", None]["loss_difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert text["full", None]["read"] == 1.0
    for (name, _), row in text.items():
        assert row["perplexity"]["low"] <= row["perplexity"]["value"] <= row["perplexity"]["high"]
        assert ("mass" in row) == (name not in ("full", "magicpig-own", "twilight-own"))
        if name != "twilight-own":  # which loses as little as 95 % of the weight keep
            assert (row["kl"]["value"] > 1e-3) == (name != "full")
        if "mass" in row:
            assert [len(layer) for layer in row["recall_by_head"]] == [2, 2, 2]
            assert row["layers"] == [0, 1, 2]
    assert text["oracle", 8]["mass"]["value"] > text["random", 8]["mass"]["value"] + 0.02
    assert abs(text["full", None]["kl"]["value"]) < 1e-5
    assert text["oracle", 0.1]["recall"]["value"] > 0.98
    # 70 of 700 tokens: a random choice keeps a tenth, apart from the newest token.
    assert text["random", 0.1]["recall"]["value"] == pytest.approx(0.1, abs=0.02)
    assert text["random", 0.1]["read"] == pytest.approx(0.1, abs=0.001)
    assert text["oracle", 0.1]["read"] == pytest.approx(0.6, abs=0.001)


def test_each_corpus_has_its_own_figures(rows):
    for row in rows[0]:
        if row["task"] == "text":
            assert {name: own["prompts"] for name, own in row["by_corpus"].items()} == {"demo-prose": 1, "demo-code": 1}
            for figure in set(row["by_corpus"]["demo-code"]) - {"prompts", "perplexity"}:
                own = [each[figure]["value"] for each in row["by_corpus"].values()]
                assert row[figure]["value"] == pytest.approx(sum(own) / 2, abs=1e-6)


def test_the_forced_tokens_are_the_same_at_every_length(artifact):
    model = tiny.model(**LENGTHS)
    enable(model)
    fed = []
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda module, args, output: fed.append(args[0]))
    comparison = replace(PLAIN, tasks=["text"], lengths=[200, 400], prompts=2, methods=["full"], forced=100)
    comparison = replace(comparison, corpora=[open_corpus("demo-prose")])
    short, long = evaluate(model, tiny.tokenizer(), artifact[1], comparison)
    assert [ids.shape[1] for ids in fed] == [100, *[1] * 99, 300, *[1] * 99]
    assert torch.equal(torch.cat(fed[1:100], dim=1), torch.cat(fed[101:], dim=1))
    assert torch.equal(fed[0][:, -99:], fed[100][:, -99:])
    assert short["perplexity"] != long["perplexity"]


def test_needles_are_counted_by_depth(rows):
    for row in rows[0]:
        if row["task"] == "needle":
            assert len(row["depths"]) == 2
            assert sum(depth["value"] for depth in row["depths"]) == pytest.approx(2 * row["score"]["value"])
            assert row["example"]["fact"].startswith(" The ")


PLAIN = Comparison(tasks=["needle"], lengths=[1024], budgets=[0.1], prompts=5, rules=HARD)


def refused(rules=None, **changes):
    comparison = replace(PLAIN, rules=HARD | (rules or {}), **changes)
    with pytest.raises(InputError) as fault:
        check(tiny.config(**LENGTHS), None, comparison)
    return str(fault.value)


def test_bad_settings_are_refused_before_any_work():
    assert refused(tasks=["needle", "no-task"]).startswith("unknown task 'no-task': the tasks are text, needle, ")
    assert refused(methods=["h2o"]).startswith("unknown method 'h2o': the methods are full, oracle, ")
    assert refused(methods=["bpc"]) == "method 'bpc' needs an artifact of this model; method 'bpc-online' needs none"
    assert refused(lengths=[4096, 8192]) == "prompts of 4,096 tokens are too long: the model's limit is 2,048"
    assert refused(tasks=["text"]) == "task 'text' needs a corpus"
    text = {"tasks": ["text"], "corpora": [open_corpus("demo-prose")]}
    assert refused(**text, forced=1) == "at least 2 tokens of a text must be forced, not 1"
    assert refused(**text, forced=600) == (
        "task 'text' needs at least 1200 tokens, twice those that are forced, not 1024"
    )
    assert refused(prompts=0) == "prompts must be 1 to 1,048,576, not 0"
    assert refused(budgets=[]) == "give at least one budget"
    assert refused(budgets=[0.004], methods=["window"]) == (
        "a budget of 0.4 % is 4 of 1,024 tokens, and window + sinks always attends to 5: nothing is left to choose"
    )
    assert "BPC online always attends to 1" in refused(rules={"recent": 1}, budgets=[1], methods=["bpc-online"])
    assert refused(rules={"dense_layers": (9,)}).startswith("dense_layers")
    for methods in (None, ["full"], ["bpc-online"], ["quest"]):
        assert refused(rules={"min_context": 9}, methods=methods).startswith(
            "min_context makes short contexts full attention"
        )
    assert check(tiny.config(**LENGTHS), None, PLAIN)[0] == tuple(
        name for name in METHODS if name not in ("bpc", "twilight", "twilight-own", "spotlight", "hata", "compresskv")
    )


def test_what_cannot_be_computed_is_left_out(artifact, caplog):
    model, methods = tiny.model(**LENGTHS), ["oracle", "window"]
    enable(model)
    comparison = Comparison(
        ["text", "single", "copying"], [128, 700, 4096], [5, 8], methods, 1, [open_corpus("demo-prose")]
    )
    found = evaluate(model, tiny.tokenizer(), artifact[1], replace(comparison, rules=HARD))
    cells = [(row["task"], row["tokens"], row["method"], row["budget"]) for row in found]
    lines = [("oracle", 5), ("oracle", 8), ("window", 8)]
    places = [("text", 128), ("text", 700), ("single", 700), ("copying", 700)]
    assert cells == [(*place, *line) for place in places for line in lines]
    nothing = "and window + sinks always attends to 5: nothing is left to choose"
    assert [record.getMessage() for record in caplog.records] == [
        f"skipped: a budget of 5 tokens is 5 of 128 tokens, {nothing}",
        f"skipped: a budget of 5 tokens is 5 of 700 tokens, {nothing}",
        "skipped: prompts of 4,096 tokens are too long: the model's limit is 2,048",
        "skipped: task 'single' at 128 tokens: the question and its statements need 39 more",
        "skipped: task 'copying' at 128 tokens: the question and its statements need 450 more",
    ]


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("task", ["text", "needle"])
def test_an_evaluation_goes_on_where_it_was_stopped(artifact, task):
    model = tiny.model(**LENGTHS)
    enable(model)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(None))
    methods = ["full", "bpc", "random", "signs"]
    comparison = Comparison(
        [task], [300 if task == "text" else 700], [8], methods, 3, [open_corpus("demo-prose")], batch=2, rules=HARD
    )
    rows = evaluate(model, tiny.tokenizer(), artifact[1], comparison)
    whole, finished, spent = len(passes), {}, 0

    for allowed in (0.2, 0.5, 0.3):
        passes.clear()

        def stop(share, what, allowed=allowed):
            if share > allowed:
                raise StoppedError

        with pytest.raises(StoppedError):
            evaluate(model, tiny.tokenizer(), artifact[1], comparison, finished=finished, progress=stop)
        finished = json.loads(json.dumps(finished))
        spent += len(passes)
    passes.clear()
    assert evaluate(model, tiny.tokenizer(), artifact[1], comparison, finished=finished) == rows
    assert 0 < len(passes) < whole / 2
    assert spent + len(passes) < 1.8 * whole
    passes.clear()
    assert evaluate(model, tiny.tokenizer(), artifact[1], comparison, finished=finished) == rows
    assert not passes


def test_an_answer_without_a_comparison_is_no_part_of_one(artifact):
    model, finished = tiny.model(**LENGTHS), {}
    enable(model)
    alone = Comparison(["text"], [300], [8], ["full"], 2, [open_corpus("demo-prose")], rules=HARD)
    evaluate(model, tiny.tokenizer(), artifact[1], alone, finished=finished)
    both = replace(alone, methods=["full", "bpc"])
    rows = evaluate(model, tiny.tokenizer(), artifact[1], both)
    assert evaluate(model, tiny.tokenizer(), artifact[1], both, finished=finished) == rows
    assert all("kl" in row for row in rows)


def test_other_prompts_are_other_parts(artifact):
    model, finished = tiny.model(**LENGTHS), {}
    enable(model)
    comparison = replace(PLAIN, methods=["full"], lengths=[700], prompts=2)
    for changes in ({}, {"seed": 1}, {"prompts": 3}, {"tasks": ["single"]}, {"lengths": [701]}):
        before = len(finished)
        evaluate(model, tiny.tokenizer(), artifact[1], replace(comparison, **changes), finished=finished)
        assert len(finished) == before + 1


SMALL = ("--preset", "hard", "--lengths", "700", "--prompts", "2", "--budgets", "8", "--methods", "full,bpc,random")


def test_the_command_prints_a_table(bpc, folder, artifact):
    ran = bpc("eval", "-m", folder, "-a", artifact[0], "--tasks", "text,single", *SMALL)
    assert ran.code == 0, ran.err
    assert "tiny-llama, 8 of 700 tokens: right answers in %, and 95 % interval" in ran.out
    assert "tiny-llama, 8 of 700 tokens: text compared with full attention, and 95 % interval" in ran.out
    assert ran.out.endswith("Preset hard. Dense layers: none. No minimum of tokens.\n")
    for word in ("full attention", "BPC", "random keys", "KV read", "single", "same", "cosine"):
        assert word in ran.out
    lines = [line for line in ran.err.splitlines() if not line.startswith("Warning: the projections hardly fit")]
    assert len(ran.err.splitlines()) <= len(lines) + 1  # said once for all caches
    assert lines[0] == "Loading tiny-llama on cpu ..."
    assert lines[2] == "Evaluating: 0 %, text, 700 tokens"
    assert lines[-1].startswith("Evaluating: done in ")
    assert len(lines) == 4


@pytest.mark.slow  # a process; tests below stop evaluations in this one
def test_a_stopped_command_goes_on(bpc, folder, artifact, tmp_path):
    output, work = tmp_path / "result.json", tmp_path / "result.json.work"
    words = ["eval", "-m", folder, "-a", artifact[0], "--tasks", "text", *SMALL, "-o", output]
    with subprocess.Popen([sys.executable, "-m", "bpc_cli", *map(str, words)], stderr=subprocess.PIPE) as run:
        while run.poll() is None and len(list(work.glob("*.json"))) < 3:
            time.sleep(0.01)
        run.send_signal(signal.SIGTERM)
        said = run.stderr.read().decode()
    assert run.returncode == 143, said
    assert said.splitlines()[-2:] == [
        f"The finished work is in {work}: the same command goes on with it",
        "Stopped by SIGTERM.",
    ]
    assert not output.exists()
    (work / "damaged.json").write_text("{")
    one = min(work.glob("?" * 32 + ".json"))
    one.write_text(one.read_text().replace('"result"', '"results"'))
    again = bpc(*words, "--json")
    assert again.code == 0, again.err
    assert f"Going on with {work}: " in again.err
    assert [path.name for path in work.iterdir()] == ["damaged.json"]
    whole = bpc(*words[:-2], "--work-dir", tmp_path / "else", "--json")
    assert not (tmp_path / "else").exists()
    assert json.loads(whole.out) == json.loads(again.out) == json.loads(output.read_text())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_result_that_cannot_be_printed_leaves_the_finished_work(folder, tmp_path):
    words = ["eval", "-m", folder, "--tasks", "single", *SMALL[:-1], "full,random", "--work-dir", tmp_path / "w", "-q"]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "bpc_cli", *map(str, words), "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == 1
    assert "The finished work is in" in ran.stderr
    assert list((tmp_path / "w").glob("*.json"))


def test_an_evaluation_goes_on_where_its_parts_cannot_be_kept(bpc, folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    words = ("eval", "-m", folder, "--tasks", "single", *SMALL[:-1], "full,random", "--work-dir")
    ran = bpc(*words, tmp_path / "file" / "inside")
    assert ran.code == 0, ran.err
    assert ran.err.count("Once stopped, this evaluation would have to begin anew: ") == 1
    refused = bpc(*words, tmp_path / "file")
    assert (refused.code, refused.err.splitlines()[-1]) == (
        1,
        f"Error: {tmp_path / 'file'}: not a folder: choose another --work-dir",
    )


def test_the_command_writes_json_and_pictures(bpc, folder, artifact, tmp_path):
    pytest.importorskip("matplotlib")
    output, plot = tmp_path / "result.json", tmp_path / "pictures"
    words = ("eval", "-m", folder, "-a", artifact[0], *SMALL, "--budgets", "8,0.1", "-o", output, "--plot", plot)
    ran = bpc(*words, "--json")
    assert ran.code == 0, ran.err
    shown = json.loads(ran.out)
    assert shown == json.loads(output.read_text())
    assert shown["model"] == "tiny-llama"
    assert {row["task"] for row in shown["rows"]} == {"text", "needle"}
    pictures = {path.name for path in plot.iterdir()}
    assert pictures == {"recall.png", "needles.png", "budgets.png", "bytes.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plot.iterdir())
    again = bpc(*words)
    assert again.code == 1
    assert "exists; pass --force" in again.err
    assert bpc(*words, "--force", "--methods", "full", "-q").code == 0
    output.write_text('{"mine": 1}')
    refused = bpc(*words, "--force").err
    assert refused.endswith(
        "result.json: exists and is not a result of this command, so it is never replaced: give another name\n"
    )
    assert output.read_text() == '{"mine": 1}'
    output.unlink()
    (plot / "recall.png").write_text("mine")
    assert "recall.png: exists and is not a picture" in bpc(*words, "--force").err


def test_prompts_are_in_the_chat_template_unless_raw(bpc, tmp_path):
    folder = tiny.save(tmp_path / "chatting", **LENGTHS)
    tokenizer = tiny.tokenizer()
    words = ("eval", "-m", folder, "--tasks", "single", "--methods", "full", "--lengths", "700", "--prompts", "1")
    words += ("--json",)
    before = json.loads(bpc(*words).out)
    tokenizer.chat_template = "{{ bos_token }}<user>{{ messages[0].content }}<assistant>"
    tokenizer.save_pretrained(folder)
    said = [json.loads(bpc(*words, *more).out) for more in ((), ("--raw",))]
    assert [each["settings"]["raw"] for each in said] == [False, True]
    assert said[1]["rows"] == before["rows"]
    assert said[0]["rows"][0]["example"]["said"] != before["rows"][0]["example"]["said"]


def test_a_preset_is_that_of_generate(bpc, folder):
    words = ("eval", "-m", folder, *SMALL[2:], "--methods", "bpc-online", "--tasks", "single")
    ran = bpc(*words)
    assert ran.out.endswith("Preset default. Dense layers: 0, 1. At least 192 tokens are attended.\n")
    assert "--min-tokens 192 is more than a budget of 8 tokens at 700 tokens: --preset hard measures" in ran.err
    given = ([], ["--preset", "fast"], ["--preset", "hard"], ["--preset", "hard", "--min-tokens", "64"])
    settings = [json.loads(bpc(*words, *more, "--json").out)["settings"] for more in given]
    assert [(each["preset"], each["min_tokens"], each["dense_layers"]) for each in settings] == [
        ("default", 192, [0, 1]),
        ("fast", 64, [0, 1]),
        ("hard", 1, []),
        (None, 64, []),
    ]
    for more, found in zip(given, settings, strict=True):
        generated = json.loads(bpc("generate", "-m", folder, "-p", "The", "--max-new-tokens", "1", *more, "--json").out)
        assert (generated["preset"], generated["min_tokens"]) == (found["preset"], found["min_tokens"])
        assert generated["budget"] == (0.01 if "fast" in more else 0.02)
    words = ("eval", "-m", folder, "--methods", "bpc-online", "--tasks", "single", "--lengths", "700", "--prompts", "1")
    rows = json.loads(bpc(*words, "--preset", "fast", "--json").out)["rows"]
    assert [row["budget"] for row in rows] == [0.01, 0.1]


def test_a_corpus_is_refused_before_the_weights_are_loaded(bpc, folder, tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"text\0text\xff" * 9)
    (tmp_path / "short.txt").write_text(tiny.prose(20))
    shutil.copytree(folder, tmp_path / "hollow")
    (tmp_path / "hollow" / "model.safetensors").unlink()
    for name, said in (("binary", "not UTF-8 text"), ("short", "has text for 0 of 20 samples of 700 tokens")):
        ran = bpc("eval", "-m", tmp_path / "hollow", "--lengths", "700", "--corpus", tmp_path / f"{name}.txt", "-q")
        (line,) = ran.err.splitlines()
        assert (ran.code, f"{name}.txt" in line, said in line) == (1, True, True), line


@pytest.mark.parametrize("equal", [False, True])
def test_bpc_decodes_as_generate_does_and_the_others_attend_to_the_same_mean(artifact, needs, equal):
    config = tiny.config(**LENGTHS)
    for made in (artifact[1], needs[1]):
        rules = {"budget": 0.1, "equal_shares": equal}
        own = [(type(each), each.rules) for each in BPCCache(config, made, **rules).layers]
        assert [(type(each), each.rules) for each in make_cache("bpc", config, made, **rules).layers] == own
        dense = [kind.__name__ == "DenseLayer" for kind, _ in own]
        assert dense == [made is artifact[1]] * 2 + [False]
        for name in METHODS.keys() - {"full"}:
            layers = make_cache(name, config, made, **rules).layers
            assert [type(each).__name__ == "DenseLayer" for each in layers] == dense, name
            shares = [each.rules.shares for each in layers]
            follows = name in ("bpc", "oracle", "twilight", "twilight-own")
            assert shares == [each.shares if follows else None for _, each in own], name
            assert {each.rules.count(2000) for each in layers} == {200}
    assert (own[2][1].shares is None) == equal


@pytest.mark.slow  # seven evaluations; the test above has the rules
def test_the_command_takes_the_shares_of_the_artifact(bpc, folder, artifact, needs):
    words = ("eval", "-m", folder, *SMALL[2:], "--budgets", "64", "--tasks", "text", "--methods", "oracle,bpc,random")
    said = "exact top-k and BPC share the budget by what each KV head needs"
    for file, more, dense, equal in (
        (artifact[0], (), [0, 1], True),
        (needs[0], (), [], False),
        (
            needs[0],
            ("--preset", "hard"),
            [],
            False,
        ),
        (needs[0], ("--equal-shares",), [], True),
        (needs[0], ("--dense-layers", "1", "--min-tokens", "1"), [1], False),
    ):
        ran = bpc(*words, "-a", file, *more, "--json")
        result = json.loads(ran.out)
        settings, text = result["settings"], {row["method"]: row for row in result["rows"]}
        assert (settings["dense_layers"], settings["equal_shares"]) == (dense, equal), more
        assert {len(row["layers"]) for row in text.values()} == {3 - len(dense)}
        assert text["oracle"]["recall"]["value"] > 0.99
    ran = bpc(*words, "-a", needs[0], "--preset", "hard")
    assert ran.out.splitlines()[-2] == "Preset hard. Dense layers: none. No minimum of tokens."
    assert ran.out.splitlines()[-1].startswith(said)
    assert said not in bpc(*words, "-a", needs[0], "--preset", "hard", "--equal-shares").out


def test_options_without_effect_are_noted(bpc, folder, artifact):
    words = (
        "eval",
        "-m",
        folder,
        "-a",
        artifact[0],
        *SMALL,
        "--methods",
        "full",
        "--tasks",
        "single",
        "--corpus",
        "demo",
    )
    lines = bpc(*words).err.splitlines()
    assert lines[:2] == [
        "--corpus has no effect: the task text is not among --tasks",
        "--artifact has no effect: the method bpc is not among --methods",
    ]
    assert "--equal-shares has no effect: there are no projections" in bpc(*words, "--equal-shares").err


def test_the_same_seed_gives_the_same_result(bpc, folder, artifact):
    words = ("eval", "-m", folder, "-a", artifact[0], *SMALL, "--json")
    one, other = (bpc(*words) for _ in range(2))
    assert one.out == other.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dense-layers", "7"), "dense_layers"),
        (("--artifact", "nowhere.safetensors"), "nowhere.safetensors"),
        (("--plot", "no/where"), "there is no folder no: make it first"),
        (("--output", "no/where.json"), "there is no folder no: make it first"),
        (("--lengths", "4096"), "prompts of 4,096 tokens are too long: the model's limit is 2,048"),
    ],
)
def test_bad_input_is_one_line(bpc, folder, words, message):
    ran = bpc("eval", "-m", folder, "--lengths", "700", *words)
    assert ran.code == 1
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1
    assert ran.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tasks", "no-task"), "unknown task 'no-task': the tasks are text, needle,"),
        (("--lengths", "many"), "many: expected numbers, like 2048,8192"),
        (("--budgets", "0.1%", "--preset", "hard", "--methods", "window"), "a budget of 0.1 % is 1 of 700 tokens"),
        (("--budgets", "much"), "much: expected a share"),
        (("--methods", "h2o"), "unknown method 'h2o'"),
    ],
)
def test_what_cannot_be_compared_is_wrong_usage(bpc, words, message):
    ran = bpc("eval", "-m", "nowhere", "--lengths", "700", *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert message in ran.err


def test_the_artifact_of_another_model(bpc, folder, artifact, tmp_path):
    other = tiny.save(tmp_path / "other", num_hidden_layers=2, **LENGTHS)
    ran = bpc("eval", "-m", other, "-a", artifact[0], "--lengths", "700", "--preset", "hard")
    assert ran.code == 1
    assert ran.err.startswith("Error: made for llama, does not fit other: layers: the artifact has 3, the model 2")
    assert len(ran.err.splitlines()) == 1


def test_pictures_without_matplotlib(bpc, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = bpc("eval", "-m", folder, "--plot", "pictures")
    assert (ran.code, ran.err) == (1, f"Error: pictures need matplotlib: {install('plots')}\n")


def test_a_task_without_room_is_an_error_alone_and_a_warning_beside_others(bpc, folder):
    words = ("eval", "-m", folder, "--lengths", "700", "--methods", "full", "--prompts", "1", "-q")
    ran = bpc(*words, "--tasks", "multi-key")
    assert ran.code == 1
    assert ran.err.startswith("Error: task 'multi-key' at 700 tokens: the question and its statements need ")
    assert len(ran.err.splitlines()) == 1
    ran = bpc(*words[:-1], "--tasks", "single,multi-key", "--json")
    assert [row["task"] for row in json.loads(ran.out)["rows"]] == ["single"]
    assert "Warning: skipped: task 'multi-key' at 700 tokens: " in ran.err


def test_pictures_of_several_lengths_in_any_order(rows, tmp_path):
    pictures = pytest.importorskip("bpc_calib.evaluation.pictures")
    pytest.importorskip("matplotlib")
    again = [row | {"tokens": 350} for row in rows[0]]
    foreign = {"task": "lm_eval:x", "tokens": None, "method": "full", "budget": None, "metrics": {"acc,none": 0.5}}
    found = dict(pictures._figures([*rows[0], *again, foreign]))
    assert set(found) == {"recall.png", "needles.png", "budgets.png", "bytes.png"}
    lines = found["bytes.png"].axes[0].containers
    assert [line.get_label() for line in lines][:2] == ["exact top-k", "BPC"]
    [middle, *_] = lines[1].lines
    own = [row for row in again if (row["task"], row["method"]) == ("text", "bpc")]
    assert sorted(middle.get_xdata()) == sorted(100 * row["read"] for row in own)
    grid = found["needles.png"].axes[0]
    assert [label.get_text() for label in grid.get_yticklabels()] == ["350", "700"]
    assert [axis.get_title() for axis in found["recall.png"].axes[:2]] == ["exact top-k", "BPC"]


def test_ruler_stands_for_several_tasks():
    from bpc_cli.eval import expand_tasks

    assert tuple(expand_tasks("ruler")) == RULER
    assert expand_tasks("needle,ruler,single")[:2] == ["needle", "single"]
