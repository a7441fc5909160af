"""What BPC will do with a model, from its config alone."""

from typing import Any

from bpc_cli.calibration_memory import calibration_memory
from bpc_cli.opening import OpenedModel
from bpc_cli.weightless import model_without_weights, weight_bytes

__all__ = ["model_facts"]

LENGTHS = (8_192, 32_768, 131_072)
DENSE = (0, 1)  # of bpc generate


def model_facts(opened: OpenedModel) -> dict[str, Any]:
    """Whether and how a model is served, the bytes that a step reads, and what its calibration takes.

    Raises:
        ModelError: BPC does not serve the model.
    """
    import torch

    from bpc_calib.method.codes import default_bits
    from bpc_calib.runtime.bytes_forecast import forecast_bytes

    model = opened.description
    weights = model_without_weights(opened)
    looked_at = _look_at_layers(weights, opened)
    dense = [layer for layer in DENSE if layer < model.num_layers]
    if set(model.full_layers) <= set(dense):  # the defaults would leave no layer to choose in
        dense = []
    reads = []
    for length in LENGTHS:
        counted = forecast_bytes(opened.config, length, weights.dtype, dense_layers=dense)
        over = model.context_limit is not None and length > model.context_limit
        reads.append({"tokens": length, "beyond_the_model": over, **vars(counted), "read": counted.read})
    kinds = {kind: [i for i, each in enumerate(model.layer_types) if each == kind] for kind in set(model.layer_types)}
    return {
        "id": model.id,
        "revision": model.revision,
        "model_type": model.model_type,
        "served": True,
        "checked": "layers" if looked_at else "config",
        "layers": {
            "sparse": [layer for layer in model.full_layers if layer not in dense],
            "dense": [layer for layer in model.full_layers if layer in dense],
            "sliding": kinds.pop("sliding_attention", []),
            "other": sorted(layer for kind, layers in kinds.items() if kind != "full_attention" for layer in layers),
        },
        "kv_heads": model.kv_heads,
        "query_heads": model.query_heads,
        "head_dim": model.head_dim,
        "context_limit": model.context_limit,
        "bits": default_bits(model.head_dim),
        "dtype": str(weights.dtype).removeprefix("torch."),
        "reads": reads,
        "kernels": _kernels(opened, weights.dtype),
        "calibration": _calibration(opened, weights, torch.device(opened.device)),
        "crossover": None,
    }


def _look_at_layers(weights: Any, opened: OpenedModel) -> bool:
    """Check the attention of every layer, without weights; False: a layer does not run without values."""
    from bpc_calib.errors import ModelError
    from bpc_calib.models.observation import verify

    try:
        verify(weights, opened.description)
    except ModelError:
        raise
    except Exception:  # of torch: models are many, and experts are chosen by values
        return False
    return True


def _kernels(opened: OpenedModel, dtype: Any) -> str | None:
    """What about the model is beyond the compiled kernels; None: nothing."""
    import torch

    from bpc_calib.backends.limits import unserved
    from bpc_calib.backends.protocol import Request

    model = opened.description
    group = model.query_heads // model.kv_heads
    query = torch.empty(1, model.kv_heads, group, model.head_dim, dtype=dtype, device="meta")
    return unserved(Request(query, torch.Size([1, model.kv_heads, 1]), heads=group))


def _calibration(opened: OpenedModel, weights: Any, device: Any) -> dict[str, Any]:
    """What a calibration with the default settings takes, as far as it can be counted."""
    from bpc_calib.calibration.forecast import needs
    from bpc_calib.calibration.plan import make_plan

    plan = make_plan(opened.description)
    found, held = needs(plan, weights, device), weight_bytes(weights)
    return {
        "samples": plan.samples,
        "sequence_length": plan.sequence_length,
        "weights_bytes": held,
        **calibration_memory(found, held, device),
        "disk_bytes": found.disk_bytes,
        "output_bytes": plan.artifact_bytes,
        "seconds": None,
    }
