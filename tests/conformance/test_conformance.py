"""Compare every operation of a cache with the masked reference, for all model families and settings."""

import itertools
import shutil
from dataclasses import replace

import pytest
import reference
import suite
import tiny
import torch
from drawn import EXACT
from suite import check

from bpc_calib import BPCCache, enable
from bpc_calib.method.step import attend
from bpc_calib.runtime.call import AttentionCall
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.layers import RankingLayer

FAMILIES = {family: (family, {}) for family in tiny.FAMILIES} | {
    "mistral, wide window": ("mistral", {"sliding_window": 128}),  # as wide as the context: full attention
}
SHAPES = {
    "MHA": {"num_key_value_heads": 4},
    "GQA 4": {"num_key_value_heads": 1},
    "GQA 5": {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64},
    "GQA 3": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 80},
    "head_dim 96": {"head_dim": 96},
    "head_dim 128": {"head_dim": 128},
    "head_dim 256": {"head_dim": 256},
}
RULES = {
    "paper": {"gain": False, "group": "max"},
    "no gain": {"gain": False},
    "32 bits": {"bits": 32},
    "128 bits": {"bits": 128},
    "128 bits, no gain": {"bits": 128, "gain": False},
    "nibbles": {"nibbles": True},
    "nibbles, metric, centred": {"nibbles": True, "metric": True, "centred": True},
    "nibbles, 128 bits, metric, safeguard alone": {
        "nibbles": True,
        "bits": 128,
        "metric": True,
        "safeguard": 1.0,
        "recent": 0,
    },
    "nibbles, 32 bits, no gain": {"nibbles": True, "bits": 32, "gain": False},
    "metric": {"metric": True},
    "centred": {"centred": True},
    "metric, centred, 128 bits": {"metric": True, "centred": True, "bits": 128},
    "metric, no gain, safeguard alone": {"metric": True, "gain": False, "safeguard": 1.0, "recent": 0},
    "max": {"group": "max"},
    "one token": {"budget": 1},
    "a number of tokens": {"budget": 9},
    "a share": {"budget": 0.4},
    "all but one": {"budget": 0.99},
    "everything": {"budget": 1.0},
    "min_tokens": {"budget": 0.02, "min_tokens": 12},
    "min_tokens above the prompt": {"budget": 0.02, "min_tokens": 46},
    "min_context among the prompts": {"min_context": 36},
    "min_context among the prompts, online": {"min_context": 33, "online": True},
    "no safeguard": {"safeguard": 0.0},
    "safeguard alone": {"safeguard": 1.0, "recent": 0},
    "recent": {"recent": 4},
    "none recent": {"recent": 0},
    "sink": {"sink": 3},
    "forced tokens above k": {"budget": 6, "recent": 4, "sink": 4, "safeguard": 0.5},
    "a dense layer": {"dense_layers": (1,)},
    "seed": {"seed": 7, "online": True},
    "online, 128 bits": {"bits": 128, "online": True},
    "online, paper": {"gain": False, "group": "max", "online": True},
}


# Every family in every push by three operations, which ask of a model what differs between families: padding and
# positions of single tokens, a forward pass over buffers that keep their size, and steps of several tokens of which
# some are taken back. What else an operation does happens in the cache, alike for all: llama has everything, and
# gemma3, whose sliding layers lie beside ours.
TELLING = (suite.ragged_batch, suite.static_batch, suite.prompt_lookup)


def operations(*chosen, slow=()):
    """Those in `slow` run in `make test-slow` alone."""
    return pytest.mark.parametrize(
        "operation",
        [*chosen, *(pytest.param(operation, marks=pytest.mark.slow) for operation in slow)],
        ids=lambda operation: operation.__name__,
    )


no_static = pytest.mark.skip("static steps refuse sliding-window layers: see tests/test_static_steps.py")
no_crop = pytest.mark.skip("transformers crops only the last step of a sliding-window layer: see prompt_lookup")
FAMILIES_AND_OPERATIONS = {
    (name, operation): pytest.param(
        name,
        operation,
        id=f"{name}-{operation.__name__}",
        marks=[
            mark
            for skipped, mark in ((suite.crop, no_crop), (suite.static_batch, no_static))
            if (name, operation) == ("gemma3_text", skipped)
        ]
        + [pytest.mark.slow] * (name not in ("llama", "gemma3_text") and operation not in TELLING),
    )
    for name in FAMILIES
    for operation in suite.OPERATIONS
}
every_operation_of_every_family = pytest.mark.parametrize(("name", "operation"), FAMILIES_AND_OPERATIONS.values())


def model(family: str = "llama", **changes):
    """Return a model in float64, so that rounding of products cannot change a selection."""
    return tiny.model(family, **changes).double()


