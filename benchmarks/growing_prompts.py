"""A study: should a second prompt adapt the codes of a cache that the first one has adapted? See docs/history.md.

    python benchmarks/growing_prompts.py FOLDER OUTPUT

FOLDER is that of `real_suite.py`. The first 1,024 tokens are of one text, the next 3,072 of another. The last 64 of these
are decoded with codes as calibrated, adapted by the first text, and by both, each by its number of tokens.
"""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import report
import torch
from forced_pass import TOKENS, attention, best, counts, ranks_of_codes
from real_models import subjects
from real_suite import opened
from transformers import DynamicCache

from bpc_artifacts import load
from bpc_calib.compat import with_cache
from bpc_calib.method.metric import adapted
from bpc_calib.method.rules import Rules, ranking_defaults, shares_of
from bpc_calib.models.observation import observing
from bpc_calib.runtime.online_fit import ASKED, Asked, moment_metric, observed_places, prompt_moment
from bpc_calib.text.corpora import open_corpora
from bpc_calib.text.samples import draw_samples

FIRST, SECOND, TEXTS, BUDGET = 1024, 3072, 8, 0.02


def metrics(queries, kv_heads):
    """The metrics of the first text and of both, of the queries `[1, heads, tokens, D]` of a layer."""
    parts = (queries[:, :, :FIRST], queries[:, :, FIRST:])
    moments = []
    for part in parts:
        places = observed_places(part.shape[2])
        asked = Asked(part[:, :, places], places)
        moments.append(part.shape[2] / ASKED * prompt_moment(asked, kv_heads, None))
    return [moment_metric(each)[0] for each in (moments[0], moments[0] + moments[1])]


@torch.inference_mode()
def divergences(model, artifact, rules, ids):
    """KL of the next token by kind of codes, the mean over the last tokens."""
    ids, cache, found = ids.unsqueeze(0).to(torch.int64), DynamicCache(config=model.config), {}

    def ask(module, query, *given):
        found[module.layer_idx] = metrics(query, given[0].shape[1]) if module.layer_idx in rules else None

    with observing(model, ask):
        model.base_model(input_ids=ids[:, :-TOKENS], **with_cache(cache))

    def likely(attend):
        with observing(model, attend):
            logits = model(input_ids=ids[:, -TOKENS:], **with_cache(copy.deepcopy(cache))).logits
        return logits[0].float().log_softmax(-1)

    full, result, method = likely(lambda *given: None), {}, ranking_defaults(artifact)
    for kind, name in enumerate(("as calibrated", "adapted by the first", "adapted by both")):
        layers = {
            index: replace(each, metric=adapted(torch.from_numpy(each.metric), found[index][kind - 1]).numpy())
            if kind
            else each
            for index, each in artifact.layers.items()
        }

        def attend(module, query, key, value, arguments, layers=layers):
            if (index := module.layer_idx) not in rules:
                return None
            ranks = ranks_of_codes(query[0], key[0], layers[index], method, arguments["scaling"], False)
            kept = best(ranks, counts(rules[index], key.shape[2], key.shape[1]))
            return attention(query[0], key[0], value[0], kept, arguments["scaling"]).to(query.dtype)

        result[name] = (full.exp() * (full - likely(attend))).sum(-1).mean().item()
    return result


def main():
    """Write the KL of every pair of texts."""
    folder, output = map(Path, sys.argv[1:])
    rows = []
    for subject in subjects(folder, tiny=False):
        (model, tokenizer), artifact = opened(subject), load(subject.artifact("bpc"))
        shares = shares_of(artifact, artifact.layers)
        rules = {layer: Rules(BUDGET, min_tokens=1, shares=shares.get(layer)) for layer in artifact.layers}
        corpora, about = (
            open_corpora(subject.corpora("held-out")),
            {"samples": TEXTS, "sequence_length": SECOND, "seed": 0},
        )
        texts, _ = draw_samples(corpora, tokenizer, vocab_size=model.config.vocab_size, **about)
        for one, text in enumerate(texts):
            pair = torch.cat([text[:FIRST], texts[(one + 1) % TEXTS]])
            rows.append({"model": subject.name, "text": one} | divergences(model, artifact, rules, pair))
            print(rows[-1], file=sys.stderr, flush=True)
        own = [row for row in rows if row["model"] == subject.name]
        print({name: mean(row[name] for row in own) for name in list(own[0])[2:]}, file=sys.stderr)
    about = {"tokens": [FIRST, SECOND], "forced": TOKENS, "budget": BUDGET}
    report.keep(output, report.about() | about | {"rows": rows})


if __name__ == "__main__":
    main()
