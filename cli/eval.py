"""`bpc eval`: what BPC and other methods keep of full attention."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_calib.evaluation.methods import METHODS, method_of
from bpc_calib.evaluation.settings import Comparison, check_settings
from bpc_calib.evaluation.tasks import RULER, TASKS, TEXT
from bpc_calib.method.defaults import budget_text
from bpc_calib.method.numbers import check_seed
from bpc_calib.text.known_corpora import DEMO
from bpc_cli.command import checked, command, usage
from bpc_cli.console import note, print_json, printable, quiet_libraries
from bpc_cli.eval_tables import print_evaluation
from bpc_cli.eval_work import kept_work, made_with
from bpc_cli.opening import LoadOptions, load_artifact, open_model, open_tokenizer, open_weights
from bpc_cli.options import (
    BUDGET_HELP,
    PROJECTIONS,
    AsJson,
    DenseLayers,
    EqualShares,
    Force,
    MinTokens,
    Model,
    Output,
    Preset,
    Quiet,
    parse_budgets,
    parse_counts,
    preset_name,
    preset_rules,
    split,
)
from bpc_cli.progress import progress_bar, working
from bpc_cli.result_file import open_result_file

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

HARNESS = "lm_eval:"
LEARNING = [name for name, method in METHODS.items() if method.learns]


@dataclass(frozen=True)
class ComparisonOptions:
    """What is compared, on which prompts."""

    tasks: Annotated[
        str,
        typer.Option(
            help=f"Tasks: {', '.join([TEXT, *TASKS])}; ruler for all from {RULER[0]} to {RULER[-1]}; "
            f"{HARNESS}NAME, {HARNESS}NAME.yaml for those of lm_eval.",
            metavar="TASK,...",
        ),
    ] = "text,needle"
    lengths: Annotated[
        str, typer.Option(help="Tokens per prompt.", metavar="TOKENS,...", callback=checked(parse_counts))
    ] = "2048"
    preset: Preset = "default"
    budgets: Annotated[
        str | None,
        typer.Option(
            help=f"{BUDGET_HELP} Default: the preset's, and 10%.",
            metavar="SHARE|TOKENS,...",
            callback=checked(parse_budgets),
        ),
    ] = None
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Methods to compare: {', '.join(METHODS)}; or package.module:Class. Default: all but "
            f"{', '.join(LEARNING)}, which learn first.",
            metavar="METHOD,...",
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
    learn_corpus: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Text from which {', '.join(LEARNING)} learn, given as for bpc calibrate; none of --corpus. May be "
            f"repeated. Default: {DEMO}.",
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
        typer.Option(help="Prompts decoded at once. Default: as many as 65,536 tokens hold.", min=1),
    ] = None
    min_tokens: MinTokens = None
    dense_layers: DenseLayers = None
    equal_shares: EqualShares = False
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed of the prompts and of the methods that draw by chance.", callback=checked(check_seed)
        ),
    ] = 0

    def arguments(self) -> dict[str, Any]:
        """The arguments of `Comparison` but the tasks and the corpora, parsed."""
        rules = preset_rules(self.preset, self.min_tokens, self.dense_layers)
        own = (rules.pop("budget"), 0.1)
        return {
            "lengths": parse_counts(self.lengths),
            "budgets": own if self.budgets is None else parse_budgets(self.budgets),
            "methods": None if self.methods is None else split(self.methods),
            "prompts": self.prompts,
            "seed": self.seed,
            "raw": self.raw,
            "batch": self.batch_size,
            "rules": rules | {"equal_shares": self.equal_shares},
        }


@command
def eval_(
    *,
    model: Model,
    artifact: Annotated[
        str | None,
        typer.Option("--artifact", "-a", help=f"{PROJECTIONS} Without it, bpc and twilight are left out."),
    ] = None,
    options: ComparisonOptions,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for pictures (needs matplotlib).")] = None,
    force: Force = False,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for finished parts: after a stop, the same command goes on with them. Default: the output "
            "file's name, or that of the model and -eval, with .work added."
        ),
    ] = None,
    load: LoadOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare the quality of BPC and of other methods.

    All decode the same prompts with the same budget, by default in the setting of bpc generate. With --preset hard
    every layer has to choose and nothing is attended beyond the budget, which separates good projections from bad ones.

    Example: bpc eval -m MODEL -a model.safetensors --lengths 8192
    """
    tasks, harness_tasks, given = _parsed(options, calibrated=artifact is not None)
    quiet_libraries(quiet=quiet)
    projections = None if artifact is None else load_artifact(artifact, model)
    write = open_result_file(output, force, frozenset({"settings", "rows"}))
    from bpc_calib.text.corpora import open_corpora

    corpora = open_corpora(options.corpus or [DEMO]) if TEXT in tasks else []  # before torch is imported
    from bpc_calib import enable
    from bpc_calib.evaluation import harness, pictures
    from bpc_calib.evaluation.comparison import check, learn_methods, learners, settled
    from bpc_calib.evaluation.evaluate import draw_texts, evaluate
    from bpc_calib.evaluation.learning import draw_lessons

    if harness_tasks:
        harness.check(harness_tasks)
    if plot is not None:
        pictures.check(plot, force)
    opened = open_model(model, load)
    preset = preset_name(given["rules"])
    given["rules"] = settled(opened.config, projections, given["rules"])
    comparison = Comparison(tasks=tasks, corpora=corpora, **given)
    methods, cells = check(opened.config, projections, comparison)
    for message in () if quiet else _without_effect(options, comparison, projections, methods):
        note(message)
    tokenizer, prepared = open_tokenizer(opened), []
    texts = draw_texts(opened.config, tokenizer, comparison, cells)  # refuses a corpus before anything slow
    teaching = open_corpora(options.learn_corpus or [DEMO]) if learners(methods) else []
    lessons = draw_lessons(opened.config, tokenizer, teaching, options.seed)
    if harness_tasks:
        with working("Loading the data of lm_eval's tasks", quiet):
            prepared = harness.prepare(harness_tasks, tokenizer, comparison.lengths, options.seed)
    loaded = open_weights(opened, quiet)
    enable(loaded)
    result = {"model": opened.description.id, **_compared(preset, comparison, projections)}
    folder = work_dir or Path(f"{output or opened.description.id.split('/')[-1] + '-eval'}.work")
    made = made_with(loaded, result["model"], projections, comparison.rules, methods)
    with kept_work(folder, made, quiet) as finished:
        with progress_bar("Learning", quiet) as progress:
            learned, seconds = learn_methods(loaded, lessons, methods, comparison, finished, progress)
        if learned:
            result["learned"] = {"texts": lessons.shape[0], "tokens": lessons.shape[1], "seconds": seconds}
        shared: dict[str, Any] = {"learned": learned, "finished": finished}
        with progress_bar("Evaluating", quiet) as progress:
            result["rows"] = evaluate(
                loaded, tokenizer, projections, comparison, texts=texts, progress=progress, **shared
            )
        for task in prepared:
            with working(f"Running {HARNESS}{task.name}{f', {task.tokens:,} tokens' if task.tokens else ''}", quiet):
                result["rows"] += harness.run(loaded, tokenizer, projections, task, methods, comparison, **shared)
        write(result)
        if plot is not None:
            pictures.draw(result["rows"], plot, overwrite=force)
        if as_json:
            print_json(result)
        else:
            print_evaluation(result)
            for path in filter(None, (output, plot)):
                print(f"Wrote {printable(path)}")
        sys.stdout.flush()  # or the finished work would go before a full disk is noticed


