"""Load a model's config, tokenizer and weights from a folder, a GGUF file or the Hub."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from bpc_artifacts.file import ARTIFACT
from bpc_calib.demo import DEMO_MODEL
from bpc_calib.errors import ModelError, first_line, is_out_of_memory
from bpc_calib.extras import lacking
from bpc_calib.hub import explain, fetch, online
from bpc_calib.models.description import tensor_ranks
from bpc_calib.models.gguf import find_gguf, gguf_config, is_gguf

__all__ = ["check_packages", "is_model", "load_config", "load_model", "load_tokenizer", "weights_identity"]

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
LOOKED_AT = 4096  # bytes per tensor: training or quantising changes nearly all bytes of a tensor

# "auto", or a device, "cpu" or "disk" by the name of a module, as in transformers.
DeviceMap = str | dict[str, Any]
_folders: list[tempfile.TemporaryDirectory[str]] = []  # kept until the process ends, and removed then


def load_config(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> tuple[Any, str | None]:
    """Load the config of a folder, a GGUF file or a Hub id; return it with the Hub commit (None for local files).

    Raises:
        ModelError: the model does not exist, or its config cannot be read.
    """
    from transformers import AutoConfig

    if is_gguf(model):
        file, commit = find_gguf(model, revision)
        return gguf_config(file), commit
    folder, commit = _folder(model), None
    if not model:
        raise ModelError("(empty): no such model folder")
    if folder is not None:
        if revision is not None:
            raise ModelError(f"{model} is a folder, and only models on the Hub have revisions: omit the revision")
        if not (folder / "config.json").is_file():
            files = sorted(path.name for path in folder.glob("*.gguf"))
            hint = f": name its GGUF file, such as {folder / files[0]}" if files else ""
            raise ModelError(f"{model}: the folder has no config.json, so it is not a transformers model{hint}")
    elif os.path.islink(os.path.expanduser(model)):
        raise ModelError(f"{model}: no such model folder: it is a link to {os.readlink(os.path.expanduser(model))}")
    elif os.path.isfile(os.path.expanduser(model)):
        what = "an artifact, not a model: -a takes it" if _is_artifact(model) else "a file, not a model folder"
        raise ModelError(f"{model} is {what}")
    elif os.path.exists(os.path.expanduser(model)) or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"{model}: no such model folder")
    else:
        try:
            _, commit = fetch(model, "config.json", revision)
        except Exception as fault:
            raise ModelError(explain(fault, f"model {model} (no folder here)")) from fault
    try:
        config = AutoConfig.from_pretrained(**_source(model, commit, trust_remote_code))
    except Exception as fault:
        raise _fault(fault, "the config of", model) from fault
    return config, commit


def is_model(name: str) -> bool:
    """Return True for the name of the bundled model, a folder with a config, and the name of a GGUF file."""
    folder = _folder(name)
    return is_gguf(name) if folder is None else (folder / "config.json").is_file()


def _is_artifact(model: str) -> bool:
    """Whether a file is a BPC artifact, as far as it can be read."""
    try:
        return ARTIFACT.holds(Path(os.path.expanduser(model)))
    except OSError:
        return False


def load_tokenizer(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder or a GGUF file, or of a Hub id at a commit. Raises `ModelError`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(**_source(model, revision, trust_remote_code))
    except ModelError:
        raise
    except Exception as fault:
        folder = _folder(model)
        if folder is not None and not any(any(folder.glob(each)) for each in TOKENIZER_FILES):
            raise ModelError(
                f"{model}: the folder has no tokenizer: add the tokenizer.json that came with the model"
            ) from fault
        raise _fault(fault, "the tokenizer of", model) from fault


def load_model(
    model: str,
    *,
    config: Any = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a model in evaluation mode, from safetensors or GGUF weights only.

    On a processor that multiplies its dtype slowly, its long passes compute in float32 (`widen_long_passes`).

    Args:
        config: the result of `load_config`; None reads it. With a `distributed_config` (`tensor_parallel`), each
            process of torchrun loads its part, to the device that transformers gives it.
        dtype: of the weights; "auto" is the config's, for a GGUF file that of `gguf_config`.
        device: holds the whole model, without a `device_map`.
        device_map: spreads the layers over devices, main memory ("cpu") and "disk", as transformers does: "auto", or
            devices by the names of modules.

    Raises:
        ModelError: the model cannot be loaded, or does not fit into memory; the message says what to do.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from bpc_calib.models.long_passes import slow_products, widen_long_passes

    if config is None:
        config, _ = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
    arguments = _source(model, revision, trust_remote_code)
    if shared := tensor_ranks(config) > 1:
        arguments["distributed_config"] = config.distributed_config
    else:
        arguments |= _placement(model, config, device, device_map)
    if is_gguf(model):  # unpack all weights: packed ones are computed in float32 only
        from transformers import GgufConfig

        arguments["quantization_config"] = GgufConfig(dequantize=True)
    try:
        loaded, report = AutoModelForCausalLM.from_pretrained(
            **arguments,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,  # a pickle could run code
            ignore_mismatched_sizes=True,  # transformers' own error is a page
            output_loading_info=True,
        )
        # transformers fills such tensors with random values and only warns.
        if unlike := sorted(report["mismatched_keys"], key=str):
            name, found, expected = unlike[0]
            raise ModelError(
                f"the weights of {model} do not fit its config.json: {name} has the shape {tuple(found)}, and the "
                f"config asks for {tuple(expected)}: get both files from one place"
            )
        if lacking := sorted(report["missing_keys"]):
            others = f" and {len(lacking) - 1} more" if lacking[1:] else ""
            raise ModelError(f"the weights of {model} lack tensors of the model: {lacking[0]}{others}")
        loaded.config.name_or_path = config.name_or_path
        loaded = loaded.eval() if shared or "device_map" in arguments else loaded.eval().to(device)
        if loaded.device.type == "meta":  # where the tokens of a forward pass would go
            raise ModelError(f"model {model} does not fit: not even its first layer found room in memory")
        if _is_quantised(config):  # compressed-tensors unpack in the first pass, but only in one of the whole model
            with torch.no_grad():
                loaded(torch.zeros(1, 1, dtype=torch.long, device=loaded.device), use_cache=False)
        if loaded.device.type == "cpu" and slow_products(loaded.dtype):
            widen_long_passes(loaded)
        return loaded
    except ModelError:
        raise
    except Exception as fault:
        if not is_out_of_memory(fault):
            raise _fault(fault, "model", model) from fault
        hint = "try --device cpu" if device_map else "try --device-map auto, or --device cpu"
        if torch.device(device).type == "cpu":
            hint = "try a smaller or a quantised model, or --device-map auto, which leaves a part on disk"
        hint = "start more processes" if shared else hint
        raise ModelError(f"model {model} does not fit into the memory of {device}: {hint}") from fault


def _folder(model: str) -> Path | None:
    """Return the local folder with this name; None if there is none, so that the name may be a Hub id."""
    path = DEMO_MODEL if model == "demo" else Path(os.path.expanduser(model))
    return path if model and os.path.isdir(path) else None


def _source(model: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Return the source arguments of `from_pretrained`: local files, or the Hub at a commit (offline: its cache)."""
    if is_gguf(model):
        file, _ = find_gguf(model, revision)
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
    folder = _folder(model)
    return {
        "pretrained_model_name_or_path": str(folder or model),
        "revision": revision if folder is None else None,
        "local_files_only": folder is not None or not online(),
        "trust_remote_code": trust_remote_code,
    }


