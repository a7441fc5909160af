"""`bpc demo`: the whole story on the bundled model, in two minutes and without a network."""

import sys
import time
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from bpc_cli.arguments import (
    AsJson,
    Device,
    NoProgress,
    pick_device,
)
from bpc_cli.console import bars, command, print_json, print_table, printable, quiet_libraries

TOKENS = 2048
BUDGET = 0.005
SAMPLES = 30


@command
def demo(
    prompts: Annotated[int, typer.Option(help="Questions to ask.", min=1)] = 20,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Of text and questions.", min=0)] = 0,
    as_json: AsJson = False,
    quiet: NoProgress = False,
) -> None:
    """Calibrate the bundled model, then ask it for facts hidden in long texts, attending to 0.5 % of the tokens.

    Full attention, BPC and tokens drawn by chance answer the same questions. No layer is dense and nothing is
    attended beyond the budget, so every answer shows what was ranked first. Needs no network; writes nothing.
    """
    quiet_libraries(bars=not quiet, warnings=not quiet)
    started = time.monotonic()
    from bpc_calib import calibrate, describe, enable, make_plan
    from bpc_calib.evaluation import HARD, evaluate
    from bpc_calib.models.loading import load_model, load_tokenizer

    device = pick_device(device)
    tokenizer = load_tokenizer("demo")
    model = load_model("demo", device=device)
    show = not as_json
    if show:
        count = sum(weight.numel() for weight in model.parameters())
        print(f"1. The model: a Llama of {count / 1e6:.1f} million parameters that looks facts up in its context.")
    progress = bars()
    with progress if not quiet and sys.stderr.isatty() else nullcontext():
        shown = progress.add_task("Calibrating", total=1.0)
        artifact = calibrate(
            model,
            tokenizer,
            ["demo"],
            make_plan(describe(model.config), samples=SAMPLES, sequence_length=TOKENS, seed=seed),
            progress=lambda stage, done, total: progress.update(shown, description=stage, completed=done / total),
        )
        calibrated = time.monotonic() - started
        if show:
            print(
                f"2. Calibration: {SAMPLES} texts of {TOKENS:,} tokens gave a projection to 64 bits for every KV head; "
                f"of a key it leaves {artifact.metadata['metrics']['residual']:.2f} of its length in the query "
                f"metric. {calibrated:.0f} s."
            )
        enable(model)
        rows = evaluate(
            model,
            tokenizer,
            artifact,
            tasks=["needle"],
            lengths=[TOKENS],
            budgets=[BUDGET],
            methods=["full", "bpc", "random"],
            prompts=prompts,
            seed=seed,
            progress=lambda done, what: progress.update(shown, description=what, completed=done),
            **HARD,
        )
    result = {"tokens": TOKENS, "budget": BUDGET, "rows": rows, "seconds": round(time.monotonic() - started, 1)}
    if as_json:
        print_json(result)
    else:
        _print(rows, prompts)
        print(f"{result['seconds']:.0f} s in all.")


def _print(rows: list[dict[str, Any]], prompts: int) -> None:
    from rich.table import Table

    example = rows[0]["example"]
    print(f"3. Decoding: each text of {TOKENS:,} tokens hides 8 facts, then asks for one. The first one:")
    print(f"     ...{printable(example['fact'])} ...{printable(example['question'])}")
    table = Table("attends to", "KV bytes read", "it answers", f"right, of {prompts}", "95 % interval")
    names = {"full": "every token", "bpc": "the best 0.5 % by their codes (BPC)", "random": "0.5 % drawn by chance"}
    for row in rows:
        score = row["score"]
        table.add_row(
            names[row["method"]],
            f"{row['read']:.1%}",
            printable(row["example"]["said"].strip()),
            f"{score['value'] * prompts:.0f}",
            f"{score['low']:.0%} to {score['high']:.0%}",
        )
    print_table("", table)
    print(
        "On your own model:\n"
        "  bpc calibrate -m MODEL -o model.safetensors\n"
        "  bpc eval -m MODEL -a model.safetensors --tasks text,needle,ruler --lengths 32768\n"
        "  bpc generate -m MODEL -a model.safetensors --prompt-file book.txt --compare\n"
        "and all methods on this one: bpc eval -m demo"
    )
