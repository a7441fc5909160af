"""The model card of an artifact: what it is, how it was made, how well it fits, and how to use it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bpc_artifacts import ProjectionArtifact, verdict
from bpc_artifacts.schema import codes_of
from bpc_calib.sharing.markdown import code, table
from bpc_calib.sharing.quality import quality

__all__ = ["BUDGETS", "LIBRARY", "RESIDUALS", "model_card"]

LIBRARY = "bpc"
RESIDUALS, BUDGETS = "residuals.png", "budgets.png"  # pictures beside the card
TAGS = [LIBRARY, "sparse-attention", "kv-cache"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def model_card(
    artifact: ProjectionArtifact,
    reference: str,
    *,
    evaluation: Mapping[str, Any] | None = None,
    pictures: Sequence[str] = (),
) -> str:
    """Return the README.md of a repository, from the metadata of its artifact.

    Args:
        artifact: see `bpc_artifacts.publishing.publishable`.
        reference: `ORG/NAME` on the Hub, or `ORG/NAME@BRANCH` for another branch than main.
        evaluation: see `quality.publishable_result`.
        pictures: which of `RESIDUALS` and `BUDGETS` are beside the card.
    """
    from huggingface_hub import ModelCard, ModelCardData

    metadata = artifact.metadata
    base = _hub_id(metadata["model"]["id"], metadata["model"]["revision"])
    sources = metadata["calibration"]["sources"]
    datasets = [found for source in sources if (found := _hub_id(source["path"], source["revision"]))]
    data = ModelCardData(
        library_name=LIBRARY,
        pipeline_tag="text-generation",
        tags=TAGS,
        base_model=base,
        base_model_relation=base and "adapter",
        datasets=sorted(set(datasets)) or None,
    )
    parts = [
        f"# {_repository(reference).split('/')[1]}",
        _what(metadata, base),
        "## Use",
        _use(metadata, base, reference),
        "## Calibration",
        _calibration(metadata),
        "## Residuals",
        _residuals(artifact, pictures),
    ]
    if evaluation is not None:
        parts += ["## Measured quality", quality(evaluation)]
        parts += [f"![Quality by budget, one line per method]({BUDGETS})"] if BUDGETS in pictures else []
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


def _repository(reference: str) -> str:
    return reference.partition("@")[0]


def _hub_id(path: str, revision: str | None) -> str | None:
    """Return `ORG/NAME` of something on the Hub; `path` may name a file in it. None for something local."""
    name = "/".join(path.split("/")[:2])
    return name if revision is not None and _HUB_ID.fullmatch(name) else None


def _what(metadata: Mapping[str, Any], base: str | None) -> str:
    model, bits = metadata["model"], metadata["algorithm"]["bits"]
    if base is None:
        of = f"the local model {code(model['id'])} ({code(model['model_type'])})"
    else:
        of = f"[{base}](https://huggingface.co/{base}) at revision {code(model['revision'])}"
    return (
        f"Projections of BPC (Binary Principal Components) for {of}. They hash each cached key to a code of {bits} "
        "bits. For each new token, the codes rank the keys of a long context, and exact attention reads only the best "
        "ones.\n\nThe file holds no weights of the model, and the model stays as it is."
    )


def _use(metadata: Mapping[str, Any], base: str | None, reference: str) -> str:
    local = metadata["model"]["id"]
    model = base if base is None or local == base else local  # a GGUF file in the repository of the model
    if model is None:
        model = "demo" if local == "demo" else "MODEL"
    elif not re.fullmatch(r"[\w./-]+", model, re.ASCII):
        model = base
    return (
        "Install BPC (the Python package `bpc-calib`), then:\n\n"
        f"```console\n$ bpc generate -m {model} -a {reference} --prompt-file long.txt\n"
        f"$ bpc chat -m {model} -a {reference}\n$ bpc inspect {reference}\n$ bpc pull {reference}\n```\n\n"
        f"`-a {_repository(reference)}@COMMIT` always takes the same file; `bpc pull` prints the commit."
    )


def _calibration(metadata: Mapping[str, Any]) -> str:
    algorithm, model, calibration = metadata["algorithm"], metadata["model"], metadata["calibration"]
    held_out = metadata["metrics"].get("held_out")
    facts = {
        "samples": f"{calibration['samples']:,} of {calibration['sequence_length']:,} tokens"
        + (f", {held_out['samples']:,} of them kept aside" if held_out else ""),
        "tokens": f"{calibration['tokens']:,}",
        "keys per KV head": f"{calibration['keys_per_head']:,}",
        "codes": f"{codes_of(metadata)}, {algorithm['bits']} bits per key",
        "method": code(algorithm["name"]),
        "layers": f"{len(metadata['layers'])} of {model['num_layers']}",
        "heads": f"{model['kv_heads']} KV heads of {model['head_dim']} numbers, {model['query_heads']} query heads",
        "precision of the model": code(calibration["dtype"]),
        "seed": algorithm["seed"],
        "written by": f"bpc {code(metadata['bpc_version'])}, format version {metadata['format_version']}",
    }
    texts = []
    for source in calibration["sources"]:
        dataset = _hub_id(source["path"], source["revision"])
        where = code(source["path"])
        where = f"[{where}](https://huggingface.co/datasets/{dataset})" if dataset else where
        revision = code(source["revision"][:12]) if source["revision"] else "not from the Hub"
        texts.append([code(source["name"]), where, revision, f"{source['samples']:,}", f"{source['tokens']:,}"])
    return f"{table(['', ''], facts.items())}\n\n{table(['text', 'path', 'revision', 'samples', 'tokens'], texts)}"


def _residuals(artifact: ProjectionArtifact, pictures: Sequence[str]) -> str:
    held_out = artifact.metadata["metrics"].get("held_out")
    rows = []
    for index, layer in artifact.layers.items():
        last = layer.residual[:, -1]
        new = [] if held_out is None else [f"{held_out['residual_by_layer'][str(index)]:.3f}"]
        rows.append([index, f"{last.mean():.3f}", *new, f"{last.min():.3f}", f"{last.max():.3f}"])
    head = ["layer", "mean", *([] if held_out is None else ["on new text"]), "best head", "worst head"]
    picture = f"![Residuals by bits, and by layer and KV head]({RESIDUALS})"
    if RESIDUALS not in pictures:
        picture = "This card has no pictures: matplotlib was not installed where it was made."
    algorithm = artifact.metadata["algorithm"]
    length = "distance from the mean key" if algorithm["centred"] else "length"
    measure = ", in a metric from the queries" if algorithm["metric"] else ""
    return "\n\n".join(
        [
            f"The residual is the share of a key's {length} that its code does not explain{measure}: less is better.",
            " ".join(verdict(artifact)),
            picture,
            table(head, rows),
        ]
    )
