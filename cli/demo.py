"""`bpc demo`: the whole story on the bundled model, in less than two minutes and without a network."""

import time
from typing import Annotated, Any

import typer

from bpc_calib.evaluation.settings import check_prompts
from bpc_calib.method.numbers import check_seed
from bpc_calib.text.known_corpora import DEMO
from bpc_cli.calibration_report import STAGES
from bpc_cli.command import checked, command
from bpc_cli.console import TextTable, print_json, print_text_table, printable, quiet_libraries
from bpc_cli.opening import Device, OneDeviceOptions, open_model, open_tokenizer, open_weights
from bpc_cli.options import AsJson, Quiet
from bpc_cli.progress import stage_bars

TOKENS = 2048
BUDGET = 0.005
SAMPLES = 12


@command
def demo(
    *,
    prompts: Annotated[int, typer.Option(help="Number of questions.", callback=checked(check_prompts))] = 12,
    device: Device = "auto",
    seed: Annotated[
        int, typer.Option(help="Random seed of the texts and questions.", callback=checked(check_seed))
    ] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show the method at work on the bundled model.

    It is calibrated, then asked for facts hidden in long texts, attending to 0.5 % of the tokens. Full attention, BPC
    and randomly drawn tokens answer the same questions. No layer is dense and nothing is attended beyond the budget, so
    every answer shows what was ranked first. Needs no network; writes nothing.
    """
    quiet_libraries(quiet=quiet)
    started = time.monotonic()
    import torch

    from bpc_calib import calibrate, enable, make_plan
    from bpc_calib.evaluation.comparison import HARD, Comparison
    from bpc_calib.evaluation.evaluate import evaluate

    opened = open_model(DEMO, OneDeviceOptions(device=device))
    tokenizer, model = open_tokenizer(opened), open_weights(opened, quiet)
    torch.set_num_threads(1)  # a small model gains little from more, and they wait for each other where cores are busy
    show = not as_json
    if show:
        count = sum(weight.numel() for weight in model.parameters())
        print(f"1. The model: a Llama of {count / 1e6:.1f} million parameters that looks facts up in its context.")
    with stage_bars(STAGES | {"answers": "Answering questions"}, quiet) as progress:
        artifact = calibrate(
            model,
            tokenizer,
            [DEMO],
            make_plan(opened.description, samples=SAMPLES, sequence_length=TOKENS, seed=seed),
            progress=lambda stage, done, total: progress(stage, done, total, ""),
        )
        if show:
            print(
                f"2. Calibration: {SAMPLES} texts of {TOKENS:,} tokens gave every KV head a projection to 64 bits. The "
                f"mean residual is {artifact.metadata['metrics']['residual']:.2f} of a key's length in the query "
                f"metric. {time.monotonic() - started:.0f} s."
            )
        enable(model)
        comparison = Comparison(
            tasks=["needle"],
            lengths=[TOKENS],
            budgets=[BUDGET],
            methods=["full", "bpc", "random"],
            prompts=prompts,
            seed=seed,
            rules=HARD,
        )
        rows = evaluate(
            model,
            tokenizer,
            artifact,
            comparison,
            progress=lambda share, what: progress("answers", share, None, what),
        )
    result = {"tokens": TOKENS, "budget": BUDGET, "rows": rows, "seconds": round(time.monotonic() - started, 1)}
    if as_json:
        print_json(result)
    else:
        _print_answers(rows, prompts)
        print(f"{result['seconds']:.0f} s in all.")


def _print_answers(rows: list[dict[str, Any]], prompts: int) -> None:
    example = rows[0]["example"]
    print(f"3. Decoding: each text of {TOKENS:,} tokens hides 8 facts, then asks for one. The first question:")
    print(f"     ...{printable(example['fact'])} ...{printable(example['question'])}")
    names = {"full": "every token", "bpc": "BPC's best 0.5 %", "random": "0.5 % by chance"}
    lines = []
    for row in rows:
        said, score = row["example"]["said"].strip(), row["score"]
        figures = (f"{score['value'] * prompts:.0f}", f"{score['low']:.0%} to {score['high']:.0%}")
        lines.append((names[row["method"]], f"{row['read']:.1%}", said, *figures))
    columns = ("attends to", "KV read", "it answers", f"right of {prompts}", "95 % interval")
    print_text_table(TextTable("", columns, lines))
    print(
        "On your own model:\n"
        "  bpc calibrate -m MODEL -o model.safetensors\n"
        "  bpc eval -m MODEL -a model.safetensors --preset hard --tasks text,needle,ruler --lengths 32768\n"
        "  bpc generate -m MODEL -a model.safetensors --prompt-file book.txt --compare\n"
        "Other methods on the bundled model: bpc eval -m demo --preset hard"
    )
