"""The picture of `bpc inspect --plot`: residuals by bits, and by layer and head."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from bpc_cli.console import printable

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

__all__ = ["draw_residuals"]


def draw_residuals(artifact: "ProjectionArtifact", path: Path, force: bool) -> None:
    """Draw the residual against bits, one line per layer, and the last residual of every layer and head."""
    import matplotlib

    matplotlib.use("agg")
    import numpy as np
    from matplotlib import pyplot

    from bpc_artifacts.replacing import PICTURE, replacing

    layers = list(artifact.layers)
    residual = np.stack([layer.residual for layer in artifact.layers.values()])  # [layers, heads, bits + 1]
    figure, (curves, heatmap) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    colors = pyplot.get_cmap("viridis")(np.linspace(0, 1, len(layers)))
    for values, layer, color in zip(residual.mean(axis=1), layers, colors, strict=True):
        curves.plot(values, color=color, label=f"layer {layer}")
    if (held_out := artifact.metadata["metrics"].get("held_out")) is not None:
        others = [held_out["residual_by_layer"][str(layer)] for layer in layers]
        curves.scatter([residual.shape[2] - 1] * len(layers), others, c=colors, marker="x", label="on new text")
    unit = "bits" if residual.shape[2] - 1 == artifact.metadata["algorithm"]["bits"] else "parts of 8 bits"
    curves.set(xlabel=unit, ylabel="|K - UP| / |K|, mean over KV heads", ylim=(0, 1))
    curves.set_title(f"Residual by {unit}", parse_math=False)
    curves.legend(fontsize="small", ncols=1 + len(layers) // 12)
    picture = heatmap.imshow(residual[:, :, -1], aspect="auto", cmap="viridis", interpolation="nearest")
    heatmap.set(xlabel="KV head", ylabel="layer")
    heatmap.set_title(f"Residual after {residual.shape[2] - 1} {unit}", parse_math=False)
    heatmap.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize="small")
    heatmap.set_xticks(range(residual.shape[1]))
    figure.colorbar(picture, ax=heatmap)
    figure.suptitle(printable(artifact.metadata["model"]["id"]), parse_math=False)
    with replacing(path, force, PICTURE) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the font may lack letters of a name
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)