def _fault(fault: Exception, what: str, model: str) -> ModelError:
    """Return a one-line `ModelError` with the cause; it mentions the Hub only for a model that is not a folder."""
    if "trust_remote_code" in str(fault):
        return ModelError(f"{model} has its own code: read it, then pass --trust-remote-code to run it")
    if isinstance(fault, ModuleNotFoundError):
        return ModelError(f"{what} {model} needs {fault.name}: pip install {fault.name}")
    if isinstance(fault, OSError) and "torch.distributed" in str(fault):
        cause = first_line(fault.__cause__) if fault.__cause__ else first_line(fault)
        return ModelError(
            f"the processes of torchrun do not reach each other ({cause}): name their network interface in "
            "GLOO_SOCKET_IFNAME on CPUs, NCCL_SOCKET_IFNAME on GPUs"
        )
    if type(fault).__name__ == "SafetensorError":
        return ModelError(
            f"{what} {model} has weights that are cut off or damaged: get them again ({first_line(fault)})"
        )
    if _folder(model) is not None or is_gguf(model):
        return ModelError(f"{what} {model} cannot be loaded: {first_line(fault)}")
    return ModelError(explain(fault, f"{what} {model}"))


def check_packages(name: str, config: Any, device_map: DeviceMap | None) -> None:
    """Raise `ModelError` if the package is missing that places the weights."""
    if (device_map is not None or _is_quantised(config)) and (lacks := lacking("accelerate", "accelerate")):
        what = "--device-map" if device_map is not None else f"{name}: a quantised model"
        raise ModelError(f"{what} needs {lacks}")


def _placement(name: str, config: Any, device: str, device_map: DeviceMap | None) -> dict[str, Any]:
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


def _is_quantised(config: Any) -> bool:
    text = config.get_text_config(decoder=True)
    return any(getattr(each, "quantization_config", None) is not None for each in (config, text))


def weights_identity(model: Any) -> dict[str, str]:
    """Return the dtype of a model and a hash of its tensors: their names, shapes, dtypes, and some of their bytes.

    Of tensors that are not in memory (offloaded to a disk) or not plain (packed by a quantiser), it covers the names,
    shapes and dtypes only. Processes that hold a model's shards call this together, and get what one process gets.
    """
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if hasattr(tensor, "full_tensor"):  # a shard of it
            tensor = tensor.full_tensor()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        if not tensor.is_meta and type(tensor) is torch.Tensor:
            numbers = tensor.detach().flatten()
            step = max(1, numbers.numel() * numbers.element_size() // LOOKED_AT)
            digest.update(numbers[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {"dtype": str(model.dtype).removeprefix("torch."), "sha256": digest.hexdigest()}
