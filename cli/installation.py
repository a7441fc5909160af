"""What is installed here, what is missing, and how to get it."""

from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from bpc_cli.console import fail

__all__ = ["check_core", "installation"]

PROJECT = "bpc-calib"
EXTRAS = {
    "cpu": "fast kernels on a CPU",
    "plots": "pictures: --plot",
    "accelerate": "quantised models, --device-map",
    "gguf": "GGUF files as models",
    "eval": "tasks of lm_eval",
    "vllm": "bpc serve",
}


def installation() -> dict[str, Any]:
    """The versions of what BPC needs, and whether each of its extras is complete.

    Returns:
        `core` by package: `installed` (None: not), `needed`, `fits`. `extras` by name: `use`, `packages` in the same
        form, `complete` and `install`, the command that completes it.
    """
    core, extras = _requirements("", alone=True), {}
    for name, use in EXTRAS.items():
        packages = _requirements(name)
        complete = all(each["fits"] for each in packages.values())
        extras[name] = {
            "use": use,
            "packages": packages,
            "complete": complete,
            "install": f"pip install '{PROJECT}[{name}]'",
        }
    return {"core": core, "extras": extras}


def check_core(found: dict[str, Any]) -> None:
    """End the command with one line if a package is missing or too old that BPC always needs."""
    for name, each in found["core"].items():
        if not each["fits"]:
            what = "is not installed" if each["installed"] is None else f"{each['installed']} does not fit"
            fail(f"{name} {what}: pip install '{name}{each['needed']}'")


def _requirements(extra: str, alone: bool = False) -> dict[str, dict[str, Any]]:
    """The packages that an extra adds, those of the extras that it includes too; `alone`: those without an extra."""
    from packaging.requirements import Requirement

    found: dict[str, dict[str, Any]] = {}
    try:
        lines = requires(PROJECT) or []
    except PackageNotFoundError:
        fail(f"{PROJECT} is not installed as a package: pip install . in a checkout")
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": extra}):
            continue
        if not alone and (marker is None or marker.evaluate({"extra": ""})):
            continue
        if requirement.name == PROJECT:
            for included in requirement.extras:
                found |= _requirements(included)
            continue
        installed = _version(requirement.name)
        fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        found[requirement.name] = {"installed": installed, "needed": str(requirement.specifier), "fits": fits}
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
