"""A saved cache goes on where it was, in any process with the same model; other files and models are refused."""

import copy
import functools
import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path

import damage
import pytest
import test_artifact
import test_chat
import test_damage
import tiny
import torch
from hypothesis import given
from safetensors.torch import load_file

from bpc_artifacts import save
from bpc_calib import BPCCache, CacheFileError, InputError, ModelError, enable, exact_decoding
from bpc_calib.calibration.durable import locked
from bpc_calib.compat import with_cache
from bpc_calib.runtime.hashed_layer import BPCLayer

FEW = {"budget": 0.2, "min_tokens": 8, "min_context": 0}


@functools.cache
def enabled(family="llama", **changes):
    model = tiny.model(family, **changes)
    enable(model)
    return model


def generate(model, ids, mask, cache, new=8, **more):
    return model.generate(
        ids, attention_mask=torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1),
        max_new_tokens=new, min_new_tokens=new, do_sample=False, **with_cache(cache), **more,
    )  # fmt: skip


def logits(model, ids, mask, cache, steps=4):
    """Return the logits of greedy steps behind `ids`, of which the cache holds all but the last."""
    found = []
    for _ in range(steps):
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        with torch.no_grad():
            out = model(ids[:, -1:], attention_mask=mask, position_ids=mask.cumsum(-1)[:, -1:] - 1, **with_cache(cache))
        found.append(out.logits)
        ids = torch.cat([ids, out.logits[:, -1].argmax(-1, keepdim=True)], 1)
    return torch.cat(found, 1)


def written(path, family="llama", lengths=(40,), artifact=None, new=8, **settings):
    """Return a model, the text, its mask and the cache, and what `open` returned of it."""
    model, (ids, mask) = enabled(family), tiny.prompt(*lengths)
    cache = BPCCache(model.config, artifact, **(FEW | settings))
    text = generate(model, ids, mask, cache, new)
    cache.save(path, model, text)
    return model, text, mask, cache


LENGTHS = {"one": (40,), "padded": (40, 23, 31)}


def cases():
    """Every family, length and kind of projections; a push runs each once."""
    often = {("llama", "padded", "online"), ("gemma3_text", "one", "calibrated"), ("qwen3", "padded", "needs")}
    for case in itertools.product(("llama", "gemma3_text", "qwen3"), LENGTHS, ("online", "calibrated", "needs")):
        yield pytest.param(*case, marks=() if case in often else pytest.mark.slow)


@pytest.mark.parametrize(("family", "length", "made"), list(cases()))
def test_an_opened_cache_has_the_same_bits(tmp_path, family, length, made):
    """The layers that choose, those that do not, and sliding windows."""
    lengths, path, model = LENGTHS[length], tmp_path / "a.cache", enabled(family)
    artifact = None if made == "online" else tiny.artifact(model.config, metric=True, needs=made == "needs")
    _, text, mask, cache = written(path, family, lengths, artifact, safeguard=0.3, recent=1)
    opened, tokens = BPCCache.open(path, model, artifact)
    assert torch.equal(tokens, text)
    assert opened.settings == cache.settings
    for one, other in zip(opened.layers, cache.layers, strict=True):
        assert type(one) is type(other)
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        if isinstance(one, BPCLayer):
            assert (one.hashed, one.guarded) == (other.hashed, other.guarded)
    assert torch.equal(logits(model, text, mask, opened), logits(model, text, mask, cache))


def test_a_prompt_alone_is_saved_too(tmp_path):
    """Its queries wait for online projections, which the first step fits."""
    model, (ids, mask) = enabled(), tiny.prompt(40)
    cache = BPCCache(model.config, **FEW)
    model.model(ids[:, :-1], use_cache=True, **with_cache(cache))
    cache.save(tmp_path / "a.cache", model, ids)
    opened, _ = BPCCache.open(tmp_path / "a.cache", model)
    assert [layer.hashed for layer in opened.layers if isinstance(layer, BPCLayer)] == [0]
    assert torch.equal(logits(model, ids, mask, opened), logits(model, ids, mask, cache))


