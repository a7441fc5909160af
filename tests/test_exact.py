"""Exact decoding has full attention's text and leaves its cache; checked decoding measures and changes nothing."""

import functools
import itertools
import math
import threading

import pytest
import tiny
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from bpc_calib import BPCCache, InputError, checked_decoding, enable, exact_decoding
from bpc_calib.compat import with_cache
from bpc_calib.method.defaults import MOST_DRAFTED
from bpc_calib.runtime import exact
from bpc_calib.runtime.agreement import Agreement
from bpc_calib.runtime.draft_length import Pace, rounds_tokens

FEW = {"budget": 0.2, "min_tokens": 8, "dense_layers": (), "min_context": 0}
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.1}
SERVED = ["llama", "gemma3_text", "qwen3"]  # gemma3_text has a sliding window of 16


@functools.cache
def enabled(family="llama", **changes):
    """Return an enabled model, with room for long texts."""
    model = tiny.model(family, max_position_embeddings=16384, **changes)
    enable(model)
    return model


def prompt(*lengths, seed=1):
    """Return random sequences, padded on the left to the longest."""
    return dict(zip(("input_ids", "attention_mask"), tiny.prompt(*lengths, seed=seed), strict=True))


def generate(model, inputs, cache=None, way=None, *, new=40, **arguments):
    """Generate with a cache; None: transformers' own."""
    torch.manual_seed(0)
    if way is not None:
        arguments |= {"custom_generate": way}
    cached = {} if cache is None else with_cache(cache)
    return model.generate(**inputs, **cached, max_new_tokens=new, **arguments)


def assert_cached(cache, full):
    """Compare a cache with one that was filled by full attention."""
    assert cache.get_seq_length() == full.get_seq_length()
    for ours, theirs in zip(cache.layers, full.layers, strict=True):
        kept = min(ours.keys.shape[2], theirs.keys.shape[2])  # of a sliding window both keep what is still read
        for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(one[:, :, -kept:], other[:, :, -kept:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "draft", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow), None]
)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", SERVED)
def test_the_text_and_the_cache_are_those_of_full_attention(family, sampling, draft):
    model, inputs, full = enabled(family), prompt(40), DynamicCache(config=enabled(family).config)
    expected = generate(model, inputs, full, **sampling)
    cache = BPCCache(model.config, **FEW)
    assert torch.equal(generate(model, inputs, cache, exact_decoding, draft=draft, **sampling), expected)
    assert_cached(cache, full)
    assert cache.agreement.checked > 0
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)


@pytest.mark.parametrize("family", SERVED)
def test_sequences_of_different_lengths(family):
    """The third one ends early; padding and what follows an end are no checks."""
    model, inputs = enabled(family), prompt(40, 23, 31)
    free = generate(model, inputs, **GREEDY)
    end = int(free[2, 40 + 9])
    expected = generate(model, inputs, eos_token_id=end, **GREEDY)
    assert (expected[2] == model.config.pad_token_id).any()
    cache = BPCCache(model.config, **FEW)
    found = generate(model, inputs, cache, exact_decoding, draft=4, eos_token_id=end, **GREEDY)
    assert torch.equal(found, expected)
    assert cache.get_seq_length() == found.shape[1] - 1


@functools.cache
def long_texts(family):
    """Return four sequences of different lengths with 2,500 tokens of full attention each, and the arguments."""
    several, how = prompt(60, 47, 33, 9), GREEDY | {"new": 2500, "min_new_tokens": 2500, "repetition_penalty": 1.2}
    return several, how, generate(enabled(family), several, **how)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [*(pytest.param(length, marks=pytest.mark.rare) for length in (2, 4, 8)), None])
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.rare), "gemma3_text"])
def test_ten_thousand_tokens(family, draft):
    """Behind padding, and with a sliding window."""
    several, how, expected = long_texts(family)
    cache = BPCCache(enabled(family).config, **FEW)
    found = generate(enabled(family), several, cache, exact_decoding, draft=draft, **how)
    assert torch.equal(found, expected)
    assert found.shape == (4, 60 + 2500)
    assert 0.1 < cache.agreement.rate < 1  # some drafts are wrong


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")
def test_triton_verifies_drafts(monkeypatch):
    """In Triton's interpreter, with a dense layer beside those that choose: all attend to several tokens at once."""
    from bpc_calib.backends.triton import pipeline

    model, inputs, passes = enabled(num_hidden_layers=2), prompt(40), []
    full = DynamicCache(config=model.config)
    expected = generate(model, inputs, full, new=6, **GREEDY)
    plain = pipeline.dense_decode

    def counted(query, state, rows, scaling, new):
        passes.append(new)
        return plain(query, state, rows, scaling, new)

    monkeypatch.setattr(pipeline, "dense_decode", counted)
    monkeypatch.setenv("BPC_BACKEND", "triton")
    cache = BPCCache(model.config, tiny.artifact(model.config), **FEW | {"dense_layers": (0,)})
    assert torch.equal(generate(model, inputs, cache, exact_decoding, new=6, draft=3, **GREEDY), expected)
    assert_cached(cache, full)
    assert passes[:2] == [4, 4]


