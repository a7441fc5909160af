"""The Hub: real clients, in processes of their own, talk to a local server with the real repository names."""

import gzip
import json
from pathlib import Path

import hub
import pyarrow
import pyarrow.parquet
import pytest
import tiny

from bpc_artifacts import load, save

MODEL = "Qwen/Qwen3-8B"
PINNED = {
    "hoskinson-center/proof-pile": "490b980249446f2f3bd2df3a8cf085d0f2de240a",
    "namespace-Pt/long-llm-data": "48e96d937d87395c9223caf467ad30ae8e525191",
}


def parquet(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"short_book_title": ["x"] * len(texts), "text": texts}), path)


def json_lines(path: Path, field: str, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"repo_name": "x", field: text}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def make_repositories(folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Write a little data in the files and formats of the real repositories."""
    texts = [tiny.prose(1500, seed=i) for i in range(24)]
    sets = folder / "sets"
    parquet(sets / "pg19" / "data" / "train-00000-of-00002.parquet", texts[:6])
    parquet(sets / "pg19" / "data" / "train-00001-of-00002.parquet", texts[6:12])
    parquet(sets / "pg19" / "data" / "test-00000-of-00001.parquet", ["the wrong split"])
    json_lines(sets / "proof" / "test" / "proofpile_test.jsonl.gz", "text", texts[:8])
    json_lines(sets / "parrot" / "file-000000000001.json.gz", "content", texts[8:])
    for name in ("pg19", "proof-pile", "codeparrot"):
        json_lines(sets / "authors" / "lm" / f"{name}.json", "text", texts[:8])
    parquet(sets / "mistral" / "data" / "train-00000-of-00001.parquet", texts)
    models = {MODEL: tiny.save(folder / "model"), "org/bidirectional": folder / "bert"}
    tiny.config("bert", architectures=["BertForMaskedLM"]).save_pretrained(folder / "bert")
    datasets = {
        "emozilla/pg19": sets / "pg19",
        "hoskinson-center/proof-pile": sets / "proof",
        "codeparrot/codeparrot-clean-valid": sets / "parrot",
        "namespace-Pt/long-llm-data": sets / "authors",
        "emozilla/proofpile-test-tokenized-mistral": sets / "mistral",
    }
    return models, datasets


def environment(url: str, home: Path) -> dict[str, str]:
    """Return the environment variables of a client process that talks to the local server."""
    return {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    models, datasets = make_repositories(folder)
    with hub.serve(models, datasets, revisions=PINNED) as server:
        yield server, environment(server.url, folder / "home")


@pytest.fixture
def client(one_process, tmp_path, served):
    """Run commands one after the other in one new process, in an empty folder: `client([words, ...], HF_HOME=...)`.

    By default it talks to the local server with the real names.
    """
    return lambda commands, **variables: one_process(commands, tmp_path, **served[1] | variables)


def test_the_default_corpora_from_the_hub(bpc_process, served, tmp_path):
    """By the entry point: no library writes to stderr beside it."""
    ran = bpc_process("calibrate", "-m", MODEL, "--samples", 7, "--bits", 32, "-q", **served[1])
    assert ran.code == 0, ran.err
    assert ran.err == ""
    artifact = load(tmp_path / "Qwen3-8B-bpc32.safetensors")
    model = artifact.metadata["model"]
    assert model["id"] == MODEL
    assert len(model["revision"]) == 40
    sources = artifact.metadata["calibration"]["sources"]
    assert [(s["name"], s["samples"], s["split"], s["field"]) for s in sources] == [
        ("pg19", 3, "train", "text"),
        ("proofpile", 2, "train", "text"),
        ("codeparrot", 2, "train", "content"),
    ]
    assert sources[1]["revision"] == PINNED["hoskinson-center/proof-pile"]
    assert all(len(source["revision"]) == 40 for source in sources)
    # Every file was read at a fixed commit.
    content = [path for _, path in map(str.split, served[0].requests) if "/resolve/" in path and "/datasets/" in path]
    assert content
    assert not any("/resolve/main/" in path for path in content)


@pytest.mark.slow  # the default corpora are read in every push
def test_every_other_named_corpus(client, tmp_path):
    names = ("authors-pg19", "authors-proofpile", "authors-codeparrot", "proofpile-parquet")
    words = ("calibrate", "-m", MODEL, "--samples", 2, "--bits", 32)
    for name, ran in zip(names, client([(*words, "--corpus", name, "-o", name) for name in names]), strict=True):
        assert ran.code == 0, ran.err
        (source,) = load(tmp_path / name).metadata["calibration"]["sources"]
        assert source["name"] == name
        assert source["tokens"] == 256


def one_error(ran) -> str:
    assert ran.code == 1
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    return line


def test_missing_repositories_and_revisions_are_one_error(client, tmp_path):
    (tmp_path / "a.txt").write_text(tiny.prose())
    words = ("--samples", 2, "--corpus", "a.txt")
    no_model, no_revision, other_kind, no_artifact = map(
        one_error,
        client(
            [
                ("calibrate", "-m", "org/none", *words),
                ("calibrate", "-m", MODEL, *words, "--revision", "v9"),
                ("calibrate", "-m", "org/bidirectional", *words),
                ("inspect", "org/none"),
            ]
        ),
    )
    assert "model org/none (no folder here) is not on the Hub (or private: set HF_TOKEN)" in no_model
    assert f"model {MODEL} (no folder here) has no such revision" in no_revision
    assert "org/bidirectional (bert) is not a causal" in other_kind
    assert "org/none (no file here) is not on the Hub" in no_artifact
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_without_a_network_the_error_says_what_to_do(client, tmp_path, model_folder):
    message = "cannot be reached: check the network, or use local files (HF_HUB_OFFLINE=1 skips the attempt)"
    commands = [
        ("calibrate", "-m", MODEL),
        ("calibrate", "-m", model_folder, "--samples", 3, "-q"),
        ("inspect", "org/artifact"),
    ]
    nowhere = environment("http://127.0.0.1:9", tmp_path / "home")
    no_model, no_corpus, no_artifact = map(one_error, client(commands, **nowhere))
    assert no_model.startswith(
        f"Error: model {MODEL} (no folder here) is not in the cache and the Hub (http://127.0.0.1:9) {message}"
    )
    assert no_corpus.startswith("Error: corpus pg19 (emozilla/pg19) is not in the cache and the Hub")
    assert no_corpus.endswith(f"{message}; local text: --corpus NAME=PATH")
    assert message in no_artifact


@pytest.mark.slow  # three processes
def test_a_cached_model_works_offline(client, tmp_path):
    (tmp_path / "a.txt").write_text(tiny.prose())
    words = ("calibrate", "-m", MODEL, "--samples", 2, "--corpus", "a.txt", "--bits", 32, "-o")
    online, inspected = client([(*words, "online"), ("inspect", "online", "-m", MODEL)])
    assert online.code == 0, online.err
    assert inspected.out.endswith(f"Fits {MODEL}.\n")
    for name, how in (("unset", {"HF_HUB_OFFLINE": "1"}), ("gone", {"HF_ENDPOINT": "http://127.0.0.1:9"})):
        (ran,) = client([(*words, name)], **how)
        assert ran.code == 0, ran.err
        assert (tmp_path / name).read_bytes() == (tmp_path / "online").read_bytes()


def test_inspect_an_artifact_on_the_hub(client, tmp_path):
    (tmp_path / "a.txt").write_text(tiny.prose())
    for folder in ("two", "one", "large", "empty"):
        (tmp_path / folder).mkdir()
    for bits in (32, 64):
        made = tiny.calibrated(tiny.model(), tiny.tokenizer(), [str(tmp_path / "a.txt")], samples=2, bits=bits)
        save(made, tmp_path / "two" / f"b{bits}.safetensors")
    (tmp_path / "two" / "README.md").write_text("An artifact.")
    (tmp_path / "one" / "bpc.safetensors").write_bytes((tmp_path / "two" / "b32.safetensors").read_bytes())
    with open(tmp_path / "large" / "model.safetensors", "wb") as file:
        file.truncate((1 << 30) + 1)
    repositories = {f"org/{name}": tmp_path / name for name in ("two", "one", "large", "empty")}
    with hub.serve(repositories, {}) as server:
        seen = environment(server.url, tmp_path / "home")
        first, second, *refused = client(
            [
                ("inspect", "org/one", "--json"),
                ("inspect", "org/two/b64.safetensors"),
                ("inspect", "org/two"),
                ("inspect", "org/large"),
                ("inspect", "org/two/no.safetensors"),
                ("inspect", "org/empty/a.safetensors"),
            ],
            **seen,
        )
        shown = json.loads(first.out)
        assert shown["metadata"]["algorithm"]["bits"] == 32
        assert len(shown["commit"]) == 40
        # Only the artifacts that were named were fetched.
        fetched = {r.rsplit("/", 1)[1] for r in server.requests if "/resolve/" in r}
        assert fetched == {"bpc.safetensors", "b64.safetensors"}
        assert "64 bits per key" in second.out
        several, large, other, none = map(one_error, refused)
        choose = "choose one of b32.safetensors, b64.safetensors"
        found = "found b32.safetensors, b64.safetensors: choose one with org/two/FILE"
        assert f"expected one safetensors file, {found}" in several
        assert "expected an artifact of at most" in large
        assert other == f"Error: org/two/no.safetensors: org/two has no file no.safetensors: {choose}"
        assert "org/empty has no file a.safetensors, and no other safetensors file: choose another" in none
    names = ("org/one", "org/two/b64.safetensors", "org/two/b32.safetensors")
    *cached, missing = client([("inspect", name) for name in names], **(seen | {"HF_HUB_OFFLINE": "1"}))
    for ran in cached:
        assert ran.code == 0, ran.err
    expected = "the cache of org/two has no file b32.safetensors: choose one of b64.safetensors"
    assert expected in one_error(missing)
