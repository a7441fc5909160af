"""`enable`, `disable` and `BPCCache`: what they leave unchanged, what they refuse, and that caches share no state."""

import copy
import gc
import logging
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

import bpc_calib
from bpc_artifacts import ArtifactError
from bpc_calib import BPCCache, InputError, ModelError, disable, enable
from bpc_calib.compat import with_cache
from bpc_calib.models.description import ModelDescription
from bpc_calib.runtime import enabling
from bpc_calib.runtime.call import AttentionCall
from bpc_calib.runtime.growing import append
from bpc_calib.runtime.hashed_layer import BPCLayer

SMALL = {"budget": 5, "min_tokens": 1, "dense_layers": ()}


def ids(length: int = 40, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(250, (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(model, prompt=None, **arguments):
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_logits": True} | arguments
    prompt = ids() if prompt is None else prompt
    made = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), return_dict_in_generate=True, pad_token_id=256, **settings
    )
    return made.sequences, torch.stack(made.logits)


def enabled(family="llama", **changes):
    model = tiny.model(family, **changes)
    enable(model)
    return model


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, "sdpa") for family in tiny.FAMILIES] + [("llama", "eager"), ("gemma3_text", "eager")],
)
def test_without_a_bpc_cache_an_enabled_model_is_untouched(family, attention):
    model = tiny.model(family)
    model.set_attn_implementation(attention)
    prompt, padded = ids(30, rows=2), torch.ones(2, 30, dtype=torch.long)
    padded[0, :7] = 0

    def everything():
        arguments = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        made = model.generate(prompt, attention_mask=padded, **arguments)
        with torch.no_grad():
            plain = model(prompt).logits
            again = model(prompt, attention_mask=padded, use_cache=False).logits
        return made.sequences, *made.logits, plain, again

    before = everything()
    enable(model)
    assert all(map(torch.equal, before, everything()))
    disable(model)
    assert model.config._attn_implementation == attention
    assert all(map(torch.equal, before, everything()))


def test_buffers_grow_by_blocks():
    buffer, copies = None, 0
    for length in range(5000):
        grown = append(buffer, length, torch.full((1, 1, 1), float(length)))
        copies += grown is not buffer
        buffer = grown
    assert copies < 25
    assert buffer.shape[2] < 5000 * 1.07
    assert torch.equal(buffer[0, 0, :5000], torch.arange(5000.0))


