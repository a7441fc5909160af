"""A cache that is used as it must not be: one line says what is wrong, before the cache or an answer is spoilt."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiny
import torch
from test_runtime import SMALL, enabled, generate, ids
from transformers import AutoModelForCausalLM

from bpc_calib import (
    BPCCache,
    InputError,
    ModelError,
    checked_decoding,
    enable,
    exact_decoding,
    static_generate,
    static_steps,
)
from bpc_calib.compat import with_cache


@pytest.fixture(params=["llama", "gemma3_text"])  # the first layer of the latter has a sliding window
def begun(request):
    """A model, its cache with a prompt, and the next step."""
    model = enabled(request.param, **({"sliding_window": 64} if request.param == "gemma3_text" else {}))
    cache = BPCCache(model.config, **SMALL)

    @torch.no_grad()
    def step(tokens=1):
        return model(ids(tokens, seed=1), **with_cache(cache)).logits

    step(40)
    return model, cache, step


def test_after_set_attn_implementation_a_cache_waits_for_enable(begun):
    model, cache, step = begun
    expected = step()
    cache.crop(-1)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match=r"is now sdpa, not BPC's .* call bpc_calib\.enable\(model\) again"):
        step()
    assert {layer.get_seq_length() for layer in cache.layers} == {40}
    enable(model)
    assert torch.equal(step(), expected)


@pytest.mark.parametrize("rules", [SMALL, {"dense_layers": (0,)}, {"dense_layers": (0, 1)}])
def test_a_new_cache_after_set_attn_implementation(rules):
    model = enabled()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match=r"cached keys without BPC's attention: call bpc_calib\.enable\(model\)"):
        generate(model, **with_cache(BPCCache(model.config, **rules)))


@pytest.mark.parametrize(
    ("change", "new"), [({"dtype": torch.bfloat16}, "torch.bfloat16 on cpu"), ({"device": "meta"}, "float32 on meta")]
)
def test_another_dtype_or_device(begun, change, new):
    model, cache, step = begun
    model.to(**change)
    with pytest.raises(
        InputError, match=rf"holds torch\.float32 on cpu, but the new keys are .*{new}: call cache\.reset"
    ):
        model(ids(1).to(model.device), **with_cache(cache))
    model.float()
    if "dtype" in change:
        step()  # nothing was cached


@pytest.mark.parametrize(
    "shape", [{"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"num_attention_heads": 8}, {"head_dim": 16}]
)
def test_a_model_of_another_shape(shape):
    cache = BPCCache(enabled().config, **SMALL)
    with pytest.raises(ModelError, match="belongs to another model; create one from this model's config"):
        generate(enabled(**shape), **with_cache(cache))


def test_a_second_thread_at_the_same_time(begun):
    """The thread that came first goes on, as if the other had not tried."""
    model, cache, step = begun
    expected = step()
    cache.crop(-1)
    faults = []

    def other(*_):
        def run():
            with pytest.raises(InputError, match="another thread began with this cache is running or has failed") as it:
                step()
            faults.append(it.value)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    hook = model.model.layers[1].register_forward_pre_hook(other)
    assert torch.equal(step(), expected)
    hook.remove()
    assert len(faults) == 1
    with ThreadPoolExecutor() as pool:
        pool.submit(step).result()  # one after the other they may


@pytest.mark.parametrize("fails", ["in a layer", "in BPC's attention"])
def test_a_cache_whose_pass_failed_says_how_to_go_on(begun, fails):
    model, cache, step = begun
    if fails == "in a layer":
        hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step()
        hook.remove()
    else:
        with torch.no_grad(), pytest.raises(ModelError, match="weighs tokens"):
            model(ids(1), **with_cache(cache), attention_mask=torch.full((1, 1, 1, 41), -0.5))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"holds 41 tokens and the last 40: call cache\.reset\(\), or make a new"):
            step()
    cache.reset()
    whole = torch.cat([ids(40, seed=1), ids(1, seed=1)], 1)
    assert torch.equal(
        generate(model, whole, **with_cache(cache))[0],
        generate(model, whole, **with_cache(BPCCache(model.config, **SMALL)))[0],
    )


@pytest.mark.parametrize("needs", [False, True], ids=["dense layers", "no dense layers"])
def test_after_a_refused_batch_the_cache_goes_on(needs):
    model = enabled()
    cache, alone = (BPCCache(model.config, tiny.artifact(model.config, needs=needs)) for _ in range(2))
    with torch.no_grad():
        for each in (cache, alone):
            model(ids(40), **with_cache(each))
        with pytest.raises(InputError, match="holds 1 sequences, but the new tokens are of 2"):
            model(ids(1, rows=2), **with_cache(cache))
        found, expected = (model(ids(1), **with_cache(each)).logits for each in (cache, alone))
    assert torch.equal(found, expected)


def test_an_interrupted_prompt_of_exact_decoding_is_not_taken_for_a_text():
    model = enabled("gemma3_text")
    cache = BPCCache(model.config, **SMALL)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, ids(30), **with_cache(cache), custom_generate=exact_decoding)
    hook.remove()
    with pytest.raises(ModelError, match="failed, whose first layer holds 30 tokens and the last 0"):
        generate(model, ids(50), **with_cache(cache), custom_generate=exact_decoding)


def test_a_budget_that_was_set_stays_after_a_reset():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    cache.set_budget(20)
    with pytest.raises(InputError, match="budget must be"):
        cache.set_budget(3.0)
    cache.reset()
    assert cache.settings["budget"] == 20
    assert {layer.rules.budget for layer in cache.layers} == {20}


@pytest.mark.parametrize("name", ["equal_shares", "adapt"])
def test_a_word_is_no_flag(name):
    with pytest.raises(InputError, match=f"{name} must be True or False, not 'false'"):
        BPCCache(enabled().config, **{name: "false"})


@pytest.mark.parametrize("length", [-3, 43])
def test_a_cache_is_not_rewound_to_what_it_never_had(begun, length):
    _, cache, _ = begun
    with pytest.raises(InputError, match=rf"rewind\({length}\): the cache has 40 tokens"):
        cache.rewind(length)


def test_a_rewound_cache_takes_the_same_step(begun):
    _, cache, step = begun
    expected = step()
    cache.rewind(40)
    assert {layer.get_seq_length() for layer in cache.layers} == {40}
    assert torch.equal(step(), expected)


def test_a_window_that_lacks_earlier_tokens_is_not_cropped():
    """After drafts transformers leaves its recording on, and the window holds what the last pass left."""
    model, prompt = enabled("gemma3_text"), torch.cat([ids(12)] * 4, 1)
    cache = BPCCache(model.config, budget=1.0)
    generate(model, prompt, **with_cache(cache), prompt_lookup_num_tokens=3, max_new_tokens=10)
    before = [(layer.get_seq_length(), layer.keys.shape[2]) for layer in cache.layers]
    assert before[0][1] < before[0][0]
    with pytest.raises(InputError, match="layer 0 has a sliding window of 16 and no longer has the earlier"):
        cache.crop(1 - before[0][0] + 16)
    assert [(layer.get_seq_length(), layer.keys.shape[2]) for layer in cache.layers] == before


def test_layers_with_one_state_of_all_tokens_cannot_undo_any(tmp_path):
    config = tiny.config("lfm2", num_hidden_layers=4, layer_types=["full_attention", "conv"] * 2)
    model = AutoModelForCausalLM.from_config(config).eval()
    enable(model)
    cache = BPCCache(model.config, **SMALL)
    text, _ = generate(model, ids(50), **with_cache(cache))
    held = [cache.layers[index].get_seq_length() for index in (0, 2)]
    calls = [
        lambda: cache.crop(-5),
        lambda: cache.rewind(10),
        *(
            functools.partial(generate, model, ids(50), **with_cache(cache), custom_generate=way)
            for way in (exact_decoding, checked_decoding)
        ),
    ]
    for call in calls:
        with pytest.raises(ModelError, match=r"layer 1 keeps one state of all tokens \(LinearAttentionLayer\): "):
            call()
    with pytest.raises(ModelError, match="layer 1 of the cache is a LinearAttentionLayer, which cannot be saved"):
        cache.save(tmp_path / "saved", model, text)
    with pytest.raises(ModelError, match="layer 1 has one state of all tokens, which static steps do not serve"):
        static_generate(model, ids(50), cache=BPCCache(model.config, **SMALL), max_new_tokens=4)
    assert [cache.layers[index].get_seq_length() for index in (0, 2)] == held


def test_in_static_steps_the_cache_changes_in_no_other_way():
    model = enabled()
    cache = BPCCache(model.config, **SMALL)
    with torch.no_grad():
        model(ids(40), **with_cache(cache))
    with static_steps(model, cache, 4) as step:
        step(ids(1))
        step(ids(1))
        for change in (lambda: cache.set_budget(3), lambda: cache.rewind(40), cache.reset):
            with pytest.raises(InputError, match="the cache is in a `static_steps` block"):
                change()
        assert cache.min_context == 0
    assert cache.get_seq_length() == 42
    assert cache.settings["budget"] == SMALL["budget"]


def test_numbers_of_numpy_are_settings_too(tmp_path):
    model = enabled()
    cache = BPCCache(model.config, **(SMALL | {"budget": np.int64(8)}))
    text, _ = generate(model, ids(40), **with_cache(cache))
    cache.save(tmp_path / "saved", model, text)
    opened, _ = BPCCache.open(tmp_path / "saved", model)
    assert opened.settings["budget"] == 8
