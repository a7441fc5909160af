"""Does the error-aware safeguard find what the rest of a prompt does not resemble?

One fact with digits in made prose without any: projections found online in such a prompt fit its prose, and code the
digits badly. Asked as in needles.py, with the safeguard and without.

    python benchmarks/outlier_needle.py --output outlier_needle.json
"""

import functools
import random
from typing import Any

import report
from needles import make_parser, run

from bpc_calib import BPCCache, enable
from bpc_calib.evaluation import HARD
from bpc_calib.evaluation.tasks import single
from bpc_calib.models.loading import load_model, load_tokenizer


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
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
    settings = {name: getattr(arguments, name) for name in ("tokens", "prompts", "budgets", "seed")}
    report.write(arguments.output, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
