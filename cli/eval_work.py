"""The work folder of `bpc eval`: one file per finished part, so that the same command goes on after a stop."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpc_cli.console import fail, note

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact


class FinishedParts(dict[str, Any]):
    """Results by the name of their part, each also in a file. Results of other models or settings may lie beside them.

    A file that is damaged counts as absent. Where none can be written, a note says so, and the evaluation goes on.
    """

    def __init__(self, folder: Path, made_with: dict[str, Any]) -> None:
        super().__init__()
        self.folder, self.made_with, self.kept = folder, _digest(made_with), True
        for path in folder.glob("*.json") if folder.is_dir() else ():
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                found = json.loads(path.read_bytes())
                if path == self._path(found["part"]) and found["sha256"] == _digest(found["result"]):
                    super().__setitem__(found["part"], found["result"])

    def __setitem__(self, part: str, result: Any) -> None:
        """Keep a result."""
        from bpc_calib.calibration.durable import make_folder, write_file
        from bpc_calib.errors import WorkError

        super().__setitem__(part, result)
        table = {"part": part, "result": result, "sha256": _digest(result)}
        try:
            if self.kept:
                make_folder(self.folder)
                write_file(self._path(part), json.dumps(table).encode())
        except WorkError as fault:
            self.kept = False
            note(f"Once stopped, this evaluation would have to begin anew: {fault}")

    def remove(self) -> None:
        """Remove the files of these results, and the folder if nothing else is in it."""
        with suppress(OSError):
            for part in self:
                self._path(part).unlink(missing_ok=True)
            self.folder.rmdir()

    def _path(self, part: str) -> Path:
        return self.folder / f"{_digest([self.made_with, part])}.json"


def made_with(
    model: Any, name: str, artifact: "ProjectionArtifact | None", rules: Mapping[str, Any], methods: Iterable[str]
) -> dict[str, Any]:
    """What decides the results beside their prompts: the model, the projections, the rules, and who computes.

    Of the user's own methods it has their files, so that nothing is kept of a method that has changed.
    """
    import inspect
    from importlib.metadata import version

    from bpc_calib.evaluation.comparison import layer_class_of
    from bpc_calib.models.loading import weights_identity

    files = {each: inspect.getsourcefile(layer_class_of(each)) for each in methods if ":" in each}

    packages = ("bpc-calib", "torch", "transformers")
    return {
        "model": name,
        "weights": weights_identity(model),
        "device": model.device.type,
        "artifact": None if artifact is None else [artifact.metadata["payload_sha256"], artifact.metadata["algorithm"]],
        "rules": dict(rules),
        "own": {each: _digest(Path(file).read_text()) for each, file in files.items() if file},
        "versions": {each: version(each) for each in packages},
    }


@contextmanager
def kept_work(folder: Path, made_with: dict[str, Any], quiet: bool) -> Iterator[FinishedParts]:
    """Give what earlier runs have finished, to be added to; remove it at the end, and keep it where the block fails."""
    if folder.exists() and not folder.is_dir():
        fail(f"{folder}: not a folder: choose another --work-dir")
    parts = FinishedParts(folder, made_with)
    if parts and not quiet:
        note(f"Going on with {folder}: {len(parts):,} parts are finished")
    try:
        yield parts
    except BaseException:
        if parts and parts.kept:
            note(f"The finished work is in {folder}: the same command goes on with it")
        raise
    parts.remove()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
