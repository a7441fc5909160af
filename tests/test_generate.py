"""`bpc generate`: what it prints, where it reads, and what it refuses."""

import contextlib
import functools
import io
import json
import os
import re

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from bpc_artifacts import save
from bpc_calib import BPCCache, enable
from bpc_calib.compat import with_cache
from bpc_calib.runtime.layers import GrowingLayer
from bpc_cli.decoding import decode, kv_bytes, make_decoder, why_empty
from bpc_cli.generate import online_hint, print_comparison, what_to_try

PROMPT = "the old stone bridge over the river saw a small lantern"
ALL_SPARSE = ("--dense-layers", "none", "--min-tokens", "1")
TEMPLATE = "<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
TIMES = ("compile_seconds", "prefill_seconds", "prepare_seconds", "decode_seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def artifact(model_folder, text_folder, tmp_path_factory):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    path = tmp_path_factory.mktemp("artifact") / "tiny.safetensors"
    save(tiny.calibrated(model, tokenizer, corpora=[str(text_folder)], samples=4), path)
    return path


@pytest.fixture(scope="module")
def expected(model_folder):
    """The tokens of the library itself: a function of the cache's settings, None for full attention."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    enable(model)

    def generate(new, artifact=None, prompt=PROMPT, **rules):
        cache = BPCCache(model.config, artifact, **rules) if rules else None
        inputs = tokenizer(prompt, return_tensors="pt")
        settings = {**with_cache(cache), "do_sample": False, "pad_token_id": 256}
        made = inputs["input_ids"]
        if cache is not None:  # the prompt is hashed before the first step
            made = model.generate(**inputs, max_new_tokens=1, **settings)
            cache.prepare()
        made = model.generate(made, max_length=inputs["input_ids"].shape[1] + new, **settings)
        return made[0, inputs["input_ids"].shape[1] :].tolist()

    return generate


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A folder of a model with a chat template."""
    folder = tiny.save(tmp_path_factory.mktemp("model") / "chatty")
    set_template(folder, TEMPLATE)
    return folder


def set_template(folder, template):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def as_json(ran):
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_decodes_with_its_options(bpc, model_folder, artifact, expected):
    from bpc_artifacts import load

    words = ("-m", model_folder, "-a", artifact, "-p", PROMPT, "--budget", "8", *ALL_SPARSE)
    made = as_json(bpc("generate", *words, "--max-new-tokens", "20", "--json"))
    assert made["tokens"] == expected(20, load(artifact), budget=8, min_tokens=1, dense_layers=())
    assert made["tokens"] != expected(20)
    assert made["prompt_tokens"] == len(PROMPT) + 1
    # A step reads 8 tokens of 2 heads x 8 x 4 bytes, keys and values; code and gain of every token and head.
    lengths = range(len(PROMPT) + 2, len(PROMPT) + 1 + 20)
    share = sum(8 * 128 + n * 18 for n in lengths) / sum(128 * n for n in lengths)
    assert made["kv_bytes_share"] == pytest.approx(share)
    parts = made["kv_bytes_parts"]
    assert parts["chosen"] == pytest.approx(19 * 8 / sum(lengths))
    assert parts["ranking"] == pytest.approx(18 / 128)
    assert parts["dense"] == parts["sliding"] == parts["minimum"] == 0


def test_exact_writes_the_text_of_full_attention(bpc, model_folder, artifact, expected):
    words = ("-m", model_folder, "-a", artifact, "-p", PROMPT, "--budget", "8", *ALL_SPARSE, "--max-new-tokens", "20")
    ran = bpc("generate", *words, "--exact", "--draft", "4", "--compare")
    assert ran.code == 0, ran.err
    assert "first difference: none in 20 tokens" in ran.out
    assert re.search(
        r"^\d+ of \d+ checked tokens were full attention's \(\d+\.\d%\), KL divergence 0\.\d{4}$", ran.out, re.M
    )
    assert "KV bytes read" not in ran.out
    made = as_json(bpc("generate", *words, "--exact", "--draft", "4", "--json"))
    assert made["tokens"] == expected(20)
    assert made["kv_bytes_share"] is None
    assert 0 < made["agreement"]["agreed"] < made["agreement"]["checked"] < 20
    assert made["agreement"]["fell_back"] is None


def test_checks_are_told_and_change_nothing(bpc, model_folder, artifact):
    words = ("-m", model_folder, "-a", artifact, "-p", PROMPT, "--budget", "8", *ALL_SPARSE, "--max-new-tokens", "80")
    plain, checked = (as_json(bpc("generate", *words, *more, "--json")) for more in ((), ("--check", "4")))
    assert checked["tokens"] == plain["tokens"]
    assert "agreement" not in plain
    assert checked["agreement"]["checked"] == (len(plain["tokens"]) - 1) // 4
    ran = bpc("generate", *words, "--check", "1", "--fallback", "1")
    assert ran.code == 0
    assert "; full attention alone from token " in ran.err


def test_the_bytes_of_many_steps_are_those_of_evenly_spaced_ones(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    enable(model)
    cache = BPCCache(model.config, tiny.artifact(model.config), budget=0.1, min_tokens=64)
    with torch.no_grad():
        model(torch.ones(1, 9, dtype=torch.long), **with_cache(cache))
    counted = [cache.kv_bytes(length) for length in range(301, 1300)]
    share = sum(read for read, _ in counted) / sum(full for _, full in counted)
    assert kv_bytes(cache, 300, 1000)["kv_bytes_share"] == pytest.approx(share, rel=1e-3)
    assert kv_bytes(cache, 300, 1) == {"kv_bytes_share": None, "kv_bytes_parts": None}


def test_a_short_context_is_attended_whole_and_a_line_says_so(bpc, model_folder, artifact, expected, monkeypatch):
    monkeypatch.setattr(GrowingLayer, "switch_over", lambda layer, keys: 90)
    words = ("generate", "-m", model_folder, "-a", artifact, "-p", PROMPT, "--budget", "8", *ALL_SPARSE)
    ran = bpc(*words, "--max-new-tokens", "20", "--json")
    made = as_json(ran)
    assert made["tokens"] == expected(20)
    assert (made["min_context"], made["kv_bytes_share"]) == (90, 1)
    length = len(PROMPT) + 21
    assert (
        f"Every step attended to all tokens: choosing is faster from 90 tokens on here, and this context has {length} "
        "(--min-context 0 always chooses)." in ran.err
    )
    always = bpc(*words, "--max-new-tokens", "20", "--json", "--min-context", "0")
    assert as_json(always)["tokens"] != made["tokens"]
    assert "Every step" not in always.err
    asked = bpc(*words, "--max-new-tokens", "20", "--json", "--min-context", "90")
    assert as_json(asked)["tokens"] == made["tokens"]
    assert "Every step" not in asked.err


@pytest.mark.slow  # compilations; tests/test_compiled_layers.py compares the layers
def test_long_answers_are_decoded_by_compiled_layers(bpc, model_folder, artifact, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("bpc_cli.decoding.COMPILED_FROM", 20)
    words = ("generate", "-m", model_folder, "-a", artifact, "-p", PROMPT, "--max-new-tokens", "20", "--json")
    runs = [bpc(*words, *more) for more in ((), (), ("--no-compile",), ("--quiet",))]
    assert ["Compiling the model's layers" in run.err for run in runs] == [True, False, False, False]
    assert len(list((tmp_path / "bpc").iterdir())) == 1
    tokens = [as_json(run)["tokens"] for run in runs]
    assert tokens == [tokens[0]] * 4  # in float32 their roundings change no token of this answer
    exact = [bpc(*words, "--exact", "--draft", "2", *more) for more in ((), ("--no-compile",))]
    assert len(list((tmp_path / "bpc").iterdir())) == 2  # passes that verify drafts, too
    assert len({tuple(as_json(run)["tokens"]) for run in exact}) == 1

    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        without = bpc(*words)
    assert as_json(without)["tokens"] == tokens[0]
    assert "Decoding without compiled layers: torch cannot compile the layers of LlamaDecoderLayer" in without.err


def test_online_is_the_default(bpc, model_folder, expected):
    words = ("-m", model_folder, "-p", PROMPT, "--budget", "0.2", *ALL_SPARSE, "--max-new-tokens", "12", "--json")
    made = as_json(bpc("generate", *words))
    assert made["artifact"] == "online"
    assert made["tokens"] == expected(12, budget=0.2, min_tokens=1, dense_layers=())
    assert made == as_json(bpc("generate", *words, "--artifact", "online")) | {name: made[name] for name in TIMES}


@pytest.mark.parametrize("budget", ["100%", "1.0", "5000"])
def test_the_whole_budget_gives_the_text_of_full_attention(bpc, model_folder, expected, budget):
    made = as_json(
        bpc("generate", "-m", model_folder, "-p", PROMPT, "--budget", budget, "--max-new-tokens", "15", "--json")
    )
    assert made["tokens"] == expected(15)


def test_reads_the_prompt_from_a_file_and_from_stdin(bpc, model_folder, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    words = ("generate", "-m", model_folder, "--max-new-tokens", "5", "--json")
    texts = {
        as_json(ran)["text"]
        for ran in (bpc(*words, "-p", PROMPT), bpc(*words, "--prompt-file", file), bpc(*words, stdin=PROMPT + "\n"))
    }
    assert len(texts) == 1


def test_prints_the_text_and_nothing_else_on_stdout(bpc, model_folder):
    words = ("generate", "-m", model_folder, "-p", PROMPT, "--max-new-tokens", "30")
    text = as_json(bpc(*words, "--json"))["text"]
    assert any(not c.isprintable() for c in text)  # or the next line shows little
    ran = bpc(*words)
    assert ran.out == "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text) + "\n"
    assert re.search(r"^Prompt: 56 tokens in \d+\.\d s \([\d,]+ tokens/s\)", ran.err, re.MULTILINE)
    assert re.search(r"^Answer: 30 tokens, .* tokens/s, .*% of the KV bytes of full attention$", ran.err, re.MULTILINE)
    assert bpc(*words, "--quiet") == (0, ran.out, "")


def test_compare_prints_both_texts_and_where_they_part(bpc, model_folder, artifact, expected):
    words = ("generate", "-m", model_folder, "-a", artifact, "-p", PROMPT, "--max-new-tokens", "20", "--compare")
    made = as_json(bpc(*words, "--budget", "3", *ALL_SPARSE, "--json"))
    full = expected(20)
    assert made["full_attention"]["tokens"] == full
    first = next(i for i in range(20) if made["tokens"][i] != full[i])
    assert made["first_difference"]["token"] == first + 1
    printed = bpc(*words, "--budget", "3", *ALL_SPARSE).out
    for line in (
        "--- BPC (calibrated, 3 tokens, at least 1) ---",
        "--- full attention ---",
        f"first difference: token {first + 1}: ",
    ):
        assert line in printed
    assert re.search(
        r"^KV bytes read: .*% of full attention's: codes 14\.1%, chosen keys and values ", printed, re.MULTILINE
    )
    same = as_json(bpc(*words, "--budget", "100%", "--json"))
    assert same["first_difference"] is None
    assert "first difference: none in 20 tokens" in bpc(*words, "--budget", "100%").out


@pytest.mark.parametrize("sampled", [(), ("--temperature", "0.9")], ids=["greedy", "sampled"])
def test_static_steps_print_the_same(bpc, model_folder, artifact, monkeypatch, sampled):
    """As on a GPU, where they are captured."""
    words = ("-m", model_folder, "-a", artifact, "-p", PROMPT, "--max-new-tokens", "20", "--compare", *sampled)
    words = ("generate", *words, "--budget", "3", *ALL_SPARSE)
    plain, shown = as_json(bpc(*words, "--json")), bpc(*words).out
    used = []
    monkeypatch.setattr("bpc_cli.decoding.captures", lambda device: used.append(str(device)) or True)
    static, shown_static = as_json(bpc(*words, "--json")), bpc(*words).out
    assert set(used) == {"cpu"}
    for one, other in ((plain, static), (plain["full_attention"], static["full_attention"])):
        assert one["tokens"] == other["tokens"]
    assert plain["kv_bytes_share"] == static["kv_bytes_share"]
    texts = [each.partition("--- comparison")[0] for each in (shown, shown_static)]
    assert texts[0] == texts[1] != ""


def test_a_model_without_static_steps_is_decoded_without(bpc, tmp_path, monkeypatch):
    folder = tiny.save(tmp_path / "gemma", "gemma3_text")
    words = ("generate", "-m", folder, "-p", PROMPT, "--max-new-tokens", "6", "--compare")
    plain = as_json(bpc(*words, "--json"))
    monkeypatch.setattr("bpc_cli.decoding.captures", lambda device: True)
    ran = bpc(*words, "--json")
    assert as_json(ran)["tokens"] == plain["tokens"]
    assert ran.err.count("Decoding without CUDA graphs: ") == 1
    assert "has a sliding window" in ran.err
    assert bpc(*words, "--quiet").err == ""


def test_a_model_with_more_inputs_than_tokens_decodes_without_static_steps(bpc, model_folder, monkeypatch):
    prepare = LlamaForCausalLM.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def more(*positional, **arguments):
        return prepare(*positional, **arguments) | {"beside": torch.ones(1)}

    monkeypatch.setattr(LlamaForCausalLM, "prepare_inputs_for_generation", more)
    words = ("generate", "-m", model_folder, "-p", PROMPT, "--max-new-tokens", "6", "--json")
    plain = as_json(bpc(*words))
    monkeypatch.setattr("bpc_cli.decoding.captures", lambda device: True)
    ran = bpc(*words)
    assert as_json(ran)["tokens"] == plain["tokens"]
    assert "Decoding without CUDA graphs: " in ran.err
    assert "so it cannot serve beside" in ran.err


@pytest.mark.parametrize("new", [2, 9])
@pytest.mark.parametrize("compare", [False, True])
def test_what_is_tried_out(bpc, tmp_path, monkeypatch, expected, new, compare):
    """As many steps as there are, up to three, whatever ends the text; of a prompt as long if speeds are compared.

    On a CPU kernels are compiled without a step, and a comparison tries out a short prompt.
    """
    folder = tiny.save(tmp_path / "ends")
    prompt = PROMPT * 2
    ends = expected(1, prompt=prompt)[0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    made, graphs = [], True

    def recorded(decoder, ids, *arguments, **more):
        run = decode(decoder, ids, *arguments, **more)
        made.append((ids.shape[1], len(run["tokens"])))
        return run

    monkeypatch.setattr("bpc_cli.decoding.decode", recorded)
    monkeypatch.setattr("bpc_cli.decoding.captures", lambda device: graphs)
    words = ("-m", folder, "-p", prompt, "--max-new-tokens", new, *(["--compare"] * compare))
    assert bpc("generate", *words).code == 0
    count, steps = len(prompt) + 1, min(4, new)
    whole = count if compare else 64
    assert made == [(64, steps), (whole, steps), (whole, steps), (count, 1), *([(count, 1)] * compare)]
    made.clear()
    graphs = False
    assert bpc("generate", *words).code == 0
    assert made == [(64, steps)] * 3 * compare + [(count, 1)] * (1 + compare)


def test_sampling_is_repeated_by_its_seed(bpc, model_folder):
    words = ("generate", "-m", model_folder, "-p", PROMPT, "--max-new-tokens", "12", "--temperature", "2", "--json")
    texts = [as_json(bpc(*words, "--seed", seed))["tokens"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_p_samples_from_the_most_likely_tokens_alone(bpc, model_folder, expected):
    words = ("generate", "-m", model_folder, "-p", PROMPT, "--max-new-tokens", "12", "--budget", "1.0", "--json")
    assert as_json(bpc(*words, "--temperature", "2", "--top-p", "1e-9"))["tokens"] == expected(12)
    assert as_json(bpc(*words, "--temperature", "2", "--top-p", "1"))["tokens"] != expected(12)


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        ((), "<s><user>hello<assistant>"),
        (("--system", "be kind"), "<s><system>be kind<user>hello<assistant>"),
        (("--raw",), "<s>hello"),
    ],
)
def test_a_model_with_a_template_gets_the_prompt_in_it(bpc, chatty, words, sent):
    """With BOS once, as the template or the tokenizer writes it."""
    ran = bpc("generate", "-m", chatty, "--max-new-tokens", "9", "-p", "hello", "--json", *words)
    tokenizer, model = AutoTokenizer.from_pretrained(chatty), AutoModelForCausalLM.from_pretrained(chatty)
    ids = tokenizer(sent, add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert ids[0].tolist().count(257) == 1
    made = as_json(ran)
    assert made["prompt_tokens"] == ids.shape[1]
    assert made["tokens"] == model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :].tolist()
    assert made["chat_template"] is ("--raw" not in words)
    assert ("Sending the prompt in the chat template of chatty" in ran.err) is ("--raw" not in words)


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[-1].content }}",
        "{{ messages[-1].content }}",
    ],
    ids=["refuses", "leaves out"],
)
def test_a_template_without_a_system_message_refuses_one(bpc, tmp_path, template):
    folder = tiny.save(tmp_path / "strict")
    set_template(folder, template)
    words = ("generate", "-m", folder, "-p", "hello", "--max-new-tokens", "2", "-q")
    assert bpc(*words).code == 0
    ran = bpc(*words, "--system", "be kind")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("Error: --system: the chat template of strict takes no system message: ")
    assert ran.err.count("\n") == 1


def test_a_system_message_needs_the_template(bpc, chatty, model_folder):
    words = ("generate", "-p", "hello", "--system", "be kind")
    assert "Error: --raw leaves the chat template out" in bpc(*words, "-m", chatty, "--raw").err
    assert "Error: --system: tiny-llama has no chat template" in bpc(*words, "-m", model_folder).err


def test_a_template_that_fails_is_one_line(bpc, tmp_path):
    folder = tiny.save(tmp_path / "strict")
    set_template(folder, "{{ raise_exception('never\nin this way') }}")
    ran = bpc("generate", "-m", folder, "-p", "hello")
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "the chat template of strict refuses the conversation: never" in ran.err


@pytest.mark.parametrize(
    ("text", "tokens", "ended_by", "said"),
    [
        ("", 1, "model", "the model ended its text at once"),
        ("", 5, "limit", "the model wrote only special tokens, 5 of them"),
        (" \n", 2, "limit", "the model wrote only white space, in 2 tokens"),
    ],
)
def test_why_an_answer_is_empty(text, tokens, ended_by, said):
    run = {"text": text, "tokens": [258] * tokens, "ended_by": ended_by}
    assert why_empty(run) == f"The answer is empty: {said}."
    assert why_empty(run | {"text": " a"}) is None
    assert why_empty(run | {"ended_by": "interrupt"}) is None


def test_what_to_try_after_an_empty_answer():
    assert what_to_try(templated=True, template=True).startswith("A model that only continues text wants --raw")
    assert what_to_try(templated=False, template=True) == "This model has a chat template: leave --raw out."
    assert what_to_try(templated=False, template=False).startswith("Change the end of the prompt")


def test_an_empty_answer_says_why(bpc, tmp_path, expected):
    folder = tiny.save(tmp_path / "mute")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": expected(1)[0]}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(expected(1)[0])]})
    tokenizer.save_pretrained(folder)
    ran = bpc("generate", "-m", folder, "-p", PROMPT)
    assert (ran.code, ran.out) == (0, "\n")
    assert "The answer is empty: the model ended its text at once. Change the end of the prompt" in ran.err
    assert bpc("generate", "-m", folder, "-p", PROMPT, "-q") == (0, "\n", "")


def test_a_first_difference_is_one_line():
    difference = {"token": 3, "bpc": "a\nb", "full": "می\u200cروم\r\tb"}
    run = {"tokens": [1, 2, 3, 4], "ended_by": "limit", "prefill_tokens": 7, "prefill_seconds": 2.0}
    run |= {"prepare_seconds": 14.84, "decode_seconds": 1.0, "tokens_per_second": 3.0}
    run |= {"full_attention": run | {"prepare_seconds": 0.0}, "first_difference": difference}
    run |= {"kv_bytes_share": 0.5, "min_tokens": 128, "min_context": 0}
    parts = {"sliding": 0.1, "dense": 0.2, "ranking": 0.0, "chosen": 0.15, "minimum": 0.05}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_comparison(run | {"kv_bytes_parts": parts}, online=True)
    assert printed.getvalue().splitlines()[1:] == [
        'first difference: token 3: "a\\nb" instead of "می\u200cروم\\r\\tb"',
        "BPC: prompt 7 tokens in 2.0 s (4 tokens/s), online projections 14.8 s; answer 4 tokens, 3.0 tokens/s",
        "full attention: prompt 7 tokens in 2.0 s (4 tokens/s); answer 4 tokens, 3.0 tokens/s",
        "KV bytes read: 50.0% of full attention's: sliding-window layers 10.0%, dense layers 20.0%, "
        "chosen keys and values 15.0%, at least 128 tokens 5.0%",
    ]
    assert online_hint(run, "org/model") == (
        "Online projections took 14.8 s; a calibrated file saves that: bpc calibrate -m org/model"
    )
    assert online_hint(run | {"prepare_seconds": 0.9}, "org/model") is None
    assert online_hint(run | {"decode_seconds": 200.0}, "org/model") is None


def test_stops_at_the_limit_of_the_model(bpc, model_folder):
    ran = bpc("generate", "-m", model_folder, "-p", "x" * 120, "--max-new-tokens", "50")
    assert ran.code == 0
    assert "Stopping after 7 tokens, at the limit of tiny-llama" in ran.err


def test_streams(model_folder):
    """Words are printed before the last step of the model."""
    events = []

    class Recorder(io.StringIO):
        def write(self, text):
            events.append(text)
            return super().write(text)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    model.register_forward_hook(lambda *_: events.append(None))
    ids = tokenizer("the old stone bridge", return_tensors="pt")["input_ids"]
    words = set(tokenizer("ab ", add_special_tokens=False)["input_ids"])  # a word is printed when it is whole
    others = [i for i in range(tiny.VOCAB) if i not in words]
    decoder = make_decoder(model, tokenizer, {"do_sample": True}, seed=0)
    with contextlib.redirect_stdout(Recorder()):
        made = decode(decoder, ids, None, 60, show=True, suppress_tokens=others)
    steps = [i for i, event in enumerate(events) if event is None]
    assert len(steps) == len(made["tokens"])
    assert any(event for event in events[: steps[-1]] if event)


@pytest.mark.parametrize(
    ("code", "words", "fault"),
    [
        (2, ["--budget", "0"], "budget must be a share in (0, 1] or a positive number of tokens, not 0"),
        (2, ["--budget", "abc"], "abc: expected a share of the tokens (2% or 0.02) or a number of tokens (2048)"),
        (2, ["--budget", "1e9999999%"], "1e9999999%"),
        (2, ["--budget", "150%"], "budget must be a share in (0, 1] or a positive number of tokens, not 1.5"),
        (2, ["--temperature", "1e-42"], "'--temperature': 1e-42: expected 0, or a number of at least 0.01"),
        (2, ["--seed", str(2**64)], "seed must be below 2^63"),
        (2, ["--min-tokens", "0"], "the minimum must be an integer of at least 1, not 0"),
        (2, ["--min-context", "-1"], "the context must be an integer of at least 0, not -1"),
        (2, ["--dense-layers", "0,x"], "0,x: expected layers like 0,1 or none"),
        (2, ["--prompt", ""], "--prompt is empty"),
        (2, ["--temperature", "0.5", "--top-p", "0"], "'--top-p': 0.0: expected a probability above 0 and at most 1"),
        (2, ["--top-p", "0.9"], "--top-p changes only sampling: give --temperature too"),
        (2, ["--device", "nonsense"], "device nonsense"),
        (1, ["--prompt", "\udcff"], "the prompt is not UTF-8 text"),
        (1, ["--prompt-file", "~nosuchuser/x"], "~nosuchuser/x: the prompt cannot be read"),
        (1, ["--prompt-file", os.devnull], "/dev/null is empty"),
        (1, ["--dense-layers", "99"], "99 is not a layer of tiny-llama, which has layers 0 to 2"),
        (1, ["--dense-layers", "0,1,2"], "leave BPC no layer"),
        (
            1,
            ["--prompt", "x" * 128],
            "the prompt has 129 tokens, and tiny-llama takes 128 in all: shorten it, or take another model",
        ),
        (1, ["--artifact", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_what_is_refused_is_refused_in_one_line(bpc, model_folder, code, words, fault):
    prompt = [] if words[0].startswith("--prompt") else ["--prompt", "hello"]
    ran = bpc("generate", "-m", model_folder, *prompt, *words)
    assert ran.code == code
    assert ran.out == ""
    assert ran.err.startswith("Error: ")
    assert ran.err.count("\n") == 1
    assert fault in ran.err


def test_an_artifact_of_another_model_is_refused(bpc, artifact, tmp_path):
    other = tiny.save(tmp_path / "other", num_hidden_layers=4, head_dim=16)
    ran = bpc("generate", "-m", other, "-a", artifact, "-p", "hello")
    assert ran.code == 1
    assert "made for tiny-llama, does not fit other" in ran.err
    assert "layers: the artifact has 3, the model 4" in ran.err
    assert "head_dim: the artifact has 8, the model 16" in ran.err


def test_prompts_that_cannot_be_read_are_refused(bpc, model_folder, tmp_path):
    assert "cannot be read" in bpc("generate", "-m", model_folder, "--prompt-file", tmp_path / "none").err
    assert "the prompt is not UTF-8 text (byte 0)" in bpc("generate", "-m", model_folder, stdin=b"\xff\xfe").err
    (tmp_path / "a.docx").write_bytes(b"PK\3\4\x14\0\xff")
    ran = bpc("generate", "-m", model_folder, "--prompt-file", tmp_path / "a.docx")
    assert "a.docx is not UTF-8 text but a document: save its text to a file first" in ran.err
    assert bpc("generate", "-m", model_folder, "-p", "a", "--prompt-file", "b").code == 2


def test_a_model_that_cannot_be_served_is_refused(bpc, tmp_path):
    folder = tiny.save(tmp_path / "windows", "mistral", sliding_window=16)
    ran = bpc("generate", "-m", folder, "-p", "hello")
    assert ran.code == 1
    assert "no layer attends to the whole context" in ran.err


def test_settings_that_come_with_the_model_do_not_break_the_stream(bpc, tmp_path):
    folder = tiny.save(tmp_path / "settings")
    settings = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "cache_implementation": "static",
    }
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 258}))
    ran = bpc("generate", "-m", folder, "-p", PROMPT, "--max-new-tokens", "3", "--compare")
    assert ran.code == 0, ran.err
    assert "first difference: none in 3 tokens" in ran.out


def test_quiet_says_nothing_of_doubts(bpc, artifact, tmp_path):
    other = tiny.save(tmp_path / "other", vocab_size=300)
    words = ("generate", "-m", other, "-a", artifact, "-p", "hello", "--max-new-tokens", "2", "--compare")
    assert bpc(*words).err.count("config differs") == 1
    assert bpc(*words, "--quiet").err == ""
