"""Measure what each KV head needs, on some of the samples, with the projections in a work folder."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.calibration.memory import memory_advice
from bpc_calib.calibration.needs import joined, text_needs
from bpc_calib.calibration.ranks import LOADING
from bpc_calib.calibration.stored import NEEDS, read_needs, wait_for_files, write_needs
from bpc_calib.calibration.work_folder import WorkFolder, check_same
from bpc_calib.models.loading import weights_identity

__all__ = ["measure"]


def measure(
    load: Callable[[], Any],
    tokens: Tensor,
    artifact: ProjectionArtifact,
    work: WorkFolder,
    progress: Callable[[str, int, int], None],
) -> ProjectionArtifact:
    """Measure this rank's share of the needs that the work folder lacks; return the artifact with those of all ranks.

    Args:
        load: returns the model; it is not called where this rank measures nothing.
        tokens: int `[samples, T]`.
        artifact: the projections of all layers.
        work: the open work folder.
        progress: see `calibrate`; it counts two steps for each layer and text, of all ranks.

    Raises:
        ModelError: the memory is too small.
        WorkError: the weights are not those of the work folder, or the folder is damaged or cannot be written.
    """
    plan, ranks, steps = work.plan, work.ranks, 2 * len(artifact.layers)
    if not plan.measured:
        return artifact
    mine = [nth for nth in range(len(plan.measured)) if nth not in work.needs][ranks.rank :: ranks.count]
    model = load() if mine else None
    if model is not None:
        check_same(work.path, {"weights": work.journal.weights}, {"weights": weights_identity(model)})
    ranks.barrier("model", within=LOADING)

    def show(more: int = 0) -> int:
        done = steps * len(work.needs) + ranks.add("needs", more)
        progress("needs", done, steps * len(plan.measured))
        return done

    show()
    for nth in mine:
        sample, length = plan.measured[nth]
        with (
            ranks.step("needs"),
            memory_advice(
                f"{plan.model.id}: out of memory while needs are measured on {length:,} tokens: make room, and the "
                "same command goes on"
            ),
        ):
            write_needs(work.path, nth, text_needs(model, artifact, tokens[sample, :length], show))
    ranks.barrier("needs", show)
    if ranks.count > 1:
        wait_for_files(work.path, NEEDS, range(len(plan.measured)))
    return joined(artifact, [length for _, length in plan.measured], read_needs(work.path, plan))