def test_the_room_of_a_buffer_is_zeros():
    """Flex attention on a CPU reads some of it; in this mode fresh memory is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        buffer = append(None, 0, torch.ones(1, 2, 40, 8))
    finally:
        torch.use_deterministic_algorithms(before)
    assert (buffer[:, :, :40] == 1).all()
    assert buffer.shape[2] > 40
    assert (buffer[:, :, 40:] == 0).all()


def test_memory_grows_only_by_the_new_tokens():
    model = enabled()
    cache = BPCCache(model.config, safeguard=0.1, **SMALL)
    generate(model, ids(40), **with_cache(cache))
    layer = cache.layers[1]
    before = {name: buffer.data_ptr() for name, buffer in layer.buffers.items() if name != "worst"}
    tokens = generate(model, ids(60), **with_cache(cache))[0]
    assert cache.get_seq_length() == tokens.shape[1] - 1
    assert {name: buffer.data_ptr() for name, buffer in layer.buffers.items() if name != "worst"} == before
    assert set(before) == {"keys", "values", "codes", "error", "gain"}


def test_errors_and_gains_are_stored_only_if_needed():
    model = enabled()
    cache = BPCCache(model.config, gain=False, safeguard=0.0, **SMALL)
    generate(model, **with_cache(cache))
    assert set(cache.layers[0].buffers) == {"keys", "values", "codes"}


def test_a_cache_is_freed_when_it_is_dropped():
    model = enabled()
    gc.disable()
    try:
        cache = BPCCache(model.config, **SMALL)
        generate(model, **with_cache(cache))
        watched = weakref.ref(cache.layers[0].buffers["keys"])
        del cache
        assert watched() is None
    finally:
        gc.enable()


def test_a_model_is_freed_although_its_cache_lives():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    generate(model, **with_cache(cache))
    watched = weakref.ref(model.model.layers[0].self_attn)
    del model
    gc.collect()
    assert watched() is None
    assert cache.get_seq_length() == 45


def test_inference_mode_and_no_grad_mix():
    model = enabled()
    made = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = BPCCache(model.config, **SMALL)
        with mode():
            model(ids(), **with_cache(cache))
            model(ids(1), **with_cache(cache))
        made.append(generate(model, ids(50), **with_cache(cache))[0])
    assert torch.equal(*made)
    model(ids(3), **with_cache(fresh := BPCCache(model.config, **SMALL)))  # with gradients on
    assert not fresh.layers[0].buffers["keys"].requires_grad


class HashesFirst(BPCLayer):
    """A layer whose steps find a code for every token."""

    def decode(self, query, rows):
        self.hash(rows.valid)
        return super().decode(query, rows)


def test_whole_steps_keep_what_single_stages_keep():
    """The same codes, gains and errors, and the same logits: after a prompt, a crop, a rewind and another prompt."""
    model = enabled()
    plain = type("InStages", (BPCCache,), {"layer_class": HashesFirst})
    rules = SMALL | {"budget": 20, "safeguard": 0.2, "recent": 1}
    made = []
    for kind in (plain, BPCCache):
        cache, logits = kind(model.config, tiny.artifact(model.config, metric=True, centred=True), **rules), []
        for length, undo in (
            (80, None),
            (1, None),
            (1, None),
            (1, cache.crop),
            (1, cache.rewind),
            (300, None),
            (1, None),
        ):
            if undo is not None:
                undo(-1 if undo == cache.crop else 81)
            with torch.no_grad():
                logits.append(model(ids(length, seed=length), **with_cache(cache)).logits[:, -1])
        made.append((cache, torch.stack(logits)))
    (stages, expected), (whole, found) = made
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    length = stages.get_seq_length()
    for one, other in zip(stages.layers, whole.layers, strict=True):
        assert other.hashed == one.hashed == length
        for name in ("codes", "gain", "error"):
            assert torch.equal(one.buffers[name][:, :, :length], other.buffers[name][:, :, :length]), name


def test_a_copy_of_a_cache_is_independent():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    generate(model, **with_cache(cache), max_new_tokens=2, min_new_tokens=2)
    cache.crop(-1)
    once, again = copy.deepcopy(cache), copy.deepcopy(cache)
    first = generate(model, ids(50, seed=1), **with_cache(once))
    generate(model, ids(60, seed=2), **with_cache(cache))
    second = generate(model, ids(50, seed=1), **with_cache(again))
    assert all(map(torch.equal, first, second))


def test_models_and_threads_share_no_state():
    models = [enabled(), enabled("qwen3"), None]
    models[2] = models[0]  # one model, two threads
    rules = [SMALL, SMALL | {"bits": 128, "gain": False}, SMALL | {"budget": 9, "sink": 3}]
    prompts = [ids(30 + i, seed=i) for i in range(3)]

    def run(i):
        return generate(models[i], prompts[i], **with_cache(BPCCache(models[i].config, **rules[i])), max_new_tokens=12)[
            0
        ]

    alone = [run(i) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            assert all(map(torch.equal, alone, pool.map(run, range(3))))


def test_a_second_enable_or_disable_does_nothing():
    model = enabled()
    name = model.config._attn_implementation
    enable(model)
    assert model.config._attn_implementation == name
    disable(model)
    disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_an_enabled_model_is_saved_with_its_own_attention(tmp_path):
    model = enabled()
    model.save_pretrained(tmp_path)
    assert "bpc" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_only_the_text_part_of_a_multimodal_model_is_enabled():
    model = tiny.multimodal()
    before = model.config.vision_config._attn_implementation
    enable(model)
    assert model.config.vision_config._attn_implementation == before
    made, _ = generate(model, **with_cache(BPCCache(model.config, **SMALL)))
    assert made.shape == (1, 46)
    disable(model)
    assert model.config.text_config._attn_implementation == before


def test_flash_attention_is_called_under_its_own_name():
    """FlashAttention loads the implementation that the module's config names, so that must be its own name."""
    seen = []

    def flash(module, query, key, value, attention_mask, **arguments):
        seen.append((module.config._attn_implementation, module.is_causal, module.config.hidden_size))
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **arguments)

    AttentionInterface.register("flash_stand_in", flash)
    module = tiny.model().model.layers[0].self_attn
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    found = enabling._attention("flash_stand_in", module, query, key, key, None, scaling=0.3)
    expected = AttentionInterface()["sdpa"](module, query, key, key, None, scaling=0.3)
    assert torch.equal(found[0], expected[0])
    assert seen == [("flash_stand_in", True, 32)]


