"""`bpc calibrate`: from a model and text to a projection artifact."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpc_calib.calibration.numbers import SEQUENCE_LENGTH, fitted_keys
from bpc_calib.calibration.projection_method import DEFAULT_METHOD, PROJECTION_METHODS
from bpc_calib.text.known_corpora import DEFAULT_CORPORA, DEMO, HUB_CORPORA
from bpc_cli.calibration_report import STAGES, print_plan, print_report, report
from bpc_cli.calibration_work import WorkOptions, finish, finished, open_work, reused, was_finished
from bpc_cli.command import command, usage
from bpc_cli.console import note, print_json, quiet_libraries
from bpc_cli.opening import LoadOptions, open_model, open_tokenizer, open_weights
from bpc_cli.options import AsJson, Model, Quiet
from bpc_cli.progress import StageTimes, stage_bars
from bpc_cli.ranks import check_shared, joined_ranks

if TYPE_CHECKING:
    from bpc_calib.calibration.plan import Plan
    from bpc_calib.text.known_corpora import Corpus

FIELD_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet")  # of files that have fields
METHOD_HELP = "; ".join(f"{method.name} {method.summary}" for method in PROJECTION_METHODS.values())


def _check_method(name: str) -> str:
    if name not in PROJECTION_METHODS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(PROJECTION_METHODS)}")
    return name


@dataclass(frozen=True)
class TextOptions:
    """The text that calibration reads."""

    corpus: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Calibration text: {', '.join([*HUB_CORPORA, DEMO])}, PATH or NAME=PATH. A path is a text, code, "
            ".jsonl, .json.gz or .parquet file, or a folder of such files. May be repeated. Default: "
            f"{', '.join(DEFAULT_CORPORA)} from the Hub; for the bundled model {DEMO}, text generated on the spot.",
            metavar="CORPUS",
        ),
    ] = None
    text_field: Annotated[
        str | None,
        typer.Option(help="Field of local JSON and parquet files that holds the text. Default: text."),
    ] = None

    def corpora(self, model: str, samples: int) -> "list[Corpus]":
        """Open the corpora: each text once, each with a sample; those of the Hub stay unopened."""
        from bpc_calib.text.corpora import check_corpora, open_corpora

        names = self.corpus or ([DEMO] if model == DEMO else list(DEFAULT_CORPORA))
        found = open_corpora(names, text_field=self.text_field or "text", hub=False)
        check_corpora(found, samples)
        return found


@dataclass(frozen=True)
class PlanOptions:
    """The numbers of a calibration: the arguments of `bpc_calib.make_plan`."""

    samples: Annotated[int, typer.Option(help="Number of text samples; every corpus gives an equal share.")] = 180
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens per sample. Default: 8192, or the model's limit if that is lower."),
    ] = None
    bits: Annotated[
        int | None,
        typer.Option(
            help="Length of a code in bits: 32, 64 or 128. Default: 64, or 128 where a key has more than 128 numbers."
        ),
    ] = None
    method: Annotated[
        str,
        typer.Option(
            help=f"How projections are found: {METHOD_HELP}.",
            metavar="|".join(PROJECTION_METHODS),
            callback=_check_method,
        ),
    ] = DEFAULT_METHOD
    position_shift: Annotated[
        bool | None,
        typer.Option(
            "--position-shift/--no-position-shift",
            help="Start samples at random positions, so that short samples serve long contexts.",
            show_default="set by --method",
        ),
    ] = None
    keys_per_head: Annotated[int, typer.Option(help="Keys kept per KV head.")] = 65_536
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same file.")] = 0

    def __post_init__(self) -> None:
        """Refuse what no model allows; one may take fewer tokens, or need more bits, than is assumed here."""
        length = SEQUENCE_LENGTH if self.sequence_length is None else self.sequence_length
        with usage():
            fitted_keys(self.samples, length, self.keys_per_head, 64 if self.bits is None else self.bits, self.seed)


@command
def calibrate(
    *,
    model: Model,
    numbers: PlanOptions,
    text: TextOptions,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. Default: MODEL-bpcBITS.safetensors in this folder."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")] = False,
    work: WorkOptions,
    load: LoadOptions,
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel",
            help="Under torchrun: shard one model over the processes, for a model that does not fit into one GPU.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and stop before any weights are loaded.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Find the projections of a model from text.

    They are written to one safetensors file. After a stop, the same command goes on with the finished work.

    Example: bpc calibrate -m Qwen/Qwen3-8B
    """
    started = time.monotonic()
    check_shared(tensor_parallel)
    from bpc_artifacts import check_writable

    with joined_ranks() as ranks:
        leads = ranks.rank == 0
        if leads:  # before anything slow
            corpora = text.corpora(model, numbers.samples)
            if output is not None:
                check_writable(output, 0, overwrite=force or was_finished(output, work))
        quiet_libraries(quiet=quiet or not leads, warnings=leads)
        import torch

        import bpc_calib
        from bpc_calib.calibration.calibrate import calibrate_in, help_calibrate
        from bpc_calib.calibration.run_text import read_text

        opened = open_model(model, load, shared=tensor_parallel)
        plan = bpc_calib.make_plan(opened.description, **asdict(numbers))
        target = output or Path(f"{plan.model.id.split('/')[-1]}-bpc{plan.bits}.safetensors")
        if not leads:
            if not dry_run:
                device = torch.device(opened.device)
                help_calibrate(work.folder(target), plan, device, lambda: open_weights(opened, quiet=True), ranks)
            return
        _may_replace(target, work, plan, opened.device, force)
        for message in () if quiet else _idle_options(plan, corpora, text.text_field, numbers):
            note(message)
        if dry_run:
            print_plan(plan, opened, target, corpora, as_json)
            return
        times = StageTimes(started)
        with (
            open_work(target, work, plan, opened.device, quiet, ranks) as folder,
            stage_bars(STAGES, quiet) as show,
        ):

            def progress(stage: str, done: int, total: int) -> None:
                times.add(stage, done)
                show(stage, done, total, "")

            def load_model() -> Any:
                loaded = open_weights(opened, quiet)
                times.add("load")
                return loaded

            # An earlier fit of the same keys may have been finished, not this one.
            overwrite = _may_replace(target, work, plan, opened.device, force)
            again = {"reused": reused(target, work, folder)}
            tokenizer = open_tokenizer(opened)
            times.add("load")  # so far of libraries
            drawn = read_text(corpora, tokenizer, folder, progress)
            # Where the artifact is finished, only the removal of the work folder is left.
            artifact = finished(target, work, ranks) or calibrate_in(folder, drawn, load_model, progress)
            finish(artifact, target, folder, overwrite=overwrite, keep=work.keep_work)
    result = report(artifact, target, opened.device, time.monotonic() - started, times) | again
    if as_json:
        print_json(result)
    else:
        print_report(result)


