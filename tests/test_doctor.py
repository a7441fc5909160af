"""`bpc doctor`: what it says about a model is what the cache does, and what it says about packages is installed."""

import importlib.metadata
import importlib.util
import io
import json
import shutil
from contextlib import redirect_stdout

import hub
import pytest
import test_hub
import tiny
import torch

import bpc_calib
from bpc_calib.compat import with_cache
from bpc_cli.doctor import print_doctor


def config_folder(folder, family="llama", **changes):
    """A model folder without weights."""
    tiny.config(family, **changes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {"sparse": [2], "dense": [0, 1], "sliding": [], "other": []}),
        ("gemma3_text", {"sparse": [2], "dense": [1], "sliding": [0], "other": []}),
        ("qwen3_moe", {"sparse": [2], "dense": [0, 1], "sliding": [], "other": []}),
    ],
)
def test_a_served_model(bpc, tmp_path, monkeypatch, family, kinds):
    monkeypatch.setattr("bpc_cli.doctor.LENGTHS", (40, 700))
    folder = config_folder(tmp_path / "tiny", family)
    ran = bpc("doctor", "-m", folder, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)["model"]
    assert found["served"] is True
    assert found["layers"] == kinds
    # Experts are chosen by values: torch 2.15 runs them without memory, 2.13 cannot.
    assert found["checked"] == "layers" or (family, found["checked"]) == ("qwen3_moe", "config")
    assert found["calibration"]["weights_bytes"] == sum(4 * each.numel() for each in tiny.model(family).parameters())
    assert [row["beyond_the_model"] for row in found["reads"]] == [False, True]
    # The same counts as those of a cache that holds the tokens.
    model = tiny.model(family)
    bpc_calib.enable(model)
    for row in found["reads"]:
        cache = bpc_calib.BPCCache(model.config)
        with torch.inference_mode():
            model(torch.arange(row["tokens"])[None] % 200, **with_cache(cache))
        assert {name: row[name] for name in vars(cache.kv_parts(row["tokens"]))} == vars(cache.kv_parts(row["tokens"]))
        assert row["read"] == cache.kv_parts(row["tokens"]).read
    assert found["reads"][0]["read"] == found["reads"][0]["full"]  # 40 tokens are fewer than --min-tokens
    assert found["reads"][1]["read"] < found["reads"][1]["full"]


def test_the_screen(bpc, tmp_path):
    folder = config_folder(tmp_path / "a folder/tiny", "gemma3_text")
    ran = bpc("doctor", "-m", folder)
    assert ran.code == 0, ran.err
    assert ran.err == ""
    for part in (
        "tiny (gemma3_text): BPC serves it",
        "1 layers attend to what BPC chooses: 2",
        "1 layers attend to a window, as without BPC: 0",
        "32,768 *",
        "* beyond the model's context",
        "Settings for a context of 128 tokens here: the defaults",
        f"  bpc calibrate -m '{folder}'\n",
        f"  bpc generate -m '{folder}' -a tiny-bpc64.safetensors --prompt-file FILE\n",
        "This machine",
    ):
        assert part in ran.out
    assert len(ran.out.splitlines()) < 60


def test_the_settings_follow_from_the_shape(bpc, tmp_path):
    folder = config_folder(tmp_path / "tiny", dtype="bfloat16", max_position_embeddings=1 << 17)
    model = tiny.model()
    token = 2 * 2 * bpc_calib.describe(model.config).head_dim * 2  # bytes of its keys and values in one layer
    for tokens, attended in (("100000", 2000), (None, 655), ("700", 700)):
        words = () if tokens is None else ("--tokens", tokens)
        ran = bpc("doctor", "-m", folder, "--json", *words)
        assert ran.code == 0, ran.err
        found, count = json.loads(ran.out)["settings"], int(tokens or 32_768)
        assert (found["tokens"], found["attended"]) == (count, attended)
        assert 1000 < found["sparse_from"] < 32_768  # its keys and values are small
        assert found["cache_bytes"] == 3 * token * count
        assert found["codes_bytes"] == 3 * 2 * 9 * count
        apart = found["kv_device"]
        assert apart["name"] == ("cpu" if torch.cuda.is_available() else "disk:FOLDER")
        assert apart["stays_bytes"] == found["weights_bytes"] + found["codes_bytes"]
        assert apart["moves_bytes"] == found["cache_bytes"]
        assert found["weights_bytes"] == sum(2 * each.numel() for each in model.parameters())
        step = {"full": found["cache_bytes"], "ours": 3 * token * attended + (attended < count) * found["codes_bytes"]}
        weights = found["weights_bytes"] - 2 * model.get_input_embeddings().weight.numel()
        expected = {name: found["bytes_per_second"] / (weights + read) for name, read in step.items()}
        assert found["tokens_per_second"] == pytest.approx(expected["ours"])
        assert found["full_tokens_per_second"] == pytest.approx(expected["full"])
        said = " ".join(bpc("doctor", "-m", folder, *words).out.replace("│", " ").split())
        assert ("attends to all tokens, since choosing pays from" in said) == (attended == count)
        assert ("BPC gains little at this length" in said) == (attended == count)
    refused = bpc("doctor", "--tokens", "100")
    assert refused.code == 2
    assert "give --model" in refused.err
    beyond = bpc("doctor", "-m", folder, "--tokens", "200000").out
    assert "Settings for a context of 200,000 tokens here, beyond the model's limit: the defaults" in beyond


