"""Compiled decoder layers: the same text as plain ones, from the same caches, and what stays plain."""

import copy
import re
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from processes import started
from torch._inductor.config import aot_inductor
from transformers import DynamicCache

from bpc_calib import BPCCache, InputError, ModelError, compile_layers, enable, exact_decoding
from bpc_calib.backends import linear as products
from bpc_calib.backends.linear import linear
from bpc_calib.compat import with_cache
from bpc_calib.runtime import compiled_layers, layer_package

OFTEN = ("cohere", "glm", "qwen3", "stablelm")  # families whose layers are least like Llama's
SPARSE = {"budget": 8, "min_tokens": 8, "dense_layers": ()}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The cache folder of this module's tests, so that each kind of layer is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield tmp_path_factory.getbasetemp()


def pair(family="llama", several=False, **changes):
    """The same model twice: plain, and with compiled layers."""
    plain, compiled = (tiny.model(family, **changes) for _ in range(2))
    for each in (plain, compiled):
        enable(each)
    compile_layers(compiled, several=several)
    return plain, compiled


def compiled_in(model):
    return ["forward" in vars(layer) for layer in model.get_decoder().layers]


@torch.inference_mode()
def decoded(model, cache, steps=12, prompt=40, batch=1):
    """The logits of a prompt and of greedy steps: `[steps + 1, batch, vocab]`."""
    ids = torch.arange(batch * prompt).reshape(batch, prompt) * 7 % tiny.VOCAB
    found = []
    for _ in range(steps + 1):
        logits = model(ids, **with_cache(cache)).logits[:, -1]
        found.append(logits)
        ids = logits.argmax(-1, keepdim=True)
    return torch.stack(found)


def sparse(model):
    return BPCCache(model.config, tiny.artifact(model.config), **SPARSE)


@pytest.mark.slow  # a compilation
def test_a_benchmark_decodes_through_compiled_layers():
    from bpc_calib.bench.decode import decode_rows
    from bpc_calib.bench.settings import Settings

    model = tiny.model()
    (row,) = decode_rows(model, tiny.artifact(model.config), 1, 300, Settings(repeats=1), 3, 1e9)
    assert row["compiled"] is True
    assert not any(compiled_in(model))  # so that stock transformers runs plain layers
    (row,) = decode_rows(model, tiny.artifact(model.config), 32, 300, Settings(repeats=1), 3, 1e9)
    assert row["compiled"] is False


@pytest.mark.parametrize("family", ["llama", pytest.param("smollm3", marks=pytest.mark.slow), "gemma3_text"])
def test_steps_give_the_same_logits_and_caches(family):
    plain, compiled = pair(family)
    assert all(compiled_in(compiled))
    makes = [lambda model: BPCCache(model.config), lambda model: DynamicCache(config=model.config)]
    if family != "gemma3_text":  # there a rounding changes which of two tokens is chosen
        makes.append(sparse)
    for make in makes:
        caches = [make(each) for each in (plain, compiled)]
        expected, found = map(decoded, (plain, compiled), caches)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found[0], expected[0])  # the prompt runs through plain layers
        assert not torch.equal(found[1:], expected[1:])  # and steps do not
        for one, other in zip(*(cache.layers for cache in caches), strict=True):
            torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # two compilations
def test_bfloat16_steps_are_as_near_to_float32_as_plain_ones():
    wide = tiny.model(hidden_size=128, intermediate_size=256)
    narrow = [tiny.model(hidden_size=128, intermediate_size=256).bfloat16() for _ in range(2)]
    for each in (wide, *narrow):
        enable(each)
    compile_layers(narrow[1])

    @torch.inference_mode()
    def fed(model):
        """The logits of 24 steps that are given their tokens: of one alone the errors differ by a third."""
        ids, cache = torch.arange(64).unsqueeze(0) * 7 % tiny.VOCAB, BPCCache(model.config)
        model(ids[:, :40], **with_cache(cache))
        return torch.cat([model(ids[:, i : i + 1], **with_cache(cache)).logits for i in range(40, 64)]).double()

    exact, plain, found = map(fed, (wide, *narrow))
    assert not torch.equal(found, plain)
    assert (found - exact).norm() <= 1.1 * (plain - exact).norm()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("columns", [96, 11008, 100])  # BPC's kernel does not serve the last
def test_the_product_of_one_row_is_that_of_a_linear_layer(columns, added, slow, large, monkeypatch):
    monkeypatch.setattr(products, "faster_than_torch", lambda: slow)
    monkeypatch.setattr(layer_package, "LARGE", 0 if large else 1 << 30)
    generator = torch.Generator().manual_seed(columns)
    row, weight, bias = (torch.randn(shape, generator=generator) for shape in ((1, 1, columns), (5, columns), (5,)))
    given = [each.bfloat16() for each in ((row, weight, bias) if added else (row, weight))]
    with layer_package._FewTokens():
        found = torch.nn.functional.linear(*given)
    exact = torch.nn.functional.linear(*(each.double() for each in given))
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).norm() <= 2**-8 * exact.norm()


