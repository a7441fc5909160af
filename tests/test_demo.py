"""The bundled model: its files, its retrieval, and the commands that use it."""

import json
import re
from pathlib import Path

import pytest
import tiny
from safetensors import safe_open

from bpc_calib import enable
from bpc_calib.demo import DEMO_MODEL
from bpc_calib.evaluation.comparison import HARD, Comparison
from bpc_calib.evaluation.evaluate import evaluate
from bpc_calib.models.description import describe
from bpc_calib.models.loading import load_config, load_model, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo")


def test_its_files_are_complete_and_small():
    files = {path.name: path.stat().st_size for path in DEMO_MODEL.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert sum(files.values()) <= 6_000_000
    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as weights:
        assert {str(weights.get_slice(name).get_dtype()) for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_the_name_demo_means_the_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()  # a user's folder with this name is ./demo
    config, commit = load_config("demo")
    described = describe(config)
    assert (described.id, commit, described.context_limit) == ("demo", None, 8192)


def test_its_tokenizer_knows_the_words_of_the_made_text(tokenizer):
    assert tokenizer("The amber falcon")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer.tokenize(" The pass key of amber falcon is 049217.") == [
        *("ĠThe", "Ġpass", "Ġkey", "Ġof", "Ġamber", "Ġfalcon", "Ġis", "Ġ04", "92", "17", "."),
    ]
    for text in (" zyzzyva", "Ü\n\tx", "日本"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_bpc_retrieves_and_random_keys_do_not(tokenizer):
    """The comparison of `bpc demo` with fewer questions and more methods."""
    model = load_model("demo")
    enable(model)
    artifact = tiny.calibrated(model, tokenizer, corpora=["demo"], samples=24, sequence_length=1024)
    comparison = Comparison(
        tasks=["needle"],
        lengths=[1024],
        budgets=[0.02],
        methods=["full", "oracle", "bpc", "random", "window"],
        prompts=20,
        rules=HARD,
    )
    rows = evaluate(model, tokenizer, artifact, comparison)
    right = {row["method"]: row["score"]["value"] for row in rows}
    assert right["full"] >= 0.9
    assert right["oracle"] >= 0.9
    assert right["bpc"] >= 0.8
    assert right["random"] <= 0.2
    assert right["window"] <= 0.35


@pytest.mark.slow  # `bpc demo` runs in every push as an example of the README, and prints what that shows
def test_the_command_shows_all_its_parts(bpc):
    ran = bpc("demo", "--prompts", "4", "-q")
    assert ran.code == 0, ran.err
    for word in (
        "1. The model",
        "2. Calibration",
        "3. Decoding",
        "every token",
        "BPC's best",
        "by chance",
        "bpc eval",
    ):
        assert word in ran.out
    ran = bpc("demo", "--prompts", "2", "--json", "-q")
    rows = json.loads(ran.out)["rows"]
    assert [row["method"] for row in rows] == ["full", "bpc", "random"]
    assert rows[1]["read"] < 0.1


def test_the_commands_calibrate_and_generate_with_it(bpc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = bpc("calibrate", "-m", "demo", "--samples", "6", "--sequence-length", "512", "--json", "-q")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert made["model"] == "demo"
    assert made["output"] == "demo-bpc64.safetensors"
    ran = bpc("inspect", "demo-bpc64.safetensors", "-m", "demo", "--json")
    assert [source["name"] for source in json.loads(ran.out)["metadata"]["calibration"]["sources"]] == [
        *("demo-prose", "demo-proofs", "demo-code"),
    ]
    ran = bpc(
        *("generate", "-m", "demo", "-a", "demo-bpc64.safetensors", "--max-new-tokens", "3", "-q"),
        *(
            "--prompt",
            " The door code of amber falcon is 402713. What is the door code of amber falcon? The door code of",
        ),
    )
    assert ran.code == 0, ran.err


def test_its_model_card_has_all_parts():
    card = (DEMO_MODEL / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0")
    for heading in ("## Data", "## Recipe", "## Measured", "## Limits"):
        assert heading in card
    assert re.search(r"evaluation_8192\.json", card)


def test_made_corpora_are_the_same_for_the_same_seed(tokenizer):
    import random

    from bpc_calib.text.corpora import documents
    from bpc_calib.text.known_corpora import DEMO_CORPORA, expand

    assert expand(["notes", "demo"]) == ["notes", *DEMO_CORPORA]
    for corpus in DEMO_CORPORA.values():
        one, other = (next(documents(corpus, random.Random(3))) for _ in range(2))
        assert one == other
        words = re.findall(r" ?[A-Za-z]+| ?[0-9]{1,2}| ?[^\sA-Za-z0-9]+|\s", one)
        assert len(tokenizer(one, add_special_tokens=False)["input_ids"]) == len(words)  # no word is split into bytes