def test_what_fits_where(bpc, tmp_path, monkeypatch):
    """In memory alone, and with keys and values on disk: of each token 9 bytes per KV head and layer stay."""
    folder = config_folder(tmp_path / "tiny", dtype="bfloat16", max_position_embeddings=1 << 17)
    words = ("doctor", "-m", folder, "--tokens", "100000", "--device", "cpu")
    weights = json.loads(bpc(*words, "--json").out)["settings"]["weights_bytes"]
    token = 4 * bpc_calib.describe(tiny.model().config).head_dim
    for memory, disk, most, apart, fits in (
        (2000 * 6 * (token + 9), 10**12, 2000, 2000 * (token + 9) // 9, False),
        (90000 * 6 * (token + 9), 10**12, 90000, 90000 * (token + 9) // 9, True),
        (90000 * 6 * (token + 9), 6 * token * 95000, 90000, 95000, False),
        (-1, 10**12, 0, 0, False),
    ):
        usage = shutil.disk_usage(".")._replace(free=disk)
        monkeypatch.setattr("bpc_calib.bench.machine.available_memory", lambda device, free=memory: weights + free)
        monkeypatch.setattr("shutil.disk_usage", lambda path, usage=usage: usage)
        screen = json.loads(bpc(*words, "--json").out)
        said, found = shown(screen), screen["settings"]
        assert (found["most_tokens"], found["kv_device"]["most_tokens"]) == (most, min(apart, 1 << 22))
        assert found["kv_device"]["fits"] is fits
        assert f"for {most:,} tokens in memory, for {apart:,} with --kv-device disk:FOLDER" in said
        assert ("--kv-device disk:FOLDER fits" in said) is fits
        assert (f"which is too little: with --kv-device disk:FOLDER {apart:,} tokens fit" in said) is not fits
        assert ("--prompt-file FILE --kv-device disk:FOLDER" in said) is fits
        assert "weights and codes, " in said


def test_no_speed_is_promised_for_a_mixture_of_experts(bpc, tmp_path):
    ran = bpc("doctor", "-m", config_folder(tmp_path / "tiny", "qwen3_moe"))
    assert "not known beforehand for a mixture of experts" in " ".join(ran.out.replace("│", " ").split())


def test_it_loads_no_weights_and_writes_nothing(bpc, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = config_folder(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"not weights")
    assert bpc("doctor", "-m", folder).code == 0
    assert list((tmp_path / "here").iterdir()) == []


def test_a_model_whose_layers_are_dense_by_default(bpc, tmp_path):
    folder = config_folder(tmp_path / "two", num_hidden_layers=2)
    found = json.loads(bpc("doctor", "-m", folder, "--json").out)["model"]
    assert found["layers"]["sparse"] == [0, 1]
    assert found["layers"]["dense"] == []


def test_a_calibration_that_does_not_fit_into_memory(bpc, tmp_path):
    folder = config_folder(tmp_path / "huge", hidden_size=1 << 16, intermediate_size=1 << 20, num_hidden_layers=20)
    found = json.loads(bpc("doctor", "-m", folder, "--json").out)
    assert found["model"]["calibration"]["weights_bytes"] > 16e12
    assert "more than is free" in " ".join(bpc("doctor", "-m", folder).out.replace("│", " ").split())


def shown(found):
    """The words on the screen."""
    with redirect_stdout(io.StringIO()) as screen:
        print_doctor(found, "tiny" if "model" in found else None)
    return " ".join(screen.getvalue().replace("│", " ").split())


def test_a_calibration_fits_where_what_it_adds_is_free(bpc, tmp_path):
    """This process's own memory is no longer free, and a device may not say what is free."""
    folder = config_folder(tmp_path / "tiny")
    found = json.loads(bpc("doctor", "-m", folder, "--json", "--device", "cpu").out)
    calibration, machine = found["model"]["calibration"], found["machine"]
    assert calibration["memory_bytes"] - calibration["added_memory_bytes"] > 1e8
    machine["free_memory_bytes"] = calibration["added_memory_bytes"]
    assert "more than is free" not in shown(found)
    calibration["gpu_memory_bytes"] = 1 << 30
    for free, exceeds in ((None, False), (1 << 30, False), (1, True)):
        machine["free_gpu_memory_bytes"] = free
        assert ("more than is free" in shown(found)) is exceeds
    machine["free_memory_bytes"] -= 1
    machine["free_gpu_memory_bytes"] = None
    assert "more than is free" in shown(found)


def test_what_the_kernels_do_not_serve(bpc, tmp_path):
    folder = config_folder(tmp_path / "wide", num_attention_heads=32, num_key_value_heads=1, head_dim=16)
    ran = bpc("doctor", "-m", folder, "--json")
    assert json.loads(ran.out)["model"]["kernels"] == "32 query heads per KV head, more than 16"
    if json.loads(ran.out)["machine"]["backend"] != "torch":
        shown = " ".join(bpc("doctor", "-m", folder).out.split())
        assert "plain torch where its kernels do not serve 32 query heads" in shown


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("deepseek_v3", {}, "uses multi-head latent attention (MLA), which BPC does not support"),
        ("gemma2", {"head_dim": 16}, "caps its attention logits"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "is not a causal language model"),
        ("mistral", {"sliding_window": 32}, "no layer attends to the whole context"),
        ("gpt_oss", {"head_dim": 16, "layer_types": ["full_attention"] * 3}, "layer 0 has attention sinks"),
    ],
)
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_refused_model(bpc, tmp_path, family, changes, reason, words):
    ran = bpc("doctor", "-m", config_folder(tmp_path / "tiny", family, **changes), *words)
    assert ran.code == 1
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith("Error: tiny")
    assert reason in line


def test_a_missing_folder(bpc, tmp_path):
    ran = bpc("doctor", "-m", tmp_path / "nowhere")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"Error: {tmp_path / 'nowhere'}: no such model folder\n"


def test_the_installation(bpc):
    ran = bpc("doctor", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert "model" not in found
    core = found["installation"]["core"]
    assert {"torch", "transformers", "safetensors"} <= set(core)
    for name, each in core.items():
        assert each["installed"] == importlib.metadata.version(name)
        assert each["fits"] is True
    extras = found["installation"]["extras"]
    assert set(extras["gguf"]["packages"]) == {"gguf", "accelerate", "transformers"}
    for name, module in (("plots", "matplotlib"), ("accelerate", "accelerate"), ("vllm", "vllm")):
        assert (extras[name]["packages"][module]["installed"] is not None) == (
            importlib.util.find_spec(module) is not None
        )
    shown = bpc("doctor").out
    packages = {line.split()[1] for line in shown.partition("Not installed")[0].splitlines() if line.startswith("│")}
    for each in extras.values():
        assert (each["install"] in shown) == (not each["complete"])
        assert not each["complete"] or packages >= set(each["packages"])
    assert packages >= set(core)
    assert extras["plots"]["install"].startswith("pip install 'matplotlib>=")
    machine = found["machine"]
    assert machine["hub"]["reachable"] is None  # the tests are offline
    assert machine["free_disk_bytes"] <= shutil.disk_usage(".").total
    assert machine["free_memory_bytes"] > 1e8
    assert machine["backend"] in ("torch", "native", "triton")
    if machine["backend"] == "native":
        from bpc_calib.backends.cpu import native

        assert machine["instructions"] == native.isa()
        assert f"cores, kernels for {native.isa()}" in shown


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("no-such-package>=2", "no-such-package is not installed: pip install 'no-such-package>=2'"),
        ("numpy>=99", f"numpy {importlib.metadata.version('numpy')} does not fit: pip install 'numpy>=99'"),
    ],
)
def test_a_broken_installation(bpc, tmp_path, monkeypatch, requirement, reason):
    folder = tmp_path / "bpc_calib-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: bpc-calib\nVersion: 0.1.0\nRequires-Dist: {requirement}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    ran = bpc("doctor")
    assert (ran.code, ran.out, ran.err) == (1, "", f"Error: {reason}\n")


