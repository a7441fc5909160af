"""Static steps: the same tokens and logits as steps in growing buffers, and no operator that waits for the device."""

import contextlib
import copy
import weakref

import pytest
import tiny
import torch
from drawn import EXACT
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from bpc_calib import BPCCache, InputError, ModelError, disable, enable, static_generate, static_steps
from bpc_calib.compat import with_cache
from bpc_calib.evaluation.comparison import make_cache
from bpc_calib.runtime.static_layer import StaticLayer
from bpc_calib.runtime.static_steps import _captured, warm_up

ALL_SPARSE = {"budget": 0.15, "min_tokens": 1, "dense_layers": ()}
PAPER = {"safeguard": 0.3, "recent": 1, "group": "max", "gain": False}
PROJECTIONS = {"bits": 32, "metric": True}
SERVED = [family for family in tiny.FAMILIES if family != "gemma3_text"]


def prompt(*lengths):
    """Return random sequences, padded on the left to the longest."""
    width = max(lengths)
    ids = torch.randint(250, (len(lengths), width), generator=torch.Generator().manual_seed(len(lengths)))
    mask = torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(-1)
    return {"input_ids": ids.masked_fill(~mask, 256), "attention_mask": mask.long()}


def enabled(family="llama", **changes):
    """Return an enabled model in float64, so that rounding of products cannot change a selection."""
    model = tiny.model(family, **changes).double()
    enable(model)
    return model


def growing(model, *, cache, **arguments):
    """`static_generate` without static steps."""
    return model.generate(**with_cache(cache), **arguments)


WAYS = (growing, static_generate)


def generate(model, cache, inputs, new=12, *, way=growing, **arguments):
    torch.manual_seed(0)
    settings = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return way(model, **inputs, cache=cache, **(settings | arguments))


def assert_same(model, inputs, rules, *, artifact=None, **arguments):
    """Check that plain `generate` and static decoding agree; return the two caches."""
    caches = [BPCCache(model.config, artifact, **rules) for _ in range(2)]
    plain = generate(model, caches[0], inputs, **arguments)
    static = generate(model, caches[1], inputs, way=static_generate, **arguments)
    assert torch.equal(plain.sequences, static.sequences)
    torch.testing.assert_close(static.logits, plain.logits, rtol=1e-9, atol=1e-9)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    return caches


@pytest.mark.parametrize("lengths", [(83,), (80, 43, 31)], ids=["one", "ragged"])
def test_shares_by_head(lengths):
    model = enabled()
    artifact = tiny.artifact(model.config, needs=True)
    caches = assert_same(model, prompt(*lengths), ALL_SPARSE | {"budget": 0.3}, artifact=artifact)
    layer = caches[0].layers[0]
    assert len(set(layer.counts(80))) == 2  # its two KV heads differ
    assert layer.counts(80) != layer.counts(80)[::-1]


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("lengths", [(41,), (40, 23, 31)], ids=["one", "ragged"])
def test_families(family, lengths):
    model = enabled(family)
    inputs, artifact = prompt(*lengths), tiny.artifact(model.config)
    assert_same(model, inputs, ALL_SPARSE | {"dense_layers": (1,)}, artifact=artifact)


RULES = [
    {"budget": 1.0},
    {"budget": 7},
    {"budget": 0.29, "min_tokens": 9},
    {"min_tokens": 44},  # nothing to choose at first
    {"min_tokens": 1000},
    PAPER,
    PAPER | {"gain": True, "group": "relative", "sink": 3, "recent": 2},
    {"safeguard": 1.0, "recent": 0},
    {"group": "max", "sink": 2},
    {"bits": 128},
]


# Every rule with both lengths and with both kinds of projections, and these with each other.
@pytest.mark.parametrize(
    ("rules", "lengths", "online"),
    [
        pytest.param(rules, lengths, online, id=f"{rules}-{'online' if online else 'calibrated'}-{name}")
        for turn, rules in enumerate(RULES)
        for name, lengths, online in (("one", (41,), turn % 2 > 0), ("ragged", (40, 23, 31), turn % 2 == 0))
    ],
)
def test_rules(rules, lengths, online):
    model = enabled()
    artifact = None if online else tiny.artifact(model.config, rules.get("bits", 64), metric=True, centred=True)
    assert_same(model, prompt(*lengths), ALL_SPARSE | rules, artifact=artifact)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")
