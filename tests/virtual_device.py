"""A device that is not there: its tensors know where they are, mixing them with those of the CPU fails, moves count.

Inside `virtual_device()` the device "meta" has memory: whatever torch would compute there is computed on the CPU, on
tensors that no operation of the CPU accepts. So code for two devices runs as it would beside a GPU. torch itself asks
for the runtime of any other device that it was not built for.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
MOVES = ("_to_copy", "copy_")  # the only operations that may see tensors of both places


class There(Tensor):
    """A tensor on the virtual device; `inner` has its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "There":
        about = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, device=DEVICE, **about)
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"There({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of the virtual device")


class _Operations(TorchDispatchMode):
    """Runs every operation where its tensors are."""

    def __init__(self, moved: Counter[str]) -> None:
        super().__init__()
        self.moved = moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.__name__.split(".")[0]
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        there = [each for each in tensors if isinstance(each, There)]
        if there and name not in MOVES:
            here = [each for each in tensors if not isinstance(each, There) and each.dim()]  # numbers may be anywhere
            assert not here, f"{func} mixes devices: {[*map(_size, there)]} there, {[*map(_size, here)]} here"
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        ends_there = _is_there(device) if device is not None else bool(there)
        if name == "copy_":
            ends_there = isinstance(tensors[0], There)
        if name in MOVES and isinstance(tensors[-1], There) != ends_there:
            self.moved["up" if ends_there else "down"] += tensors[-1].nbytes
        if name == "_local_scalar_dense" and there:
            self.moved["numbers"] += 1
        inner_args, inner_kwargs = tree_map(
            lambda each: each.inner if isinstance(each, There) else each, (args, kwargs)
        )
        out = func(*inner_args, **inner_kwargs)
        if name == "copy_":
            return tensors[0]
        known = {id(each.inner): each for each in there}  # an operation in place returns what it was given
        if not ends_there:
            return out

        def placed(each: Any) -> Any:
            return known[id(each)] if id(each) in known else There(each) if isinstance(each, Tensor) else each

        return tree_map(placed, out)


class _Functions(TorchFunctionMode):
    """What torch does before any operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and _is_there(kwargs.get("device")):
            return There(func(*args, **(kwargs | {"device": "cpu"})))
        if func is Tensor.new_tensor and isinstance(args[0], There):
            return There(args[0].inner.new_tensor(*args[1:], **kwargs))
        if func is Tensor.tolist and isinstance(args[0], There):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)


class _Autocast(torch.autocast):
    """What torch knows for no device of this kind."""

    def __init__(self, device_type: str, *rest: Any, **settings: Any) -> None:
        super().__init__("cpu" if device_type == DEVICE.type else device_type, *rest, **settings)


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _size(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


@contextmanager
def virtual_device() -> Iterator[Counter[str]]:
    """Give the device "meta" memory in the block; yield the bytes that moved "up" to it and "down" from it.

    Single numbers that are read from there count as "numbers".
    """
    moved: Counter[str] = Counter()
    with torch.no_grad(), mock.patch.object(torch, "autocast", _Autocast), _Operations(moved), _Functions():
        yield moved


def move(model: Any) -> None:
    """Put the weights of a model on the virtual device."""
    with virtual_device():
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = torch.nn.Parameter(There(weight.detach()), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = There(buffer)
