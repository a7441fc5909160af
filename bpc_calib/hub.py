"""Finding files on the Hugging Face Hub, and saying in one line why they cannot be had."""

import functools
from pathlib import Path

from bpc_artifacts.errors import ArtifactError
from bpc_calib.errors import first_line

__all__ = ["explain", "fetch", "fetch_artifact", "online"]

MAX_DOWNLOAD = 1 << 30  # bytes


def online() -> bool:
    """Whether the Hub answers: its clients would retry for half a minute before they turn to their cache."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        _ask_hub()
    except Exception:  # the errors of whichever library carries its requests
        return False
    return True


@functools.cache  # an answer is kept, a failure is not
def _ask_hub() -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    get_session().head(constants.ENDPOINT, timeout=10)


def fetch(repo: str, filename: str, revision: str | None) -> tuple[Path, str]:
    """One file of a model repository, and the commit it belongs to. Raises what huggingface_hub raises."""
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(repo, filename, revision=revision, local_files_only=not online()))
    # .../models--ORG--NAME/snapshots/COMMIT/FILENAME
    return path, path.parts[-1 - len(Path(filename).parts)]


def fetch_artifact(name: str, revision: str | None = None) -> tuple[Path, str]:
    """The one safetensors file of a Hub repository `ORG/NAME`, or `ORG/NAME/FILE`, and its commit.

    Only that file is downloaded, at a fixed commit, and only below a size limit.

    Raises:
        ArtifactError: there is no such file, it is too large, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download

    parts = name.split("/")
    repo, wanted = "/".join(parts[:2]), "/".join(parts[2:])
    try:
        if online():
            info = HfApi().model_info(repo, revision=revision, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        else:
            cached = Path(snapshot_download(repo, revision=revision, local_files_only=True))
            sizes = {file.relative_to(cached).as_posix(): file.stat().st_size for file in cached.rglob("*.*")}
        found = [wanted] if wanted else [file for file in sizes if file.endswith(".safetensors")]
        if len(found) != 1 or found[0] not in sizes:
            raise ArtifactError(
                f"{name}: expected one safetensors file, found {', '.join(found[:5]) or 'none'}: "
                f"name one as {repo}/FILE.safetensors"
            )
        if sizes[found[0]] > MAX_DOWNLOAD:
            raise ArtifactError(f"{name}: {sizes[found[0]]:,} bytes, expected an artifact of at most {MAX_DOWNLOAD:,}")
        return fetch(repo, found[0], revision)
    except ArtifactError:
        raise
    except Exception as fault:
        raise ArtifactError(explain(fault, f"{name} (no file here)")) from fault


def explain(fault: BaseException, what: str) -> str:
    """One line for an error of huggingface_hub, datasets or transformers about `what`."""
    from huggingface_hub import constants, errors

    chain = []
    step: BaseException | None = fault
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__

    def any_is(*kinds: type[BaseException]) -> bool:
        return any(isinstance(each, kinds) for each in chain)

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
