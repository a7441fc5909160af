"""`bpc push` and `bpc pull`: what is published, the model card, and a Hub that refuses, breaks or is not there."""

import json
import os
import pty
import subprocess
import sys

import hub
import numpy as np
import pytest
import test_artifact
import tiny
from processes import started
from test_artifact import held_out
from test_hub import environment

from bpc_artifacts import ArtifactError, load, save
from bpc_artifacts.publishing import publishable
from bpc_calib.errors import InputError
from bpc_calib.models.loading import load_model, load_tokenizer
from bpc_calib.sharing.card import BUDGETS, RESIDUALS, model_card, publishable_result

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = test_artifact.metadata()["calibration"]["sources"][0]


def source(name: str, path: str, revision: str | None = None) -> dict:
    return SOURCE | {"name": name, "path": path, "revision": revision}


def from_hub(**changes):
    """An artifact of a model and a corpus on the Hub."""
    sources = [source("pg19", "emozilla/pg19", COMMIT), source("proofs", "org/proofs/test/a.jsonl.gz", COMMIT)]
    known = {"model__revision": COMMIT, "calibration__sources": sources, "metrics__held_out": held_out()}
    return test_artifact.artifact(metric=True, mean=True, **(known | changes))


# What is published


@pytest.mark.parametrize(
    ("name", "revision", "published"),
    [
        ("/home/anna/models/llama", None, "llama"),
        ("~/models/llama/", None, "llama"),
        ("C:\\Users\\anna\\llama", None, "llama"),
        ("../anna/llama", None, "llama"),
        ("anna/llama", None, "llama"),  # no revision: nothing says that this is on the Hub
        ("anna/llama", COMMIT, "anna/llama"),
        ("anna/llama/llama-q8.gguf", COMMIT, "anna/llama/llama-q8.gguf"),
        ("/home/anna/llama", COMMIT, "llama"),
        ("~/", None, "local"),
        ("demo", None, "demo"),
    ],
)
def test_names_that_are_paths_become_their_last_parts(name, revision, published):
    given = test_artifact.artifact(model__id=name, model__revision=revision)
    artifact, changed = publishable(given)
    assert artifact.metadata["model"]["id"] == published
    assert changed == (["metadata.model.id"] if name != published else [])
    assert given.metadata["model"]["id"] == name
    for tensor, array in given.tensors().items():
        np.testing.assert_array_equal(artifact.tensors()[tensor], array)


def test_paths_of_texts_become_their_names(tmp_path):
    sources = [
        source("a/b", "/home/anna/b"), source("letters", "acme-lawsuit-2026"), source("demo-code", "demo/code"),
        source("c", "org/c", COMMIT), source("d", "d"),
    ]  # fmt: skip
    artifact, changed = publishable(test_artifact.artifact(model__id="llama", calibration__sources=sources))
    found = [(each["name"], each["path"]) for each in artifact.metadata["calibration"]["sources"]]
    assert found == [("b", "b"), ("letters", "letters"), ("demo-code", "demo/code"), ("c", "org/c"), ("d", "d")]
    where = "metadata.calibration.sources"
    assert changed == [f"{where}[0].name", f"{where}[0].path", f"{where}[1].path"]
    assert "lawsuit" not in model_card(stored(artifact, tmp_path), "alice/name")
    assert b"lawsuit" not in (tmp_path / "stored.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"note": "made by Anna"}, "metadata.note: the format has no such key"),
        ({"model__host": "anna-laptop"}, "metadata.model.host: the format has no such key"),
        ({"metrics__user": "anna"}, "metadata.metrics.user: the format has no such key"),
        ({"metrics__held_out": held_out(user="anna")}, "metadata.metrics.held_out.user: the format has no such key"),
        ({"calibration__sources": [SOURCE | {"user": "anna"}]}, r"metadata.calibration.sources\[0\].user: the format"),
        ({"bpc_version": "0.1 (/home/anna/bpc)"}, "metadata.bpc_version: holds a local path"),
        ({"model__rope": {"file": "/home/anna/rope"}}, "metadata.model.rope.file: holds a local path"),
        ({"model__rope": {"~/rope": 1}}, "metadata.model.rope: holds a local path"),
    ],
)
def test_other_private_text_is_refused(changes, message):
    with pytest.raises(ArtifactError, match=message):
        publishable(test_artifact.artifact(**changes))


