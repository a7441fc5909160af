"""The Hub: real clients, each in its own process, talk to a local server with the real repository names."""

import gzip
import json
from pathlib import Path

import hub
import pyarrow
import pyarrow.parquet
import pytest
import tiny

from bpc_artifacts import load

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
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
def bpc(bpc_process, served):
    """Run `bpc` in a process that talks to the local server."""
    return lambda *words, **more: bpc_process(*words, **(served[1] | more))


def test_the_default_corpora_from_the_hub(bpc, served, tmp_path):
    ran = bpc("calibrate", "-m", MODEL, "--samples", 7, "--bits", 32, "-q")
    assert ran.code == 0, ran.err
    assert ran.err == ""
    artifact = load(tmp_path / "Llama-3.1-8B-Instruct-bpc32.safetensors")
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
    assert bpc("inspect", "Llama-3.1-8B-Instruct-bpc32.safetensors", "-m", MODEL).out.endswith(f"Fits {MODEL}.\n")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("authors-pg19", marks=pytest.mark.slow),  # the same format in another file
        pytest.param("authors-proofpile", marks=pytest.mark.slow),
        "authors-codeparrot",
        "proofpile-parquet",
    ],
)
def test_every_other_named_corpus(bpc, tmp_path, name):
    ran = bpc("calibrate", "-m", MODEL, "--samples", 2, "--bits", 32, "--corpus", name, "-o", "a.safetensors")
    assert ran.code == 0, ran.err
    (source,) = load(tmp_path / "a.safetensors").metadata["calibration"]["sources"]
    assert source["name"] == name
    assert source["tokens"] == 256


def one_error(ran) -> str:
    assert ran.code == 1
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    return line


def test_missing_repositories_and_revisions_are_one_error(bpc, tmp_path):
    (tmp_path / "a.txt").write_text(tiny.prose())
    words = ("--samples", 2, "--corpus", "a.txt")
    assert "model org/none (no folder here) is not on the Hub (or private: set HF_TOKEN)" in one_error(
        bpc("calibrate", "-m", "org/none", *words)
    )
    error = one_error(bpc("calibrate", "-m", MODEL, *words, "--revision", "v9"))
    assert f"model {MODEL} (no folder here) has no such revision" in error
    assert "org/bidirectional (bert) is not a causal" in one_error(bpc("calibrate", "-m", "org/bidirectional", *words))
    assert "org/none (no file here) is not on the Hub" in one_error(bpc("inspect", "org/none"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_without_a_network_the_error_says_what_to_do(bpc_process, tmp_path, model_folder):
    nowhere = environment("http://127.0.0.1:9", tmp_path / "home")
    message = "cannot be reached: check the network, or use local files (HF_HUB_OFFLINE=1 skips the attempt)"
    error = one_error(bpc_process("calibrate", "-m", MODEL, **nowhere))
    assert error.startswith(
        f"Error: model {MODEL} (no folder here) is not in the cache and the Hub (http://127.0.0.1:9) {message}"
    )
    error = one_error(bpc_process("calibrate", "-m", model_folder, "--samples", 3, **nowhere))
    assert error.startswith("Error: corpus pg19 (emozilla/pg19) is not in the cache and the Hub")
    assert error.endswith(f"{message}; local text: --corpus NAME=PATH")
    assert message in one_error(bpc_process("inspect", "org/artifact", **nowhere))


def test_a_cached_model_works_offline(bpc, tmp_path):
    (tmp_path / "a.txt").write_text(tiny.prose())
    words = ("calibrate", "-m", MODEL, "--samples", 2, "--corpus", "a.txt", "--bits", 32)
    assert bpc(*words, "-o", "online.safetensors").code == 0
    for name, how in (("unset", {"HF_HUB_OFFLINE": "1"}), ("gone", {"HF_ENDPOINT": "http://127.0.0.1:9"})):
        ran = bpc(*words, "-o", f"{name}.safetensors", **how)
        assert ran.code == 0, ran.err
        assert (tmp_path / f"{name}.safetensors").read_bytes() == (tmp_path / "online.safetensors").read_bytes()


def test_inspect_an_artifact_on_the_hub(bpc_process, bpc, tmp_path):
    (tmp_path / "a.txt").write_text(tiny.prose())
    one = tmp_path / "one"
    one.mkdir()
    for bits in (32, 64):
        words = ("calibrate", "-m", MODEL, "--samples", 2, "--corpus", "a.txt", "--bits", bits)
        assert bpc(*words, "-o", f"one/b{bits}.safetensors").code == 0
    (one / "README.md").write_text("An artifact.")
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "bpc.safetensors").write_bytes((one / "b32.safetensors").read_bytes())
    (tmp_path / "large").mkdir()
    with open(tmp_path / "large" / "model.safetensors", "wb") as file:
        file.truncate((1 << 30) + 1)
    (tmp_path / "empty").mkdir()
    repositories = {"org/two": one, "org/one": tmp_path / "single", "org/large": tmp_path / "large"}
    repositories["org/none-yet"] = tmp_path / "empty"
    with hub.serve(repositories, {}) as server:
        seen = environment(server.url, tmp_path / "home")
        shown = json.loads(bpc_process("inspect", "org/one", "--json", **seen).out)
        assert shown["metadata"]["algorithm"]["bits"] == 32
        assert len(shown["commit"]) == 40
        # Only the artifact was fetched.
        assert {r.rsplit("/", 1)[1] for r in server.requests if "/resolve/" in r} == {"bpc.safetensors"}
        assert "64 bits per key" in bpc_process("inspect", "org/two/b64.safetensors", **seen).out
        error = one_error(bpc_process("inspect", "org/two", **seen))
        assert (
            "expected one safetensors file, found b32.safetensors, b64.safetensors: choose one with org/two/FILE"
            in error
        )
        assert "expected an artifact of at most" in one_error(bpc_process("inspect", "org/large", **seen))
        error = one_error(bpc_process("inspect", "org/two/no.safetensors", **seen))
        assert error == (
            "Error: org/two/no.safetensors: org/two has no file no.safetensors: "
            "choose one of b32.safetensors, b64.safetensors"
        )
        error = one_error(bpc_process("inspect", "org/none-yet/a.safetensors", **seen))
        assert "org/none-yet has no file a.safetensors, and no other safetensors file: choose another" in error
    offline = seen | {"HF_HUB_OFFLINE": "1"}
    for name in ("org/one", "org/two/b64.safetensors"):
        ran = bpc_process("inspect", name, **offline)
        assert ran.code == 0, ran.err
    error = one_error(bpc_process("inspect", "org/two/b32.safetensors", **offline))
    assert "the cache of org/two has no file b32.safetensors: choose one of b64.safetensors" in error