def test_a_backend_that_is_named(bpc, monkeypatch):
    monkeypatch.setenv("BPC_BACKEND", "torch")
    assert json.loads(bpc("doctor", "--json", "--device", "cpu").out)["machine"]["backend"] == "torch"
    monkeypatch.setenv("BPC_BACKEND", "best")
    ran = bpc("doctor")
    assert (ran.code, ran.out) == (1, "")
    assert "BPC_BACKEND must be one of torch, triton, native" in ran.err


@pytest.mark.slow  # processes; tests/test_hub.py reads models of the Hub in every push
def test_a_model_on_the_hub(bpc_process, tmp_path):
    repositories = {"org/name": tiny.save(tmp_path / "model")}
    with hub.serve(repositories, {}) as server:
        seen = test_hub.environment(server.url, tmp_path / "home")
        ran = bpc_process("doctor", "-m", "org/name", "--json", **seen)
        assert ran.code == 0, ran.err
        found = json.loads(ran.out)
        assert found["machine"]["hub"] == {"address": server.url, "reachable": True}
        assert found["model"]["id"] == "org/name"
        assert len(found["model"]["revision"]) == 40
        assert not any("safetensors" in request and "resolve" in request for request in server.requests)
    gone = bpc_process("doctor", "--json", **seen)
    assert gone.code == 0
    assert json.loads(gone.out)["machine"]["hub"]["reachable"] is False