def test_all_that_calibration_writes_may_be_published(tmp_path):
    artifact = from_hub()
    save(artifact, tmp_path / "a.safetensors")
    again, changed = publishable(load(tmp_path / "a.safetensors"))
    assert changed == []
    save(again, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


# The card


def stored(artifact, folder):
    """The artifact as it is read from a file, which fills in the rest of its metadata."""
    save(artifact, folder / "stored.safetensors", overwrite=True)
    return load(folder / "stored.safetensors")


def test_the_front_matter_names_the_model_and_the_datasets(tmp_path):
    from huggingface_hub import ModelCard

    card = ModelCard(model_card(stored(from_hub(), tmp_path), "alice/name-bpc32", pictures=[RESIDUALS]))
    assert card.data.to_dict() == {
        "library_name": "bpc",
        "pipeline_tag": "text-generation",
        "tags": ["bpc", "sparse-attention", "kv-cache"],
        "base_model": "org/name",
        "base_model_relation": "adapter",
        "datasets": ["emozilla/pg19", "org/proofs"],
    }
    assert f"[org/name](https://huggingface.co/org/name) at revision `{COMMIT}`" in card.text
    assert "$ bpc generate -m org/name -a alice/name-bpc32 --prompt-file long.txt" in card.text
    assert "| samples | 2 of 32 tokens, 1 of them kept aside |" in card.text
    assert "| `pg19` | [`emozilla/pg19`](https://huggingface.co/datasets/emozilla/pg19) | `0123456789ab` |" in card.text
    assert "residual 0.500 on 32 keys per head of 1 sample kept aside" in card.text
    assert "| layer | mean | on new text | best head | worst head |" in card.text
    assert f"({RESIDUALS})" in card.text
    assert "no pictures" not in card.text


def test_a_local_model_is_no_base_model_and_names_cannot_leave_their_place(tmp_path):
    from huggingface_hub import ModelCard

    name = "a`b|c\n# Heading [x](http://y)"
    artifact = test_artifact.artifact(model__id=name, calibration__sources=[source(name, name)])
    card = ModelCard(model_card(stored(artifact, tmp_path), "alice/name"))
    assert "base_model" not in card.data.to_dict()
    assert "datasets" not in card.data.to_dict()
    assert "the local model `a b c # Heading [x](http://y)`" in card.text
    assert "\n# Heading" not in card.text
    assert "This card has no pictures: matplotlib was not installed where it was made." in card.text
    assert "bpc generate -m MODEL -a alice/name" in card.text
    path = {"model__id": "org/$(reboot)/x.gguf", "model__revision": COMMIT}
    card = model_card(stored(from_hub(**path), tmp_path), "alice/name")
    assert "base_model" not in card.split("---")[1]
    assert "-m MODEL" in card


def test_without_matplotlib_the_card_has_no_pictures(tmp_path, monkeypatch):
    from bpc_cli.hub import _files

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the import fails
    files = _files(stored(from_hub(), tmp_path), "name.safetensors", "alice/name", None)
    assert list(files) == ["name.safetensors", "README.md"]
    assert b"This card has no pictures" in files["README.md"]


SETTINGS = {"prompts": 20, "raw": False, "min_tokens": 1, "dense_layers": [0]}


def evaluation(artifact, /, **changes) -> dict:
    """What `bpc eval -o` writes."""
    figure = {"value": 0.5, "low": 0.25, "high": 0.75}
    row = {"tokens": 2048, "method": "bpc", "budget": 0.02, "prompts": 20, "read": 0.05}
    full = {"tokens": 2048, "method": "full", "budget": None, "prompts": 20, "read": 1.0}
    rows = [
        {**row, "task": "needle", "score": figure, "example": {"said": "/home/anna"}},
        {**full, "task": "needle", "score": {"value": 1, "low": 0.8, "high": 1}},
        {**row, "task": "text", "loss_difference": figure, "kl": figure, "by_corpus": {"/home/anna": 1}},
        {**row, "task": "arc_easy", "tokens": None, "metrics": {"acc,none": 0.625, "alias": "arc"}},
    ]
    metadata = artifact.metadata
    known = {"model": metadata["model"]["id"], "artifact": metadata["algorithm"], "settings": SETTINGS, "rows": rows}
    return known | {"payload_sha256": metadata["payload_sha256"]} | changes


def test_the_card_shows_measured_quality_and_nothing_else_of_the_evaluation(tmp_path):
    artifact = stored(from_hub(), tmp_path)
    (tmp_path / "eval.json").write_text(json.dumps(evaluation(artifact)))
    measured = publishable_result(tmp_path / "eval.json", artifact)
    card = model_card(artifact, "alice/name", evaluation=measured, pictures=[RESIDUALS, BUDGETS])
    quality = card.split("## Measured quality")[1]
    full, ours = [line for line in quality.splitlines() if line.startswith("| 2,048")][:2]
    assert full == "| 2,048 |  | full attention | 100.0 % | 100 % (80 to 100) |"
    assert ours == "| 2,048 | 2 % | BPC | 5.0 % | 50 % (25 to 75) |"
    assert "| 2,048 | 2 % | BPC | 5.0 % | 0.500 (0.250 to 0.750) | 0.500 (0.250 to 0.750) |  |  |" in quality
    assert "| `arc_easy` |  | 2 % | BPC | `acc,none` | 0.625 |" in quality
    assert "20 prompts per task and length, dense layers 0, tokens attended at least 1." in quality
    assert f"({BUDGETS})" in quality
    assert "anna" not in card
    (tmp_path / "eval.json").write_text(json.dumps(evaluation(artifact, settings=SETTINGS | {"equal_shares": False})))
    shared = model_card(artifact, "alice/name", evaluation=publishable_result(tmp_path / "eval.json", artifact))
    assert "at least 1, exact top-k and BPC share them by what each KV head needs." in shared
    assert "share them by" not in card


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "org/other"}, "was made without these projections or with another model"),
        ({"artifact": None}, "was made without these projections or with another model"),
        ({"payload_sha256": "0" * 64}, "was made without these projections or with another model"),
        ({"payload_sha256": None}, "was made without these projections or with another model"),
        (
            {"rows": [{"task": "/home/x.yaml", "method": "bpc", "tokens": 1, "budget": 1}]},
            "/home/x.yaml is a local path",
        ),
        ({"rows": [{"task": "needle", "method": "none", "tokens": 1, "budget": 1}]}, "not a result of bpc eval"),
        ({"rows": [{"task": "needle", "method": "bpc", "tokens": 1, "budget": 1}]}, "not a result of bpc eval"),
        ({"settings": {"prompts": "many"}}, "not a result of bpc eval"),
        ({"settings": SETTINGS | {"equal_shares": "no"}}, "not a result of bpc eval"),
        ({"rows": 7}, "not a result of bpc eval"),
    ],
)
def test_an_evaluation_of_something_else_is_refused(changes, message, tmp_path):
    artifact = stored(from_hub(), tmp_path)
    (tmp_path / "eval.json").write_text(json.dumps(evaluation(artifact, **changes)))
    with pytest.raises(InputError, match=message):
        publishable_result(tmp_path / "eval.json", artifact)


