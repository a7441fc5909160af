"""The study behind the defaults: the steps of the method alone and together, at the same bytes, on one model.

    python benchmarks/projections.py -m demo --prompts 300 --output projections_demo_2048.json

Questions about hidden facts are asked in the hard setting (no dense layer, no lower bound on the tokens attended), and
text is forced token by token; docs/projections.md has the tables.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import rankings
import report
import torch

from bpc_calib import describe, disable, enable
from bpc_calib.calibration.collecting import collect
from bpc_calib.calibration.contents import contents
from bpc_calib.calibration.plan import Plan, make_plan
from bpc_calib.calibration.positions import early_keys
from bpc_calib.calibration.projecting import fit_layers
from bpc_calib.calibration.projection_method import PROJECTION_METHODS, ProjectionMethod
from bpc_calib.calibration.run_text import read_text
from bpc_calib.calibration.stored import read_layer, total_moments
from bpc_calib.calibration.work_folder import open_work_folder
from bpc_calib.evaluation.baselines import OracleLayer, RandomLayer
from bpc_calib.evaluation.comparison import FORCED, HARD
from bpc_calib.evaluation.evaluate import OTHER_TEXT, ask, draw_prompts
from bpc_calib.evaluation.fidelity import METRICS, probe
from bpc_calib.evaluation.forcing import fork, log_likelihoods, prefill
from bpc_calib.evaluation.statistics import mean, proportion
from bpc_calib.models.loading import load_model, load_tokenizer
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.rules import ranking_defaults
from bpc_calib.text.corpora import open_corpus
from bpc_calib.text.known_corpora import Corpus, expand
from bpc_calib.text.samples import draw_samples

BEST = PROJECTION_METHODS["score-aware"]
PAPER = PROJECTION_METHODS["paper"]
EIGHT = replace(PAPER, name="8 steps", iterations=8, shift=True)
TINY = {  # every kind of layer once
    "parts": ["headline", "others", "groups", "searches", "ranks", "shares", "top-p", "codes"],
    "only": [
        "product, metric 3/4",
        "exact", "as in the paper", "score-aware", "random keys", "PCA + sign + gain", "online", "softmax",
        "descent, parallel error weighs 3", "beam of 8", "score + 0.2 error", "budget by layer", "top-p 0.8",
    ],
    "length": 512,
    "prompts": 1,
    "texts": 1,
    "budgets": [0.02],
    "samples": 3,
    "sequence_length": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One row of a table: how projections are found, from which text, and how they rank."""

    method: ProjectionMethod | None = BEST  # None: needs no calibration, or is online
    codes: str = "signs"
    bits: int = 64
    layer: type[Any] = BPCLayer
    linear: str | None = None  # codes of another kind
    rules: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)