def test_two_dimensional_masks_mark_padding():
    """FlashAttention uses such masks."""

    def mask_2d(*arguments, attention_mask=None, kv_length=0, **rest):
        return None if attention_mask is None else attention_mask[:, :kv_length]

    def attention(module, query, key, value, attention_mask, **arguments):
        if attention_mask is not None:
            causal = torch.ones(query.shape[2], key.shape[2]).tril(key.shape[2] - query.shape[2]).bool()
            attention_mask = attention_mask[:, None, None].bool() & causal
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **arguments)

    AttentionInterface.register("padding_2d", attention)
    AttentionMaskInterface.register("padding_2d", mask_2d)
    prompt = {"input_ids": ids(30, rows=2), "attention_mask": (torch.arange(30) >= torch.tensor([[0], [11]])).long()}
    arguments = {"max_new_tokens": 5, "do_sample": False}
    model = enabled()
    expected = model.generate(**prompt, **with_cache(BPCCache(model.config, **SMALL)), **arguments)
    model = tiny.model()
    model.set_attn_implementation("padding_2d")
    enable(model)
    assert torch.equal(model.generate(**prompt, **with_cache(BPCCache(model.config, **SMALL)), **arguments), expected)


def test_an_attention_without_masks_is_refused():
    AttentionInterface.register("maskless", AttentionInterface()["sdpa"])
    model = tiny.model()
    model.set_attn_implementation("maskless")
    with pytest.raises(ModelError, match="registers no mask function"):
        enable(model)