@pytest.mark.parametrize(
    ("rules", "lengths"),
    [
        pytest.param({"dense_layers": (1,)}, (36, 23), id="a dense layer-ragged"),
        pytest.param(PAPER, (41,), id="paper-one"),
        pytest.param({"budget": 1.0}, (36, 23), id="everything-ragged"),
        # What differs between rows is in the kernels, and tests of them show it.
        pytest.param(PAPER, (36, 23), id="paper-ragged", marks=pytest.mark.slow),
    ],
)
def test_the_kernels(rules, lengths, monkeypatch):
    monkeypatch.setenv("BPC_BACKEND", "triton")
    model = enabled(num_hidden_layers=1 + ("dense_layers" in rules))
    artifact = tiny.artifact(model.config, **PROJECTIONS)
    assert_same(model, prompt(*lengths), ALL_SPARSE | rules, artifact=artifact, new=4)


# In float16 numba compiles for half a minute.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_in_the_dtypes_of_models(dtype):
    model = tiny.model().to(dtype)
    enable(model)
    caches = [BPCCache(model.config, tiny.artifact(model.config), **ALL_SPARSE, safeguard=0.2) for _ in range(2)]
    inputs = prompt(41)
    plain = generate(model, caches[0], inputs, new=4)
    static = generate(model, caches[1], inputs, new=4, way=static_generate)
    torch.testing.assert_close(static.logits, plain.logits, rtol=EXACT[dtype], atol=EXACT[dtype])


class NoDigit(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, 48:58] = -torch.inf
        return scores


class After(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **rest):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_what_generate_offers_works():
    model = enabled()
    inputs = prompt(40, 23)
    free = generate(model, BPCCache(model.config, **ALL_SPARSE), inputs, 12).sequences
    eos = int(free[0, 44])  # ends one sequence first; padding follows it
    for arguments in (
        {"do_sample": True, "temperature": 1.3, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 2},
        {"eos_token_id": eos, "pad_token_id": 256},
        {"repetition_penalty": 1.4, "logits_processor": LogitsProcessorList([NoDigit()])},
        {"stopping_criteria": StoppingCriteriaList([After(45)])},
        {"prefill_chunk_size": 16},
        {"max_new_tokens": 1},
        {"output_scores": True},
    ):
        assert_same(model, inputs, ALL_SPARSE, **arguments)


def test_streamers_work(capsys):
    model, texts = enabled(), []
    for way in WAYS:
        streamer = TextStreamer(tiny.tokenizer(), skip_prompt=True)
        generate(model, BPCCache(model.config, **ALL_SPARSE), prompt(40), way=way, streamer=streamer)
        texts.append(capsys.readouterr().out)
    assert texts[0] != ""
    assert texts[0] == texts[1]


def test_more_steps_than_announced():
    """`max_length` counts the cached tokens that are not passed again, so the steps must go on in another block."""
    model, made = enabled(), []
    for way in WAYS:
        cache = prefilled(model)
        inputs = {"input_ids": prompt(5)["input_ids"], "attention_mask": torch.ones(1, 45, dtype=torch.long)}
        made.append(generate(model, cache, inputs, None, way=way, max_length=50, min_length=50).sequences)
    assert made[0].shape == (1, 50)
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("lengths", "count"), [((41,), 0), ((40, 23), 7), ((40, 23), 40)], ids=["one-0", "ragged-7", "ragged-40"]
)
def test_a_prompt_of_embeddings(lengths, count):
    """`generate` receives the first `count` token ids in addition to the embeddings."""
    model, inputs = enabled(), prompt(*lengths)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    inputs["input_ids"] = inputs["input_ids"][:, :count]
    assert_same(model, inputs | {"inputs_embeds": embeds}, ALL_SPARSE)


def test_only_the_new_tokens():
    """The mask also covers the tokens that are cached already."""
    model, made = enabled(), []
    for way in WAYS:
        cache = prefilled(model)
        inputs = {"input_ids": prompt(5)["input_ids"], "attention_mask": torch.ones(1, 45, dtype=torch.long)}
        made.append(generate(model, cache, inputs, way=way).sequences)
    assert torch.equal(*made)


