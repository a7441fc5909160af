"""Compile a model's decoder layers for passes of a few tokens on a CPU, where Python and small operations cost most.

The machine code has everything of a layer but its attention and its cache. Those stay Python: the code calls back, so
caches, masks and budgets work as without it. For the code a batch is one sequence, because only attention tells
sequences apart. A layer is compiled once for all layers that are alike (`bpc_calib.runtime.layer_package`). Each is
compared with the plain layer before it is used.
"""

import copy
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bpc_calib.backends.linear import MOST
from bpc_calib.backends.pages import copied_to_huge_pages
from bpc_calib.compat import attention_name, cache_name, with_cache
from bpc_calib.errors import InputError, ModelError
from bpc_calib.models.description import describe
from bpc_calib.models.observation import observing
from bpc_calib.runtime.enabling import is_enabled
from bpc_calib.runtime.few_tokens import serve_few_tokens, unread
from bpc_calib.runtime.layer_package import Inputs, load_layer, packaged, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["compile_layers"]

MOVED_AT_ONCE = 1 << 26  # bytes of weights, or one matrix
KINDS = 3  # of layers in a model: some may have no RoPE, or a sliding window
POSITION = 7  # of the first token of the comparison
SEVERAL = 3  # tokens of the comparison that stands for all passes of more than one
# Largest distance of a compiled layer's result, in units of what the layer changes: rounding in other places.
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_16 = 0.03

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_Held = tuple[dict[str, Any], str, Any, int]  # a part of a layer: where it is, its name, itself, and its address or 0


class _Running(threading.local):
    """The attention of the layer that runs in this thread, and what it raised."""

    attend: Attend | None = None
    fault: BaseException | None = None


_running = _Running()
# Not `torch.library.custom_op`, whose wrappers cost tens of microseconds per call.
_library = torch.library.Library("bpc", "FRAGMENT")
_library.define("layer_attention(Tensor query, Tensor key, Tensor value) -> Tensor")


def _layer_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    try:
        assert _running.attend is not None
        return _running.attend(query, key, value).to(query.dtype).contiguous()  # autocast may change it
    except BaseException as fault:  # C++ would turn it into a RuntimeError
        _running.fault = fault
        return _like_output(query, key, value)


def _like_output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


_library.impl("layer_attention", _layer_attention, "CPU")
torch.library.register_fake("bpc::layer_attention", _like_output, lib=_library)


@dataclass(eq=False)
class _Call:
    """A call of a decoder layer with random hidden states, what it returned, and the code that may stand in for it."""

    inputs: Inputs | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # beside tensors and the cache
    output: Any = None
    run: Callable[[Inputs], Tensor] | None = None
    held: list["_Held"] = field(default_factory=list)  # what the code read when it was loaded


@dataclass(eq=False)
class _Layer:
    """A decoder layer, and one call of it for each number of tokens that was compiled: 1, and `SEVERAL` for more."""

    module: nn.Module
    attention: Any = None
    # What its attention module passes to the attention function beside tensors.
    passed: dict[str, Any] = field(default_factory=dict)
    calls: dict[int, _Call] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Layer":
        """Return that of a copied module, which is plain: the code has the weights of this one."""
        memo[id(self)] = made = _Layer(self.module)
        made.module, made.attention = copy.deepcopy((self.module, self.attention), memo)
        made.passed = dict(self.passed)
        return made


def compile_layers(
    model: "PreTrainedModel", compiling: Callable[[], None] = lambda: None, *, several: bool = False
) -> None:
    """Run passes of a few tokens of a model on a CPU through compiled decoder layers, from now on.

    Steps of one sequence use them, and with `several` also steps of a batch and passes that verify drafts, of up to 31
    tokens in all. In other passes layers stay plain, but those of a few tokens without gradients read the weights
    faster (`bpc_calib.runtime.few_tokens`). Results differ from plain ones by rounding: products are summed in float32.
    The first call for a model compiles for 8 to 15 seconds, with `several` for twice as long, and keeps the code on
    disk (`packaged`). Layers whose compiled code does not reproduce them stay plain. A second call adds what is
    missing, and what other weights need: a layer whose weights or modules are no longer those that were compiled, as
    after training adapters or loading others, runs plain. Weights are moved to pages of 2 MB, from which all steps read
    them faster.

    Args:
        model: an enabled model (`bpc_calib.enable`) on a CPU.
        compiling: is called before the first compilation.
        several: also compile passes of 2 to 31 tokens.

    Raises:
        InputError: the model is not enabled.
        ModelError: the model is not on one CPU, or its layers cannot be compiled; the message says why. The model is
            then as it was.
    """
    if not is_enabled(model):
        raise InputError("call bpc_calib.enable(model) before compile_layers")
    layers = _layers(model)
    needed = [
        tokens for tokens in ((1, SEVERAL) if several else (1,)) if not any(tokens in each.calls for each in layers)
    ]
    if not needed:
        return
    compiling = functools.cache(compiling)
    if fault := unread(model):
        raise ModelError(f"{fault}, so its layers cannot be compiled")
    if not any(each.calls for each in layers):
        _move_weights(model)
    made = [each for tokens in needed for each in _compiled(model, layers, tokens, compiling)]
    for layer, tokens, call in made:
        if _compiled_before(layer.module) is None:
            layer.module.__dict__["forward"] = functools.partial(_forward, layer, layer.module.forward)
        layer.calls[tokens] = call
    serve_few_tokens(model)