@pytest.mark.parametrize(
    ("family", "changes", "fault"),
    [
        ("gemma2", {"head_dim": 16}, "caps its attention logits"),
        ("deepseek_v3", {}, "MLA"),
        ("mistral", {"sliding_window": 16}, "no layer attends to the whole context"),
        ("bloom", {}, "interface"),
        ("gpt_oss", {"head_dim": 16, "layer_types": ["full_attention"] * 3, "num_local_experts": 4}, "sinks"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(family, changes, fault):
    model = tiny.model(family, **changes)
    with pytest.raises(ModelError, match=fault) as refused:
        enable(model)
    assert "\n" not in str(refused.value)
    assert not str(model.config._attn_implementation).startswith("bpc")


def test_objects_that_are_no_model_or_config_are_refused():
    with pytest.raises(InputError, match=r"expected a model's config \(model\.config\), not LlamaForCausalLM"):
        BPCCache(tiny.model())
    with pytest.raises(InputError, match="expected a transformers model, not Linear"):
        enable(nn.Linear(2, 2))


class BypassedAttention(nn.Module):
    """Attention that calls SDPA directly after it has cached the keys."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments, **keywords):
        config = self.inner.config
        try:
            self.inner.config = copy.copy(config)
            self.inner.config._attn_implementation_internal = "sdpa"
            return self.inner(*arguments, **keywords)
        finally:
            self.inner.config = config


def test_a_model_that_bypasses_the_attention_is_refused():
    model = enabled()
    for layer in model.model.layers:
        layer.self_attn = BypassedAttention(layer.self_attn)
    with pytest.raises(ModelError, match=r"layer 0 cached keys without BPC's attention|layer 1"):
        generate(model, **with_cache(BPCCache(model.config, **SMALL)))
    disable(model)
    with pytest.raises(ModelError, match="bypass"):
        enable(model)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_is_refused_by_a_model_that_is_not_enabled(layers):
    model = tiny.model(num_hidden_layers=layers)
    with pytest.raises(ModelError, match=r"call bpc_calib\.enable\(model\)"):
        generate(model, **with_cache(BPCCache(model.config, **SMALL)))


def test_a_cache_is_refused_after_disable():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    generate(model, **with_cache(cache))
    disable(model)
    with pytest.raises(ModelError, match=r"is now sdpa, .* call bpc_calib\.enable\(model\)"):  # in the first step
        model(ids(1), **with_cache(cache))


def test_a_model_is_compared_once(monkeypatch):
    """Not in every layer: that took a tenth of a short prompt's time."""
    asked, original = [], ModelDescription.fits

    def fits(self, config):
        asked.append(config)
        return original(self, config)

    monkeypatch.setattr(ModelDescription, "fits", fits)
    model = enabled()
    cache = BPCCache(model.config, dense_layers=())
    for _ in range(2):
        model(ids(40), **with_cache(cache))
    assert asked == [model.config]


def test_a_cache_of_another_model_is_refused():
    model, twin, other = enabled(), enabled(), enabled(rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    cache = BPCCache(model.config, **SMALL)
    with pytest.raises(ModelError, match="belongs to another model"):
        generate(other, **with_cache(BPCCache(model.config, **SMALL)))
    generate(model, **with_cache(cache))
    with pytest.raises(ModelError, match="belongs to another model"):
        generate(twin, ids(50), **with_cache(cache))
    cache.reset()
    generate(twin, **with_cache(cache))


@pytest.mark.parametrize("source", ["assistant", "early exit"])
def test_drafts_by_a_model_are_told_to_save_nothing(source, caplog):
    """Every step verifies drafts, and so attends to everything."""
    model = enabled()
    drafts = {"assistant_early_exit": 1} if source == "early exit" else {"assistant_model": tiny.model()}
    cache, long = BPCCache(model.config, **SMALL), {"max_new_tokens": 60, "min_new_tokens": 60}
    made, _ = generate(model, **with_cache(cache), **drafts, **long)
    expected, _ = generate(model, **long)
    said = [each.message for each in caplog.records if "saves nothing" in each.message]
    assert len(said) == 1
    assert torch.equal(made[:, :-1], expected[:, :-1])


def test_a_batch_of_another_size_is_refused():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    model(ids(10), **with_cache(cache))
    with pytest.raises(InputError, match="holds 1 sequences, but the new tokens are of 2"):
        model(ids(1, rows=2), **with_cache(cache))


def test_masks_that_weigh_tokens_or_differ_between_heads_are_refused():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    with torch.no_grad():
        model(ids(10), **with_cache(cache))
        with pytest.raises(ModelError, match="weighs tokens"):
            model(ids(1), **with_cache(cache), attention_mask=torch.full((1, 1, 1, 11), -0.5))
        cache.reset()
        model(ids(10), **with_cache(cache))
        with pytest.raises(ModelError, match="differs between heads"):
            model(ids(1), **with_cache(cache), attention_mask=torch.zeros(1, 4, 1, 11))


def test_a_cache_is_refused_after_a_failed_pass():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    with torch.no_grad():
        model(ids(), **with_cache(cache))
        hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids(1), **with_cache(cache))
        hook.remove()
        with pytest.raises(
            ModelError,
            match="an earlier pass with this cache failed, whose first layer holds 41 tokens and the last 40",
        ):
            model(ids(1), **with_cache(cache))


def test_a_cache_cropped_to_nothing_accepts_another_batch_size():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    generate(model, ids(30, rows=2), **with_cache(cache))
    cache.crop(-cache.get_seq_length())
    cache.batch_select_indices(torch.tensor([0]))
    found = generate(model, ids(33), **with_cache(cache))
    assert all(map(torch.equal, found, generate(model, ids(33), **with_cache(BPCCache(model.config, **SMALL)))))


def test_a_refused_crop_changes_no_layer():
    model = enabled("gemma3_text")
    cache = BPCCache(model.config, **SMALL)
    generate(model, **with_cache(cache))
    with pytest.raises(InputError, match="layer 0 has a sliding window of 16"):
        cache.crop(-1)
    with pytest.raises(InputError, match="as a negative number"):
        cache.crop(3)
    assert {layer.get_seq_length() for layer in cache.layers} == {45}


def test_a_model_may_change_settings_other_than_its_shape():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    model.config.pad_token_id = 3
    model.resize_token_embeddings(300)
    tokens, logits = generate(model, **with_cache(cache))
    assert logits.shape[-1] == 300
    assert torch.equal(tokens, generate(model, **with_cache(BPCCache(model.config, **SMALL)))[0])


def test_attentions_with_similar_names_are_distinguished():
    called = []
    for name in ("my-attn", "my_attn", "my.attn"):

        def attention(*arguments, name=name, **keywords):
            called.append(name)
            return AttentionInterface()["sdpa"](*arguments, **keywords)

        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    models = {}
    for name in ("my-attn", "my_attn", "my.attn"):
        models[name] = tiny.model()
        models[name].set_attn_implementation(name)
        enable(models[name])
    for name, model in models.items():
        called.clear()
        model(ids(3))
        assert set(called) == {name}
        disable(model)
        assert model.config._attn_implementation == name


def test_a_continued_cache_with_chunks_is_right_or_refused():
    model = enabled()
    prompt = ids(60)

    def continued(**arguments):
        cache = BPCCache(model.config, **SMALL)
        generate(model, prompt[:, :30], **with_cache(cache), max_new_tokens=1, min_new_tokens=1)
        return generate(model, prompt, **with_cache(cache), **arguments)[0]

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21):
        with pytest.raises(InputError, match="prefill_chunk_size"):
            continued(prefill_chunk_size=8)
    else:
        assert torch.equal(continued(prefill_chunk_size=8), continued())


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": -1}, "budget"),
        ({"budget": 1.5}, "budget"),
        ({"budget": "abc"}, "budget"),
        ({"budget": True}, "budget"),
        ({"budget": float("nan")}, "budget"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"min_tokens": 2.5}, "min_tokens"),
        ({"min_context": -1}, "min_context must be an integer of at least 0"),
        ({"min_context": True}, "min_context"),
        ({"recent": -1}, "recent"),
        ({"sink": -1}, "sink"),
        ({"safeguard": 1.1}, "safeguard"),
        ({"safeguard": "x"}, "safeguard"),
        ({"group": "sum"}, "group must be one of relative, max, not 'sum'"),
        ({"gain": 1}, "gain"),
        ({"bits": 63}, "bits"),
        ({"bits": 64.0}, "bits"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"dense_layers": 1}, "dense_layers"),
        ({"dense_layers": "0"}, "dense_layers"),
        ({"dense_layers": (99,)}, "dense_layers: 99 is not a layer of llama, which has layers 0 to 2"),
        ({"dense_layers": (-1,)}, "dense_layers"),
        ({"dense_layers": (0, 1, 2)}, "leave BPC no layer"),
    ],
)
def test_settings_out_of_range_are_refused(rules, fault):
    with pytest.raises(InputError, match=fault):
        BPCCache(tiny.config(), **rules)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 4}, "layers: the artifact has 4, the model 3"),
        ({"num_key_value_heads": 4}, "KV heads: the artifact has 4, the model 2"),
        ({"head_dim": 16}, "head_dim: the artifact has 16, the model 8"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "RoPE"),
    ],
)
def test_the_artifact_of_another_model_is_refused(changes, named):
    with pytest.raises(ArtifactError, match=named):
        BPCCache(tiny.config(), tiny.artifact(tiny.config(**changes)))