def test_the_settings_are_those_of_the_cache_or_the_callers(tmp_path):
    model, text, _, cache = written(tmp_path / "a.cache", dense_layers=(0,), seed=3)
    cache.set_budget(0.4)
    cache.save(tmp_path / "a.cache", model, text, overwrite=True)
    opened, _ = BPCCache.open(tmp_path / "a.cache", model)
    assert (opened.settings["budget"], opened.settings["dense_layers"], opened.settings["seed"]) == (0.4, [0], 3)
    opened, _ = BPCCache.open(tmp_path / "a.cache", model, budget=5, dense_layers=())
    assert [layer.rules.budget for layer in opened.layers] == [5, 5, 5]
    with pytest.raises(InputError, match="budget"):
        BPCCache.open(tmp_path / "a.cache", model, budget=0)


def test_other_projections_hash_the_keys_again(tmp_path):
    model = enabled()
    first, second = (tiny.artifact(model.config, metric=metric) for metric in (True, False))
    _, text, mask, cache = written(tmp_path / "a.cache", artifact=first, dense_layers=())
    opened, _ = BPCCache.open(tmp_path / "a.cache", model, second)
    assert all(layer.hashed == 0 for layer in opened.layers)
    again = BPCCache(model.config, second, **FEW, dense_layers=())
    for layer, other in zip(again.layers, cache.layers, strict=True):
        layer.take({"keys": other.keys, "values": other.values})
    assert torch.equal(logits(model, text, mask, opened), logits(model, text, mask, again))
    for one, two in zip(opened.layers, again.layers, strict=True):
        assert torch.equal(one.contents()["codes"], two.contents()["codes"])


def test_another_number_of_bits_hashes_the_keys_again(tmp_path):
    model, text, mask, _ = written(tmp_path / "a.cache")
    cache, _ = BPCCache.open(tmp_path / "a.cache", model, bits=128)
    assert cache.layers[2].hashed == 0
    logits(model, text, mask, cache, 1)
    assert cache.layers[2].codebook.bits == 128


def test_an_opened_cache_does_what_any_cache_does(tmp_path):
    """Crop and other text; a copy; exact decoding; saved once more."""
    model, _, mask, cache = written(tmp_path / "a.cache")
    opened, tokens = BPCCache.open(tmp_path / "a.cache", model)
    for each in (opened, cache):
        each.crop(-5)
    other = torch.cat([tokens[:, :-5], (tokens[:, -5:] + 1) % 250], 1)
    assert torch.equal(*(generate(model, other, mask, copy.deepcopy(each)) for each in (opened, cache)))
    assert torch.equal(*(logits(model, other, mask, copy.deepcopy(each)) for each in (opened, cache)))
    full = generate(model, other, mask, None)
    assert torch.equal(generate(model, other, mask, opened, custom_generate=exact_decoding), full)
    opened.save(tmp_path / "b.cache", model, full)
    assert torch.equal(BPCCache.open(tmp_path / "b.cache", model)[1], full)


def test_the_file_is_safetensors_and_the_same_for_the_same_cache(tmp_path):
    model, text, _, cache = written(tmp_path / "a.cache")
    cache.save(tmp_path / "b.cache", model, text)
    assert (tmp_path / "a.cache").read_bytes() == (tmp_path / "b.cache").read_bytes()
    tensors = load_file(tmp_path / "a.cache")
    assert torch.equal(tensors["tokens"], text)
    assert torch.equal(tensors["layers.2.keys"], cache.layers[2].keys)
    assert (tmp_path / "a.cache").stat().st_mode & 0o077 == 0  # nobody else reads what the text says
    assert tensors["layers.2.codes"].shape == (1, 2, cache.layers[2].hashed, 1)


def test_sixteen_bits(tmp_path):
    model = tiny.model().bfloat16()
    enable(model)
    ids, mask = tiny.prompt(40)
    cache = BPCCache(model.config, **FEW)
    text = generate(model, ids, mask, cache)
    cache.save(tmp_path / "a.cache", model, text)
    opened, _ = BPCCache.open(tmp_path / "a.cache", model)
    assert torch.equal(logits(model, text, mask, opened), logits(model, text, mask, cache))
    with pytest.raises(CacheFileError, match=r"made in torch\.bfloat16, and this model computes in torch\.float32"):
        BPCCache.open(tmp_path / "a.cache", enabled())


