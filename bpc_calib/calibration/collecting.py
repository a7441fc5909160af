"""Collect the keys of all samples into a work folder, one sample in memory at a time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from bpc_calib.calibration.journal import check_same
from bpc_calib.calibration.keys import sample_keys
from bpc_calib.calibration.memory import memory_advice
from bpc_calib.calibration.positions import first_positions, key_positions
from bpc_calib.calibration.run_text import Text
from bpc_calib.calibration.stored_keys import write_sample
from bpc_calib.calibration.stored_moments import write_moments
from bpc_calib.calibration.work_folder import WorkFolder, check_room
from bpc_calib.models.observation import verify
from bpc_calib.models.weights import weights_identity

__all__ = ["collect"]


def collect(model: Any, text: Text, work: WorkFolder, progress: Callable[[str, int, int], None]) -> dict[int, Tensor]:
    """Run every sample that the work folder lacks, and write its keys and the sums of the queries' moments.

    Returns:
        The sums over the fitted samples by layer; see `SampleKeys`.

    Raises:
        ModelError: the model is not supported, or a key is not finite.
        WorkError: the weights are not those of the work folder, or it cannot be written.
    """
    plan = work.plan
    verify(model, plan.model)
    weights = weights_identity(model)
    if work.journal.weights:
        check_same(work.path, {"weights": work.journal.weights}, {"weights": weights})
    work.note(replace(work.journal, weights=weights))
    check_room(work, model.dtype.itemsize)

    last, moments = work.summed
    positions, offsets, summed = key_positions(plan), first_positions(plan), set(plan.summed)
    done = len(work.samples)
    progress("keys", done, plan.samples)
    for sample in sorted(set(range(plan.samples)) - work.samples):
        sums = sample in summed and sample > last
        with memory_advice(
            f"{plan.model.id}: out of memory in a sample of {plan.sequence_length:,} tokens: make room, and the same "
            f"command goes on after {done} finished samples; or begin anew with a lower --sequence-length"
        ):
            found = sample_keys(
                model, plan.model, text.tokens[sample], positions[sample], offset=offsets[sample], moments=sums
            )
        write_sample(work.path, sample, found.keys)
        if sums:
            moments = {layer: moments[layer] + each if moments else each for layer, each in found.moments.items()}
            write_moments(work.path, sample, moments)
        done += 1
        progress("keys", done, plan.samples)
    return moments