def test_a_cache_that_keeps_rejected_tokens_is_found(monkeypatch):
    """What the tests above compare would differ."""
    model, inputs = enabled(), prompt(40)
    expected = generate(model, inputs, **GREEDY)
    monkeypatch.setattr(BPCCache, "back", lambda cache, length: None)
    found = generate(model, inputs, BPCCache(model.config, **FEW), exact_decoding, draft=4, **GREEDY)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("left_out", ["budget", "min_context"])
def test_nothing_is_drafted_where_steps_attend_to_everything(left_out):
    model, inputs = enabled(), prompt(40)
    cache = BPCCache(model.config, **FEW | ({"min_context": 1000} if left_out == "min_context" else {"budget": 1.0}))
    assert torch.equal(
        generate(model, inputs, cache, exact_decoding, draft=4, **GREEDY), generate(model, inputs, **GREEDY)
    )
    assert cache.agreement.rate in (None, 1.0)


def test_codes_and_the_guarded_tokens_are_those_of_the_text():
    """As after plain steps: rejected tokens leave nothing, and passes that verify do not count as prompts."""
    model, inputs = enabled(), prompt(40)
    rules = FEW | {"safeguard": 0.2}
    artifact = tiny.artifact(model.config)
    cache, other = (BPCCache(model.config, artifact, **rules) for _ in range(2))
    text = generate(model, inputs, cache, exact_decoding, draft=4, **GREEDY)
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text[:, :-1], **with_cache(full))
        model(text[:, :40], **with_cache(other))
        with other.full_attention():
            model(text[:, 40:-1], **with_cache(other))
        assert_cached(cache, full)
        one, two = (model(text[:, -1:], **with_cache(each)).logits for each in (cache, other))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        assert ours.guarded == theirs.guarded == 40
        assert ours.hashed == theirs.hashed == text.shape[1]
        same = ours.buffers["codes"][:, :, : text.shape[1]] == theirs.buffers["codes"][:, :, : text.shape[1]]
        assert same.float().mean() > 0.999  # a product near 0 may round to the other side


def test_a_conversation_with_prompts_in_chunks():
    model, full = enabled("gemma3_text"), DynamicCache(config=enabled("gemma3_text").config)
    cache, text = BPCCache(model.config, **FEW), prompt(30)["input_ids"]
    for turn, more in enumerate((7, 1, 12)):
        text = torch.cat([text, prompt(more, seed=turn)["input_ids"]], 1)
        inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        expected = generate(model, inputs, full, new=9, **GREEDY)
        text = generate(model, inputs, cache, exact_decoding, new=9, draft=4, **GREEDY)
        assert torch.equal(text, expected)
    alone = BPCCache(model.config, **FEW)
    inputs = {"input_ids": prompt(33)["input_ids"]}
    found = generate(model, inputs, alone, exact_decoding, draft=3, prefill_chunk_size=8, **GREEDY)
    assert torch.equal(found, generate(model, inputs, **GREEDY))


class Raises(StoppingCriteria):
    """Stops after some tokens by raising."""

    def __init__(self, tokens):
        self.left = tokens

    def __call__(self, ids, scores, **more):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("fails", ["between", "in a draft", "in a check"])