def test_another_model_is_refused(tmp_path):
    path = tmp_path / "a.cache"
    model = written(path)[0]
    with pytest.raises(CacheFileError, match="its config is not that of"):
        BPCCache.open(path, enabled("qwen3"))
    with pytest.raises(CacheFileError, match="its weights is not that of"):
        BPCCache.open(path, tiny.model(seed=1))
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        for weight in tuned.model.layers[1].self_attn.k_proj.parameters():
            weight.add_(1e-3)
    with pytest.raises(CacheFileError, match="another model"):
        BPCCache.open(path, tuned)


def test_what_cannot_be_saved_is_refused(tmp_path):
    model, text, _, cache = written(tmp_path / "a.cache")
    for tokens in (text[:, :-2], text[0], text.repeat(2, 1)):
        with pytest.raises(InputError, match="tokens must be"):
            cache.save(tmp_path / "b.cache", model, tokens)
    with pytest.raises(InputError, match="empty"):
        BPCCache(model.config).save(tmp_path / "b.cache", model, text)
    cache.layers[1].crop(-1)
    with pytest.raises(InputError, match="a pass failed"):
        cache.save(tmp_path / "b.cache", model, text)

    class Other:
        get_seq_length = cache.layers[0].get_seq_length
        keys = cache.layers[0].keys

    cache.layers[1] = Other()
    with pytest.raises(ModelError, match="a Other, which cannot be saved"):
        cache.save(tmp_path / "b.cache", model, text)
    assert [path.name for path in tmp_path.iterdir()] == ["a.cache"]


def test_other_files_stay(tmp_path):
    model, text, _, cache = written(tmp_path / "a.cache")
    before = (tmp_path / "a.cache").read_bytes()
    with pytest.raises(CacheFileError, match="exists"):
        cache.save(tmp_path / "a.cache", model, text)
    save(test_artifact.artifact(), tmp_path / "p.safetensors")
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("p.safetensors", "notes.txt"):
        with pytest.raises(CacheFileError, match="is not a saved cache, so it is never replaced"):
            cache.save(tmp_path / name, model, text, overwrite=True)
    with pytest.raises(CacheFileError, match="there is no folder"):
        cache.save(tmp_path / "none" / "a.cache", model, text)
    assert (tmp_path / "a.cache").read_bytes() == before
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "there is no such file"),
        (Path.mkdir, "is a folder"),
        (lambda path: path.write_bytes(b""), "header"),
        (lambda path: path.write_text("some text that is no cache"), "header"),
        (
            lambda path: save(test_artifact.artifact(), path),
            "its metadata have no bpc_cache, so it is another kind of file",
        ),
    ],
    ids=["none", "folder", "empty", "text", "artifact"],
)
def test_other_files_are_refused_in_one_line(tmp_path, make, says):
    make(tmp_path / "x")
    with pytest.raises(CacheFileError, match=says) as refused:
        BPCCache.open(tmp_path / "x", enabled())
    assert str(refused.value).startswith(f"{tmp_path / 'x'}: ")
    test_damage.check_message(str(refused.value))


def test_damaged_files_are_refused(tmp_path):
    """Every file with another byte, and files whose hashes are right but whose values cannot be."""
    path = tmp_path / "a.cache"
    model, text, mask, cache = written(path, safeguard=0.3, new=2)
    whole, expected = path.read_bytes(), logits(model, text, mask, copy.deepcopy(cache), 1)

    @test_damage.often(250)
    @given(broken=damage.of_a_sealed_file(test_damage.seal, "bpc_cache"))
    def check(broken):
        blob = broken(whole)
        path.write_bytes(blob)
        try:
            with test_damage.bounded():
                opened, tokens = BPCCache.open(path, model)
        except (CacheFileError, InputError) as fault:
            return test_damage.check_message(str(fault))
        if blob != whole and metadata_of(blob)["settings"] == metadata_of(whole)["settings"]:
            assert torch.equal(tokens, text)  # what changed is a name or a note
            assert torch.equal(logits(model, text, mask, opened, 1), expected)

    check()


