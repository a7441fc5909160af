"""`bpc eval`: what BPC and other methods keep of full attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_calib.evaluation.methods import METHODS
from bpc_calib.evaluation.tasks import RULER, TASKS, TEXT
from bpc_calib.method.defaults import budget_text
from bpc_calib.text.known_corpora import DEMO
from bpc_cli.command import command
from bpc_cli.console import fail, note, print_json, quiet_libraries
from bpc_cli.eval_tables import is_hard, print_evaluation
from bpc_cli.opening import LoadOptions, load_artifact, open_model, open_tokenizer, open_weights
from bpc_cli.options import (
    BUDGET_HELP,
    DENSE_LAYERS,
    MIN_TOKENS,
    PROJECTIONS,
    AsJson,
    DenseLayers,
    Force,
    MinTokens,
    Model,
    Output,
    Quiet,
    parse_budgets,
    parse_layers,
    split,
)
from bpc_cli.progress import progress_bar, working
from bpc_cli.result_file import open_result_file

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact
    from bpc_calib.evaluation.harness import HarnessTask

HARNESS = "lm_eval:"


@dataclass(frozen=True)
class ComparisonOptions:
    """What is compared, on which prompts."""

    tasks: Annotated[
        str,
        typer.Option(
            help=f"Tasks: {', '.join([TEXT, *TASKS])}; ruler for all from {RULER[0]} to {RULER[-1]}; "
            f"{HARNESS}NAME for a task of lm_eval.",
            metavar="TASK,...",
        ),
    ] = "text,needle"
    lengths: Annotated[str, typer.Option(help="Tokens per prompt.", metavar="TOKENS,...")] = "2048"
    budgets: Annotated[str, typer.Option(help=BUDGET_HELP, metavar="SHARE|TOKENS,...")] = "2%,10%"
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Methods to compare: {', '.join(METHODS)}. Default: all.", metavar="METHOD,...", show_default=False
        ),
    ] = None
    prompts: Annotated[
        int, typer.Option(help="Prompts per task and length; tasks of lm_eval use their first documents.")
    ] = 20
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Text for the task {TEXT}, given as for bpc calibrate. May be repeated. Default: {DEMO}.",
            metavar="CORPUS",
        ),
    ] = None
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Send the prompts as they are. Without it, a model with a chat template gets them in it."
        ),
    ] = False
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Prompts decoded at once. Default: as many as 65,536 tokens hold.", min=1, show_default=False
        ),
    ] = None
    hard: Annotated[
        bool,
        typer.Option(
            "--hard",
            help="No dense layers and no minimum of tokens, so that every layer must choose: this separates methods.",
        ),
    ] = False
    min_tokens: MinTokens = MIN_TOKENS
    dense_layers: DenseLayers = DENSE_LAYERS
    seed: Annotated[
        int, typer.Option(help="Random seed of the prompts and of the methods that draw by chance.", min=0)
    ] = 0


@dataclass(frozen=True)
class _Comparison:
    """The options of a comparison, parsed."""

    tasks: list[str]  # of our own
    harness_tasks: list[str]  # of lm_eval
    lengths: list[int]
    budgets: tuple[float | int, ...]
    rules: dict[str, Any]  # of BPCCache


@command
def eval_(
    *,
    context: typer.Context,
    model: Model,
    artifact: Annotated[
        str | None,
        typer.Option(
            "--artifact", "-a", help=f"{PROJECTIONS} Without it, the method bpc is left out; bpc-online needs none."
        ),
    ] = None,
    options: ComparisonOptions,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for pictures of the result (needs matplotlib).")] = None,
    force: Force = False,
    load: LoadOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare BPC with full attention, the exact top-k and other methods: same prompts, same budget, all decoded.

    By default the setting is that of bpc generate. With --hard every layer has to choose and nothing is attended beyond
    the budget, which separates good projections from bad ones.

    Example: bpc eval -m meta-llama/Llama-3.1-8B-Instruct -a llama.safetensors --tasks needle,ruler --lengths 32768
    """
    wanted = _parse(options, context)
    quiet_libraries(quiet=quiet, warnings=not quiet)
    projections = None if artifact is None else load_artifact(artifact)
    write = open_result_file(output, force, frozenset({"settings", "rows"}))
    from bpc_calib import enable
    from bpc_calib.evaluation import pictures
    from bpc_calib.evaluation.comparison import Comparison, check
    from bpc_calib.evaluation.evaluate import evaluate
    from bpc_calib.text.corpora import open_corpora

    _check_harness(wanted.harness_tasks)
    if plot is not None:
        pictures.check(plot, force)
    opened = open_model(model, load)
    corpora = open_corpora(options.corpus or [DEMO]) if TEXT in wanted.tasks else []
    rules = dict(wanted.rules)
    comparison = Comparison(
        tasks=wanted.tasks,
        lengths=wanted.lengths,
        budgets=wanted.budgets,
        methods=None if options.methods is None else split(options.methods),
        prompts=options.prompts,
        corpora=corpora,
        seed=rules.pop("seed"),
        raw=options.raw,
        batch=options.batch_size,
        rules=rules,
    )
    methods = check(opened.config, projections, comparison)
    for message in () if quiet else _without_effect(options, wanted, projections is not None and "bpc" not in methods):
        note(message)
    tokenizer = open_tokenizer(opened)
    harness_tasks = _prepare_harness(wanted, tokenizer, quiet)
    loaded = open_weights(opened, quiet)
    enable(loaded)
    result: dict[str, Any] = {
        "model": opened.description.id,
        "artifact": None if projections is None else dict(projections.metadata["algorithm"]),
        "payload_sha256": None if projections is None else projections.metadata["payload_sha256"],
        "settings": {
            "prompts": options.prompts,
            "forced": comparison.forced,
            "raw": options.raw,
            "hard": is_hard(wanted.rules),
            **wanted.rules,
        },
    }
    with progress_bar("Evaluating", quiet) as progress:
        result["rows"] = evaluate(loaded, tokenizer, projections, comparison, progress=progress)
    if harness_tasks:
        _run_harness(result, write, harness_tasks, wanted, methods, loaded, tokenizer, projections, quiet)
    write(result)
    if as_json:
        print_json(result)
    else:
        print_evaluation(result)
    if plot is not None:
        pictures.draw(result["rows"], plot, overwrite=force)