def _parsed(options: ComparisonOptions, calibrated: bool) -> tuple[list[str], list[str], dict[str, Any]]:
    """The tasks, those of lm_eval, and the other arguments of `Comparison`; methods may be of this folder."""
    every = expand_tasks(options.tasks)
    tasks = [task for task in every if not task.startswith(HARNESS)]
    given = options.arguments()
    with usage():
        methods = check_settings(Comparison(tasks=tasks, **given), calibrated=calibrated)
    if any(":" in name for name in methods):
        sys.path.insert(0, os.getcwd())
    return tasks, [task.removeprefix(HARNESS) for task in every if task.startswith(HARNESS)], given


def _compared(preset: str | None, comparison: Comparison, artifact: "ProjectionArtifact | None") -> dict[str, Any]:
    """The projections and settings that a result is of."""
    settings = {each: getattr(comparison, each) for each in ("prompts", "forced", "raw", "seed")}
    return {
        "artifact": None if artifact is None else dict(artifact.metadata["algorithm"]),
        "payload_sha256": None if artifact is None else artifact.metadata["payload_sha256"],
        "settings": {"preset": preset, **settings, **comparison.rules},
    }


def _without_effect(
    options: ComparisonOptions,
    comparison: Comparison,
    artifact: "ProjectionArtifact | None",
    methods: tuple[str, ...],
) -> Iterator[str]:
    """Say which options change nothing."""
    from bpc_calib.evaluation.comparison import learners
    from bpc_calib.method.budget import attended

    if options.corpus and TEXT not in comparison.tasks:
        yield f"--corpus has no effect: the task {TEXT} is not among --tasks"
    if options.learn_corpus and not learners(methods):
        yield f"--learn-corpus has no effect: of --methods none learns, as {', '.join(LEARNING)} do"
    has_needs = artifact is not None and artifact.has_needs  # which the exact top-k follows, and the dense layers
    if artifact is not None and not has_needs and not any(method_of(name).calibrated for name in methods):
        yield "--artifact has no effect: the method bpc is not among --methods"
    if options.equal_shares and not has_needs:
        yield "--equal-shares has no effect: there are no projections that say what each KV head needs"
    least = comparison.rules["min_tokens"]
    lengths_of_ours = comparison.lengths if comparison.tasks else ()
    pairs = [(length, budget) for length in lengths_of_ours for budget in comparison.budgets]
    small = [(length, budget) for length, budget in pairs if attended(length, budget, 1) < min(least, length)]
    if small:
        lengths, budgets = (dict.fromkeys(each) for each in zip(*small, strict=True))
        yield (
            f"--min-tokens {least} is more than a budget of {', '.join(map(budget_text, budgets))} at "
            f"{', '.join(f'{length:,}' for length in lengths)} tokens: --preset hard measures the budget itself"
        )


def expand_tasks(text: str) -> list[str]:
    """The tasks of `ruler,needle`, each once; `ruler` stands for several."""
    tasks = list(dict.fromkeys(name for task in split(text) for name in (RULER if task == "ruler" else (task,))))
    if not tasks:
        raise typer.BadParameter("--tasks: give at least one")
    for task in tasks:
        if task.endswith((".yaml", ".yml")) and not task.startswith(HARNESS):
            raise typer.BadParameter(f"--tasks: the file of a task of lm_eval is given as {HARNESS}{task}")
    return tasks
