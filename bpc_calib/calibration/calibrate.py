"""Calibration: from text to keys, to their decomposition, to the artifact."""

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.calibration.collecting import collect
from bpc_calib.calibration.contents import contents
from bpc_calib.calibration.measuring import measure
from bpc_calib.calibration.plan import Plan, make_plan
from bpc_calib.calibration.projecting import project
from bpc_calib.calibration.ranks import Ranks
from bpc_calib.calibration.run_text import read_text, stored_text
from bpc_calib.calibration.stored import LAYERS, read_layers, wait_for_files
from bpc_calib.calibration.work_folder import WorkFolder, broadcast_work, join_work_folder, open_work_folder
from bpc_calib.errors import InputError, ModelError
from bpc_calib.models.description import describe
from bpc_calib.models.observation import input_device
from bpc_calib.text.corpora import check_corpora, open_corpora
from bpc_calib.text.known_corpora import DEFAULT_CORPORA, Corpus

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["calibrate", "calibrate_in", "help_calibrate"]

Progress = Callable[[str, int, int], None]


def calibrate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    corpora: Sequence[str | os.PathLike[str] | Corpus] = DEFAULT_CORPORA,
    plan: Plan | None = None,
    *,
    work_dir: str | os.PathLike[str] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> ProjectionArtifact:
    """Find the projections of a causal language model from text (the paper's OPC).

    The same plan, model, text and software produce the same artifact, byte for byte.

    Args:
        model: a transformers causal language model, on the device for the computation.
        tokenizer: the model's tokenizer.
        corpora: names of `HUB_CORPORA`, `demo`, paths, `NAME=PATH`, or results of `open_corpus`; each corpus gets an
            equal share of the samples.
        plan: the settings (`make_plan`); None is the default plan for this model.
        work_dir: a folder for the finished samples and layers; the same call with the same folder goes on where a
            former one stopped. It stays until you delete it. None: a temporary folder, removed at the end.
        progress: is called with a stage ("text", "keys", "decompose", "needs"), the number of finished steps and their
            total.

    Raises:
        ModelError: the model is not supported, or a key is not finite.
        CorpusError: a text cannot be read, or a corpus is too short.
        InputError: the plan is for another model, there is no corpus, a text is given twice, or there are fewer samples
            than corpora.
        WorkError: the work folder is in use, is damaged, cannot be written, or belongs to another calibration.
    """
    description = describe(model.config)
    if description.ranks > 1:
        raise ModelError(
            f"{description.id}: {description.ranks} processes shard it, and only `bpc calibrate --tensor-parallel` "
            "calibrates so: run that with torchrun, or load the model with device_map='auto'"
        )
    plan = plan or make_plan(description)
    if plan.model.config_sha256 != description.config_sha256:
        raise InputError(f"the plan is for {plan.model.id}, but the model is {description.id}: make a plan for it")
    opened = open_corpora(corpora, hub=False)
    check_corpora(opened, plan.samples)
    with ExitStack() as stack:
        folder = work_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="bpc-"))
        work = stack.enter_context(open_work_folder(Path(folder), plan, input_device(model)))
        tokens = read_text(opened, tokenizer, work, progress)
        return calibrate_in(work, tokens, lambda: model, progress)


def calibrate_in(work: WorkFolder, tokens: Tensor, load: Callable[[], Any], progress: Progress) -> ProjectionArtifact:
    """Do what is left of a calibration, with the other ranks if there are some.

    Args:
        work: the work folder of the calibration.
        tokens: its samples, int32 `[samples, T]`.
        load: returns the model; called only if a sample or its needs are left.
        progress: as in `calibrate`.

    Raises:
        ModelError: the model is not supported, a key is not finite, or the keys of a layer cannot be fitted.
        WorkError: the work folder is damaged or cannot be written, or another rank is gone.
    """
    broadcast_work(work)
    return _finish(work, tokens, load, progress)


def _finish(work: WorkFolder, tokens: Tensor, load: Callable[[], Any], progress: Progress) -> ProjectionArtifact:
    """Do this rank's part of each stage; return the artifact of all ranks."""
    load = functools.cache(load)
    collect(load, tokens, work, progress)
    project(work, progress)
    if work.ranks.count > 1:
        wait_for_files(work.path, LAYERS, work.plan.model.full_layers)
    fits = read_layers(work.path, work.plan)
    artifact = contents(work.plan, work.journal.sources, work.journal.weights["dtype"], fits)
    artifact = measure(load, tokens, artifact, work, progress)
    work.ranks.barrier("artifact")  # then rank 0 may remove the folder
    return artifact


def help_calibrate(path: Path, plan: Plan, device: torch.device, load: Callable[[], Any], ranks: Ranks) -> None:
    """Do the part of another rank than rank 0, which runs `calibrate_in` in the work folder `path`.

    Args:
        path: the work folder, as this rank sees it.
        plan: the settings, the same on all ranks.
        device: where this rank computes.
        load: returns the model; called only if a sample or its needs are left.
        ranks: this process among the ranks.

    Raises:
        ModelError: the model is not supported, a key is not finite, or the keys of a layer cannot be fitted.
        WorkError: this rank does not see that folder, or has another plan, weights, processor or version than rank 0.
    """
    work = join_work_folder(path, plan, device, ranks)
    if work is not None:
        _finish(work, stored_text(work), load, lambda stage, done, total: None)
