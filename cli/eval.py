"""`bpc eval`: what BPC and other methods keep of full attention."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from bpc_cli.arguments import (
    AsJson,
    Device,
    Dtype,
    Model,
    NoProgress,
    Revision,
    TrustRemoteCode,
    WeightsDtype,
    find_artifact,
    parse_budget,
    parse_layers,
    pick_device,
    split,
)
from bpc_cli.console import bars, command, fail, note, print_json, print_table, printable, quiet_libraries

HARNESS = "lm_eval:"
FIGURES = {"loss_difference": "loss", "recall": "recall", "mass": "mass", "best_kept": "best kept", "cosine": "cosine"}


@command
def eval_(
    model: Model,
    artifact: Annotated[
        str | None,
        typer.Option(
            "--artifact",
            "-a",
            help="Projections of bpc calibrate: a file or a Hub id. Without, only BPC online is compared.",
        ),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="text, needle, single, multi-key, multi-value, multi-query, tracking, common-words, frequent-words, "
            "or ruler for all but text; lm_eval:NAME runs a task of lm_eval.",
            metavar="TASK,...",
        ),
    ] = "text,needle",
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt.", metavar="TOKENS,...")] = "2048",
    budgets: Annotated[
        str, typer.Option(help="Tokens attended: 2% or 0.02 of them, or 2048 of them.", metavar="SHARE|TOKENS,...")
    ] = "2%,0.5%",
    methods: Annotated[
        str | None,
        typer.Option(
            help="full, oracle, bpc, bpc-online, quest, magicpig, magicpig-own, signs, snapkv, pyramidkv, window, "
            "random. Default: all.",
            metavar="METHOD,...",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Of each task and length; of lm_eval the first so many.")] = 20,
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="Of task text, as for bpc calibrate; may be repeated. Default: demo.", metavar="CORPUS"),
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Attend to no fewer than these.")] = 1,
    dense_layers: Annotated[
        str, typer.Option(help="Layers that attend to everything, like 0,1; or none.", metavar="LAYERS")
    ] = "none",
    batch_size: Annotated[
        int | None,
        typer.Option(help="Prompts at once. Default: what 65,536 tokens hold.", min=1, show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the result as JSON to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write pictures into this folder (needs matplotlib).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    revision: Revision = None,
    dtype: WeightsDtype = Dtype.auto,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Of prompts and of what is drawn by chance.", min=0)] = 0,
    as_json: AsJson = False,
    quiet: NoProgress = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compare BPC with full attention, the exact top-k and other methods: same prompts, same budget, all decoded.

    By default every layer has to choose and nothing is attended beyond the budget: the setting that tells good
    projections from bad ones. --min-tokens 128 --dense-layers 0,1 is what bpc generate does.

    Example: bpc eval -m meta-llama/Llama-3.1-8B-Instruct -a llama.safetensors --tasks needle,ruler --lengths 32768
    """
    wanted = _tasks(tasks)
    if not wanted:
        fail("--tasks: give at least one")
    own = [task for task in wanted if not task.startswith(HARNESS)]
    foreign = [task.removeprefix(HARNESS) for task in wanted if task.startswith(HARNESS)]
    sizes = [_number(text) for text in split(lengths)]
    shares = list(dict.fromkeys(parse_budget(text, "--budgets") for text in split(budgets)))
    chosen = None if methods is None else split(methods)
    rules: dict[str, Any] = {"min_tokens": min_tokens, "dense_layers": parse_layers(dense_layers), "seed": seed}
    quiet_libraries(bars=not quiet, warnings=not quiet)
    from bpc_artifacts import load
    from bpc_artifacts.file import check_writable

    projections = None if artifact is None else load(find_artifact(artifact)[0])
    if output is not None:
        check_writable(output, 1 << 20, overwrite=force)
    from bpc_calib import describe, enable
    from bpc_calib.evaluation import TEXT, check, evaluate
    from bpc_calib.models.loading import load_config, load_model, load_tokenizer
    from bpc_calib.text.corpora import expand, open_corpus

    if foreign:
        from bpc_calib.evaluation import harness

        harness.check(foreign)
    if plot is not None:
        from bpc_calib.evaluation import pictures

        pictures.check(plot, force)
    device = pick_device(device)
    config, commit = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
    description = describe(config, revision=commit)
    corpora = [open_corpus(spec) for spec in expand(corpus or ["demo"])] if TEXT in own else []
    chosen = list(check(config, projections, own, sizes, shares, chosen, prompts, corpora, **rules))
    tokenizer = load_tokenizer(model, revision=commit, trust_remote_code=trust_remote_code)
    visible = not quiet and sys.stderr.isatty()
    if visible:
        note(f"Loading {description.id} on {device} ...")
    loaded = load_model(model, revision=commit, dtype=dtype.value, device=device, trust_remote_code=trust_remote_code)
    enable(loaded)
    result: dict[str, Any] = {
        "model": description.id,
        "artifact": None if projections is None else dict(projections.metadata["algorithm"]),
        "settings": {"prompts": prompts, "seed": seed, "min_tokens": min_tokens, "dense_layers": rules["dense_layers"]},
        "rows": [],
    }
    progress = bars()
    with progress if visible else nullcontext():
        shown = progress.add_task("Evaluating", total=1.0)
        result["rows"] = evaluate(
            loaded,
            tokenizer,
            projections,
            tasks=own,
            lengths=sizes,
            budgets=shares,
            methods=chosen,
            prompts=prompts,
            corpora=corpora,
            batch=batch_size,
            progress=lambda done, what: progress.update(shown, completed=done, description=what),
            **rules,
        )
    ours = force  # whether the file is this run's own, or may be replaced
    for task in foreign:
        if output is not None and result["rows"]:  # whatever lm_eval meets, what is known stays
            _write(result, output, ours)
            ours = True
        result["rows"] += harness.run(loaded, tokenizer, projections, task, chosen, shares, limit=prompts, **rules)
    if output is not None:
        _write(result, output, ours)
    if as_json:
        print_json(result)
    else:
        _print(result["rows"], description.id)
    if plot is not None:
        pictures.draw(result["rows"], plot, overwrite=force)


