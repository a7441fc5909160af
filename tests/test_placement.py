"""Models that are spread over devices, main memory and disk, and quantised checkpoints."""

import importlib.util
import json
import sys

import pytest
import tiny
import torch
from test_cli import assert_one_error

from bpc_artifacts import load, save
from bpc_calib import BPCCache, ModelError, describe, enable
from bpc_calib.compat import with_cache
from bpc_calib.extras import install
from bpc_calib.models.loading import load_config, load_model, load_tokenizer

pytest.importorskip("accelerate", reason="needs the extra accelerate")

ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.norm": "disk",
    "lm_head": "disk",
}


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory):
    """A tiny model with 8-bit floats and one scale per block, as in the FP8 checkpoints on the Hub."""
    folder = tmp_path_factory.mktemp("fp8") / "tiny-fp8"
    model = tiny.model().bfloat16()
    weights = model.state_dict()
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].float().abs().max() / 448
        weights[name] = (weights[name].float() / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale.reshape(1, 1)  # the weights are smaller than one block
    model.save_pretrained(folder, state_dict=weights)
    tiny.tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_calibration_from_disk_writes_the_same_file(model_folder, text_folder, tmp_path):
    for name, device_map in (("memory", None), ("auto", "auto"), ("disk", ON_DISK)):
        model = load_model(str(model_folder), device_map=device_map)
        made = tiny.calibrated(model, load_tokenizer(str(model_folder)), [str(text_folder)], samples=4, bits=32)
        save(made, tmp_path / name)
        assert {weight.device.type for weight in model.parameters()} == ({"cpu", "meta"} if name == "disk" else {"cpu"})
    memory, auto, disk = ((tmp_path / name).read_bytes() for name in ("memory", "auto", "disk"))
    assert memory == auto == disk


def test_decoding_from_disk_gives_the_same_tokens(model_folder):
    ids, found = torch.arange(60).unsqueeze(0), []
    for device_map in (None, ON_DISK):
        model = load_model(str(model_folder), device_map=device_map)
        enable(model)
        cache = BPCCache(model.config, tiny.artifact(model.config), budget=8, min_tokens=1, dense_layers=())
        found.append(model.generate(ids, **with_cache(cache), max_new_tokens=8, do_sample=False))
    assert torch.equal(*found)


def test_the_first_layer_must_be_in_memory(model_folder):
    with pytest.raises(ModelError, match="does not fit: not even its first layer"):
        load_model(str(model_folder), device_map=ON_DISK | {"model.embed_tokens": "disk"})


def test_the_command_line_spreads_a_model(bpc, model_folder, text_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", 4, "--bits", 32)
    assert bpc(*words, "-o", "plain").code == 0
    assert bpc(*words, "-o", "spread", "--device-map", "auto").code == 0
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "spread").read_bytes()
    ran = bpc(*words, "--device-map", "auto", "--device", "cpu")
    assert_one_error(ran, "--device-map chooses the devices: leave out --device cpu", code=2)


def test_without_accelerate_one_line_says_how_to_get_it(bpc, model_folder, fp8_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)  # import raises ImportError
    for words in (("-m", model_folder, "--device-map", "auto"), ("-m", fp8_folder)):
        ran = bpc("calibrate", *words, "--corpus", "demo", "--dry-run")
        assert_one_error(ran, f"needs accelerate: {install('accelerate')}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, transformers keeps FP8 packed, for a GPU alone")
def test_a_quantised_checkpoint_calibrates_and_fits_the_model_it_was_made_from(
    bpc, fp8_folder, text_folder, tmp_path, monkeypatch
):
    """transformers unpacks FP8 where there is no GPU, without another package."""
    monkeypatch.chdir(tmp_path)
    found = load_model(str(fp8_folder)).state_dict()
    for name, weight in tiny.model().state_dict().items():
        assert (found[name].float() - weight).abs().max() < weight.abs().max() / 16, name
    ran = bpc("calibrate", "-m", fp8_folder, "--corpus", text_folder, "--samples", 4, "--bits", 32, "-q")
    assert (ran.code, ran.err) == (0, "")
    made = load(tmp_path / "tiny-fp8-bpc32.safetensors")
    assert made.metadata["calibration"]["dtype"] == "bfloat16"
    assert describe(load_config(str(fp8_folder))[0]).config_sha256 == describe(tiny.config()).config_sha256
    ran = bpc("generate", "-m", fp8_folder, "-a", "tiny-fp8-bpc32.safetensors", "--prompt", "A river", "--json", "-q")
    assert ran.code == 0


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "gptqmodel"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, "torchao"),
    ],
    ids=["bitsandbytes", "gptq", "awq", "compressed-tensors", "torchao"],
)
def test_a_format_whose_package_is_missing_is_one_line(bpc, model_folder, tmp_path, settings, package):
    if importlib.util.find_spec(package.replace("-", "_")) is not None:
        pytest.skip(f"{package} is installed")
    folder = tmp_path / "packed"
    folder.mkdir()
    for path in model_folder.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    config = json.loads((model_folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    ran = bpc("calibrate", "-m", folder, "--corpus", "demo", "--samples", 3, "-q")
    assert_one_error(ran, f"{folder}", "pip install", package)
