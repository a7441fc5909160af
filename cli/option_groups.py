"""Groups of options: a command's parameter that is annotated with a dataclass stands for one option per field.

Typer reads a command's options from its signature. With groups, commands share options and keep short signatures.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

__all__ = ["collect_groups", "option_signature"]


def option_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature for Typer: the fields of each group stand in the group's place."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        for name, annotation, default in _options(parameter):
            found.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
    return inspect.Signature(found)


def collect_groups(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the function, its groups made from the options that Typer parsed."""
    arguments = {}
    for parameter in inspect.signature(function).parameters.values():
        given = {name: options[name] for name, _, _ in _options(parameter)}
        group = parameter.annotation if _is_group(parameter) else None
        arguments[parameter.name] = group(**given) if group else given[parameter.name]
    return arguments


def _is_group(parameter: inspect.Parameter) -> bool:
    return is_dataclass(parameter.annotation)


def _options(parameter: inspect.Parameter) -> list[tuple[str, Any, Any]]:
    """Name, annotation and default of each option that a parameter stands for."""
    if not _is_group(parameter):
        return [(parameter.name, parameter.annotation, parameter.default)]
    return [
        (field.name, field.type, inspect.Parameter.empty if field.default is MISSING else field.default)
        for field in fields(parameter.annotation)
    ]
