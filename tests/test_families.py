"""Every supported family: the description of its config, and its collected keys, which equal the keys of its cache."""

import pytest
import tiny
import torch

from bpc_calib import ModelError, describe
from bpc_calib.compat import cache_name
from bpc_calib.models.observation import observing, verify

families = pytest.mark.parametrize("family", list(tiny.FAMILIES))


def tokens(samples: int = 3, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 256, (samples, length), generator=torch.Generator().manual_seed(1))


@families
def test_collected_keys_equal_the_cached_keys(family):
    model = tiny.model(family)
    description = describe(model.config)
    verify(model, description)
    samples = tokens()
    keys, _ = tiny.collect_keys(model, samples, [list(range(40))] * 3, [0] * 3)
    assert list(keys) == description.full_layers
    for i, sample in enumerate(samples):
        cache = model(sample[None], use_cache=True)[cache_name()]
        for layer, collected in keys.items():
            part = collected[:, i * samples.shape[1] : (i + 1) * samples.shape[1]]
            torch.testing.assert_close(part, cache.layers[layer].keys[0], rtol=1e-5, atol=1e-6)


@families
def test_a_position_shift_rotates_the_keys_and_keeps_the_function(family):
    model = tiny.model(family)
    description = describe(model.config)
    assert description.can_shift
    sample = tokens(1)
    plain = model(sample).logits
    shifted = model(sample, position_ids=torch.arange(40)[None] + 61).logits
    torch.testing.assert_close(shifted, plain, rtol=1e-3, atol=1e-4)
    still, moved = (tiny.collect_keys(model, sample, [list(range(40))], [offset])[0] for offset in (0, 61))
    for layer in description.full_layers:
        without_rope = family == "smollm3" and layer == 1
        assert torch.allclose(still[layer], moved[layer], atol=1e-4) == without_rope
        torch.testing.assert_close(still[layer].norm(dim=-1), moved[layer].norm(dim=-1), rtol=1e-3, atol=1e-3)


@families
def test_every_family_can_be_calibrated(family, text_folder):
    model = tiny.model(family)
    before = model.config._attn_implementation
    artifact = tiny.calibrated(model, tiny.tokenizer(), corpora=[str(text_folder)], samples=4, bits=32)
    metadata = artifact.metadata
    assert metadata["model"]["model_type"] == family
    assert metadata["model"]["num_layers"] == 3
    expected_layers = [1, 2] if family == "gemma3_text" else [0, 1, 2]
    assert list(artifact.layers) == metadata["layers"] == expected_layers
    for layer in artifact.layers.values():
        assert layer.projection.shape == (2, 32, metadata["model"]["head_dim"])
        assert layer.residual.shape == (2, 33)
        assert (layer.residual[:, 0] == 1).all()
        assert (layer.residual[:, -1] < 0.5).all()  # 32 bits for keys of 8 or 16 dimensions
    assert metadata["calibration"]["sequence_length"] == 128  # the model's limit
    assert metadata["algorithm"]["position_shift"] is True
    assert model.config._attn_implementation == before


def test_multimodal_gemma3_is_calibrated_through_its_language_model(text_folder):
    model = tiny.multimodal()
    before = (model.config._attn_implementation, model.config.vision_config._attn_implementation)
    artifact = tiny.calibrated(model, tiny.tokenizer(), corpora=[str(text_folder)], samples=2, bits=32)
    assert list(artifact.layers) == [1, 2]
    assert (model.config._attn_implementation, model.config.vision_config._attn_implementation) == before


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v3", {}, r"deepseek_v3\) uses multi-head latent attention"),
        ("gemma2", {"head_dim": 16}, r"gemma2\) caps its attention logits"),
        ("bloom", {}, "does not use transformers' attention interface"),
        ("t5", {}, "not a causal language model"),
        ("vit", {}, "not a causal language model"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "not a causal language model"),
        ("mistral", {"sliding_window": 32}, "no layer attends to the whole context"),
        ("llama", {"num_attention_heads": [4, 2, 4]}, "differ per layer"),
        ("llama", {"num_hidden_layers": 0}, "its config has an invalid value for layers: 0"),
        ("llama", {"max_position_embeddings": -5}, "and -5 positions"),
        ("llama", {"head_dim": "x"}, "its config has an invalid value for head_dim: x"),
        ("qwen2", {"layer_types": ["full_attention"]}, "3 layers, 1 layer types"),
        ("llama", {"architectures": 5}, r"llama \(llama\) is not supported"),
    ],
)
def test_refuses_unsupported_configs(family, changes, message):
    made = tiny.config(family)
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    with pytest.raises(ModelError, match=message):
        describe(made)


def test_refuses_unsupported_attention_that_the_config_does_not_show():
    sinks = tiny.model("gpt_oss", head_dim=16, layer_types=["full_attention"] * 3, num_local_experts=2)
    with pytest.raises(ModelError, match="layer 0 has attention sinks"):
        verify(sinks, describe(sinks.config))
    both_ways = tiny.model("bert")
    with pytest.raises(ModelError, match="attends in both directions"):
        verify(both_ways, describe(both_ways.config))


def test_notices_a_layer_that_bypasses_the_interface():
    model = tiny.model()
    description = describe(model.config)
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **arguments: (hidden_states, None)
    with pytest.raises(ModelError, match=r"layers \[1\] bypass"):
        verify(model, description)
    with pytest.raises(ModelError, match=r"saw the layers \{0: 1, 1: 0, 2: 1\} times, expected 1 times each"):
        tiny.collect_keys(model, tokens(), [[0]] * 3, [0] * 3)


def test_notices_heads_that_differ_from_the_description():
    model = tiny.model()
    other = describe(tiny.config(num_key_value_heads=4))
    with pytest.raises(ModelError, match=r"has \(query heads, KV heads, head_dim\) \(4, 2, 8\)"):
        verify(model, other)


def test_only_the_given_model_is_observed():
    one, other = tiny.model(), tiny.model("qwen3")
    seen = []
    with observing(one, lambda module, *rest: seen.append(module.layer_idx)), torch.inference_mode():
        one(tokens(1))
        other(tokens(1))
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("rope", "can"),
    [
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, True),
        ({"rope_type": "yarn", "factor": 2.0}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, False),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, False),
    ],
)
def test_no_shift_if_rope_depends_on_the_length(rope, can):
    rope = {"rope_theta": 10_000.0, "original_max_position_embeddings": 64} | rope
    assert describe(tiny.config(rope_parameters=rope)).can_shift is can


def test_no_shift_if_queries_are_scaled_by_position():
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "llama_4_scaling_beta": 0.5}
    assert not describe(tiny.config(rope_parameters=rope)).can_shift
    assert not describe(tiny.config(attn_temperature_tuning=True)).can_shift


def test_the_config_hash_of_a_composite_model_does_not_depend_on_the_dtype():
    text = tiny.config("gemma3_text").to_dict()
    hashes = {
        describe(tiny.config("gemma3", text_config=text | {"dtype": dtype})).config_sha256
        for dtype in ("float32", "bfloat16", None)
    }
    assert hashes == {describe(tiny.config("gemma3_text")).config_sha256}


def test_no_shift_without_rope():
    assert not describe(tiny.config("gpt2")).can_shift


def test_the_id_of_a_local_model_is_the_base_name_of_its_folder(model_folder):
    import transformers

    config = transformers.AutoConfig.from_pretrained(model_folder)
    assert describe(config).id == "tiny-llama"
    assert describe(config).config_sha256 == describe(tiny.config()).config_sha256