@pytest.mark.parametrize(
    "changes",
    [
        {"read": 10**400},
        {"tokens": 10**400},
        {"score": {"value": 10**400, "low": 0, "high": 1}},
        {"metrics": {"acc,none": 0.5}},  # of lm_eval, whose tasks have other names
        {"task": "text", "metrics": {"acc,none": 0.5}},
        {"budget": None},  # only a method that takes no budget has none
        {"budget": 0},
        {"budget": -8},
        {"budget": -0.02},
        {"budget": 1.5},
    ],
)
def test_an_evaluation_with_an_impossible_row_is_refused(changes, tmp_path):
    artifact = stored(from_hub(), tmp_path)
    row = evaluation(artifact)["rows"][0] | changes
    (tmp_path / "eval.json").write_text(json.dumps(evaluation(artifact, rows=[row])))
    with pytest.raises(InputError, match="not a result of bpc eval: give the file that bpc eval --output wrote"):
        publishable_result(tmp_path / "eval.json", artifact)


def test_an_evaluation_in_a_pipe_is_refused_and_a_folder_cannot_be_read(tmp_path):
    artifact = stored(from_hub(), tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: not a result of bpc eval: give the file that bpc eval --output wrote"):
        publishable_result(tmp_path / "pipe", artifact)
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        publishable_result(tmp_path, artifact)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"rows": [NaN]}', "\xff", "[" * 100_000])
def test_a_file_that_is_no_evaluation_is_refused(text, tmp_path):
    (tmp_path / "eval.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="not a result of bpc eval: give the file that bpc eval --output wrote"):
        publishable_result(tmp_path / "eval.json", stored(from_hub(), tmp_path))


# The Hub


@pytest.fixture
def folder(tmp_path):
    """A folder with an artifact."""
    save(from_hub(), tmp_path / "a.safetensors")
    return tmp_path


@pytest.fixture
def client(one_process, folder):
    """Run commands one after the other in one new process: `client(url, [words, ...], HF_TOKEN=...)`."""
    return lambda url, commands, **variables: one_process(commands, folder, **as_alice(url, folder) | variables)


def as_alice(url, folder) -> dict[str, str]:
    """The environment of a process that talks to the local server as alice."""
    return environment(url, folder / "home") | {"HF_TOKEN": "hf_alice"}


def uploads(server) -> list[str]:
    return [request for request in server.requests if request.split()[0] not in ("GET", "HEAD")]


def test_push_pull_and_generate(client, text_folder, folder):
    model, tokenizer = load_model("demo"), load_tokenizer("demo")
    settings = {"samples": 2, "sequence_length": 128, "bits": 32, "method": "paper"}
    save(tiny.calibrated(model, tokenizer, [str(text_folder)], **settings), folder / "demo.safetensors")
    with hub.serve({}, {}) as server:
        push = ("push", "demo.safetensors", "alice/demo-bpc32", "--yes")
        pushed, pulled = client(server.url, [push, ("pull", "alice/demo-bpc32", "-o", "pulled.safetensors")])
        code, out, err = pushed
        assert code == 0, err
        assert "Repository: alice/demo-bpc32 (public, a new repository)" in err
        commit = out.split()[-1].split("@")[1]
        assert f"{server.url}/alice/demo-bpc32 at commit {commit}" in out
        assert f"To use this commit from the Hub: -a alice/demo-bpc32@{commit}" in pulled[1]
        assert (folder / "pulled.safetensors").read_bytes() == (folder / "demo.safetensors").read_bytes()
        words = ("generate", "-m", "demo", "--prompt", "the old bridge", "--max-new-tokens", 4, "--json", "-q")
        ((code, out, err),) = client(server.url, [(*words, "-a", f"alice/demo-bpc32@{commit}")], HF_TOKEN="")
        assert code == 0, err
        assert json.loads(out)["tokens"]
    # The pinned file is in the cache now.
    ((code, _, err),) = client(server.url, [("inspect", f"alice/demo-bpc32@{commit}")], HF_HUB_OFFLINE="1")
    assert code == 0, err


def test_a_second_push_updates_the_repository_and_branches_and_commits_stay_apart(client, folder):
    artifact = load(folder / "a.safetensors")
    (folder / "eval.json").write_text(json.dumps(evaluation(artifact)))
    push = ("push", "a.safetensors", "alice/name-bpc32", "--yes", "--json")
    with hub.serve({}, {}) as server:
        answers = client(
            server.url,
            [
                (*push, "--private"),
                push,
                (*push, "--evaluation", "eval.json"),
                (*push, "--revision", "next", "--evaluation", "eval.json"),
                (*push[:-1], "--revision", "main"),
            ],
        )
        assert [code for code, _, _ in answers] == [0] * 5, answers
        first, same, measured, branch = [json.loads(out) for _, out, _ in answers[:4]]
        assert (first["created"], first["private"], first["unchanged"]) == (True, True, False)
        assert (same["created"], same["private"], same["unchanged"]) == (False, True, True)
        assert same["commit"] == first["commit"]
        assert measured["commit"] != first["commit"]
        assert list(first["files"]) == ["name-bpc32.safetensors", "residuals.png", "README.md"]
        assert first["pinned"] == f"alice/name-bpc32@{first['commit']}"
        assert branch["branch"] == "next"
        assert "Branch: next (new)" in answers[3][2]
        assert "exists: files of these names are replaced" in answers[4][2]
        assert answers[4][1].startswith("Updated: ")
        versions = server.repos["models", "alice/name-bpc32"]
        main, card = (versions.at(name).files["README.md"].decode() for name in ("main", "next"))
        assert "@next" not in main
        assert "# name-bpc32\n" in card
        for words in ("-m org/name -a alice/name-bpc32@next --prompt", "$ bpc pull alice/name-bpc32@next\n"):
            assert words in card
        assert "`-a alice/name-bpc32@COMMIT` always takes the same file" in card
        # A new branch may begin with equal files; the repository is private: only its owner reads it.
        versions.branches["main"] = versions.branches.pop("next")
        versions.tags["v1"] = first["commit"]
        (code, out, _), *answers = client(
            server.url,
            [
                (*push[:-1], "--revision", "next", "--evaluation", "eval.json"),
                ("inspect", f"alice/name-bpc32@{first['commit']}"),
                ("inspect", "alice/name-bpc32", "--revision", "next"),
                ("inspect", "alice/name-bpc32@next", "--revision", "next"),
                ("inspect", "alice/name-bpc32@nowhere"),
                ("pull", "alice/name-bpc32@v1", "--json"),
                (*push, "--revision", "v1"),
            ],
        )
        assert code == 0
        assert versions.branches["next"] == versions.branches["main"]
        assert out.splitlines() == [
            f"Published: {server.url}/alice/name-bpc32 at commit {branch['commit']}",
            f"Use it with -a alice/name-bpc32@next, or pinned with -a alice/name-bpc32@{branch['commit']}",
        ]
        assert [code for code, _, _ in answers] == [0, 0, 2, 1, 0, 1], answers
        assert "give one revision, as alice/name-bpc32@REVISION or with --revision" in answers[2][2]
        assert "has no such revision" in answers[3][2]
        assert json.loads(answers[4][1])["commit"] == first["commit"]
        assert "alice/name-bpc32: v1 is a tag, which never changes: name a branch" in answers[5][2]
        ((code, _, error),) = client(server.url, [("pull", "alice/name-bpc32")], HF_TOKEN="hf_bob")
        assert code == 1
        assert "alice/name-bpc32 (no file here) is not on the Hub (or private: set HF_TOKEN)" in error


def test_what_the_hub_refuses_is_one_line_and_changes_nothing(client, folder):
    for name, file in (("weights", "model.safetensors"), ("old", "old-name.safetensors")):
        (folder / name).mkdir()
        (folder / name / file).write_bytes((folder / "a.safetensors").read_bytes())
    (folder / "old" / "README.md").write_text("---\nlibrary_name: bpc\n---\n")
    (folder / "bad.safetensors").write_bytes(b"no artifact")
    save(from_hub(note="by Anna"), folder / "note.safetensors")
    with hub.serve({"alice/weights": folder / "weights", "alice/old": folder / "old"}, {}) as server:
        push = ("push", "a.safetensors", "alice/new", "--yes")
        expected = {
            ("push", "bad.safetensors", *push[2:]): "bad.safetensors: not a BPC artifact",
            ("push", "note.safetensors", *push[2:]): "note.safetensors: metadata.note: the format has no such key",
            ("push", "none.safetensors", *push[2:]): "none.safetensors: cannot be read",
            (*push, "--evaluation", "a.safetensors"): "a.safetensors: not a result of bpc eval",
            ("push", "a.safetensors", "bob/new", "--yes"): "bob/new: the token may not write there",
            ("push", "a.safetensors", "alice/weights", "--yes"): "holds something else than projections of BPC (model",
            ("push", "a.safetensors", "alice/old", "--yes"): "alice/old has another safetensors file, old-name.safet",
            ("push", "a.safetensors", "alice/old", "--yes", "--private"): "alice/old exists and is public",
        }
        misused = {
            ("push", "a.safetensors", "alice/new"): "there is no terminal: --yes publishes without asking",
            ("push", "a.safetensors", "new", "--yes"): "expected the repository as ORG/NAME",
            ("push", "a.safetensors", "a/b/c", "--yes"): "expected the repository as ORG/NAME",
            (*push, "--revision", COMMIT): f"{COMMIT} is a commit, which never changes: name a branch",
        }
        for words, (code, out, err) in zip(misused, client(server.url, misused), strict=True):
            assert (code, out) == (2, ""), words
            assert misused[words] in err
        for words, (code, out, err) in zip(expected, client(server.url, expected), strict=True):
            assert (code, out) == (1, ""), words
            assert err.splitlines()[-1].startswith("Error: "), err
            assert expected[words] in err.splitlines()[-1]
        assert uploads(server) == ["POST /api/repos/create"]  # bob's, refused
        ((code, _, err),) = client(server.url, [push], HF_TOKEN="hf_nobody")
        assert (code, err) == (
            1, "Error: the Hub does not accept the token: run hf auth login again, or set HF_TOKEN to a valid one\n"
        )  # fmt: skip
        ((code, _, err),) = client(server.url, [push], HF_TOKEN="")
        assert (code, err.startswith("Error: publishing needs a token: run hf auth login")) == (1, True), err
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        ((code, _, err),) = client("http://127.0.0.1:9", [push], **variables)
        assert code == 1
        assert err == (
            "Error: alice/new: the Hub cannot be reached: check the network, and that HF_HUB_OFFLINE is not set\n"
        )


def test_a_connection_that_breaks_publishes_nothing_and_a_second_push_works(client, folder):
    push = ("push", "a.safetensors", "alice/name", "--yes", "--json")
    with hub.serve({}, {}) as server:
        server.broken.append("/commit/main")  # after the upload of the objects
        broken, nothing, again = client(server.url, [push, ("pull", "alice/name"), push])
        assert broken[0] == 1
        message = broken[2].splitlines()[-1]
        assert message.startswith("Error: alice/name: the connection to the Hub broke (")
        assert message.endswith("run the command again; it publishes all files or none")
        assert nothing[0] == 1
        assert "expected one safetensors file, found none" in nothing[2]
        assert again[0] == 0, again[2]
        assert json.loads(again[1])["created"] is False
        assert server.broken == []


CHANGES = """
from bpc_calib.sharing.publishing import PublishingError, look_up, publish
def card(text):
    return {"README.md": f"---\\nlibrary_name: bpc\\n---\\n{text}".encode()}
def target(branch):
    return look_up("alice/name", branch=branch, private=False, filename="name.safetensors")
def refused(target):
    try:
        publish(target, card("late"))
    except PublishingError as fault:
        print(fault)
new = target("main")
publish(new, card("first"))
refused(new)
main, next, other = target("main"), target("next"), target("other")
publish(main, card("second"))
refused(main)
publish(next, {"notes.md": b"next"})
refused(next)
publish(other, {"notes.md": b"other"})
"""


def test_what_changes_between_the_check_and_the_commit_is_not_replaced(folder):
    with hub.serve({}, {}) as server:
        done = started(CHANGES, folder=folder, environment=as_alice(server.url, folder))
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines == ["alice/name was changed meanwhile: run the command again to see what it holds now"] * 3
        versions = server.repos["models", "alice/name"]
        held = {branch: versions.at(branch).files for branch in versions.branches}
    assert held["main"]["README.md"].endswith(b"second")
    # The branches begin where they were looked up.
    for branch in ("next", "other"):
        assert held[branch]["README.md"].endswith(b"first")
        assert held[branch]["notes.md"] == branch.encode()


def test_pull_checks_the_file_and_replaces_nothing_by_itself(client, folder):
    original = (folder / "a.safetensors").read_bytes()
    (folder / "good").mkdir()
    (folder / "good" / "g.safetensors").write_bytes(original)
    (folder / "bad").mkdir()
    (folder / "bad" / "g.safetensors").write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    (folder / "out").mkdir()
    save(from_hub(algorithm__seed=7), folder / "other.safetensors")
    (folder / "taken").mkdir()
    for path in (folder / "notes.txt", folder / "taken" / "notes.txt"):
        path.write_text("notes")
    (folder / "empty").touch()
    with hub.serve({"org/good": folder / "good", "org/bad": folder / "bad"}, {}) as server:
        pull = ("pull", "org/good")
        answers = client(
            server.url,
            [
                ("pull", "org/bad"),
                ("pull", "good"),
                (*pull, "--json"),
                (*pull, "--json"),
                (*pull, "-o", "out"),
                (*pull, "-o", "other.safetensors"),
                (*pull, "-o", "other.safetensors", "--force"),
                (*pull, "-o", "notes.txt", "--force"),
            ],
        )
        before = len(server.requests)
        early = client(
            server.url,
            [
                (*pull, "-o", "notes.txt", "--force"),
                (*pull, "-o", "empty"),
                (*pull, "-o", "none/x.safetensors"),
                (*pull, "-o", "none/"),
                (*pull, "-o", "x" * 300),
                (*pull, "-o", "x" * 300 + "/x.safetensors"),
                ("pull", "org/good/notes.txt"),
                ("pull", "org/good/notes.txt", "-o", "taken"),
            ],
        )
        assert len(server.requests) == before
    for (code, out, error), message in zip(
        early,
        [
            "notes.txt: exists and is not a BPC artifact, so it is never replaced",
            "empty: exists; pass --force",
            "there is no folder none: make it first",
            "none/: make this folder first",
            "xxx: cannot be written: File name too long",
            "/x.safetensors: ",
            "notes.txt: exists and is not a BPC artifact",
            "taken/notes.txt: exists and is not a BPC artifact",
        ],
        strict=True,
    ):
        assert (code, out) == (1, "")
        (line,) = error.splitlines()
        assert line.startswith("Error: ")
        assert message in line
    assert [code for code, _, _ in answers] == [1, 2, 0, 0, 0, 1, 0, 1], answers
    assert "org/bad at " in answers[0][2]
    assert "damaged: the sha256 of its tensors is" in answers[0][2]
    assert "home" not in answers[0][2]
    assert "good: expected an artifact on the Hub, as ORG/NAME" in answers[1][2]
    written, again = json.loads(answers[2][1]), json.loads(answers[3][1])
    assert (written["output"], written["unchanged"], again["unchanged"]) == ("g.safetensors", False, True)
    assert written["pinned"] == f"org/good@{written['commit']}"
    assert "other.safetensors: exists; pass --force" in answers[5][2]
    assert "notes.txt: exists and is not a BPC artifact, so it is never replaced" in answers[7][2]
    for name in ("g.safetensors", "out/g.safetensors", "other.safetensors"):
        assert (folder / name).read_bytes() == original
    assert (folder / "notes.txt").read_text() == "notes"


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("y\n", 0)])
def test_on_a_terminal_it_asks(answer, code, folder):
    terminal, keyboard = pty.openpty()
    os.write(terminal, answer.encode())
    with hub.serve({}, {}) as server:
        done = subprocess.run(
            [sys.executable, "-c", "from bpc_cli.main import main; main()", "push", "a.safetensors", "alice/name"],
            stdin=keyboard,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, **environment(server.url, folder / "home"), "HF_TOKEN": "hf_alice"},
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Names in them: model org/name, text pg19, proofs" in done.stderr
        assert "Publish? [y/N]:" in done.stderr
        assert bool(uploads(server)) == (code == 0)
    assert ("Nothing was published." in done.stderr) == (code == 1)
    assert ("Published: " in done.stdout) == (code == 0)
    os.close(terminal)
    os.close(keyboard)