def test_the_cache_works_after_static_steps():
    """Another turn, a crop and repeated sequences give the same logits as with a cache that only grew."""
    model = enabled()
    inputs = prompt(34, 21)
    artifact = tiny.artifact(model.config)
    made = []
    for way in WAYS:
        cache = BPCCache(model.config, artifact, **ALL_SPARSE, safeguard=0.3)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        found = []
        for turn in range(3):
            new = {"input_ids": ids, "attention_mask": mask}
            out = generate(model, cache, new, 5, way=growing if turn == 2 else way)
            ids = torch.cat([out.sequences, prompt(6, 6)["input_ids"]], dim=1)
            mask = torch.nn.functional.pad(mask, (0, 11), value=1)
            found += out.logits
        cache.crop(-3)
        cache.batch_repeat_interleave(2)
        length = cache.get_seq_length()
        mask = mask[:, : length + 1].repeat_interleave(2, 0)
        ids, positions = ids[:, length : length + 1].repeat_interleave(2, 0), mask.sum(-1, keepdim=True) - 1
        with torch.no_grad():
            step = model(ids, attention_mask=mask, position_ids=positions, **with_cache(cache))
        found.append(step.logits[:, -1])
        made.append(found)
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def prefilled(model, length=40, rows=1, **rules):
    cache = BPCCache(model.config, tiny.artifact(model.config), **(ALL_SPARSE | rules))
    ids = torch.randint(250, (rows, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(ids, **with_cache(cache))
    return cache


def test_step_by_step():
    model = enabled()
    growing, cache = prefilled(model, rows=2), prefilled(model, rows=2)
    ids = torch.randint(250, (2, 8), generator=torch.Generator().manual_seed(2)).split(1, dim=1)
    with static_steps(model, cache, 8) as step:
        for i, token in enumerate(ids):
            with torch.no_grad():
                expected = model(token, **with_cache(growing)).logits[:, -1]
            torch.testing.assert_close(step(token), expected, rtol=1e-9, atol=1e-9)
            assert cache.get_seq_length() == 41 + i
            assert isinstance(cache.layers[0], StaticLayer) is (i > 0)  # the first step that chooses is ordinary
            assert cache.kv_bytes(41 + i) == growing.kv_bytes(41 + i)
        with pytest.raises(InputError, match="was called for 8 steps"):
            step(ids[0])
    assert not any(isinstance(layer, StaticLayer) for layer in cache.layers)
    for one, other in zip(cache.layers, growing.layers, strict=True):
        for name in ("codes", "gain", "keys", "values"):
            assert torch.equal(one.buffers[name][:, :, :48], other.buffers[name][:, :, :48])
        assert one.hashed == other.hashed == 48


def test_warm_up_changes_no_result():
    """A step is warmed up before it is captured."""
    model = enabled()
    growing, cache = prefilled(model, safeguard=0.2), prefilled(model, safeguard=0.2)
    ids = torch.randint(250, (1, 6), generator=torch.Generator().manual_seed(2)).split(1, dim=1)
    with static_steps(model, cache, 6) as step:
        for i, token in enumerate(ids):
            if i in (1, 4):
                steps = step.__self__
                steps.run = steps.run or steps._begin(token)
                with torch.no_grad():
                    warm_up(steps.run, [steps.clock.place, steps.positions])
            with torch.no_grad():
                expected = model(token, **with_cache(growing)).logits[:, -1]
            torch.testing.assert_close(step(token), expected, rtol=1e-9, atol=1e-9)


def test_static_before_and_after_the_first_choice():
    model = enabled()
    cache = prefilled(model, min_tokens=43)
    ids, kinds = torch.zeros(1, 1, dtype=torch.long), []
    with static_steps(model, cache, 7) as step:
        for _ in range(7):
            step(ids)
            layer = cache.layers[0]
            kinds.append(layer.chooses if isinstance(layer, StaticLayer) else None)
    assert kinds == [False, False, False, None, True, True, True]  # at 41 to 47 tokens


class NoWaiting(TorchDispatchMode):
    """Refuse operators whose result the host needs."""

    WAIT = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "item")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[-1]
        assert name.lstrip("_") not in [word.lstrip("_") for word in self.WAIT], f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


class NoReading(TorchFunctionMode):
    """Refuse functions that read a tensor without an operator."""

    READ = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert getattr(function, "__name__", "") not in self.READ, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_operator_of_a_step_waits_for_the_device(monkeypatch, padded):
    """The kernels count as single operators here, as they do on a device."""
    import bpc_calib.backends.triton.ops  # noqa: F401

    monkeypatch.setenv("BPC_BACKEND", "triton")
    model = enabled(num_hidden_layers=2)
    mask = torch.arange(40) >= torch.tensor([[0], [7]]) if padded else None
    cache = prefilled(model, rows=2, dense_layers=(0,), safeguard=0.2, recent=1)
    ids = torch.tensor([[5], [6]])
    with static_steps(model, cache, 5, attention_mask=mask) as step:
        step(ids)
        step(ids)
        with NoReading(), NoWaiting():
            assert step(ids).shape == (2, tiny.VOCAB)
        with pytest.raises(AssertionError, match="waits"), NoReading(), NoWaiting():
            bool(step(ids).isfinite().all())  # proves that the modes see the operators


def test_unsupported_models_and_rankings_are_refused():
    model = enabled("gemma3_text")
    with pytest.raises(ModelError, match="layer 0 has a sliding window"):
        generate(model, BPCCache(model.config), prompt(20), way=static_generate)
    for rope in (
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4,
         "original_max_position_embeddings": 64},
    ):  # fmt: skip
        model = enabled(rope_parameters=rope)
        with pytest.raises(ModelError, match="RoPE changes with the length"):
            generate(model, BPCCache(model.config), prompt(20), way=static_generate)
    model = enabled("phi3")  # its window is as wide as the model's limit, and this text is longer
    with pytest.raises(ModelError, match="sliding window of 128"):
        generate(model, BPCCache(model.config, budget=5, min_tokens=1), prompt(120), 12, way=static_generate)
    model = enabled()
    cache = make_cache("oracle", model.config, None, budget=5, min_tokens=1, dense_layers=())
    with pytest.raises(ModelError, match="the ranking of a"):
        generate(model, cache, prompt(20), way=static_generate)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"num_beams": 2}, "not beam search"),
        ({"prompt_lookup_num_tokens": 3}, "not assisted generation"),
        ({"output_attentions": True}, "no attentions"),
        ({"output_hidden_states": True}, "no hidden states"),
        ({"cache": None}, "need a BPCCache"),
        ({"use_cache": False}, "needs use_cache=True"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "not beam search"),
        ({"custom_generate": print}, "does not serve custom_generate"),
    ],
)
def test_unsupported_arguments_of_generate_are_refused(arguments, fault):
    model = enabled()
    settings = {"cache": BPCCache(model.config)} | arguments
    with pytest.raises(InputError, match=fault):
        static_generate(model, **prompt(20), **settings, max_new_tokens=4)