def test_every_flipped_byte_of_the_tensors_is_found(tmp_path):
    path = tmp_path / "a.cache"
    model = written(path, new=2)[0]
    whole = path.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    for place in itertools.chain(range(8, start, start // 200), range(start, len(whole), len(whole) // 300)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(CacheFileError):
            BPCCache.open(path, model)


def metadata_of(blob):
    header = json.loads(blob[8 : 8 + struct.unpack("<Q", blob[:8])[0]])
    return json.loads(header["__metadata__"]["bpc_cache"])


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """The limit of the process stands in for the end of the disk: the system refuses the write in its middle."""
    path = tmp_path / "a.cache"
    model, text, _, _ = written(path)
    before = path.read_bytes()
    code = (
        "import resource, signal, sys, test_saved_cache as t\n"
        "model, (ids, mask) = t.enabled(), t.tiny.prompt(64)\n"
        "cache = t.BPCCache(model.config, **t.FEW)\n"
        "text = t.generate(model, ids, mask, cache)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "try:\n"
        "    cache.save(sys.argv[1], model, text, overwrite=True)\n"
        "except t.CacheFileError as fault:\n"
        "    print(fault)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, cwd=Path(__file__).parent, check=True
    )
    assert ran.stdout == f"{path}: cannot be written: File too large\n"
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.cache"]
    assert torch.equal(BPCCache.open(path, model)[1], text)


PROMPT = "the old stone bridge over the river saw a small lantern"
SPARSE = ("--dense-layers", "none", "--min-tokens", "1", "--min-context", "0", "--max-new-tokens", "6")


def answer(bpc, model_folder, prompt, *words):
    ran = bpc("generate", "-m", model_folder, "-p", prompt, *SPARSE, *words, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out), ran.err


def test_generate_reads_a_prompt_once(bpc, model_folder, tmp_path):
    path = tmp_path / "p.cache"
    plain, _ = answer(bpc, model_folder, PROMPT)
    first, said = answer(bpc, model_folder, PROMPT, "--prompt-cache", path)
    written = path.read_bytes()
    assert f"Saved the cache of {first['prompt_tokens']} tokens: {path}, " in said
    again, said = answer(bpc, model_folder, PROMPT, "--prompt-cache", path)
    count = again["prompt_tokens"]
    assert f"{count - 2} of the {count} tokens of the prompt are in {path}" in said
    assert (first["tokens"], again["tokens"]) == (plain["tokens"], plain["tokens"])
    assert (first["prefill_tokens"], again["prefill_tokens"]) == (count, 2)
    other, said = answer(bpc, model_folder, PROMPT[:-3] + "k", "--prompt-cache", path)
    assert other["prefill_tokens"] == 2
    assert path.read_bytes() == written
    longer, said = answer(bpc, model_folder, 2 * PROMPT, "--prompt-cache", path, "--budget", "100%")
    assert longer["prefill_tokens"] == longer["prompt_tokens"] - count
    assert "Saved the cache" in said
    assert answer(bpc, model_folder, 2 * PROMPT, "--budget", "100%")[0]["tokens"] == longer["tokens"]
    whole = path.read_bytes()
    _, said = answer(bpc, model_folder, PROMPT[::-1], "--prompt-cache", path)
    assert "holds another text of" in said
    assert path.read_bytes() == whole


def test_generate_refuses_what_is_no_prompts_cache(bpc, model_folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "broken").write_bytes(b"\x10\0\0\0\0\0\0\0" + b'{"bpc_cache":   ')
    model, _, _, cache = written(tmp_path / "chat", new=1)
    cache.save(tmp_path / "chat", model, torch.zeros(1, 41), about={"messages": []}, overwrite=True)
    for name, says in (
        ("notes.txt", "exists and is not a saved cache"),
        ("broken", "Error while deserializing header"),
        ("chat", "holds a conversation of bpc chat --session"),
        ("none/a.cache", "there is no folder"),
    ):
        ran = bpc("generate", "-m", model_folder, "-p", PROMPT, "--prompt-cache", tmp_path / name)
        assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
        assert says in ran.err
    written(tmp_path / "other", "qwen3")
    for command in (("generate", "-p", PROMPT, "--prompt-cache"), ("chat", "--session")):
        ran = bpc(*command, tmp_path / "other", "-m", model_folder)
        assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)  # before the weights are loaded
        assert f"Error: {tmp_path / 'other'}: belongs to another model" in ran.err


def test_an_answer_comes_although_its_prompt_cannot_be_saved(bpc, model_folder, tmp_path, monkeypatch):
    """The folder goes away while the model reads."""
    from bpc_cli import decoding

    compiled = decoding.compile_decoder
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(decoding, "compile_decoder", lambda *how: ((tmp_path / "there").rmdir(), compiled(*how)))
    found, said = answer(bpc, model_folder, PROMPT, "--prompt-cache", tmp_path / "there" / "p.cache")
    assert len(found["tokens"]) == 6
    assert "Not saved: " in said
    assert "there is no folder" in said


def test_chat_goes_on_where_it_ended(bpc, tmp_path):
    folder, path = tiny.save(tmp_path / "chatty", max_position_embeddings=512), tmp_path / "talk.cache"
    test_chat.save_template(folder)
    words = ("chat", "-m", folder, *SPARSE, "--json")
    whole = bpc(*words, stdin="the old stone bridge\nwho saw the lantern?\n").out.splitlines()
    first = bpc(*words, "--session", path, "--system", "Be kind.", stdin="the old stone bridge\n")
    assert first.code == 0, first.err
    path.unlink()
    first = bpc(*words, "--session", path, stdin="the old stone bridge\n")
    second = bpc(*words, "--session", path, stdin="who saw the lantern?\n")
    assert "Going on with the conversation in" in second.err
    turns = [json.loads(line) for ran in (first, second) for line in ran.out.splitlines()]
    for turn, expected in zip(turns, map(json.loads, whole), strict=True):
        assert {name: turn[name] for name in ("text", "tokens", "prefill_tokens")} == {
            name: expected[name] for name in ("text", "tokens", "prefill_tokens")
        }
    ran = bpc(*words, "--session", path, "--system", "Be kind.", stdin="x\n")
    assert (ran.code, ran.out) == (1, "")
    assert "has begun" in ran.err
    prompts = tmp_path / "p.cache"
    answer(bpc, folder, PROMPT, "--raw", "--prompt-cache", prompts)
    ran = bpc(*words, "--session", prompts, stdin="x\n")
    assert "holds a saved cache, but no conversation" in ran.err


@pytest.fixture
def chatty(tmp_path):
    folder = tiny.save(tmp_path / "chatty", max_position_embeddings=512)
    test_chat.save_template(folder)
    return ("chat", "-m", folder, *SPARSE, "--json", "--session", tmp_path / "talk.cache")


def test_after_a_reset_the_old_conversation_stays_and_a_line_says_so(bpc, chatty, tmp_path):
    bpc(*chatty, stdin="the old stone bridge\n")
    before = (tmp_path / "talk.cache").read_bytes()
    ran = bpc(*chatty, stdin="/reset\n")
    assert "talk.cache still holds the earlier conversation: delete it to begin anew" in ran.err
    assert (tmp_path / "talk.cache").read_bytes() == before


def test_two_chats_do_not_share_a_session(bpc, chatty, tmp_path):
    with locked(tmp_path / ".talk.cache.lock", "taken"):
        ran = bpc(*chatty, stdin="the old stone bridge\n")
    assert (ran.code, ran.out) == (1, "")
    assert "another chat goes on with it: wait until that ends, or give another --session" in ran.err


@pytest.mark.parametrize("size", [0, 1, 3000])
def test_a_file_that_was_cut_off_says_so(tmp_path, size):
    model, *_ = written(tmp_path / "a.cache")
    whole = (tmp_path / "a.cache").read_bytes()
    (tmp_path / "a.cache").write_bytes(whole[:size])
    with pytest.raises(CacheFileError, match=r"a\.cache: .*(damaged|cut off)"):
        BPCCache.open(tmp_path / "a.cache", model)