def variants() -> dict[str, dict[str, Variant]]:
    """By part of the study and name."""
    plain = {"gain": False}
    papers = {"group": "max", "gain": False, "safeguard": 0.1, "recent": 1}
    headline = {
        "exact": Variant(None, layer=OracleLayer),
        "as in the paper": Variant(PAPER, rules=papers),
        "score-aware": Variant(),
    }
    steps = {
        "one step, no shift (the paper's projection)": Variant(PAPER, rules=plain),
        "one step, shift": Variant(replace(PAPER, shift=True), rules=plain),
        "8 steps": Variant(EIGHT, rules=plain),
        "one step, shift + gain": Variant(replace(PAPER, shift=True)),
        "8 steps + gain": Variant(EIGHT),
        "8 steps + gain, no shift": Variant(replace(EIGHT, shift=False)),
        "8 + gain + least squares": Variant(replace(EIGHT, rounds=6)),
        "8 + gain + centring": Variant(replace(EIGHT, centred=True)),
        "8 + gain + metric 1/4": Variant(replace(EIGHT, metric=True, power=0.25)),
        "8 + gain + metric 1/2": Variant(replace(EIGHT, metric=True, power=0.5)),
        "8 + gain + metric 1": Variant(replace(EIGHT, metric=True, power=1.0)),
        "8 + metric 1 + least squares, no gain": Variant(replace(EIGHT, metric=True, power=1.0, rounds=6), rules=plain),
        "8 + gain + metric 1 + least squares": Variant(replace(EIGHT, metric=True, power=1.0, rounds=6)),
        "8 + gain + metric 1/4 + least squares": Variant(replace(EIGHT, metric=True, power=0.25, rounds=6)),
        "8 + gain + least squares + centring": Variant(replace(EIGHT, rounds=6, centred=True)),
        "all, metric 1/4: score-aware": Variant(),
        "all, metric 1/2": Variant(replace(BEST, power=0.5)),
        "all but the shift": Variant(replace(BEST, shift=False)),
        "all, no gain": Variant(rules=plain),
    }
    others = {
        "exact": Variant(None, layer=OracleLayer),
        "random keys": Variant(None, layer=RandomLayer),
        "random signs (LSH)": Variant(EIGHT, linear="lsh"),
        "PCA + sign": Variant(EIGHT, linear="pca"),
        "PCA + sign + gain": Variant(EIGHT, linear="pca", rules={"gain": True}),
        "ITQ": Variant(EIGHT, linear="itq"),
        "ITQ + gain": Variant(EIGHT, linear="itq", rules={"gain": True}),
        "RaBitQ": Variant(EIGHT, linear="rabitq", rules={"gain": True}),
        "score-aware": Variant(),
        "online": Variant(None),
    }
    groups = {
        "exact, relative": Variant(None, layer=OracleLayer),
        "exact, max": Variant(None, layer=OracleLayer, rules={"group": "max"}),
        "exact, sum": Variant(None, layer=OracleLayer, rules={"group": "sum"}),
        "relative": Variant(),
        "max": Variant(rules={"group": "max"}),
        "sum": Variant(rules={"group": "sum"}),
        "softmax": Variant(layer=rankings.SoftmaxLayer),
        "as in the paper": Variant(PAPER, rules=papers),
    }
    searches = {
        "greedy": Variant(),
        "coordinate descent": Variant(layer=rankings.DescentLayer),
        "descent, parallel error weighs 3": Variant(layer=rankings.subclass(rankings.DescentLayer, PARALLEL=3.0)),
        "beam of 8": Variant(layer=rankings.BeamLayer),
    }
    codes = {"exact": Variant(None, layer=OracleLayer), "signs": Variant()}
    codes |= {
        f"product, metric {text}": Variant(replace(BEST, power=power), codes="product")
        for text, power in (("1/4", 0.25), ("1/2", 0.5), ("3/4", None), ("1", 1.0))
    }
    top = {f"top-p {p}": Variant(layer=rankings.subclass(rankings.TopPLayer, P=p)) for p in (0.4, 0.6, 0.8, 0.9)}
    bounds = {part: rankings.subclass(rankings.ErrorBoundLayer, SHARE=part) for part in (0.05, 0.2)}
    ranks = {"score-aware: nothing forced": Variant()}
    ranks |= {f"newest {count} tokens forced": Variant(rules={"recent": count}) for count in (1, 4)}
    ranks |= {f"safeguard {part}": Variant(rules={"safeguard": part}) for part in (0.05, 0.1, 0.2)}
    # The least safeguard takes no token, but errors are kept.
    ranks |= {f"score + {part} error": Variant(layer=bounds[part], rules={"safeguard": 1e-9}) for part in bounds}
    forms: tuple[tuple[str, ProjectionMethod, dict[str, Any]], ...] = (
        ("one step, no gain", PAPER, plain),
        ("8 steps + gain", EIGHT, {}),
        ("score-aware", BEST, {}),
    )
    bits = {
        f"{name}, {count} bits": Variant(method, bits=count, rules=rules)
        for count in (32, 64, 128)
        for name, method, rules in forms
    }
    keys = {
        f"{count:,} keys a head": Variant(calibration={"keys_per_head": count})
        for count in (256, 1024, 4096, 16384, 65536, 1 << 30)
    }
    lengths = {
        f"calibrated on {length:,} tokens{'' if shift else ', no shift'}": Variant(
            replace(BEST, shift=shift), calibration={"sequence_length": length, "samples": (1 << 17) // length}
        )
        for length in (512, 2048, 8192)
        for shift in ((True, False) if length < 8192 else (True,))
    }
    foreign = {
        f"{name}, calibrated on {text}": Variant(method, rules=rules, calibration={"corpora": text})
        for text in ("own text", "foreign text")
        for name, method, rules in (
            ("8 steps", EIGHT, plain),
            ("8 steps + gain", EIGHT, {}),
            ("score-aware", BEST, {}),
            ("score-aware, no gain", BEST, plain),
        )
    }
    return {
        "headline": headline,
        "steps": steps,
        "others": others,
        "groups": groups,
        "searches": searches,
        "ranks": ranks,
        "shares": {"budget by layer": Variant(layer=rankings.LayerShareLayer), "same in all layers": Variant()},
        "top-p": top,
        "codes": codes,
        "bits": bits,
        "keys": keys,
        "lengths": lengths,
        "foreign": foreign,
    }


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--parts", nargs="+", default=["headline"], choices=list(variants()))
    parser.add_argument("--only", nargs="+", help="only the variants of these names")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument(
        "--texts", type=int, default=32, help="texts on which recall, mass, best kept and cosine are measured"
    )
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.0025, 0.005, 0.01, 0.02, 0.05])
    parser.add_argument("--corpus", default="demo", help="for calibration and test, in different pieces")
    parser.add_argument("--foreign", default="", help="the corpus of the part `foreign`")
    parser.add_argument("--samples", type=int, default=64, help="of calibration text")
    parser.add_argument("--sequence-length", type=int, default=2048, help="of these samples, in tokens")
    parser.add_argument("--keys-per-head", type=int, default=16384, help="kept in calibration")
    parser.add_argument("--seed", type=int, default=0)
    arguments = report.parse(parser, **TINY)

    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    makers: dict[Any, Callable[[], BPCCache]] = {
        ("full attention", None): partial(BPCCache, model.config, budget=1.0, dense_layers=())
    }
    calibrate = Calibrations(model, tokenizer, arguments)
    parts = variants()
    for part in arguments.parts:
        for name, variant in parts[part].items():
            if arguments.only and name not in arguments.only:
                continue
            made = maker(variant, calibrate)
            for budget in arguments.budgets:
                makers[f"{part}: {name}", budget] = partial(made, budget=budget)
    enable(model)
    rows = {key: {"variant": key[0], "budget": key[1]} for key in makers}
    needles(model, tokenizer, arguments, makers, rows)
    choices(model, tokenizer, arguments, makers, rows)
    for row in rows.values():
        print({name: value["value"] if isinstance(value, dict) else value for name, value in row.items()})
    names = ("length", "prompts", "texts", "corpus", "samples", "sequence_length", "keys_per_head", "seed")
    settings = report.settings(arguments, names) | {"corpus": report.without_folder(arguments.corpus)}
    report.write(arguments.output, {"settings": settings | HARD, "rows": list(rows.values())})