def test_arguments_that_do_not_fit_are_refused():
    model = enabled()
    cache = prefilled(model, rows=2)
    for arguments, fault in (
        ({"attention_mask": torch.ones(2, 41)}, "attention_mask must be"),
        ({"position_ids": torch.zeros(2, 2, dtype=torch.long)}, "position_ids must be"),
    ):
        with pytest.raises(InputError, match=fault), static_steps(model, cache, 4, **arguments):
            pass
    with pytest.raises(InputError, match="steps must be"), static_steps(model, cache, -1):
        pass
    with pytest.raises(InputError, match="the cache is empty"), static_steps(model, BPCCache(model.config), 4):
        pass
    ids = torch.zeros(2, 1, dtype=torch.long)
    with static_steps(model, cache, 4) as step:
        for wrong in (ids[:1], ids.float(), ids.expand(2, 2)):
            with pytest.raises(InputError, match="ids must be"):
                step(wrong)
        step(ids)
        step(ids)
        with pytest.raises(InputError, match="already in a `static_steps` block"), static_steps(model, cache, 4):
            pass
        for change in (
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.tensor([1, 0])),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
        ):
            with pytest.raises(InputError, match="in a `static_steps` block: leave the block"):
                change()
    cache.crop(-1)
    assert cache.get_seq_length() == 41
    disable(model)
    with pytest.raises(InputError, match="enable"), static_steps(model, cache, 4):
        pass


