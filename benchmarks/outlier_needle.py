"""Does the error-aware safeguard find a fact that is unlike the rest of the prompt?

One fact with digits is hidden in made prose that has none. Projections found online in such a prompt fit its prose and
code the digits badly. The questions are those of needles.py, with the safeguard and without.

    python benchmarks/outlier_needle.py --output outlier_needle.json
"""

import functools
import random
from typing import Any

import report
from needles import TINY, make_parser, run

from bpc_calib import BPCCache, enable
from bpc_calib.evaluation.comparison import HARD
from bpc_calib.evaluation.tasks import single
from bpc_calib.models.loading import load_model, load_tokenizer


def main() -> None:
    arguments = report.parse(make_parser(__doc__), **TINY)
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    enable(model)
    makers: dict[Any, Any] = {("full attention", 1.0): lambda: BPCCache(model.config, budget=1.0, dense_layers=())}
    for gain in (False, True):
        for bits in (32, 64):
            for safeguard in (0.0, 0.1, 0.3):
                for budget in arguments.budgets:
                    rules = {"bits": bits, "gain": gain, "safeguard": safeguard, "budget": budget} | HARD
                    name = f"{bits} bits{', gain' * gain}, safeguard {safeguard}"
                    makers[name, budget] = functools.partial(BPCCache, model.config, **rules)
    problems = [single(random.Random(f"outlier {arguments.seed}/{i}")) for i in range(arguments.prompts)]
    rows = run(arguments, model, tokenizer, problems, makers, style="prose")
    settings = report.settings(arguments, ("tokens", "prompts", "budgets", "seed"))
    report.write(arguments.output, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