def test_the_artifact_of_another_model_is_refused_before_its_layers_are_counted():
    with pytest.raises(ArtifactError, match="layers: the artifact has 3, the model 2"):
        BPCCache(tiny.config(num_hidden_layers=2), tiny.artifact(tiny.config()))


def test_doubts_about_an_artifact_are_logged(caplog):
    with caplog.at_level(logging.WARNING, "bpc_calib"):
        BPCCache(tiny.config(), tiny.artifact(tiny.config(vocab_size=300)))
    assert "config differs" in caplog.text


def test_the_method_of_the_artifact_sets_the_ranking_defaults():
    config = tiny.config()

    def rules(artifact, **settings):
        return BPCCache(config, artifact, **settings).layers[2].rules

    paper, ours = tiny.artifact(config, name="paper"), tiny.artifact(config)

    def chosen(rules):
        return rules.gain, rules.group, rules.safeguard, rules.recent

    assert chosen(rules(paper)) == (False, "max", 0.1, 1)
    assert chosen(rules(ours)) == (True, "relative", 0, 0)
    assert chosen(rules(None)) == (True, "relative", 0, 0)
    for group in ("relative", "max"):
        settings = {"gain": True, "group": group, "safeguard": 0.5, "recent": 3}
        assert chosen(rules(paper, **settings)) == chosen(rules(ours, **settings)) == (True, group, 0.5, 3)
    assert rules(ours, gain=False).gain is False


def test_a_layer_with_other_kv_heads_than_the_projections_is_refused():
    config = tiny.config()
    layer = BPCCache(config, tiny.artifact(config), dense_layers=()).layers[0]
    layer.update(torch.ones(1, 1, 9, 8), torch.ones(1, 1, 9, 8))  # one of two heads, as under tensor parallelism
    with pytest.raises(ModelError, match="layer 0 has 1 KV heads, but its projections have 2"):
        layer.hash(None)