@pytest.mark.parametrize("rules", [{}, {"budget": 1.0}], ids=str)
def test_inside_the_block_the_cache_accepts_only_steps(rules):
    """A refused call changes nothing."""
    model = enabled()
    growing, cache = prefilled(model, **rules), prefilled(model, **rules)
    ids = torch.tensor([[7]])
    with static_steps(model, cache, 6) as step, torch.no_grad():
        for taken in range(4):
            expected = model(ids, **with_cache(growing)).logits[:, -1]
            torch.testing.assert_close(step(ids), expected, rtol=1e-9, atol=1e-9)
            if taken:
                with pytest.raises(InputError, match="in a `static_steps` block: leave the block"):
                    model(ids, **with_cache(cache))
                with pytest.raises(InputError, match="in a `static_steps` block: leave the block"):
                    copy.deepcopy(cache)
    with torch.no_grad():
        expected = model(ids, **with_cache(growing)).logits
        torch.testing.assert_close(model(ids, **with_cache(copy.deepcopy(cache))).logits, expected)


def test_keys_and_values_are_in_memory_once():
    model = enabled()
    cache = prefilled(model, dense_layers=(0,))
    ids = torch.tensor([[7]])
    with static_steps(model, cache, 1000) as step:
        step(ids)
        before = [weakref.ref(buffer) for layer in cache.layers for buffer in layer.buffers.values()]
        step(ids)
        assert all(reference() is None for reference in before)
        for layer in cache.layers:
            for name in ("keys", "values"):
                views = (getattr(layer, name), getattr(layer.layer, name), layer.layer.buffers[name])
                assert len({view.untyped_storage().data_ptr() for view in views}) == 1


@pytest.mark.parametrize("modes", ["IOOOOO", "IIIOOI", "OIIOIO"])
@pytest.mark.parametrize("rules", [{"safeguard": 0.2}, {"min_tokens": 43}, {"budget": 1.0}], ids=str)
def test_in_and_out_of_inference_mode(modes, rules):
    """I is inside of inference mode, O outside; the first letter is for the prefill and the start of the block."""
    model = enabled()
    ids = torch.tensor([[7]])
    growing = prefilled(model, **rules)
    with contextlib.ExitStack() as stack:
        with torch.inference_mode(modes[0] == "I"):
            cache = prefilled(model, **rules)
            step = stack.enter_context(static_steps(model, cache, 6))
        for mode in modes[1:]:
            with torch.no_grad():
                expected = model(ids, **with_cache(growing)).logits[:, -1]
            with torch.inference_mode(mode == "I"):
                torch.testing.assert_close(step(ids), expected, rtol=1e-9, atol=1e-9)


def test_a_full_device_raises_out_of_memory(monkeypatch):
    def full(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "device", full)
    with pytest.raises(torch.OutOfMemoryError):
        _captured(lambda: torch.zeros(1), [torch.zeros(1)])


@pytest.mark.parametrize("dense_layers", [(), (0, 1)])
def test_a_model_that_bypasses_the_attention_is_refused(dense_layers):
    """The model's own attention would read slots without a token."""
    model = enabled()
    cache = prefilled(model, dense_layers=dense_layers)
    ids = torch.zeros(1, 1, dtype=torch.long)
    with static_steps(model, cache, 6) as step:
        step(ids)
        step(ids)
        disable(model)
        with pytest.raises(ModelError, match="bypasses BPC's attention"):
            step(ids)


def test_a_failed_step_does_not_change_the_cache():
    model = enabled()
    cache = prefilled(model)
    ids = torch.zeros(1, 1, dtype=torch.long)
    with static_steps(model, cache, 6) as step:
        step(ids)
        step(ids)
        handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(ids)
        handle.remove()
        with pytest.raises(InputError, match="failed"):
            step(ids)
    again = prefilled(model)
    with torch.no_grad():
        expected = [model(ids, **with_cache(again)).logits for _ in range(3)][-1]
        torch.testing.assert_close(model(ids, **with_cache(cache)).logits, expected)