def test_a_cache_stays_usable_after_an_interrupt(fails, family):
    model, inputs = enabled(family), prompt(40)
    cache, calls = BPCCache(model.config, **FEW), 0
    deep = model.model.layers[1].mlp
    stop = {"stopping_criteria": StoppingCriteriaList([Raises(9)])} if fails == "between" else {}

    def fail(module, given):
        nonlocal calls
        tokens = given[0].shape[1]
        calls += tokens == 1 if fails == "in a draft" else 1 < tokens < 40
        if calls == (11 if fails == "in a draft" else 3):
            raise KeyboardInterrupt

    hook = deep.register_forward_pre_hook(fail) if fails != "between" else None
    with pytest.raises(KeyboardInterrupt):
        generate(model, inputs, cache, exact_decoding, draft=4, **GREEDY, **stop)
    if hook is not None:
        hook.remove()
    held = cache.get_seq_length()
    assert 40 < held < 79
    full = DynamicCache(config=model.config)
    expected = generate(model, inputs, full, **GREEDY)
    again = {"input_ids": expected[:, : held + 3]}
    found = generate(model, again, cache, exact_decoding, draft=4, new=77 - held, **GREEDY)
    assert torch.equal(found, expected[:, : found.shape[1]])


def test_ends_inside_of_a_draft():
    """By the end of a text, and by the largest number of tokens."""
    model, inputs = enabled(), prompt(40)
    text = generate(model, inputs, **GREEDY)
    for new in (1, 2, 3, 6):
        cache = BPCCache(model.config, **FEW)
        found = generate(model, inputs, cache, exact_decoding, draft=8, new=new, **GREEDY)
        assert torch.equal(found, text[:, : 40 + new])
        assert cache.get_seq_length() == 39 + new
    for place in (43, 50):
        cache = BPCCache(model.config, **FEW)
        ends = {"eos_token_id": int(text[0, place])}
        expected = generate(model, inputs, **ends, **GREEDY)
        assert torch.equal(generate(model, inputs, cache, exact_decoding, draft=8, **ends, **GREEDY), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1


class Pair(StoppingCriteria):
    """Stops behind two tokens."""

    def __init__(self, *tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, ids, scores, **more):
        return (ids[:, -2:] == self.tokens).all(-1)


def test_another_criterion_ends_a_text():
    model, inputs = enabled(), prompt(40, 33)
    text = generate(model, inputs, **GREEDY)
    criteria = StoppingCriteriaList([Pair(*text[0, 47:49].tolist())])
    cache = BPCCache(model.config, **FEW)
    found = generate(model, inputs, cache, exact_decoding, draft=8, stopping_criteria=criteria, **GREEDY)
    assert torch.equal(found, generate(model, inputs, stopping_criteria=criteria, **GREEDY))
    assert cache.agreement.checked < 2 * 39  # one has ended


def test_streams_each_token_once_and_in_order():
    class Kept:
        def __init__(self):
            self.parts, self.ended = [], False

        def put(self, value):
            self.parts.append(value.reshape(-1).tolist())

        def end(self):
            self.ended = True

    model, inputs, kept = enabled(), prompt(40), Kept()
    way = functools.partial(exact_decoding, streamer=kept)
    text = generate(model, inputs, BPCCache(model.config, **FEW), way, draft=4, streamer=kept, **GREEDY)
    assert kept.ended
    assert [len(part) for part in kept.parts] == [40] + [1] * (text.shape[1] - 40)
    assert list(itertools.chain(*kept.parts)) == text[0].tolist()


class Counting(LogitsProcessor):
    """Forbids another token after each call: a guess may not change its state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        scores[:, self.calls * 7 % 250] = -math.inf
        return scores


def test_processors_with_a_state():
    model, inputs = enabled(), prompt(40)
    expected = generate(model, inputs, logits_processor=LogitsProcessorList([Counting()]), **SAMPLED)
    own, cache = Counting(), BPCCache(model.config, **FEW)
    processors = LogitsProcessorList([own])
    found = generate(model, inputs, cache, exact_decoding, draft=4, logits_processor=processors, **SAMPLED)
    assert torch.equal(found, expected)
    assert own.calls == found.shape[1] - 40


def test_returned_scores_are_those_of_full_attention():
    model, inputs = enabled(), prompt(40)
    asked = {"return_dict_in_generate": True, "output_logits": True, **GREEDY}
    expected = generate(model, inputs, **asked)
    cache = BPCCache(model.config, **FEW)
    found = generate(model, inputs, cache, exact_decoding, draft=4, **asked)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)


def test_ties_within_rounding_are_counted():
    found = Agreement()
    found.add_ties(torch.tensor([[16, 15.75, 0], [0, -16, -16.5], [15, 15.5, 16], [1, 0.99, 0]]).bfloat16())
    assert found.ties == 2  # 2 spacings of 2^-7 times the best: 0.25 of 16, 0.016 of 1
    found.add_ties(torch.tensor([[16, 15.75, 0], [16, 16 - 2e-6, 0]]))
    assert found.ties == 3

    model, inputs = enabled(), prompt(40, 29)
    rows = model.lm_head.weight.data
    rows[1::2] = rows[::2]  # tokens in pairs
    cache = BPCCache(model.config, **FEW)
    text = generate(model, inputs, cache, exact_decoding, draft=4, **GREEDY)
    assert cache.agreement.ties == 2 * (text.shape[1] - 40 - 1)  # all but those after the prompt


def test_a_fallback_ends_the_drafts():
    model, inputs = enabled(), prompt(40)
    cache, said = BPCCache(model.config, **FEW), []
    found = generate(
        model, inputs, cache, exact_decoding, new=300, draft=4, fallback=0.9, on_check=said.append, **GREEDY
    )
    assert torch.equal(found, generate(model, inputs, new=300, **GREEDY))
    agreement = cache.agreement
    assert set(map(id, said)) == {id(agreement)}
    assert agreement.checked == len(said)
    assert 64 <= agreement.checked < 64 + 4  # those of one more draft
    assert agreement.rate < 0.9
    assert 40 < agreement.fell_back < 340
    assert agreement.divergence > 0.01
    cache.reset()
    assert cache.agreement == Agreement()


@pytest.mark.parametrize("family", SERVED)
def test_checks_change_no_token(family):
    model, inputs = enabled(family), prompt(40, 29)
    plain, checked = (BPCCache(model.config, **FEW) for _ in range(2))
    for sampling in (GREEDY, SAMPLED):
        expected = generate(model, inputs, plain, **sampling)
        found = generate(model, inputs, checked, checked_decoding, every=4, **sampling)
        assert torch.equal(found, expected)
        plain.reset()
        assert 9 <= checked.agreement.checked <= 2 * 9  # a sequence may end early
        assert 0 < checked.agreement.agreed < checked.agreement.checked
        checked.reset()


def test_a_fallback_of_checks_goes_on_with_full_attention():
    model, inputs = enabled(), prompt(40)
    cache = BPCCache(model.config, **FEW)
    found = generate(model, inputs, cache, checked_decoding, new=120, every=1, fallback=0.9, **GREEDY)
    place = cache.agreement.fell_back
    assert cache.agreement.checked == 64
    assert 100 <= place <= 105
    # From there on, full attention chooses each token.
    with torch.no_grad(), cache.full_attention():
        cache.back(place)
        logits = model(found[:, place:-1], **with_cache(cache)).logits
    assert torch.equal(logits.argmax(-1), found[:, place + 1 :])


def test_what_is_refused():
    model, inputs = enabled(), prompt(40)
    cache = BPCCache(model.config, **FEW)
    for way, wrong, said in (
        (exact_decoding, {"draft": 0}, "draft must be from 1 to 16 tokens, not 0"),
        (exact_decoding, {"fallback": 2.0}, "fallback must be a share from 0 to 1, not 2.0"),
        (checked_decoding, {"every": 0}, "every must be 1 or more steps, not 0"),
        (exact_decoding, {"num_beams": 2}, "serve greedy decoding and sampling, not beam search"),
        (exact_decoding, {"output_hidden_states": True, "return_dict_in_generate": True}, "return no hidden states"),
        (exact_decoding, {"cache": DynamicCache(config=model.config)}, "BPCCache.*not DynamicCache"),
    ):
        arguments = GREEDY | wrong
        with pytest.raises(InputError, match=said):
            generate(model, inputs, arguments.pop("cache", cache), way, **arguments)
    with pytest.raises(InputError, match=r"call bpc_calib.enable\(model\) before exact or checked decoding"):
        generate(tiny.model(), inputs, BPCCache(model.config), exact_decoding, **GREEDY)


def chi_squared(model, runs=300):
    """Return how far sampled texts of three tokens are from full attention's probabilities; 7 degrees of freedom."""
    ids, top = prompt(24)["input_ids"], 2
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(runs):
        cache = BPCCache(model.config, **FEW | {"budget": 1, "min_tokens": 1})
        torch.manual_seed(seed)
        text = model.generate(
            ids, **with_cache(cache), custom_generate=exact_decoding, draft=2, do_sample=True, top_k=top,
            max_new_tokens=3,
        )  # fmt: skip
        place = tuple(text[0, 24:].tolist())
        counts[place] = counts.get(place, 0) + 1

    expected = {(): 1.0}
    for _ in range(3):
        longer = {}
        for path, share in expected.items():
            with torch.no_grad():
                logits = model(torch.cat([ids, torch.tensor([path], dtype=torch.int64)], 1)).logits[0, -1]
            best = logits.topk(top)
            for token, part in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[(*path, token)] = share * part
        expected = longer
    if counts.keys() - expected.keys():  # texts that full attention never has
        return math.inf
    assert len(expected) == 8
    return sum((counts.get(path, 0) - runs * share) ** 2 / (runs * share) for path, share in expected.items())


@pytest.mark.slow  # many texts
def test_sampled_texts_have_the_distribution_of_full_attention(monkeypatch):
    """The test can fail: it does where every drafted token counts as right."""
    model = enabled(num_hidden_layers=1)
    assert chi_squared(model) < 26.0  # more has a chance of 1 in 2,000

    def accept_all(run, ids):
        place = run.given - 1
        if run.logits is None or place == run.drafted.shape[1]:
            return None
        run.given += 1
        return run.logits[:, run.given - 1]

    monkeypatch.setattr(exact._Exact, "_ahead", accept_all)
    assert chi_squared(model) > 26.0


def test_the_length_of_drafts():
    """The best of all lengths by their expected speed; none without a measurement, and few where drafts are wrong."""
    simulated = torch.rand(200_000, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    assert rounds_tokens(0.7, 6) == pytest.approx(1 + float(simulated.cumprod(1).sum(1).float().mean()), rel=0.01)
    assert rounds_tokens(1.0, 6) == 7
    pace = Pace()
    assert pace.choose(8) == 0
    pace.saw(0, 0.0, 1.0)
    assert [pace.choose(limit) for limit in (2, 8)] == [2, 4]
    pace.saw(4, 0.4, 1.2)  # a step takes 0.1, and a verified token 0.05
    for _ in range(200):
        pace.saw_token(True)
    assert pace.choose(100) == MOST_DRAFTED
    for _ in range(400):
        pace.saw_token(False)
    assert pace.choose(100) == 0
    for _ in range(200):
        pace.saw_token(True)
    pace.saw(4, 3.9, 1.2)  # a step as slow as full attention
    pace.saw(4, 3.9, 1.2)
    for _ in range(30):
        pace.saw(4, 3.9, 1.2)
    assert pace.choose(100) == 0
    for _ in range(64):
        pace.saw(0, 0.0, 1.0)
    assert pace.choose(100) == 4  # tries again


def test_a_slow_first_step_decides_only_for_a_while():
    """The first draft hashes the prompt, and the first steps of a run are slow: both are measured again soon."""
    pace = Pace()
    pace.saw(0, 0.0, 9.0)  # makes drafts look better than they are
    pace.saw(4, 40.0, 1.2)
    assert pace.choose(8) == 0
    for _ in range(4):
        assert pace.choose(8) == 0
        pace.saw(0, 0.0, 1.0)
    assert pace.choose(8) == 4
    rounds = 0
    while (count := pace.choose(4)) and rounds < 100:
        assert count == 4
        pace.saw(4, 0.4, 1.2)
        rounds += 1
    assert rounds == 64  # then a step of full attention shows whether drafts still pay


def test_a_processor_that_cannot_be_copied_is_named():
    class Locked(LogitsProcessor):
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, text, scores):
            return scores

    model = enabled()
    with pytest.raises(InputError, match=r"copy the logits processors, and one cannot be copied \(cannot pickle"):
        generate(
            model, prompt(40), BPCCache(model.config, **FEW), exact_decoding,
            logits_processor=LogitsProcessorList([Locked()]),
        )  # fmt: skip


def test_the_model_of_a_processor_is_not_copied():
    """That of classifier-free guidance holds the model: a copy would take its memory twice."""
    model, copied = enabled(), []

    class Guided(LogitsProcessor):
        def __init__(self, model):
            self.model = model

        def __call__(self, text, scores):
            copied.append(self.model is not model)
            return scores

    processors = LogitsProcessorList([Guided(model)])
    generate(model, prompt(40), BPCCache(model.config, **FEW), exact_decoding, logits_processor=processors)
    assert copied
    assert not any(copied)