def runs(model):
    """Count the runs of compiled code from now on, by the number of its tokens."""
    found = []
    for layer in model.get_decoder().layers:
        for call in layer.forward.args[0].calls.values():
            call.run = lambda inputs, run=call.run: found.append(inputs[0].shape[1]) or run(inputs)
    return found


@pytest.mark.parametrize("processor", ["Arm", "x86"])
@pytest.mark.parametrize(("batch", "new"), [(2, 1), (8, 1), (31, 1), (1, 5), (3, 4)])
def test_passes_of_several_tokens_give_the_same_logits_and_caches(batch, new, processor, monkeypatch, folder):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / processor))  # one processor has one cache folder
    monkeypatch.setattr(products, "faster_than_torch", lambda: processor == "x86")
    plain, compiled = pair(several=True)
    ids = torch.arange(batch * 64).view(batch, 64) * 7 % tiny.VOCAB
    caches = [BPCCache(each.config, budget=1.0) for each in (plain, compiled)]
    found = runs(compiled)
    with torch.inference_mode():
        for begin, end in ((0, 40), (40, 40 + new), (40 + new, 40 + 2 * new)):
            logits = [
                each(ids[:, begin:end], **with_cache(cache)).logits
                for each, cache in zip((plain, compiled), caches, strict=True)
            ]
            torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert found == [batch * new] * 2 * len(caches[0].layers)  # all but the prompt
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-4)


def test_a_padded_batch_and_verified_drafts_give_the_same_text():
    plain, compiled = pair(several=True)
    found = runs(compiled)
    ids = torch.arange(80).view(2, 40) * 7 % tiny.VOCAB
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    how = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    texts = [
        each.generate(ids, **how, **more, **with_cache(sparse(each)))
        for each in (plain, compiled)
        for more in ({}, {"custom_generate": exact_decoding, "draft": 4})
    ]
    assert torch.equal(texts[2], texts[0])
    assert torch.equal(texts[3], texts[1])
    assert {2, 10} <= set(found)


def test_passes_of_several_tokens_can_be_compiled_later():
    plain, compiled = pair()
    expected = decoded(plain, BPCCache(plain.config), batch=2)
    for several in (False, True, True, False):
        compile_layers(compiled, several=several)
    found = runs(compiled)
    torch.testing.assert_close(decoded(compiled, BPCCache(compiled.config), batch=2), expected, rtol=1e-4, atol=1e-4)
    assert found == [2] * 12 * len(compiled.get_decoder().layers)
    decoded(compiled, BPCCache(compiled.config), steps=1)
    assert found[-1] == 1


@pytest.mark.parametrize("processor", ["Arm", "x86"])
def test_what_is_no_step_of_one_sequence_stays_plain(processor, monkeypatch):
    monkeypatch.setattr(products, "faster_than_torch", lambda: processor == "x86")
    plain, compiled = pair()
    both = [decoded(each, sparse(each), batch=2) for each in (plain, compiled)]
    assert torch.equal(*both) or processor == "x86"  # there a rounding may change a choice
    found, expected = (decoded(each, BPCCache(each.config), batch=2) for each in (compiled, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found, expected) == (processor == "Arm")
    with torch.enable_grad():  # a pass that could be differentiated
        ids = torch.tensor([[5]])
        assert torch.equal(plain(ids).logits, compiled(ids).logits)
        compiled(ids).logits.sum().backward()
    assert compiled.get_decoder().layers[0].mlp.up_proj.weight.grad is not None


@pytest.mark.skipif(
    not hasattr(aot_inductor, "custom_ops_to_c_shims"), reason="this torch calls operators through Python"
)
def test_compiled_code_multiplies_without_python(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "faster_than_torch", lambda: True)
    plain, compiled = pair()
    caches = [BPCCache(each.config) for each in (plain, compiled)]
    decoded(compiled, caches[1], steps=1)
    called = []
    sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code))
    try:
        found = decoded(compiled, caches[1], steps=1, prompt=1)
    finally:
        sys.setprofile(None)
    assert called.count(linear.__code__) == 2  # of the head, in each of two steps
    (file,) = (tmp_path / "bpc").iterdir()
    assert b"aoti_torch_cpu_few_tokens" in file.read_bytes()
    decoded(plain, caches[0], steps=1)
    torch.testing.assert_close(found, decoded(plain, caches[0], steps=1, prompt=1), rtol=1e-4, atol=1e-4)


