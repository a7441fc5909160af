"""The model card of an artifact: what it is, how it was made, how well it fits, and how to use it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bpc_artifacts import ProjectionArtifact, verdict
from bpc_calib.errors import InputError
from bpc_calib.evaluation.methods import FIGURES, in_order, method_of
from bpc_calib.evaluation.saved_result import read_result
from bpc_calib.evaluation.tasks import TASKS, TEXT
from bpc_calib.method.defaults import budget_text

__all__ = ["BUDGETS", "LIBRARY", "RESIDUALS", "model_card", "publishable_result"]

LIBRARY = "bpc"
RESIDUALS, BUDGETS = "residuals.png", "budgets.png"  # pictures beside the card
TAGS = [LIBRARY, "sparse-attention", "kv-cache"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_TASK = re.compile(r"[\w.:-]+")  # a name, and never a path
_METRIC = re.compile(r"[\w.-]+,[\w.-]+")  # lm_eval's: the metric and its filter
# The figures of plain text on a card, by the names of its columns.
_SHOWN = {"loss_difference": "loss above full attention's, nats"} | {n: FIGURES[n] for n in ("kl", "recall", "mass")}


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
        evaluation: see `publishable_result`.
        pictures: which of `RESIDUALS` and `BUDGETS` are beside the card.
    """
    from huggingface_hub import ModelCard, ModelCardData

    metadata, repository = artifact.metadata, reference.partition("@")[0]
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
        f"# {repository.split('/')[1]}",
        _what(metadata, base),
        "## Use",
        _use(metadata["model"]["id"], base, reference, repository),
        "## Calibration",
        _calibration(metadata),
        "## Residuals",
        _residuals(artifact, pictures),
    ]
    if evaluation is not None:
        parts += ["## Measured quality", quality(evaluation)]
        parts += [f"![Quality by budget, one line per method]({BUDGETS})"] if BUDGETS in pictures else []
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


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


def _use(local: str, base: str | None, reference: str, repository: str) -> str:
    model = base if base is None or local == base else local  # a GGUF file in the repository of the model
    if model is None:
        model = "demo" if local == "demo" else "MODEL"
    elif not re.fullmatch(r"[\w./-]+", model, re.ASCII):
        model = base
    return (
        "Install BPC (the Python package `bpc-calib`), then:\n\n"
        f"```console\n$ bpc generate -m {model} -a {reference} --prompt-file long.txt\n"
        f"$ bpc chat -m {model} -a {reference}\n$ bpc inspect {reference}\n$ bpc pull {reference}\n```\n\n"
        f"`-a {repository}@COMMIT` always takes the same file; `bpc pull` prints the commit."
    )


def _calibration(metadata: Mapping[str, Any]) -> str:
    algorithm, model, calibration = metadata["algorithm"], metadata["model"], metadata["calibration"]
    held_out = metadata["metrics"].get("held_out")
    facts = {
        "samples": f"{calibration['samples']:,} of {calibration['sequence_length']:,} tokens"
        + (f", {held_out['samples']:,} of them kept aside" if held_out else ""),
        "tokens": f"{calibration['tokens']:,}",
        "keys per KV head": f"{calibration['keys_per_head']:,}",
        "codes": f"{algorithm['bits']} bits per key",
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
        rows.append([index, f"{layer.mean_residual:.3f}", *new, f"{last.min():.3f}", f"{last.max():.3f}"])
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


def publishable_result(path: Path, artifact: ProjectionArtifact) -> dict[str, Any]:
    """Read the file that `bpc eval --output` wrote, for a card.

    Raises:
        InputError: it is no such file, measured another model or other projections, or names a task by its path.
    """
    found = read_result(path, artifact)
    for row in found["rows"]:
        if not _TASK.fullmatch(row["task"]):
            raise InputError(f"{path}: {row['task'][:80]} is a local path: run bpc eval without this task")
    return found


def quality(evaluation: Mapping[str, Any]) -> str:
    """Return the tables of a checked evaluation: right answers, plain text, and tasks of lm_eval."""
    rows, settings = evaluation["rows"], evaluation["settings"]
    dense = ", ".join(map(str, settings["dense_layers"])) or "none"
    shared = "" if settings.get("equal_shares", True) else ", exact top-k and BPC share them by what each KV head needs"
    parts = [
        f"Measured by `bpc eval`: {settings['prompts']} prompts per task and length, dense layers {dense}, "
        f"tokens attended at least {settings['min_tokens']:,}{shared}"
        f"{', no chat template' if settings['raw'] else ''}. In brackets: the 95 % interval."
    ]
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    answers = [row for row in rows if row["task"] in tasks]
    if answers:
        parts += ["Right answers:", _grid(answers, {task: task for task in tasks}, _answer)]
    texts = [row for row in rows if row["task"] == TEXT]
    if texts:
        parts += ["Plain text, compared with full attention:", _grid(texts, _SHOWN, _figure)]
    harness = [
        [code(row["task"]), *_setting(row), code(name), f"{value:.4g}"]
        for row in rows
        if "metrics" in row
        for name, value in row["metrics"].items()
        if _METRIC.fullmatch(name)
    ]
    if harness:
        parts += ["Tasks of lm_eval:", table(["task", "tokens", "attended", "method", "metric", "value"], harness)]
    return "\n\n".join(parts)


def _grid(rows: list[dict[str, Any]], columns: Mapping[str, str], cell: Any) -> str:
    """Return one line per length, budget and method, with one column per task or figure."""
    groups = dict.fromkeys((row["tokens"], row["budget"], row["method"]) for row in rows)
    methods = in_order(row["method"] for row in rows)

    def place(key: tuple[int, float | int | None, str]) -> tuple[float, ...]:
        """Return where a line stands: full attention, which has no budget, comes first."""
        tokens, budget, method = key
        read = -1 if budget is None else budget if isinstance(budget, int) else budget * tokens
        return tokens, read, methods.index(method)

    lines = []
    for key in sorted(groups, key=place):
        own = [row for row in rows if (row["tokens"], row["budget"], row["method"]) == key]
        read = next((f"{100 * row['read']:.1f} %" for row in own if row.get("read") is not None), "")
        cells = [next((text for row in own if (text := cell(row, name))), "") for name in columns]
        lines.append([*_setting(own[0]), read, *cells])
    return table(["tokens", "attended", "method", "KV bytes read", *columns.values()], lines)


def _setting(row: Mapping[str, Any]) -> list[str]:
    """Return tokens, budget and method of a row in words."""
    tokens = "" if row["tokens"] is None else f"{row['tokens']:,}"
    budget = "" if row["budget"] is None else budget_text(row["budget"])
    return [tokens, budget, method_of(row["method"]).label]


def _answer(row: Mapping[str, Any], task: str) -> str:
    if row["task"] != task:
        return ""
    value, low, high = (100 * row["score"][side] for side in ("value", "low", "high"))
    return f"{value:.0f} % ({low:.0f} to {high:.0f})"


def _figure(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return ""
    return f"{row[name]['value']:.3f} ({row[name]['low']:.3f} to {row[name]['high']:.3f})"


def code(text: object) -> str:
    """Return text as a code span on one line, also inside a table."""
    safe = "".join(c if c.isprintable() and c not in "`|" else " " for c in str(text)).strip()
    return f"`{safe or ' '}`"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; its cells are trusted."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
