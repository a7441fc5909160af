"""A cache that is used as it must not be: one line says what is wrong, before the cache or an answer is spoilt."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_runtime import SMALL, enabled, generate, ids

from bpc_calib import BPCCache, InputError, ModelError, enable
from bpc_calib.compat import with_cache


@pytest.fixture
def begun():
    """A model, its cache with a prompt, and the next step."""
    model = enabled()
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