def _write(result: dict[str, Any], path: Path, force: bool) -> None:
    from bpc_artifacts.file import replacing

    with replacing(path, force) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")


def _tasks(text: str) -> list[str]:
    """`ruler` stands for every task but text."""
    ruler = ("single", "multi-key", "multi-value", "multi-query", "tracking", "common-words", "frequent-words")
    wanted = split(text)
    return list(dict.fromkeys(name for task in wanted for name in (ruler if task == "ruler" else (task,))))


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        fail(f"--lengths {text}: expected numbers of tokens, like 2048,8192")
    return int(text)


def _print(rows: list[dict[str, Any]], model: str) -> None:
    """Two tables for every length and budget: what was answered right, and what was kept of full attention."""
    _print_metrics([row for row in rows if "metrics" in row], model)
    rows = [row for row in rows if "metrics" not in row]
    groups = dict.fromkeys((row["tokens"], row["budget"]) for row in rows if row["budget"] is not None)
    for tokens, budget in groups or {(row["tokens"], None): None for row in rows}:
        own = [row for row in rows if row["tokens"] == tokens and row["budget"] in (budget, None)]
        title = f"{printable(model)}, {_of(budget, tokens)}"
        answers = {row["task"]: _share for row in own if "score" in row}
        if answers:
            cells = [(row["method"], row["task"], row.get("read"), row["score"]) for row in own if "score" in row]
            _print_table(f"{title}: right answers, %, and 95 % interval", cells, answers)
        figures = {key: _mean for key in FIGURES if any(key in row for row in own)}
        if figures:
            cells = [(row["method"], key, row["read"], row[key]) for row in own for key in figures if key in row]
            _print_table(f"{title}: text, of full attention, and 95 % interval", cells, figures)


def _print_metrics(rows: list[dict[str, Any]], model: str) -> None:
    """What lm_eval says, as it says it: a line a method and budget."""
    from rich.table import Table

    from bpc_calib.evaluation import METHODS

    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        names = list(dict.fromkeys(name for row in own for name in row["metrics"] if "," in name))
        table = Table("method", "budget", *map(printable, names))
        for row in own:
            budget = "" if row["budget"] is None else _of(row["budget"], None)
            cells = [f"{row['metrics'][name]:.4g}" if name in row["metrics"] else "" for name in names]
            table.add_row(METHODS[row["method"]].label, budget, *cells)
        print_table(f"{printable(model)}: {printable(task)}, {own[0]['prompts']} documents", table)


def _print_table(title: str, cells: list[tuple[str, str, float | None, Any]], columns: dict[str, Any]) -> None:
    from rich.table import Table

    from bpc_calib.evaluation import METHODS

    table = Table()
    table.add_column("method", no_wrap=True)
    for name in ("KV read", *(FIGURES.get(name, name) for name in columns)):
        table.add_column(printable(name), justify="right")
    for method in dict.fromkeys(cell[0] for cell in cells):
        found = {column: (read, figure) for name, column, read, figure in cells if name == method}
        read = next(iter(found.values()))[0]
        shown = [columns[name](found[name][1]) if name in found else "" for name in columns]
        table.add_row(METHODS[method].label, "" if read is None else f"{read:.1%}", *shown)
    print_table(title, table)


def _of(budget: float | None, tokens: int | None) -> str:
    if budget is None:
        return f"{tokens:,} tokens" if tokens else "all tokens"
    share = f"{budget} tokens" if isinstance(budget, int) else f"{100 * budget:.3g} %"
    return f"{share} of {tokens:,} tokens" if tokens else f"{share} of the tokens"


def _share(figure: dict[str, Any]) -> str:
    value, low, high = (100 * figure[side] for side in ("value", "low", "high"))
    return f"{value:.0f} ({low:.0f}-{high:.0f})"


def _mean(figure: dict[str, float]) -> str:
    return f"{figure['value']:.3f} ±{(figure['high'] - figure['low']) / 2:.3f}"
