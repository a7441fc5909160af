"""A decoder layer as machine code for a few new tokens, compiled once by torch and kept on disk for all alike."""

import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bpc_calib import compat
from bpc_calib.backends import dispatch, linear
from bpc_calib.backends.linear import MOST, slow_in_torch
from bpc_calib.compat import compile_program, load_program
from bpc_calib.errors import BPCError, ModelError, first_line
from bpc_calib.runtime import few_tokens
from bpc_calib.runtime.few_tokens import IN_COMPILED_CODE, product

__all__ = ["Inputs", "load_layer", "packaged", "weights_of"]

LARGE = 1 << 21  # numbers of a matrix from which torch's product with a vector is faster than a loop

SOURCES = (__file__, compat.__file__, few_tokens.__file__, linear.__file__)  # what the code depends on

Inputs = tuple[Tensor, tuple[Tensor, ...]]  # hidden states [1, T, hidden_size], and the position embeddings


def packaged(
    layer: nn.Module,
    config: Any,
    inputs: Inputs,
    arguments: dict[str, Any],
    index: int,
    compiling: Callable[[], None],
) -> Path:
    """Return the file with the machine code of a decoder layer, compiled now if it is not in the cache folder.

    The file has no weights. It serves this processor, these versions of torch and transformers, and every layer with
    the same code and shapes. Its folder is `bpc` in `$XDG_CACHE_HOME`, else in `~/.cache`.

    Args:
        layer: called as `layer(hidden, position_embeddings=(..), **arguments)`.
        config: of the model.
        inputs: an example; only the shapes and dtypes count. The code serves passes of one token if that has one, else
            passes of 2 to `MOST`.
        arguments: neither tensors nor the cache.
        index: of the layer in its model.
        compiling: is called before a compilation, which takes some seconds.

    Raises:
        ModelError: torch cannot compile the layer, no C++ compiler is installed, or others may write to the folder.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bpc"
    file = folder / f"{_digest(layer, config, inputs, arguments, index)}.pt2"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = folder.stat().st_mode & 0o022
    except OSError as fault:
        raise ModelError(f"{folder} cannot hold compiled layers: {first_line(fault)}") from fault
    if others:
        raise ModelError(f"{folder} holds machine code, and others may write to it: chmod go-w {folder}")
    if file.exists():
        return file
    compiling()
    try:
        with tempfile.TemporaryDirectory(dir=folder) as unfinished, _quiet():
            program = torch.export.export(_Called(layer, arguments), inputs, dynamic_shapes=_free(inputs), strict=False)
            made = Path(unfinished) / file.name
            # Without the kernel's library, code that names its function could not be loaded.
            compile_program(program, made, IN_COMPILED_CODE if linear.faster_than_torch() else {})
            os.replace(made, file)
    except BPCError:
        raise
    except Exception as fault:  # torch's compiler fails in many ways
        raise ModelError(f"torch cannot compile the layers of {type(layer).__name__}: {first_line(fault)}") from fault
    return file


def load_layer(file: Path, layer: nn.Module) -> Callable[[Inputs], Tensor]:
    """Return the compiled function of a layer, which reads the layer's weights where they are.

    Raises:
        ModelError: the file is damaged or for another layer; it is deleted, so that it is compiled anew.
    """
    weights = {f"layer.{name}": each.detach() for name, each in weights_of(layer)}
    try:
        with _quiet():
            compiled = load_program(file, weights)
    except (RuntimeError, KeyError, OSError) as fault:
        file.unlink(missing_ok=True)
        raise ModelError(f"{file} cannot be loaded, so it was deleted ({first_line(fault)})") from fault

    def run(inputs: Inputs) -> Tensor:
        hidden, positions = inputs
        found: Tensor = compiled([hidden, *positions])[0]
        return found

    return run


def weights_of(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a layer by name, in its own order."""
    return [*layer.named_parameters(), *layer.named_buffers()]


def _free(inputs: Inputs) -> Any:
    """Return which sizes of the inputs the code leaves open: of several tokens, their number."""
    hidden, positions = inputs
    if hidden.shape[1] == 1:
        return None
    tokens = {1: torch.export.Dim("tokens", min=2, max=MOST)}
    return tokens, tuple(tokens for _ in positions)


class _Called(nn.Module):
    """A layer as a function of tensors alone."""

    def __init__(self, layer: nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, hidden: Tensor, positions: tuple[Tensor, ...]) -> Tensor:
        named = {"position_embeddings": positions} if positions else {}
        with _FewTokens():
            found = self.layer(hidden, **named, **self.arguments)
        if not isinstance(found, Tensor):
            raise ModelError(f"a layer returned a {type(found).__name__}, not a tensor")
        return found


class _FewTokens(TorchFunctionMode):
    """Inside this block, linear layers read their weights at the speed of memory.

    torch's own linear layer reads 16-bit weights of one token at half of that speed, or at a quarter. Where torch's
    product with a vector is slow, too, BPC's kernel computes it, and that of several tokens. Elsewhere torch's product
    serves large matrices, and a compiled loop, which starts faster, small ones.
    """

    def __torch_function__(
        self, function: Any, types: Any, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if function is not torch.nn.functional.linear or named:
            return function(*given, **(named or {}))
        tokens, weight, added = given if len(given) == 3 else (*given, None)
        own, flat = slow_in_torch(weight), tokens.reshape(-1, tokens.shape[-1])
        if not own and flat.shape[0] > 1:
            return function(*given)
        if own or weight.numel() < LARGE:
            wide = product(flat, weight) if own else (flat.float() * weight.float()).sum(-1).unsqueeze(0)
            found = (wide if added is None else wide + added.float()).to(tokens.dtype)
        elif added is None:
            found = torch.addmv(flat[0, :1], weight, flat[0], beta=0)
        else:
            found = torch.addmv(added, weight, flat[0])
        return found.view(*tokens.shape[:-1], -1)


def _digest(layer: nn.Module, config: Any, inputs: Inputs, arguments: dict[str, Any], index: int) -> str:
    """Return a name for what the machine code depends on."""
    import transformers

    kind, (hidden, positions) = type(layer), inputs
    tensors = [("", each) for each in (hidden, *positions)] + weights_of(layer)
    about = [
        torch.__version__,
        transformers.__version__,
        _processor(),
        dispatch.backend(hidden.device),  # which also loads the kernel that the code calls
        linear.faster_than_torch(),
        [hashlib.sha256(Path(each).read_bytes()).hexdigest() for each in SOURCES],
        f"{kind.__module__}.{kind.__qualname__}",
        config.to_json_string(use_diff=False),
        index,
        repr(sorted(arguments.items())),
        [(name, list(each.shape), list(each.stride()), str(each.dtype)) for name, each in tensors],
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _processor() -> str:
    """Return what tells processors apart for which the same machine code does not run."""
    about = [platform.system(), platform.machine(), torch.backends.cpu.get_cpu_capability()]
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    for name in ("model name", "flags", "Features"):
        about += [line for line in lines if line.partition(":")[0].strip() == name][:1]
    return "\n".join(about)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's compiler warns of its own uses of old parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
