"""GGUF files as models: their weights, config and tokenizer, and the errors of files that cannot be read."""

import json
import struct
import sys

import hub
import numpy as np
import pytest
import test_hub
import tiny
import torch
from test_cli import assert_one_error

from bpc_artifacts import load
from bpc_calib import describe
from bpc_calib.extras import install
from bpc_calib.models.loading import load_config, load_model, load_tokenizer

pytest.importorskip("transformers", minversion="5.23", reason="GGUF files need transformers 5.23")
tiny_gguf = pytest.importorskip("tiny_gguf", reason="needs the extra gguf")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny_gguf.save(tmp_path_factory.mktemp("gguf") / "tiny.Q0.gguf", tiny.model())


def test_a_file_in_float32_is_the_model_of_the_folder(file):
    model, made = tiny.model(), load_model(str(file))
    assert made.dtype == torch.float32
    for name, weight in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], weight), name
    text = "The river carried 12\n\n stones \x00é."
    assert load_tokenizer(str(file))(text).input_ids == tiny.tokenizer()(text).input_ids
    ids = torch.arange(40).unsqueeze(0)
    assert torch.equal(made(ids).logits, model(ids).logits)


def test_the_config_is_that_of_the_folder(file, model_folder):
    described, commit = describe(load_config(str(file))[0]), load_config(str(file))[1]
    assert (described.id, commit) == ("tiny.Q0", None)
    assert described == describe(load_model(str(file)).config)
    folder = describe(load_config(str(model_folder))[0]).metadata() | {"id": "tiny.Q0"}
    assert described.metadata() == folder  # the hash of the config, too


def test_quantised_weights_are_unpacked_to_bfloat16(tmp_path):
    model = tiny.model()
    file = str(tiny_gguf.save(tmp_path / "tiny.gguf", model, quantised=True))
    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        made = load_model(file, dtype=dtype)
        assert {weight.dtype for weight in made.parameters()} == {expected}
        name = "model.layers.1.self_attn.k_proj.weight"
        weight, found = model.state_dict()[name], made.state_dict()[name].float()
        assert 0 < (found - weight).abs().max() < weight.abs().max() / 100
    assert not hasattr(made.config, "quantization_config")


def test_calibrate_inspect_and_generate(bpc, file, model_folder, text_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--corpus", text_folder, "--samples", 4, "--bits", 32)
    assert bpc("calibrate", "-m", file, *words).code == 0
    made = load(tmp_path / "tiny.Q0-bpc32.safetensors")
    assert bpc("calibrate", "-m", model_folder, "-o", "folder.safetensors", *words).code == 0
    folder = load(tmp_path / "folder.safetensors")
    assert all(np.array_equal(array, folder.tensors()[name]) for name, array in made.tensors().items())
    shown = bpc("inspect", "tiny.Q0-bpc32.safetensors", "--model", model_folder)
    assert (shown.code, shown.err) == (0, "")
    assert "Fits" in shown.out
    decode = ("-a", "folder.safetensors", "--prompt", "The old bridge", "--max-new-tokens", 8, "--min-tokens", 2, "-q")
    from_file, from_folder = (bpc("generate", "-m", model, *decode) for model in (file, model_folder))
    assert (from_file.code, from_file.out) == (0, from_folder.out)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"", "not a GGUF file, or a damaged one"),
        (lambda data: b"PK\3\4" + data[4:], "does not start with the GGUF magic bytes"),
        (lambda data: data[:60], "not a GGUF file, or a damaged one"),
        (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "is GGUF v9"),
        (lambda data: data[:-5000], "which may be cut off"),
    ],
    ids=["empty", "a zip file", "cut in its head", "a later version", "cut in its weights"],
)
def test_damaged_and_foreign_files_are_one_line(bpc, file, tmp_path, change, said):
    (tmp_path / "bad.gguf").write_bytes(change(file.read_bytes()))
    ran = bpc("calibrate", "-m", tmp_path / "bad.gguf", "--corpus", "demo", "--dry-run")
    assert_one_error(ran, "bad.gguf", said)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"architecture": "mamba9"}, "architecture mamba9 is not supported"),
        ({"metadata": {"split.count": 3}}, "one of 3 parts"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "loses the RoPE scaling"),
        ({"tensors": {"rope_freqs.weight": np.ones(4, np.float32)}}, "loses the RoPE scaling"),
    ],
    ids=["architecture", "parts", "scaling", "frequencies"],
)
def test_files_that_transformers_would_misread_are_refused(bpc, tmp_path, more, said):
    file = tiny_gguf.save(tmp_path / "odd.gguf", tiny.model(), **more)
    assert_one_error(bpc("calibrate", "-m", file, "--corpus", "demo", "--dry-run"), "odd.gguf", said)


def test_a_missing_file_and_a_folder_of_files(bpc, file):
    assert_one_error(bpc("calibrate", "-m", "./none.gguf", "--dry-run"), "./none.gguf: no such file")
    assert_one_error(bpc("calibrate", "-m", file.parent, "--dry-run"), f"name its GGUF file, such as {file}")
    ran = bpc("calibrate", "-m", file, "--revision", "main", "--dry-run")
    assert_one_error(ran, "is a file, and only models on the Hub have revisions")


@pytest.mark.slow  # a process and a server; other tests fetch from the Hub, and load local files
def test_a_file_on_the_hub(bpc_process, file, tmp_path):
    with hub.serve({"org/packed": file.parent}, {}) as server:
        seen = test_hub.environment(server.url, tmp_path / "home")
        words = ("calibrate", "-m", f"org/packed/{file.name}", "--corpus", "demo", "--dry-run", "--json")
        plan = json.loads(bpc_process(*words, **seen).out)
        assert (plan["model"], plan["dtype"]) == ("tiny.Q0", "float32")
        assert len(plan["revision"]) == 40
        assert {request.rsplit("/", 1)[1] for request in server.requests if "/resolve/" in request} == {file.name}


def test_without_the_packages_one_line_says_how_to_get_them(bpc, file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # import raises ImportError
    assert_one_error(bpc("calibrate", "-m", file, "--dry-run"), f"needs gguf: {install('gguf')}")


def test_an_older_transformers_is_one_line(bpc, file, monkeypatch):
    monkeypatch.setattr("bpc_calib.models.gguf.gguf_tokenizer_is_wrong", lambda: True)
    assert_one_error(bpc("calibrate", "-m", file, "--dry-run"), "a GGUF file needs transformers 5.23")
