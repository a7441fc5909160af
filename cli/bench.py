"""`bpc bench`: the speed of BPC on this machine, beside dense attention, the paper's pipeline and the byte floors."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bpc_cli.bench_model import BenchModelOptions, check_model_options, make_model, open_bench_model
from bpc_cli.bench_settings import MeasureOptions
from bpc_cli.bench_tables import print_benchmark
from bpc_cli.command import command
from bpc_cli.console import fail, print_json, printable
from bpc_cli.find_artifact import load_artifact
from bpc_cli.libraries import quiet_libraries
from bpc_cli.opening import OneDeviceOptions
from bpc_cli.options import AsJson, Force, Output, Quiet
from bpc_cli.progress import progress_bar
from bpc_cli.result_file import open_result_file


@command
def bench(
    *,
    measured: MeasureOptions,
    subject: BenchModelOptions,
    output: Output = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="File for a picture of the result: .png, .svg or .pdf (needs matplotlib)."),
    ] = None,
    force: Force = False,
    load: OneDeviceOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time a step of BPC beside dense attention, the paper's pipeline and the bytes that must move.

    Everything is compared in the same run, with the same random keys. Where BPC loses, the table shows it.

    Example: bpc bench --parts layer --lengths 8192,131072 --budgets 2%,1% -o bench.json --plot bench.png
    """
    settings = measured.settings()
    check_model_options(subject)
    if measured.crossover and measured.parts is not None:
        fail("--crossover takes the place of the parts: leave out --parts")
    if output is not None and plot is not None and output.resolve() == plot.resolve():
        fail(f"{output}: is given for --output and for --plot: give two files")
    quiet_libraries(quiet=quiet, warnings=not quiet)
    projections = None if subject.artifact is None else load_artifact(subject.artifact)
    write = open_result_file(output, force, frozenset({"settings", "machine"}))
    if plot is not None:
        from bpc_artifacts.picture_file import check_picture

        check_picture(plot, force)
    from bpc_calib.bench.machine import without_folder
    from bpc_calib.bench.measure import check, run

    model = open_bench_model(subject, load)
    check(settings, model.config, projections)
    typed = {"command": " ".join(["bpc", *map(without_folder, sys.argv[1:])])}

    def keep(result: dict[str, Any]) -> None:
        write(typed | result)

    with progress_bar("Benchmarking", quiet) as progress:
        result = run(
            settings,
            model.config,
            lambda: make_model(model, quiet),
            projections,
            model.dtype,
            model.device,
            progress,
            keep,
        )
    if plot is not None:
        from bpc_calib.bench import pictures

        pictures.draw(result, plot, overwrite=force)
    if as_json:
        print_json(typed | result)
        return
    print_benchmark(result)
    for path in (output, plot):
        if path is not None:
            print(f"Wrote {printable(path)}")
