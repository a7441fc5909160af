"""Fetch files from the Hugging Face Hub, and explain failures in one line."""

import functools
from pathlib import Path

from bpc_artifacts.errors import ArtifactError
from bpc_calib.errors import first_line

__all__ = ["explain", "fetch", "fetch_artifact", "online", "status_of"]

MAX_DOWNLOAD = 1 << 30  # bytes


def online() -> bool:
    """Return True if the Hub answers. Without this check, clients retry for half a minute before they use the cache."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        _ask_hub()
    except Exception:  # the type depends on the HTTP library of the client
        return False
    return True


@functools.cache  # caches a success, but not a failure
def _ask_hub() -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    get_session().head(constants.ENDPOINT, timeout=10)


def fetch(repo: str, filename: str, revision: str | None) -> tuple[Path, str]:
    """Fetch one file of a model repository; return its path and commit. Raises the errors of huggingface_hub."""
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(repo, filename, revision=revision, local_files_only=not online()))
    # .../models--ORG--NAME/snapshots/COMMIT/FILENAME
    return path, path.parts[-1 - len(Path(filename).parts)]


def fetch_artifact(name: str, revision: str | None = None) -> tuple[Path, str]:
    """Fetch `ORG/NAME/FILE`, or the only safetensors file of `ORG/NAME`; return its path and commit.

    Downloads only that file, at a fixed commit, and only below a size limit.

    Raises:
        ArtifactError: the file does not exist or is too large, or the Hub is not reachable.
    """
    from huggingface_hub import HfApi, snapshot_download

    parts = name.split("/")
    repo, wanted = "/".join(parts[:2]), "/".join(parts[2:])
    place = repo
    try:
        if online():
            info = HfApi().model_info(repo, revision=revision, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        else:
            cached = Path(snapshot_download(repo, revision=revision, local_files_only=True))
            place = f"the cache of {repo}"
            sizes = {file.relative_to(cached).as_posix(): file.stat().st_size for file in cached.rglob("*.*")}
        there = [file for file in sizes if file.endswith(".safetensors")]
        if wanted and wanted not in sizes:
            choice = (
                f": choose one of {', '.join(there[:5])}"
                if there
                else ", and no other safetensors file: choose another repository"
            )
            raise ArtifactError(f"{name}: {place} has no file {wanted}{choice}")
        found = [wanted] if wanted else there
        if len(found) != 1:
            raise ArtifactError(
                f"{name}: expected one safetensors file, found {', '.join(found[:5]) or 'none'}: "
                f"choose one with {repo}/FILE.safetensors"
            )
        if sizes[found[0]] > MAX_DOWNLOAD:
            raise ArtifactError(f"{name}: {sizes[found[0]]:,} bytes, expected an artifact of at most {MAX_DOWNLOAD:,}")
        return fetch(repo, found[0], revision)
    except ArtifactError:
        raise
    except Exception as fault:
        raise ArtifactError(explain(fault, f"{name} (no file here)")) from fault


def status_of(fault: BaseException) -> int | None:
    """Return the HTTP status that an error of huggingface_hub stems from; None if the Hub did not answer."""
    for error in _chain(fault):
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _chain(fault: BaseException) -> list[BaseException]:
    """Return an error and its causes."""
    chain: list[BaseException] = []
    cause: BaseException | None = fault
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def explain(fault: BaseException, what: str) -> str:
    """Return a one-line message for an error of huggingface_hub, datasets or transformers about `what`."""
    from huggingface_hub import constants, errors

    chain = _chain(fault)

    def any_is(*kinds: type[BaseException]) -> bool:
        return any(isinstance(error, kinds) for error in chain)

    if any_is(errors.GatedRepoError):
        return f"{what} is gated: accept its terms on its page and set HF_TOKEN"
    if any_is(errors.RevisionNotFoundError):
        return f"{what} has no such revision"
    if any_is(errors.RepositoryNotFoundError):
        return f"{what} is not on the Hub (or private: set HF_TOKEN)"
    if any_is(errors.HFValidationError):
        return f"{what} is neither a folder nor a Hub id"
    if constants.HF_HUB_OFFLINE and any_is(errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, OSError):
        return f"{what} is not in the cache and HF_HUB_OFFLINE is set: unset it or use local files"
    if not online():
        return (
            f"{what} is not in the cache and the Hub ({constants.ENDPOINT}) cannot be reached: "
            "check the network, or use local files (HF_HUB_OFFLINE=1 skips the attempt)"
        )
    return f"{what} cannot be loaded: {first_line(fault)}"
