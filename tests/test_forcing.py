"""Forced decoding: after the prefix, every token is one step of the cache under comparison."""

import pytest
import tiny
import torch

from bpc_calib import BPCCache, enable
from bpc_calib.compat import with_cache
from bpc_calib.evaluation.baselines.snapkv import SnapKVLayer
from bpc_calib.evaluation.comparison import make_cache
from bpc_calib.evaluation.forcing import compare, complete, force, fork, keep, log_likelihoods, prefill
from bpc_calib.evaluation.methods import METHODS
from bpc_calib.runtime.layers import RankingLayer

IDS = torch.randint(0, 250, (2, 80), generator=torch.Generator().manual_seed(0))
HARD = {"min_tokens": 1, "dense_layers": ()}


@pytest.fixture(scope="module")
def model():
    made = tiny.model()
    enable(made)
    return made


class NewestOnly(RankingLayer):
    """A layer whose steps attend only to their own token, so that earlier text cannot matter."""

    def rank(self, query, visible):
        self.ranked = getattr(self, "ranked", 0) + 1
        return torch.arange(self.get_seq_length()).expand(self.keys.shape[:3])


class NewestCache(BPCCache):
    layer_class = NewestOnly


def newest(model):
    return NewestCache(model.config, budget=1, safeguard=0.0, **HARD)


def test_log_likelihoods_are_those_of_the_model(model):
    cache = fork(prefill(model, IDS[:, :60]), BPCCache(model.config, budget=1.0))
    likely, greedy = log_likelihoods(model, cache, IDS[:, 60:])
    with torch.inference_mode():
        logits = model(IDS).logits[:, 60:-1].log_softmax(-1)
    torch.testing.assert_close(likely, logits.gather(-1, IDS[:, 61:, None]).squeeze(-1), rtol=1e-4, atol=1e-4)
    assert torch.equal(greedy, logits.argmax(-1) == IDS[:, 61:])


def test_predictions_are_compared_with_those_of_full_attention(model):
    """The divergence is that of torch's own function, from both predictions in full precision."""
    prefix, ids = prefill(model, IDS[:, :60]), IDS[:, 60:]
    with torch.inference_mode():
        full = model(IDS).logits[:, 60:-1].log_softmax(-1)
        own = torch.stack([force(model, cache, each) for cache in [fork(prefix, newest(model))]
                           for each in ids[:, :-1].split(1, dim=1)], dim=1).log_softmax(-1)  # fmt: skip
    kept = keep(model, fork(prefix, BPCCache(model.config, budget=1.0)), ids)
    likely, apart, agree = compare(model, fork(prefix, newest(model)), ids, kept)
    wanted = torch.nn.functional.kl_div(own, full, log_target=True, reduction="none").sum(-1).double().mean(-1)
    torch.testing.assert_close(apart, wanted, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(likely, own.gather(-1, ids[:, 1:, None]).double().mean((1, 2)), rtol=1e-4, atol=1e-5)
    assert apart.min() > 1e-3
    assert torch.equal(agree, (own.argmax(-1) == full.argmax(-1)).double().mean(-1))
    assert agree.max() < 1
    same = compare(model, fork(prefix, BPCCache(model.config, budget=1.0)), ids, kept)
    assert same.divergence.abs().max() < 1e-5
    assert torch.equal(same.agreement, torch.ones(len(ids), dtype=torch.float64))
    alone = compare(model, fork(prefix, newest(model)), ids, ())
    assert alone.divergence.isnan().all()
    assert alone.agreement.isnan().all()


def test_every_forced_token_is_decoded(model):
    """A cache that attends only to the newest token must give the same likelihoods after different prefixes."""
    prefix = prefill(model, IDS[:, :60])
    one, other = fork(prefix, newest(model)), fork(prefill(model, IDS[:, :60].flip(1)), newest(model))
    first, _ = log_likelihoods(model, one, IDS[:, 60:])
    second, _ = log_likelihoods(model, other, IDS[:, 60:])
    torch.testing.assert_close(first, second)
    full, _ = log_likelihoods(model, fork(prefix, BPCCache(model.config, budget=1.0)), IDS[:, 60:])
    assert (first - full).abs().min() > 1e-4
    assert [layer.ranked for layer in one.layers] == [19] * 3


def test_every_token_of_a_completion_is_decoded(model):
    cache = fork(prefill(model, IDS[:, :60]), newest(model))
    answer = complete(model, cache, IDS[:, 60:65], 4)
    assert [layer.ranked for layer in cache.layers] == [8] * 3  # the last token of the answer is not fed
    # Each token of the answer depends only on the token before it.
    for place in range(3):
        fresh = fork(prefill(model, IDS[:, : 64 + place + 1]), newest(model))
        assert torch.equal(force(model, fresh, answer[:, place : place + 1]).argmax(-1), answer[:, place + 1])


# What needs projections, or has to learn first.
NEEDING = ("bpc", "twilight", "twilight-own", "spotlight", "hata", "compresskv")


@pytest.mark.parametrize("method", [name for name in METHODS if name not in NEEDING])
def test_a_fork_equals_a_separate_prefill(model, method):
    prefix = prefill(model, IDS[:, :60])
    forked = fork(prefix, make_cache(method, model.config, None, 12, seed=0, **HARD))
    own = make_cache(method, model.config, None, 12, seed=0, **HARD)
    with torch.inference_mode():
        model(IDS[:, :60], **with_cache(own))
    torch.testing.assert_close(force(model, forked, IDS[:, 60:]), force(model, own, IDS[:, 60:]), rtol=1e-4, atol=1e-4)
    assert prefix.get_seq_length() == 60
    assert not any(isinstance(layer, SnapKVLayer) for layer in prefix.layers)


def test_a_fork_copies_sliding_window_layers():
    model = tiny.model("gemma3_text")
    enable(model)
    prefix = prefill(model, IDS[:, :60])
    found = [force(model, fork(prefix, BPCCache(model.config, budget=1.0)), IDS[:, 60:]) for _ in range(2)]
    with torch.inference_mode():
        expected = model(IDS).logits[:, -1]
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
