"""Where the weights of a model go: to one device, or spread over devices, main memory and disk."""

import tempfile
from typing import Any

from bpc_calib.errors import ModelError
from bpc_calib.models.packages import require

__all__ = ["DeviceMap", "check_packages", "placement", "settle"]

# "auto", or a device, "cpu" or "disk" by the name of a module, as in transformers.
DeviceMap = str | dict[str, Any]


def check_packages(name: str, config: Any, device_map: DeviceMap | None) -> None:
    """Raise `ModelError` if the package is missing that places the weights."""
    if device_map is not None or _is_quantised(config):
        what = "--device-map" if device_map is not None else f"{name}: a quantised model"
        require(what, "accelerate", ["accelerate"])


def placement(name: str, config: Any, device: str, device_map: DeviceMap | None) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that place the weights; none where `.to(device)` is to move them.

    Quantised weights go to the device as they are read, because many formats cannot be moved later.

    Raises:
        ModelError: the package accelerate is missing.
    """
    check_packages(name, config, device_map)
    if device_map is not None:
        # transformers reads most weights from the model's own files again; some, like merged experts, it writes here.
        folder = tempfile.TemporaryDirectory(prefix="bpc-weights-")
        _folders.append(folder)
        return {"device_map": device_map, "offload_folder": folder.name}
    if _is_quantised(config):
        return {"device_map": {"": device}}
    return {}


def settle(name: str, config: Any, model: Any) -> None:
    """Finish what loading left for the first forward pass.

    Raises:
        ModelError: the first weights are not on a device: the tokens of a forward pass go where these are.
    """
    import torch

    if model.device.type == "meta":
        raise ModelError(f"model {name} does not fit: not even its first layer found room in memory")
    if _is_quantised(config):  # compressed-tensors unpack in the first pass, but only in one of the whole model
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)


def _is_quantised(config: Any) -> bool:
    text = config.get_text_config(decoder=True)
    return any(getattr(each, "quantization_config", None) is not None for each in (config, text))


_folders: list[tempfile.TemporaryDirectory[str]] = []  # kept until the process ends, and removed then