def _compiled(
    model: Any, layers: list[_Layer], tokens: int, compiling: Callable[[], None]
) -> list[tuple[_Layer, int, _Call]]:
    """Return the layers that compiled code reproduces in passes of so many tokens, and the code.

    Raises:
        ModelError: it reproduces none.
    """
    left, made = list(enumerate(zip(layers, _observed(model, layers, tokens), strict=True))), []
    for _ in range(KINDS):
        if left:
            (index, (first, call)), waiting = left[0], left
            assert call.inputs is not None
            with _attending(model, torch.ops.bpc.layer_attention), torch.no_grad():
                file = packaged(first.module, model.config, call.inputs, call.arguments, index, compiling)
            for at, (layer, own) in waiting:
                if _alike(layer, first):
                    own.run, own.held = load_layer(file, layer.module), _held(layer.module)
                    if _reproduces(own):
                        made.append((layer, tokens, own))
                        left = [each for each in left if each[0] != at]
            left = [each for each in left if each[0] != index]
    if not made:
        raise ModelError(f"{describe(model.config).id}: compiled layers do not reproduce its layers")
    return made


def _move_weights(model: Any) -> None:
    """Copy the weights that a step reads to huge pages, a part after the other, so that few are there twice."""
    parts = (model.get_decoder().layers, model.get_output_embeddings())
    found = {id(each): each for part in parts if part is not None for each in part.parameters()}
    weights = [each for each in found.values() if each.is_contiguous() and not each.is_inference()]
    while weights:
        count = 1
        while count < len(weights) and sum(each.nbytes for each in weights[:count]) < MOVED_AT_ONCE:
            count += 1
        part, weights = weights[:count], weights[count:]
        for weight, copied in zip(part, copied_to_huge_pages([each.data for each in part]), strict=True):
            weight.data = copied


def _layers(model: Any) -> list[_Layer]:
    """Return the decoder layers.

    Raises:
        ModelError: the model keeps them elsewhere than most models.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(f"{describe(model.config).id} has no list of decoder layers, so they cannot be compiled")
    return [_compiled_before(module) or _Layer(module) for module in layers]


def _compiled_before(module: nn.Module) -> _Layer | None:
    """Return what an earlier call of `compile_layers` made of a layer, without code for other weights."""
    forward: Any = vars(module).get("forward")
    if getattr(forward, "func", None) is not _forward:
        return None
    found: _Layer = forward.args[0]
    found.calls = {tokens: call for tokens, call in found.calls.items() if _unchanged(call)}
    return found


def _held(module: nn.Module) -> list[_Held]:
    """Return the modules and tensors of a layer, to see later whether they are still the same."""
    found: list[_Held] = []
    for part in module.modules():
        found += [(part._modules, name, each, 0) for name, each in part._modules.items()]
        for held in (part._parameters, part._buffers):
            tensors: dict[str, Any] = {name: each for name, each in held.items() if each is not None}
            found += [(held, name, each, each.data_ptr()) for name, each in tensors.items()]
    return found


def _unchanged(call: _Call) -> bool:
    """Whether a layer has the modules and the weights that its code reads; the numbers may be others."""
    for where, name, each, address in call.held:  # a loop: this runs for each layer of a step
        if (address and each.data_ptr() != address) or where.get(name) is not each:
            return False
    return True


def _attending(model: Any, attend: Attend) -> Any:
    """Compute attention like this inside the block."""
    return observing(model, lambda module, query, key, value, arguments: attend(query, key, value))


def _observed(model: Any, layers: list[_Layer], tokens: int) -> list[_Call]:
    """Run tokens through the model, with random hidden states and a stand-in for attention, and keep the calls."""
    from transformers import DynamicCache

    calls = [_Call() for _ in layers]
    owner = {part: layer for layer in layers for part in layer.module.modules()}
    generator, cache = torch.Generator().manual_seed(0), DynamicCache(config=model.config)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        cached = cache.layers[module.layer_idx]
        # Compiled layers cache what they attend to.
        same = all(map(torch.equal, (cached.keys, cached.values), (key, value)))
        if (layer := owner.get(module)) is not None and same:
            layer.attention, layer.passed = module, _without_tensors(arguments)
        return _stand_in(query, key, value)

    def before(call: _Call, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if len(given) != 1:
            raise ModelError(f"{type(module).__name__} takes more than the hidden states, so it cannot be compiled")
        hidden = torch.randn(given[0].shape, generator=generator).to(given[0].dtype)
        call.inputs = (hidden, tuple(named.get("position_embeddings") or ()))
        call.arguments = _without_tensors(named)
        call.arguments.pop("position_embeddings", None)
        return (hidden,), named

    def after(call: _Call, module: Any, given: tuple[Any, ...], output: Any) -> None:
        call.output = output

    hooks: list[Any] = []
    try:
        for layer, call in zip(layers, calls, strict=True):
            hooks.append(layer.module.register_forward_pre_hook(functools.partial(before, call), with_kwargs=True))
            hooks.append(layer.module.register_forward_hook(functools.partial(after, call)))
        with observing(model, attend), torch.no_grad():
            places = torch.arange(POSITION, POSITION + tokens).unsqueeze(0)
            model.base_model(
                input_ids=torch.ones_like(places), position_ids=places, **with_cache(cache), use_cache=True
            )
    finally:
        for hook in hooks:
            hook.remove()
    if any(layer.attention is None for layer in layers) or not all(isinstance(call.output, Tensor) for call in calls):
        raise ModelError(f"{describe(model.config).id}: its layers cannot be compiled")
    return calls


def _without_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in arguments.items() if isinstance(each, bool | int | float | str)}


def _stand_in(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return something of the shape of attention that depends on all three."""
    group = query.shape[1] // key.shape[1]
    return (query + (key + value).repeat_interleave(group, 1)).transpose(1, 2)