@every_operation_of_every_family
def test_families(name, operation):
    family, changes = FAMILIES[name]
    check(model(family, **changes), operation, online=operation in (suite.beams, suite.batch_changes))


@every_operation_of_every_family
def test_the_whole_budget_is_full_attention(name, operation):
    family, changes = FAMILIES[name]
    made = tiny.model(family, **changes)  # in float32, because both sides use the model's own attention
    plain = operation(made, reference.ReferenceCache(made.config, None, []))
    enable(made)
    for rules in ({"budget": 1.0}, {"budget": 10_000}, {"budget": 1, "min_tokens": 1000}):
        found = operation(made, BPCCache(made.config, **rules))
        torch.testing.assert_close(found.logits, plain.logits)
        assert all(map(torch.equal, found.tokens, plain.tokens))


@operations(suite.ragged_batch, suite.chunked_prefill)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, operation):
    check(model(**SHAPES[shape]), operation)


# What is kept of a key and what is chosen by differs between these; a crop, a reordering or another turn meets it.
KEPT = {
    "nibbles, metric, centred", "metric, centred, 128 bits", "no gain", "safeguard alone",
    "min_context among the prompts", "min_context among the prompts, online", "forced tokens above k", "a dense layer",
    "online, 128 bits", "online, paper", "min_tokens above the prompt",
}  # fmt: skip


PUSHED = {True: (suite.ragged_batch, suite.crop), False: (suite.ragged_batch,)}


@pytest.mark.parametrize(
    ("rules", "operation"),
    [
        pytest.param(
            rules,
            operation,
            id=f"{rules}-{operation.__name__}",
            marks=() if operation in PUSHED[rules in KEPT] else pytest.mark.slow,
        )
        for rules in RULES
        for operation in (suite.ragged_batch, suite.crop, suite.static_batch, suite.beams, suite.conversation)
        if rules in KEPT or operation in (suite.ragged_batch, suite.crop, suite.static_batch)
    ],
)
def test_rules(rules, operation):
    check(model(), operation, **RULES[rules])