def test_layers_are_compiled_where_no_kernel_is_loaded(tmp_path):
    program = """
import tiny, torch
from bpc_calib import compile_layers, enable
model = tiny.model()
enable(model)
ids = torch.arange(5).unsqueeze(0)
with torch.no_grad():
    plain = model(ids).logits
    compile_layers(model, several=True)
    torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-4)
print(all("forward" in vars(layer) for layer in model.get_decoder().layers))
"""
    environment = {"BPC_BACKEND": "torch", "PYTHONPATH": str(Path(__file__).parent), "XDG_CACHE_HOME": str(tmp_path)}
    ran = started(program, folder=tmp_path, environment=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "True\n"


def test_the_code_is_compiled_once_and_has_no_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = []
    for seed in (0, 1):
        model = tiny.model(seed=seed, hidden_size=64)
        enable(model)
        before = torch.get_rng_state()
        compile_layers(model, partial(told.append, seed))
        compile_layers(model, partial(told.append, seed))  # does nothing
        assert torch.equal(torch.get_rng_state(), before)
    assert told == [0]
    (file,) = (tmp_path / "bpc").iterdir()
    assert re.fullmatch(r"[0-9a-f]{32}\.pt2", file.name)
    assert (tmp_path / "bpc").stat().st_mode & 0o777 == 0o700
    weight = model.get_decoder().layers[0].mlp.up_proj.weight.detach().numpy().tobytes()
    assert weight[:64] not in file.read_bytes()

    file.write_bytes(file.read_bytes()[:1000])
    other = tiny.model(hidden_size=64)
    enable(other)
    with pytest.raises(ModelError, match="cannot be loaded, so it was deleted"):
        compile_layers(other)
    assert not file.exists()
    assert not any(compiled_in(other))


def test_layers_that_the_code_does_not_reproduce_stay_plain(monkeypatch):
    model = tiny.model("smollm3")  # one of its three layers has no RoPE
    enable(model)
    monkeypatch.setattr(compiled_layers, "KINDS", 1)
    compile_layers(model)
    assert compiled_in(model) == [True, False, True]
    torch.testing.assert_close(
        decoded(model, sparse(model)), decoded(pair("smollm3")[0], sparse(model)), rtol=1e-4, atol=1e-4
    )


def test_an_error_of_a_cache_comes_through():
    _, compiled = pair()
    cache = sparse(tiny.model(num_hidden_layers=3, num_attention_heads=2))
    with pytest.raises(ModelError, match="belongs to another model"):
        decoded(compiled, cache, prompt=1)
    decoded(compiled, sparse(compiled))


def test_threads_do_not_mix_their_caches():
    _, compiled = pair()
    expected = [decoded(compiled, sparse(compiled), prompt=length) for length in (30, 50)]
    found = [None, None]

    def run(place):
        for _ in range(5):
            found[place] = decoded(compiled, sparse(compiled), prompt=(30, 50)[place])

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(map(torch.equal, found, expected))


def test_refusals_are_one_line_and_change_nothing(monkeypatch, tmp_path):
    model = tiny.model()
    with pytest.raises(InputError, match=re.escape("call bpc_calib.enable(model) before compile_layers")):
        compile_layers(model)
    enable(model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    without = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with without, pytest.raises(ModelError, match="torch cannot compile the layers of LlamaDecoderLayer") as refused:
        compile_layers(model)
    assert "\n" not in str(refused.value)
    assert not any(compiled_in(model))
    assert "forward" not in vars(model.lm_head)
    assert not list((tmp_path / "bpc").iterdir())


def test_a_folder_that_others_may_write_is_not_used(monkeypatch, tmp_path):
    model = tiny.model()
    enable(model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "bpc").mkdir()
    (tmp_path / "bpc").chmod(0o777)
    with pytest.raises(ModelError, match="others may write to it: chmod go-w"):
        compile_layers(model)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot hold compiled layers"):
        compile_layers(model)
    assert not any(compiled_in(model))


@pytest.mark.slow  # a compilation for each
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.rare] * (each not in OFTEN)) for each in sorted(tiny.FAMILIES)],
)
def test_every_family_decodes_the_same(family):
    plain, compiled = pair(family, several=True)
    assert all(compiled_in(compiled))
    found = runs(compiled)
    for batch in (1, 2):
        logits = [decoded(each, BPCCache(plain.config), batch=batch) for each in (compiled, plain)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert set(found) == {1, 2}


def test_under_autocast_values_come_back_in_the_dtype_of_the_code():
    _, compiled = pair()
    with torch.autocast("cpu", torch.bfloat16):
        found = decoded(compiled, BPCCache(compiled.config, budget=1.0), steps=4)
    expected = decoded(compiled, BPCCache(compiled.config, budget=1.0), steps=4)
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)


def test_a_layer_whose_weights_are_others_runs_plain_until_it_is_compiled_again():
    plain, compiled = pair()
    trained = copy.deepcopy(compiled)
    with torch.no_grad():
        for each in trained.model.layers.parameters():
            each.mul_(1.5)
    plain.load_state_dict(trained.state_dict())
    for again in (False, True):
        if again:
            compile_layers(trained)
        torch.testing.assert_close(*(decoded(each, sparse(each), steps=3) for each in (trained, plain)))
    compiled.load_state_dict(trained.state_dict(), assign=True)
    torch.testing.assert_close(*(decoded(each, sparse(each), steps=3) for each in (compiled, plain)))


def test_a_layer_with_another_module_runs_plain():
    """As adapters replace a linear layer by one of their own."""
    plain, compiled = pair()

    class Adapted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    for each in (plain, compiled):
        mlp = each.model.layers[1].mlp
        mlp.down_proj = Adapted(mlp.down_proj)
    torch.testing.assert_close(*(decoded(each, sparse(each), steps=3) for each in (compiled, plain)))