def _alike(layer: _Layer, other: _Layer) -> bool:
    """Whether the code of one may serve the other: same class, and weights of the same names, shapes and dtypes."""

    def shape(layer: _Layer) -> Any:
        weights = weights_of(layer.module)
        return type(layer.module), [(name, each.shape, each.stride(), each.dtype) for name, each in weights]

    return bool(shape(layer) == shape(other))


@torch.no_grad()
def _reproduces(call: _Call) -> bool:
    assert call.inputs is not None
    assert call.run is not None
    return _near(_run(call.run, call.inputs, _stand_in), call.output, call.inputs[0])


def _near(found: Tensor, plain: Tensor, hidden: Tensor) -> bool:
    """Whether a result is the plain one but for rounding, in units of what the layer changes."""
    dtype = plain.dtype
    tolerance = TOLERANCE.get(dtype, TOLERANCE_16)
    found, plain, hidden = found.double(), plain.double(), hidden.double()
    return bool((found - plain).norm() <= tolerance * (plain - hidden).norm() + torch.finfo(dtype).eps * plain.norm())


def _run(run: Callable[[Inputs], Tensor], inputs: Inputs, attend: Attend) -> Tensor:
    before = _running.attend
    _running.attend = attend
    try:
        found = run(inputs)
        if _running.fault is not None:
            raise _running.fault
        return found
    finally:
        _running.attend, _running.fault = before, None


def _forward(layer: _Layer, plain: Any, *given: Any, **named: Any) -> Any:
    """Stand in for the forward of a decoder layer."""
    (hidden, *more), positions = given, tuple(named.get("position_embeddings") or ())
    batch, new = hidden.shape[:2]
    tokens = batch * new
    call = None if more or tokens > MOST else layer.calls.get(SEVERAL if tokens > 1 else 1)
    name = attention_name(layer.attention.config)
    if call is None or torch.is_grad_enabled() or name == "eager" or not _fit((hidden, *positions), call):
        return plain(*given, **named)
    from transformers import AttentionInterface

    function, cache = AttentionInterface()[name], named.get(cache_name())
    passed = {name: named.get(name, each) for name, each in layer.passed.items()}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if tokens > 1:  # [1, heads, tokens, head_dim] in the code
            query, key, value = (each[0].unflatten(1, (batch, new)).transpose(0, 1) for each in (query, key, value))
        if cache is not None:
            key, value = cache.update(key, value, layer.attention.layer_idx)
        out: Tensor = function(layer.attention, query, key, value, named.get("attention_mask"), **passed)[0]
        return out.flatten(0, 1).unsqueeze(0) if tokens > 1 else out

    if tokens > 1:
        hidden = hidden.reshape(1, tokens, -1).contiguous()
        positions = tuple(each.expand(batch, -1, -1).reshape(1, tokens, -1).contiguous() for each in positions)
    assert call.run is not None
    return _run(call.run, (hidden, positions), attend).view(batch, new, -1)


def _fit(tensors: tuple[Tensor, ...], call: _Call) -> bool:
    """Whether tensors are like the hidden states and position embeddings of a call, and the layer is still the same."""
    assert call.inputs is not None
    if not _unchanged(call):
        return False
    expected, (batch, new, _) = (call.inputs[0], *call.inputs[1]), tensors[0].shape
    return len(tensors) == len(expected) and all(
        own.dtype == each.dtype
        and own.shape[-1] == each.shape[-1]
        and own.shape[0] in (1, batch)
        and own.shape[1] == new
        for own, each in zip(tensors, expected, strict=True)
    )
