"""Models of known shapes with random weights, and random projections: speed does not depend on what they hold."""

from typing import Any

import torch

from bpc_artifacts import LayerProjection, ProjectionArtifact
from bpc_calib.bench.settings import shape_settings
from bpc_calib.errors import InputError
from bpc_calib.method.shares import GRID
from bpc_calib.models.description import describe

__all__ = ["random_artifact", "random_model", "shape_config"]


def shape_config(name: str, layers: int | None = None) -> Any:
    """The config of a shape, with fewer layers to fit a machine.

    A shape is a name of `SHAPES`, or such as 8x128x4: 8 KV heads of dimension 128 with 4 query heads each, and all
    else in the proportions of Llama 3.1 8B.

    Raises:
        InputError: a name that is no shape; sizes out of range.
    """
    from transformers import AutoConfig

    settings = shape_settings(name)
    whole = settings["num_hidden_layers"]
    if layers is not None:
        if not 1 <= layers <= whole:
            raise InputError(f"layers must be 1 to {whole} for {name}, not {layers}")
        settings["num_hidden_layers"] = layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, bos_token_id=0, eos_token_id=0)
    config.name_or_path = name
    return config


def random_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A causal language model of this config with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_artifact(config: Any) -> ProjectionArtifact:
    """Random projections with a metric, a mean and needs, as calibration makes them: what they choose means nothing.

    What the KV heads need differs by about a factor of ten, as in trained models.
    """
    model = describe(config)
    generator = torch.Generator().manual_seed(0)
    heads, dim = model.kv_heads, model.head_dim
    layers = {}
    for layer in model.full_layers:
        root = torch.randn(heads, 2 * dim, dim, generator=generator)
        layers[layer] = LayerProjection(
            (0.3 * torch.randn(heads, 64, dim, generator=generator)).numpy(),
            torch.zeros(heads, 65).numpy(),
            metric=(root.mT @ root / (2 * dim)).numpy(),
            mean=(0.1 * torch.randn(heads, dim, generator=generator)).numpy(),
            need=_need(heads, generator),
        )
    made_by = {"name": "score-aware", "bits": 64, "metric": True, "centred": True}
    return ProjectionArtifact(layers, {"model": model.metadata(), "algorithm": made_by})


def _need(heads: int, generator: torch.Generator) -> Any:
    """Losses by share that fall, each head's at its own pace: float32 `[heads, len(GRID)]`."""
    pace = 0.05 + torch.rand(heads, 1, generator=generator)
    return (torch.exp(-torch.tensor(GRID) / 0.02 / pace) * pace).numpy()
