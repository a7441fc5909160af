"""Versions of other libraries: a part that a later one lacks ends in one line, and an untested one is told."""

import json
import sys
from types import ModuleType

import pytest
import tiny
import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.models.llama import modeling_llama

from bpc_calib import BPCCache, BPCError, ModelError, compat, enable, exact_decoding
from bpc_calib.compat import with_cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny")


class Gone:
    """A private part that BPC no longer finds, while transformers goes on with it, as if it had another name there."""

    def __init__(self, owner, name):
        self.part, self.name = vars(owner)[name], name

    def __get__(self, holder, kind=None):
        callers = (sys._getframe(up).f_globals["__name__"] for up in range(2, 6))  # through a config's own reading
        if "bpc_calib.compat" in callers:
            raise AttributeError(f"no {self.name}")
        return self.part.__get__(holder, kind)

    def __set__(self, holder, value):
        self.part.__set__(holder, value)


def assert_one_line(message, package):
    assert "\n" not in message.strip()
    assert f"{package} {compat._installed(package)} lacks a part that BPC needs to" in message
    assert f"install {package} {compat.NEWEST[package]}, or a newer bpc-calib" in message


def test_without_the_name_of_the_attention(bpc, folder, monkeypatch):
    monkeypatch.setattr(PreTrainedConfig, "_attn_implementation", Gone(PreTrainedConfig, "_attn_implementation"))
    ran = bpc("generate", "-m", folder, "--prompt", "a b c", "--max-new-tokens", 2, "-q")
    assert (ran.code, ran.out) == (1, "")
    assert_one_line(ran.err, "transformers")


def test_without_the_word_of_a_class_models_are_refused_later(bpc, folder, monkeypatch):
    name = "_can_set_attn_implementation"
    monkeypatch.setattr(PreTrainedModel, name, Gone(PreTrainedModel, name))
    assert bpc("generate", "-m", folder, "--prompt", "a b c", "--max-new-tokens", 2, "-q").code == 0
    with pytest.raises(ModelError, match="does not use transformers' attention interface"):
        enable(tiny.model("bloom"))


def test_without_the_eager_attention_of_a_model(monkeypatch):
    model = tiny.model()
    model.set_attn_implementation("eager")
    enable(model)
    monkeypatch.setitem(sys.modules, modeling_llama.__name__, ModuleType("without"))
    with pytest.raises(ModelError, match="LlamaAttention has no eager attention"):
        model(torch.arange(9)[None], **with_cache(BPCCache(model.config)))


def test_without_the_loop_drafts_are_not_verified(monkeypatch):
    model = tiny.model()
    enable(model)
    monkeypatch.setattr(GenerationMixin, "_sample", Gone(GenerationMixin, "_sample"))
    ids, plain, exact = torch.arange(9)[None], BPCCache(model.config), BPCCache(model.config)
    assert model.generate(ids, **with_cache(plain), max_new_tokens=2).shape == (1, 11)
    with pytest.raises(BPCError) as fault:
        model.generate(ids, **with_cache(exact), custom_generate=exact_decoding, max_new_tokens=2)
    assert_one_line(str(fault.value), "transformers")


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("transformers.integrations.tensor_parallel", compat.copied_heads),
        ("transformers.integrations.gguf", compat.read_gguf),
    ],
)
def test_without_a_module(module, use, monkeypatch):
    monkeypatch.setitem(sys.modules, module, ModuleType("without"))
    with pytest.raises(BPCError) as fault:
        use(1)
    assert_one_line(str(fault.value), "transformers")


def test_without_the_threads_of_torch(monkeypatch):
    monkeypatch.delattr(torch._C, "set_num_threads")
    with pytest.raises(BPCError) as fault:
        compat.set_torch_threads(1)
    assert_one_line(str(fault.value), "torch")


def test_an_untested_version_is_told(bpc, monkeypatch):
    assert json.loads(bpc("doctor", "--json").out)["machine"]["untested"] == compat.untested()
    monkeypatch.setattr(compat, "NEWEST", {"transformers": "5.1"})
    line = f"transformers {compat._installed('transformers')} is newer than 5.1, the newest that BPC was tested with"
    assert line in compat.untested()
    assert line in " ".join(bpc("doctor").out.split())


def test_the_name_of_the_cache_is_the_one_that_transformers_takes():
    """The other one raises, or is said to be old."""
    model, cache = tiny.model(), BPCCache(tiny.config())
    enable(model)
    model(torch.arange(9)[None], **with_cache(cache))
    assert cache.get_seq_length() == 9


def test_commands_cause_no_warning_of_a_dependency(one_process, folder, tmp_path):
    """A name that the next release of a library drops is an error here, so that it is seen before users see it."""
    commands = (
        ["calibrate", "-m", str(folder), "--corpus", "demo-prose", "--samples", "4", "--sequence-length", "128"],
        ["generate", "-m", str(folder), "-a", "tiny-bpc64.safetensors", "--prompt", "a b c", "--max-new-tokens", "3"],
        ["inspect", "tiny-bpc64.safetensors"],
        ["doctor", "-m", str(folder)],
    )
    for ran in one_process(commands, tmp_path, PYTHONWARNINGS="error::FutureWarning,error::DeprecationWarning"):
        assert ran.code == 0, ran.err
        assert "Warning" not in ran.err