@dataclass(frozen=True)
class Collected:
    """The kept keys of a text, and what else a fit needs, by layer."""

    keys: dict[int, torch.Tensor]
    aside: dict[int, torch.Tensor]
    moments: dict[int, torch.Tensor]
    sources: list[dict[str, Any]]


def keys_of(model: Any, tokenizer: Any, plan: Plan, corpora: list[Corpus]) -> Collected:
    """Collect the keys of a text."""

    def quiet(stage: str, done: int, total: int) -> None:
        pass

    with tempfile.TemporaryDirectory() as folder, open_work_folder(Path(folder), plan, model.device) as work:
        text = read_text(corpora, tokenizer, work, quiet)
        collect(lambda: model, text.tokens, work, quiet)
        layers, aside = plan.model.full_layers, plan.held_out
        return Collected(
            {layer: read_layer(work.path, layer, plan.fitted) for layer in layers},
            {layer: read_layer(work.path, layer, aside) for layer in layers},
            dict(zip(layers, total_moments(work.path, plan, layers), strict=True)) if plan.summed else {},
            text.sources,
        )


class Calibrations:
    """Projections by method and text; the keys of each text are collected once."""

    def __init__(self, model: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
        self.model, self.tokenizer, self.arguments = model, tokenizer, arguments
        self.collected: dict[str, Collected] = {}
        self.artifacts: dict[str, Any] = {}

    def collect(self, variant: Variant) -> tuple[Collected, Any]:
        assert variant.method is not None
        arguments = self.arguments
        names = ("samples", "sequence_length", "keys_per_head")
        wanted = {name: getattr(arguments, name) for name in names} | variant.calibration
        corpora = {"own text": arguments.corpus, "foreign text": arguments.foreign}[wanted.pop("corpora", "own text")]
        chosen = make_plan(
            describe(self.model.config),
            bits=variant.bits,
            codes=variant.codes,
            position_shift=variant.method.shift,
            seed=arguments.seed,
            **wanted,
        )
        key = json.dumps([wanted, corpora, chosen.position_shift])
        if key not in self.collected:
            print(f"collecting keys: {key}", file=sys.stderr)
            opened = [open_corpus(spec) for spec in expand([corpora])]
            self.collected[key] = keys_of(
                self.model, self.tokenizer, replace(chosen, method=BEST, codes="signs"), opened
            )
        return self.collected[key], replace(chosen, method=variant.method)

    def artifact(self, variant: Variant) -> Any:
        collected, chosen = self.collect(variant)
        key = json.dumps([asdict(variant.method) | {"name": ""}, variant.codes, variant.bits, variant.calibration])  # type: ignore[arg-type]
        if key not in self.artifacts:
            began = time.perf_counter()
            layers = list(collected.keys)
            keys, aside, moments = (
                torch.stack([each[layer] for layer in layers])
                for each in (collected.keys, collected.aside, collected.moments)
            )
            found = fit_layers(keys, aside, moments, chosen, self.model.device, centring=early_keys(chosen))
            fits = dict(zip(layers, found, strict=True))
            self.artifacts[key] = contents(chosen, collected.sources, "unknown", fits)
            print(f"projected in {time.perf_counter() - began:.1f} s: {key}", file=sys.stderr)
        return self.artifacts[key]

    def linear(self, variant: Variant) -> dict[int, rankings.Linear]:
        collected, _ = self.collect(variant)
        assert variant.linear is not None
        return {layer: rankings.linear(variant.linear, keys, variant.bits) for layer, keys in collected.keys.items()}

    def budget_factors(self) -> dict[int, float]:
        """A factor on the budget of every layer, of mean 1: the attention mass that the exact best 2 % miss on text."""
        model, arguments = self.model, self.arguments
        corpora = [open_corpus(spec) for spec in expand([arguments.corpus])]
        texts, _ = draw_samples(
            corpora,
            self.tokenizer,
            samples=6,
            sequence_length=arguments.length,
            seed=arguments.seed,
            vocab_size=describe(model.config).vocab_size,
        )
        rules = HARD | {"safeguard": 0.0, "budget": 0.02}
        kind = type("ExactCache", (BPCCache,), {"layer_class": OracleLayer})
        enable(model)
        asked = probe(model.config, {"exact": kind(model.config, **rules)})
        log_likelihoods(model, fork(prefill(model, texts[:, :-FORCED]), asked), texts[:, -FORCED:])
        disable(model)
        left = 1 - asked.found()["exact"][..., 1].mean((1, 2))
        return dict(zip(asked.asked_layers(), (left / left.mean()).tolist(), strict=True))


def maker(variant: Variant, calibrate: Calibrations) -> Callable[..., BPCCache]:
    """A function that makes an empty cache of this variant for a budget."""
    config, rules, layer = calibrate.model.config, HARD | variant.rules, variant.layer
    artifact = None
    if variant.linear is not None:
        found = calibrate.linear(variant)
        settings = {"use_gain": rules.pop("gain", False), "in_products": variant.linear != "lsh"}
        layer = rankings.subclass(rankings.LinearLayer, linear=found, **settings)
    elif layer is rankings.LayerShareLayer:
        layer, artifact = rankings.subclass(layer, factors=calibrate.budget_factors()), calibrate.artifact(variant)
    elif variant.method is not None:
        artifact = calibrate.artifact(variant)
    rules = ranking_defaults(None) | {"bits": variant.bits} | rules
    kind = type("StudiedCache", (BPCCache,), {"layer_class": layer})
    return partial(kind, config, artifact, **rules)


def needles(model: Any, tokenizer: Any, arguments: argparse.Namespace, makers: Any, rows: Any) -> None:
    """Right answers to the questions of `bpc eval --tasks needle`."""
    if not arguments.prompts:
        return
    length, count = arguments.length, arguments.prompts
    asked = draw_prompts("needle", tokenizer, length, count, arguments.seed)
    show = lambda part: print(f"\rneedles {part:6.1%}", end="", file=sys.stderr, flush=True)  # noqa: E731
    found = ask(model, tokenizer, asked, makers, max(1, (1 << 16) // length), show)
    for key, answers in found.items():
        rows[key]["needle"] = proportion(sum(answers.scores), count)
        rows[key]["read"] = round(answers.read, 6)


def choices(model: Any, tokenizer: Any, arguments: argparse.Namespace, makers: Any, rows: Any) -> None:
    """How much of full attention each choice keeps while text is forced token by token."""
    if not arguments.texts:
        return
    texts, _ = draw_samples(
        [open_corpus(spec) for spec in expand([arguments.corpus])],
        tokenizer,
        samples=arguments.texts,
        sequence_length=arguments.length,
        seed=arguments.seed + OTHER_TEXT,
        vocab_size=describe(model.config).vocab_size,
    )
    kept: dict[Any, list[torch.Tensor]] = {}
    for some in texts.split(max(1, (1 << 15) // arguments.length)):
        prefix = prefill(model, some[:, :-FORCED])
        measured = {key: make() for key, make in makers.items() if key[1] is not None and "top-p" not in key[0]}
        asked = probe(model.config, measured)
        log_likelihoods(model, fork(prefix, asked), some[:, -FORCED:])
        for key, values in asked.found().items():
            kept.setdefault(key, []).append(values)
        print(f"\rtext {len(next(iter(kept.values())))}", end="", file=sys.stderr, flush=True)
    for key, parts in kept.items():
        values = torch.cat(parts, dim=1)  # [layers, texts, kv_heads, metrics]
        for place, metric in enumerate(METRICS):
            rows[key][metric] = mean(values[..., place].mean((0, 2)).tolist())


if __name__ == "__main__":
    main()
