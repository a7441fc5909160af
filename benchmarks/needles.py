"""What each part of BPC is worth: questions about hidden facts with and without it, in the hard setting.

python benchmarks/needles.py --output needles.json
"""

import argparse
import functools
import random
from pathlib import Path
from typing import Any

import calibrated
import report

from bpc_calib import BPCCache, enable
from bpc_calib.evaluation.comparison import HARD
from bpc_calib.evaluation.evaluate import ask, hide_all
from bpc_calib.evaluation.statistics import proportion
from bpc_calib.evaluation.tasks import needle
from bpc_calib.models.loading import load_model, load_tokenizer

TINY = {"tokens": 512, "prompts": 2, "budgets": [0.02]}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--artifact", "-a", type=Path, help="default: calibrate on made text")
    parser.add_argument("--facts", type=int, default=8)
    arguments = report.parse(parser, **TINY)

    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    plan = {"samples": 3 if arguments.tiny else 180, "sequence_length": 128 if arguments.tiny else 2048}
    artifact = calibrated.projections(arguments.artifact, model, tokenizer, ["demo"], **plan)
    enable(model)
    variants: dict[str, dict[str, Any]] = {
        "BPC": {},
        "BPC, no gain": {"gain": False},
        "BPC, safeguard 0.1": {"safeguard": 0.1},
        "BPC online": {"artifact": None},
        "BPC online, no gain": {"artifact": None, "gain": False},
    }
    makers: dict[Any, Any] = {("full attention", 1.0): lambda: BPCCache(model.config, budget=1.0, dense_layers=())}
    for name, changes in variants.items():
        for budget in arguments.budgets:
            rules = {"artifact": artifact, "budget": budget} | HARD | changes
            makers[name, budget] = functools.partial(BPCCache, model.config, **rules)
    problems = [needle(random.Random(f"{arguments.seed}/{i}"), facts=arguments.facts) for i in range(arguments.prompts)]
    rows = run(arguments, model, tokenizer, problems, makers)
    settings = report.settings(arguments, ("tokens", "facts", "prompts", "budgets", "seed"))
    report.write(arguments.output, {"settings": settings, "artifact": artifact.metadata["algorithm"], "rows": rows})


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of every benchmark that hides facts."""
    parser = report.make_parser(description)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.02, 0.005])
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(
    arguments: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    problems: list[Any],
    makers: dict[Any, Any],
    style: str | None = None,
) -> list[dict[str, Any]]:
    """Ask all questions with every cache; print a line and return a row for each cache."""
    drawn = [random.Random(f"{arguments.seed}/text/{i}") for i in range(len(problems))]
    asked = hide_all(problems, tokenizer, arguments.tokens, drawn, [None] * len(problems), style)
    rows = []
    for (name, budget), found in ask(model, tokenizer, asked, makers, batch=20).items():
        figure = proportion(sum(found.scores), len(problems))
        print(f"{name:<40} {budget:>6.1%} {figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})")
        rows.append({"method": name, "budget": budget, "right": sum(found.scores), "of": len(problems), **figure})
    return rows


if __name__ == "__main__":
    main()