# Padding, several tokens at once, and online projections that move with their sequences; static steps by the kernels
# are in tests/test_static_steps.py.
KERNELS = (suite.ragged_batch, suite.chunks_between_tokens, suite.batch_changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")
@operations(*KERNELS, slow=[operation for operation in suite.OPERATIONS if operation not in KERNELS])
def test_the_kernels(operation, monkeypatch):
    """Run the Triton path in its interpreter: every operation on one family, with a metric and a mean."""
    import bpc_calib.backends.triton.ops  # noqa: F401
    from bpc_calib.backends.triton import pipeline

    launched = dict.fromkeys(("sparse_decode", "encode_with"), 0)

    def counting(name, function):
        def call(*arguments, **rules):
            launched[name] += 1
            return function(*arguments, **rules)

        return call

    for name in launched:
        monkeypatch.setattr(pipeline, name, counting(name, getattr(pipeline, name)))
    monkeypatch.setenv("BPC_BACKEND", "triton")
    online = operation in (suite.beams, suite.batch_changes)
    check(model(num_hidden_layers=1), operation, online=online, metric=not online, centred=not online, bits=32)
    assert min(launched.values()) > 0, launched


def check_in_float32(operation, make, make_cache=BPCCache, **settings):
    """Check an operation in float32, because the CPU kernels do not serve float64; `make(seed)` returns a model.

    In float32, also with plain torch, rounding changes a choice in about one of 200 operations. Only if rounding also
    changes the reference at the same step is a second model tried, and that one must pass.
    """
    rules = {"tolerance": 1e-4, "nudges": 8} | settings
    try:
        check(make(1), operation, make_cache, **rules)
    except suite.RoundingError:
        check(make(2), operation, make_cache, **rules)


# Of keys and values on disk only where they lie differs, so every family takes what takes tokens back.
@pytest.mark.parametrize(
    ("name", "operation"),
    [
        param
        for (name, operation), param in FAMILIES_AND_OPERATIONS.items()
        if operation is not suite.static_batch and (name == "llama" or operation is suite.prompt_lookup)
    ],
)
def test_on_disk(name, operation, tmp_path):
    """The same bits as in memory."""
    family, changes = FAMILIES[name]
    made = tiny.model(family, **changes)
    enable(made)
    rules = suite.DEFAULTS | {"safeguard": 0.1}
    expected, found = (
        operation(made, BPCCache(made.config, **rules, kv_device=device)) for device in (None, f"disk:{tmp_path}")
    )
    assert all(map(torch.equal, found.tokens + found.logits, expected.tokens + expected.logits))
    assert not list(tmp_path.iterdir())


# The kernels do not know the family: what else its operations do, `test_families` shows.
@pytest.mark.parametrize(
    ("name", "operation"),
    [
        param
        for (name, operation), param in FAMILIES_AND_OPERATIONS.items()
        if name in ("llama", "gemma3_text") or operation in TELLING
    ],
)
def test_the_cpu_kernels(name, operation, monkeypatch):
    family, changes = FAMILIES[name]
    monkeypatch.setenv("BPC_BACKEND", "native")
    online = operation in (suite.beams, suite.batch_changes)
    check_in_float32(operation, lambda seed: tiny.model(family, seed=seed, **changes), online=online, metric=not online)


@operations(suite.ragged_batch, slow=[suite.static_batch])
@pytest.mark.parametrize("rules", [name for name in RULES if name != "online, 128 bits"])
def test_rules_of_the_cpu_kernels(rules, operation, monkeypatch):
    """Not with 128 online bits on 40 keys: after 40 bits only rounding is left of the keys, and it sets the signs."""
    monkeypatch.setenv("BPC_BACKEND", "native")
    check_in_float32(operation, lambda seed: tiny.model(seed=seed), **RULES[rules])


@operations(suite.ragged_batch)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_the_cpu_kernels(shape, operation, monkeypatch):
    monkeypatch.setenv("BPC_BACKEND", "native")
    check_in_float32(operation, lambda seed: tiny.model(seed=seed, **SHAPES[shape]))


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention compiles C++ on a CPU")


@pytest.mark.parametrize(
    "attention", ["eager", "sdpa", pytest.param("flex_attention", marks=[needs_compiler, pytest.mark.slow])]
)
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch, which compiles flex attention
def test_the_models_own_attention(attention):
    made = tiny.model()  # in float32, as the softmax of eager attention
    made.set_attn_implementation(attention)
    check(made, suite.ragged_batch, tolerance=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_layer_in_the_dtypes_of_models(dtype, head_dim):
    generator = torch.Generator().manual_seed(head_dim)
    config = tiny.config(head_dim=head_dim)
    artifact, settings = tiny.artifact(config, metric=True, centred=True), suite.DEFAULTS | {"budget": 0.2, "sink": 2}
    keys, values = torch.randn(2, 2, 2, 150, head_dim, generator=generator).to(dtype)
    queries = torch.randn(2, 4, 1, head_dim, generator=generator).to(dtype)
    visible = torch.arange(150) >= torch.tensor([[0], [37]])
    layer = BPCCache(config, artifact, **settings).layers[1]
    layer.update(keys[:, :, :120], values[:, :, :120])
    layer.update(keys[:, :, 120:], values[:, :, 120:])
    call = AttentionCall(None, queries, visible, None, None, None)
    found, _ = layer.decode(queries.squeeze(2).unflatten(1, (2, 2)), layer.rows(call))
    found = found.flatten(1, 2).unsqueeze(1)
    for row in range(2):
        for head in range(2):
            tokens = visible[row].nonzero().flatten().tolist()
            group = queries[row, 2 * head : 2 * head + 2, 0]
            projection = reference.of_head(artifact.layers[1], head)
            scores, error = reference.score(group, keys[row, head], *projection, tokens, settings)
            k = reference.how_many(len(tokens), settings["budget"], settings["min_tokens"])
            chosen = reference.choose(scores, error, tokens, k, 150, settings)
            weights = (group.double() @ keys[row, head, chosen].double().T * head_dim**-0.5).softmax(-1)
            expected = (weights @ values[row, head, chosen].double()).to(dtype)
            # One wrong token in the set moves an output by about 0.1, which is about the size of the output.
            close = {"rtol": EXACT[dtype], "atol": EXACT[dtype] / 10}
            torch.testing.assert_close(found[row, 0, 2 * head : 2 * head + 2], expected, **close)


@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_sharp_heads_reach_the_limit_of_relative_scores(gain, scaling, monkeypatch):
    config = tiny.config(head_dim=64, num_attention_heads=8, num_key_value_heads=2, hidden_size=512)
    generator = torch.Generator().manual_seed(5)
    artifact = tiny.artifact(config, metric=True, centred=True)
    settings = suite.DEFAULTS | {"budget": 0.2, "safeguard": 0.0, "gain": gain}
    keys = torch.randn(1, 2, 120, 64, generator=generator).double()
    sharpness = torch.tensor([1.0, 10, 40, 200]).repeat(2)[:, None, None]
    queries = sharpness * torch.randn(1, 8, 1, 64, generator=generator).double()
    chosen = []
    for limit in (None, 1e9):
        layer = BPCCache(config, artifact, **settings).layers[1]
        layer.update(keys, keys)
        layer.scale(scaling)
        if limit:
            monkeypatch.setattr("bpc_calib.method.scoring.RELATIVE_LIMIT", limit)
        rows = layer.rows(AttentionCall(None, queries, None, None, None, None))
        chosen.append(layer.decode(queries.squeeze(2).unflatten(1, (2, 4)), rows)[1])
    assert not torch.equal(*chosen)  # proves that the limit matters here
    for head in range(2):
        projection = reference.of_head(artifact.layers[1], head)
        group = queries[0, 4 * head : 4 * head + 4, 0]
        scores, error = reference.score(group, keys[0, head], *projection, list(range(120)), settings, scaling)
        expected = reference.choose(scores, error, list(range(120)), 24, 120, settings)
        assert chosen[0][0, head].tolist() == sorted(expected)


class IgnoresBudget(BPCLayer):
    """A layer that attends to everything."""

    def rows(self, call):
        return None


class NewestOnly(RankingLayer):
    """A layer that attends only to the newest token."""

    def rank(self, query, visible):
        return torch.arange(self.get_seq_length()).expand(*self.keys.shape[:3])

    def decode(self, query, rows):
        return super().decode(query, replace(rows, k=rows.k * 0 + 1, width=1))


class Random(RankingLayer):
    """A layer that attends to the correct number of tokens, but random ones."""

    def rank(self, query, visible):
        return torch.randint(1 << 20, self.keys.shape[:3])


class ForgetsPadding(BPCLayer):
    """A layer that ranks padding like tokens."""

    def decode(self, query, rows):
        return super().decode(query, replace(rows, valid=None))


class NeverHashes(BPCLayer):
    """A layer that gives all new keys the code of the first."""

    def hash(self, visible):
        before = self.hashed
        super().hash(visible)
        codes = self.buffers["codes"]
        codes[:, :, before : self.hashed] = codes[:, :, before : before + 1].clone()


class ForgetsToReorder(BPCLayer):
    """A layer that does not reorder its codes with the beams."""

    def _rebatch(self, change):
        codes = self.buffers["codes"]
        super()._rebatch(change)
        if len(codes) == len(self.buffers["codes"]):
            self.buffers["codes"] = codes


class KeepsCropped(BPCLayer):
    """A layer that uses the codes of cropped tokens for the tokens that replace them."""

    def crop(self, tokens_to_remove):
        hashed = self.hashed
        super().crop(tokens_to_remove)
        self.hashed = min(hashed, self.get_seq_length() + 4)


class DropsSafeguard(BPCLayer):
    """A layer without the safeguard."""

    def decode(self, query, rows):
        self.guarded = 0
        return super().decode(query, rows)


class WrongForHalf(BPCLayer):
    """A layer that chooses the newest tokens instead of the best if the first entry of the query is positive."""

    def decode(self, query, rows):
        _, chosen = super().decode(query, rows)
        newest = torch.arange(self.get_seq_length())[-chosen.shape[-1] :].expand_as(chosen)
        chosen = torch.where(query[..., :1, 0] > 0, newest, chosen)
        return attend(query, self.state(), rows, chosen, self.rules.scaling), chosen


def broken(kind):
    return type("Broken", (BPCCache,), {"layer_class": kind})


BROKEN = pytest.mark.parametrize(
    ("kind", "operation"),
    [
        (IgnoresBudget, suite.greedy),
        (NewestOnly, suite.greedy),
        (Random, suite.greedy),
        (ForgetsPadding, suite.ragged_batch),
        (NeverHashes, suite.static_batch),
        (ForgetsToReorder, suite.batch_changes),
        (KeepsCropped, suite.crop),
        (DropsSafeguard, suite.greedy),
        (WrongForHalf, suite.greedy),
    ],
    ids=lambda value: value.__name__,
)


@BROKEN
def test_a_broken_cache_fails(kind, operation):
    rules = {"sink": 2} if kind is ForgetsPadding else {}  # so that padding is among the first tokens
    check(model(), operation, **rules)
    with pytest.raises(AssertionError):
        check(model(), operation, broken(kind), **rules)


@pytest.mark.slow  # the test above says the same of the suite in float64
@BROKEN
def test_a_broken_cache_fails_in_float32(kind, operation, monkeypatch):
    """The broken cache fails although the cache of the second model is correct."""
    monkeypatch.setenv("BPC_BACKEND", "torch")
    rules = {"sink": 2} if kind is ForgetsPadding else {}
    turns = itertools.cycle((broken(kind), BPCCache))
    with pytest.raises(AssertionError):
        check_in_float32(
            operation, lambda seed: tiny.model(seed=seed), lambda *args, **kwargs: next(turns)(*args, **kwargs), **rules
        )
