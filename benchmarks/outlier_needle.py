"""Does the error-aware safeguard find what the rest of a prompt does not resemble?

One fact with digits in made prose without any: projections found online in such a prompt fit its prose, and code the
digits badly. Asked as in needles.py, with the safeguard and without.

    python benchmarks/outlier_needle.py --model MODEL
"""

import random
from typing import Any

import report
from needles import HARD, make_parser, open_model, prompt, row

from bpc_calib import BPCCache


def main() -> None:
    arguments = make_parser(__doc__).parse_args()

    model, tokenizer = open_model(arguments.model)
    asked = [
        prompt(tokenizer, random.Random(f"outlier {arguments.seed}/{i}"), arguments.tokens, 1, digits=False)
        for i in range(arguments.prompts)
    ]
    rows = [row("full attention", 1.0, model, tokenizer, asked, lambda: BPCCache(model.config, budget=1.0))]
    for gain in (False, True):
        for bits in (32, 64):
            for budget in arguments.budgets:
                for safeguard in (0.0, 0.1, 0.3):
                    rules: dict[str, Any] = {
                        "bits": bits,
                        "gain": gain,
                        "budget": budget,
                        "safeguard": safeguard,
                    } | HARD
                    name = f"{bits} bits{', gain' * gain}, safeguard {safeguard}"
                    made = row(name, budget, model, tokenizer, asked, lambda r=rules: BPCCache(model.config, **r))
                    rows.append(made | {"bits": bits, "gain": gain, "safeguard": safeguard})
    settings = {name: getattr(arguments, name) for name in ("tokens", "prompts", "budgets", "seed")}
    report.write(arguments.output, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