def _may_replace(target: Path, work: WorkOptions, plan: "Plan", device: str, force: bool) -> bool:
    """Refuse a target that cannot be written; whether a file there may be replaced."""
    from bpc_artifacts import check_writable

    overwrite = force or was_finished(target, work, plan, device)
    check_writable(target, plan.artifact_bytes + (1 << 20), overwrite=overwrite)
    return overwrite


def _idle_options(plan: "Plan", corpora: "list[Corpus]", text_field: str | None, given: PlanOptions) -> list[str]:
    """Say which of the options that were given change nothing."""
    found = []
    files = [file.name.lower() for corpus in corpora for file in corpus.files]
    if text_field is not None and not any(name.endswith(FIELD_SUFFIXES) for name in files):
        found.append(f"--text-field {text_field} has no effect: no corpus is a local JSON or parquet file")
    if given.keys_per_head > plan.keys_per_head and given.keys_per_head != type(given).keys_per_head:
        found.append(
            f"--keys-per-head {given.keys_per_head:,} is more than there are: all {plan.keys_per_head:,} keys are kept"
        )
    room = (plan.model.context_limit or plan.sequence_length) - plan.sequence_length
    if given.position_shift and not room:
        found.append(f"--position-shift has no effect: {plan.sequence_length:,} tokens are all that the model allows")
    return found