def test_artifacts_that_do_not_fit_the_settings_are_refused():
    config = tiny.config()
    with pytest.raises(InputError, match="64 bits, not 128"):
        BPCCache(config, tiny.artifact(config), bits=128)
    with pytest.raises(InputError, match=r"what bpc_artifacts\.load returns, not str"):
        BPCCache(config, "file.safetensors")
    assert BPCCache(config, tiny.artifact(config, 32)).layers[2].calibrated.projection.shape[1] == 32


def test_online_projections_are_fitted_at_the_first_choice():
    model = enabled()
    cache = BPCCache(model.config, budget=0.1, min_tokens=44, dense_layers=())
    generate(model, ids(40), **with_cache(cache), max_new_tokens=5, min_new_tokens=5)  # 44 tokens cached
    assert cache.layers[0].codebook is None
    generate(model, ids(45), **with_cache(cache), max_new_tokens=2, min_new_tokens=2)
    assert cache.layers[0].codebook.projection.shape == (1, 2, 64, 8)


@pytest.mark.parametrize(
    ("rules", "per_key", "listed"), [({}, 8 + 1, 0), ({"safeguard": 0.5}, 8 + 1, 2), ({"gain": False}, 8, 0)]
)
def test_kv_bytes_counts_what_a_step_reads(rules, per_key, listed):
    model = enabled()
    cache = BPCCache(model.config, budget=5, min_tokens=1, dense_layers=(1,), **rules)
    assert cache.kv_bytes(100) == (0, 0)
    generate(model, **with_cache(cache))
    token = 2 * 2 * 8 * 4  # keys and values, 2 heads of 8, float32
    codes = 2 * (100 * per_key + 4 * listed)  # codes and gains of 2 heads, and the part of the safeguard's list read
    assert cache.kv_bytes(100) == (2 * (5 * token + codes) + 100 * token, 3 * 100 * token)
    assert cache.kv_bytes(4) == (3 * 4 * token, 3 * 4 * token)


def test_below_min_context_a_step_is_full_attention_and_reads_all_of_it():
    model = enabled()
    plain, _ = generate(model, ids(40), max_new_tokens=8, min_new_tokens=8)
    cache = BPCCache(model.config, tiny.artifact(model.config), min_context=47, **SMALL)
    made, _ = generate(model, ids(40), **with_cache(cache), max_new_tokens=7, min_new_tokens=7)  # 46 tokens cached
    assert torch.equal(made, plain[:, :47])
    assert [layer.hashed for layer in cache.layers] == [0, 0, 0]
    token = 2 * 2 * 8 * 4
    assert cache.kv_bytes(46) == (3 * 46 * token, 3 * 46 * token)
    assert cache.kv_bytes(47) == (3 * (5 * token + 2 * 47 * 9), 3 * 47 * token)
    with torch.no_grad():
        model(made[:, -1:], **with_cache(cache))
    assert [layer.hashed for layer in cache.layers] == [47, 47, 47]  # all earlier tokens too


def test_each_sequence_of_a_batch_has_its_own_min_context():
    cache = BPCCache(tiny.config(), tiny.artifact(tiny.config()), min_context=20, **SMALL)
    layer = cache.layers[0]
    layer.update(*torch.randn(2, 3, 2, 24, 8).unbind())
    visible = torch.arange(24) >= torch.tensor([[5], [4], [0]])  # 19, 20 and 24 real tokens
    rows = layer.rows(AttentionCall(None, visible, visible, None, None, None))
    assert rows.k.tolist() == [[19], [5], [5]]
    _, chosen = layer.decode(torch.randn(3, 2, 2, 8), rows)
    assert chosen[0].tolist() == [list(range(5, 24))] * 2
    assert (chosen[1:, :, 5:] == -1).all()
    assert (chosen[1:, :, :5] >= 0).all()


def test_the_package_does_not_import_transformers_for_its_functions():
    code = "import sys, bpc_calib; bpc_calib.enable; assert 'transformers' not in sys.modules; bpc_calib.BPCCache"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        bpc_calib.nothing  # noqa: B018


def test_a_mask_shorter_than_the_cache_is_refused():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    with torch.no_grad():
        model(ids(10), **with_cache(cache))
        with pytest.raises(InputError, match="the attention mask covers 9 of 11 cached tokens"):
            model(ids(1), **with_cache(cache), attention_mask=torch.ones(1, 1, 1, 9, dtype=torch.bool))