def _parse(options: ComparisonOptions, context: typer.Context) -> _Comparison:
    tasks = expand_tasks(options.tasks)
    if not tasks:
        fail("--tasks: give at least one")
    for name in ("min_tokens", "dense_layers") if options.hard else ():
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT":
            fail(f"--hard sets --min-tokens 1 --dense-layers none: leave out --{name.replace('_', '-')}")
    return _Comparison(
        tasks=[task for task in tasks if not task.startswith(HARNESS)],
        harness_tasks=[task.removeprefix(HARNESS) for task in tasks if task.startswith(HARNESS)],
        lengths=[_length(text) for text in split(options.lengths)],
        budgets=parse_budgets(options.budgets),
        rules={
            "seed": options.seed,
            "min_tokens": 1 if options.hard else options.min_tokens,
            "dense_layers": () if options.hard else parse_layers(options.dense_layers),
        },
    )


def _without_effect(options: ComparisonOptions, wanted: _Comparison, artifact: bool) -> Iterator[str]:
    """Say which options change nothing; `artifact`: so does --artifact."""
    from bpc_calib.method.budget import attended

    if options.corpus and TEXT not in wanted.tasks:
        yield f"--corpus has no effect: the task {TEXT} is not among --tasks"
    if artifact:
        yield "--artifact has no effect: the method bpc is not among --methods"
    least = wanted.rules["min_tokens"]
    pairs = [(length, budget) for length in wanted.lengths for budget in wanted.budgets] if wanted.tasks else []
    small = [(length, budget) for length, budget in pairs if attended(length, budget, 1) < min(least, length)]
    if small:
        lengths, budgets = (dict.fromkeys(each) for each in zip(*small, strict=True))
        yield (
            f"--min-tokens {least} is more than a budget of {', '.join(map(budget_text, budgets))} at "
            f"{', '.join(f'{length:,}' for length in lengths)} tokens: --hard measures the budget itself"
        )


def expand_tasks(text: str) -> list[str]:
    """The tasks of `ruler,needle`, each once; `ruler` stands for several."""
    return list(dict.fromkeys(name for task in split(text) for name in (RULER if task == "ruler" else (task,))))


def _length(text: str) -> int:
    if not text.isdecimal() or not int(text):
        fail(f"--lengths {text}: expected numbers of tokens, like 2048,8192")
    return int(text)


def _check_harness(tasks: list[str]) -> None:
    if tasks:
        from bpc_calib.evaluation.harness import check

        check(tasks)


def _prepare_harness(wanted: _Comparison, tokenizer: Any, quiet: bool) -> "list[HarnessTask]":
    """The tasks of lm_eval with their data."""
    if not wanted.harness_tasks:
        return []
    from bpc_calib.evaluation.harness import prepare

    with working("Loading the data of lm_eval's tasks", quiet):
        return prepare(wanted.harness_tasks, tokenizer, wanted.lengths, wanted.rules["seed"])


def _run_harness(
    result: dict[str, Any],
    write: Callable[[dict[str, Any]], None],
    tasks: "list[HarnessTask]",
    wanted: _Comparison,
    methods: tuple[str, ...],
    model: Any,
    tokenizer: Any,
    artifact: "ProjectionArtifact | None",
    quiet: bool,
) -> None:
    """Add the rows of lm_eval's tasks; what is known is written before each, in case lm_eval fails."""
    from bpc_calib.evaluation import harness

    settings = {"limit": result["settings"]["prompts"], "raw": result["settings"]["raw"], **wanted.rules}
    for task in tasks:
        if result["rows"]:
            write(result)
        length = "" if task.tokens is None else f", {task.tokens:,} tokens"
        with working(f"Running {HARNESS}{task.name}{length}", quiet):
            result["rows"] += harness.run(model, tokenizer, artifact, task, methods, wanted.budgets, **settings)
