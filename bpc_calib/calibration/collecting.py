"""Collect the keys of all samples into a work folder, one sample in memory at a time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from bpc_calib.calibration.keys import sample_keys
from bpc_calib.calibration.memory import memory_advice
from bpc_calib.calibration.positions import first_positions, key_positions
from bpc_calib.calibration.ranks import LOADING, samples_of
from bpc_calib.calibration.stored import SAMPLES, read_sums, wait_for_files, write_sample, write_sums
from bpc_calib.calibration.work_folder import WorkFolder, check_room, check_same
from bpc_calib.models.loading import weights_identity
from bpc_calib.models.observation import verify

__all__ = ["collect"]


def collect(
    load: Callable[[], Any], tokens: Tensor, work: WorkFolder, progress: Callable[[str, int, int], None]
) -> None:
    """Run this rank's share of the samples that the work folder lacks; return when every rank is done.

    Their keys and the sums of their queries' moments (see `SampleKeys`) are written into the work folder. Ranks
    with a shard of the model each run every sample together, and rank 0 writes.

    Args:
        load: returns the model; it is not called where this rank has no samples.
        tokens: int `[samples, T]`.
        work: the open work folder.
        progress: see `calibrate`; it counts the samples of all ranks.

    Raises:
        ModelError: the model is not supported, or a key is not finite.
        WorkError: the weights are not those of the work folder or of rank 0, or the folder cannot be written.
    """
    plan, ranks = work.plan, work.ranks
    if len(work.samples) == plan.samples:
        return
    writes = ranks.rank == 0 or plan.model.ranks == 1
    mine = samples_of(plan, work.samples, ranks.rank, ranks.count)
    model = load() if mine else None
    _agree_on_weights(model, work)
    ranks.barrier("weights", within=LOADING)  # from here on no rank loads, so that slow steps are stuck
    positions, offsets, summed = key_positions(plan), first_positions(plan), set(plan.summed)

    def show(more: int = 0) -> int:
        done = len(work.samples) + ranks.add("keys", more)
        progress("keys", done, plan.samples)
        return done

    done, group, last, moments = show(), -1, -1, dict[int, Tensor]()
    for sample in mine:
        if sample // plan.group_size != group:
            group = sample // plan.group_size
            last = work.summed.get(group, -1)
            moments = read_sums(work.path, group, last, plan.model.full_layers) if last >= 0 else {}
        sums = sample in summed and sample > last
        with (
            ranks.step("keys"),
            memory_advice(
                f"{plan.model.id}: out of memory in a sample of {plan.sequence_length:,} tokens: make room, and the "
                f"same command goes on after {done} finished samples; or begin anew with a lower --sequence-length"
            ),
        ):
            found = sample_keys(
                model, plan.model, tokens[sample], positions[sample], offset=offsets[sample], moments=sums
            )
            if writes:
                write_sample(work.path, sample, found.keys)
            if writes and sums:
                moments = {layer: moments[layer] + each if moments else each for layer, each in found.moments.items()}
                write_sums(work.path, group, sample, moments)
        done = show(int(writes))
    ranks.barrier("keys", show)
    if ranks.count > 1:
        wait_for_files(work.path, SAMPLES, range(plan.samples))


def _agree_on_weights(model: Any, work: WorkFolder) -> None:
    """Check that the weights are those of the work folder; rank 0 notes them in its journal."""
    found = None
    if model is not None:
        verify(model, work.plan.model)
        found = weights_identity(model)
    noted = work.journal.weights
    if work.ranks.rank == 0:
        if noted:
            check_same(work.path, {"weights": noted}, {"weights": found})
        work.note(replace(work.journal, weights=found or noted))
        check_room(work, model.dtype.itemsize)
        work.ranks.broadcast("weights", found)
        return
    noted = work.ranks.receive("weights")
    if found is not None:
        check_same(work.path, {"weights": noted}, {"weights": found})
    work.journal = replace(work.journal, weights=noted)
