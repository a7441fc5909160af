"""A sample in chunks has the keys of a sample at once; which of the two is chosen; where its tokens go."""

import pytest
import tiny
import torch

from bpc_calib import ModelError, describe
from bpc_calib.calibration.keys import chunk_edges, pass_bytes, sample_keys
from bpc_calib.models.observation import input_device, verify

SLIDING = ["sliding_attention", "full_attention"] * 2


def sliding(**changes):
    """A model of which half the layers have a window of 16."""
    return tiny.model(
        "gemma3_text", num_hidden_layers=4, layer_types=SLIDING, **{"max_position_embeddings": 4096, **changes}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multimodal", [False, True])
def test_chunks_have_the_keys_and_moments_of_a_whole_pass(monkeypatch, dtype, multimodal):
    model = (tiny.multimodal() if multimodal else sliding()).to(dtype)
    description = describe(model.config)
    tokens = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    arguments = (model, description, tokens, [0, 1, 15, 16, 31, 32, 33, 90, 119])
    whole = sample_keys(*arguments, offset=5, moments=True)
    monkeypatch.setattr("bpc_calib.calibration.keys.CHUNK", 32)
    monkeypatch.setattr("bpc_calib.calibration.keys.pass_bytes", lambda *_: (2, 1))
    assert chunk_edges(model, description, 120) == [(0, 32), (32, 64), (64, 96), (96, 120)]
    chunked = sample_keys(*arguments, offset=5, moments=True)
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.05}
    for layer in description.full_layers:
        torch.testing.assert_close(chunked.keys[layer], whole.keys[layer], **tolerance)
        scale = whole.moments[layer].abs().max()
        torch.testing.assert_close(chunked.moments[layer] / scale, whole.moments[layer] / scale, **tolerance)


def test_chunks_are_the_same_with_one_and_two_threads(monkeypatch):
    monkeypatch.setattr("bpc_calib.calibration.keys.CHUNK", 512)
    model = sliding(hidden_size=64)
    description = describe(model.config)
    assert len(chunk_edges(model, description, 2000)) == 4
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            tokens = torch.arange(2000) % 256
            found.append(sample_keys(model, description, tokens, list(range(0, 2000, 50))).keys)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0][layer], found[1][layer]) for layer in found[0])


def test_chunks_serve_long_samples_of_models_with_sliding_layers():
    plain = tiny.model(max_position_embeddings=1 << 20)
    for model, length, passes in (
        (plain, 2048, 1),
        (plain, 100_000, 1),
        (sliding(), 2048, 1),
        (sliding(), 16_000, 8),
        (sliding(sliding_window=16_000, max_position_embeddings=32_000), 16_000, 1),
    ):
        edges = chunk_edges(model, describe(model.config), length)
        assert len(edges) == passes
        assert [edge[0] for edge in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == length
    whole, chunked = pass_bytes(sliding().config, describe(sliding().config), 100_000, 4)
    assert whole > 100_000**2
    assert chunked < whole / 10


def test_too_little_memory_is_one_line_that_says_what_is_kept(text_folder, tmp_path):
    model = tiny.model()
    passes = []

    def hook(module, arguments, output):
        passes.append(1)
        if len(passes) == 4:  # one to verify the model, then the third sample
            torch.empty(1 << 50)  # torch's own error

    settings = {"corpora": [str(text_folder)], "samples": 4, "bits": 32, "work_dir": tmp_path / "work"}
    handle = model.model.layers[1].register_forward_hook(hook)
    with pytest.raises(
        ModelError, match=r"out of memory in a sample of 128 tokens: .* goes on after 2 finished samples"
    ):
        tiny.calibrated(model, tiny.tokenizer(), **settings)
    handle.remove()
    seen = []
    tiny.calibrated(model, tiny.tokenizer(), progress=lambda *step: seen.append(step), **settings)
    assert [done for stage, done, _ in seen if stage == "keys"] == [2, 3, 4]


def test_offloaded_layers_give_the_same_keys(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = tiny.model()
    description = describe(model.config)
    tokens = torch.arange(50) % 256
    expected = sample_keys(model, description, tokens, [3, 30, 49], moments=True)
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert model.get_input_embeddings().weight.is_meta
    assert input_device(model) == torch.device("cpu")
    verify(model, description)
    found = sample_keys(model, description, tokens, [3, 30, 49], moments=True)
    for layer, keys in expected.keys.items():
        assert torch.equal(found.keys[layer], keys)
        assert torch.equal(found.moments[layer], expected.moments[layer])
