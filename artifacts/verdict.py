"""How far an artifact can be trusted, in words."""

from typing import TYPE_CHECKING, Any

from bpc_artifacts.bits import BITS

if TYPE_CHECKING:
    from bpc_artifacts.schema import ProjectionArtifact

__all__ = ["asks_for_action", "verdict"]

HOLDS = 1.1  # 32 fitted keys per bit raise the residual on other keys by 6 to 9 %: benchmarks/results/key_counts_*.json
LAYER_HOLDS = 1.25  # single layers vary more than their mean
KEYS_PER_BIT = 32
HIGH = 0.8  # codes explain 1 - residual^2 of the squared length of keys: here only a third
MOST_NAMED = 6  # layers in one sentence


def verdict(artifact: "ProjectionArtifact") -> list[str]:
    """Return sentences: whether the projections hold on new text, which layers stand out, and what to do."""
    metadata = artifact.metadata
    held_out = metadata["metrics"].get("held_out")
    sentences = [_new_text(artifact, held_out)]
    by_head = {index: layer.residual[:, -1].tolist() for index, layer in artifact.layers.items()}
    if held_out is not None:
        sentences += _weak_layers(artifact, held_out)
        if _holds(artifact, held_out):  # else the fitted keys say more about a head: new ones suffer from other faults
            by_head = {index: held_out["residual_by_head"][str(index)] for index in artifact.layers}
    return sentences + _high_heads(by_head, metadata["algorithm"]["bits"])


def asks_for_action(artifact: "ProjectionArtifact") -> bool:
    """Whether the verdict says more than that the projections hold on new text."""
    held_out = artifact.metadata["metrics"].get("held_out")
    return held_out is None or not _holds(artifact, held_out) or len(verdict(artifact)) > 1


def _new_text(artifact: "ProjectionArtifact", held_out: dict[str, Any] | None) -> str:
    keys, bits = artifact.metadata["calibration"]["keys_per_head"], artifact.metadata["algorithm"]["bits"]
    wanted = KEYS_PER_BIT * bits
    more = f"{keys:,} keys per head are few for {bits} bits: raise --samples or --keys-per-head, to {wanted:,} keys"
    if held_out is None:
        few = f" {more}." if keys < wanted else ""
        return f"Not measured on new text, which takes at least 2 samples.{few}"
    own, other = _mean(artifact), held_out["residual"]
    samples = f"{held_out['samples']} sample{'s' * (held_out['samples'] > 1)}"
    on = f"{held_out['keys_per_head']:,} keys per head of {samples} kept aside"
    if _holds(artifact, held_out):
        return f"The projections hold on new text: residual {other:.3f} on {on}, {own:.3f} on the fitted keys."
    advice = more if keys < wanted else "calibrate on more text, or on text more like yours: raise --samples"
    worse = f"{100 * (other / own - 1):.0f} % above" if own > 0 else "above"
    return f"On new text the residual is {worse} that of the fitted keys ({other:.3f} on {on}, {own:.3f}): {advice}."


def _weak_layers(artifact: "ProjectionArtifact", held_out: dict[str, Any]) -> list[str]:
    """Name the layers that hold far less well than the mean of all layers."""
    overall = max(held_out["residual"] / (_mean(artifact) or 1), 1)
    weak = []
    for index, layer in artifact.layers.items():
        own, other = layer.mean_residual, held_out["residual_by_layer"][str(index)]
        if other > LAYER_HOLDS * overall * own > 0:
            weak.append(f"{index} ({other:.3f}, {own:.3f} on the fitted keys)")
    if not weak:
        return []
    return [f"Some layers hold less well on new text than the others: {_few(weak)}: raise --samples."]


def _high_heads(by_head: dict[int, list[float]], bits: int) -> list[str]:
    """Name the heads whose codes say little."""
    found = {
        index: heads
        for index, residuals in by_head.items()
        if (heads := [head for head, value in enumerate(residuals) if value >= HIGH])
    }
    if not found:
        return []
    more_bits = "" if bits == BITS[-1] else " or use more --bits"
    everywhere = all(heads == list(range(len(by_head[index]))) for index, heads in found.items())
    if everywhere and len(found) == len(by_head):
        return [
            f"Every head has a residual of {HIGH} or more, so the codes say little: attend to more tokens{more_bits}."
        ]
    named = _few([f"layer {index} head {', '.join(map(str, heads))}" for index, heads in found.items()], "; ")
    return [
        f"Codes say little where the residual is {HIGH} or more ({named}): "
        f"keep these layers dense with --dense-layers{more_bits}."
    ]


def _holds(artifact: "ProjectionArtifact", held_out: dict[str, Any]) -> bool:
    return held_out["residual"] <= HOLDS * _mean(artifact)


def _mean(artifact: "ProjectionArtifact") -> float:
    means = [layer.mean_residual for layer in artifact.layers.values()]
    return sum(means) / len(means)


def _few(names: list[str], between: str = ", ") -> str:
    rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return between.join(names[:MOST_NAMED]) + rest
