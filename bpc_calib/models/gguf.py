"""GGUF files: a model and its tokenizer in one file, mostly quantised, which transformers unpacks."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from bpc_calib.compat import gguf_tokenizer_is_wrong, read_gguf
from bpc_calib.errors import ModelError, first_line
from bpc_calib.extras import lacking
from bpc_calib.hub import explain, fetch
from bpc_calib.models.description import rope_tables

__all__ = ["find_gguf", "gguf_config", "is_gguf"]

# `general.file_type` of the files whose weights are not quantised. All others hold a few bits per weight, and
# bfloat16 loses nothing of these that matters.
FLOAT_TYPES = {0: "float32", 1: "float16", 32: "bfloat16"}


def is_gguf(model: str) -> bool:
    """Return True if this names a GGUF file, here or on the Hub."""
    return model.lower().endswith(".gguf") and not os.path.isdir(os.path.expanduser(model))


def find_gguf(model: str, revision: str | None = None) -> tuple[Path, str | None]:
    """Find a file, or fetch `ORG/NAME/FILE.gguf` from the Hub; return its path and the Hub commit (None for a file).

    Raises:
        ModelError: there is no such file, or the Hub is not reachable.
    """
    path = Path(os.path.expanduser(model))
    if path.is_file():
        if revision is not None:
            raise ModelError(f"{model} is a file, and only models on the Hub have revisions: omit the revision")
        return path, None
    repo, file = "/".join(model.split("/")[:2]), "/".join(model.split("/")[2:])
    if not file or model.startswith((".", "/", "~")):
        raise ModelError(f"{model}: no such file")
    try:
        return fetch(repo, file, revision)
    except Exception as fault:
        raise ModelError(explain(fault, f"model {model} (no file here)")) from fault


def gguf_config(file: Path) -> Any:
    """Rebuild the config of a model from the metadata of its GGUF file; its dtype is the one to load the weights in.

    Raises:
        ModelError: the packages are missing, the file is no whole GGUF file, or transformers cannot read this model.
    """
    from transformers import AutoConfig

    if lacks := lacking("gguf", "gguf", "accelerate"):
        raise ModelError(f"{file.name}: a GGUF file needs {lacks}")
    if gguf_tokenizer_is_wrong():
        raise ModelError(f"{file.name}: a GGUF file needs transformers 5.23, which needs Python 3.11: upgrade it")
    try:
        metadata, tensors = read_gguf(file)
    except Exception as fault:
        raise ModelError(f"{file}: not a GGUF file, or a damaged one: {first_line(fault)}") from fault
    if (parts := metadata.get("split.count", 0)) > 1:
        raise ModelError(f"{file}: one of {parts} parts of a model: join them with gguf-split --merge")
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as fault:
        raise ModelError(
            f"{file}: transformers cannot read this GGUF file, which may be cut off or of a kind that it does not "
            f"know: {first_line(fault)}"
        ) from fault
    scaling = f"{metadata['general.architecture']}.rope.scaling"
    scaled = metadata.get(f"{scaling}.type", "none") != "none" and metadata.get(f"{scaling}.factor") != 1
    scaled = scaled or any(name.startswith(("rope_freqs", "rope_factors")) for name in tensors)
    rope = rope_tables(getattr(config, "rope_parameters", None) or {})
    if scaled and all(table.get("rope_type", "default") == "default" for table in rope):
        raise ModelError(
            f"{file}: transformers loses the RoPE scaling of this GGUF file: use the model's folder or Hub id instead"
        )
    for name, value in vars(config).items():
        if isinstance(value, float):  # the file's float32 of a decimal number: 1e-05, not 9.999999747378752e-06
            setattr(config, name, float(str(np.float32(value))))
    config.name_or_path = file.stem
    config.dtype = FLOAT_TYPES.get(metadata.get("general.file_type", -1), "bfloat16")
    return config
