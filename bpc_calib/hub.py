"""Finding files on the Hugging Face Hub, and saying in one line why they cannot be had."""

import functools
import urllib.error
import urllib.request
from pathlib import Path

from bpc_artifacts.errors import ArtifactError

__all__ = ["explain", "fetch", "fetch_artifact", "first_line", "online"]

MAX_DOWNLOAD = 1 << 30  # bytes


@functools.cache
def online() -> bool:
    """Whether the Hub answers; asked once, so that what is cached loads at once without a network."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=10).close()
    except urllib.error.HTTPError:
        return True  # any answer will do
    except (OSError, ValueError):
        return False
    return True


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
    from huggingface_hub import HfApi

    parts = name.split("/")
    repo, wanted = "/".join(parts[:2]), "/".join(parts[2:])
    try:
        if not online():
            if not wanted:
                raise ConnectionError
            return fetch(repo, wanted, revision)
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        found = [wanted] if wanted else [file for file in sizes if file.endswith(".safetensors")]
        if len(found) != 1 or found[0] not in sizes:
            raise ArtifactError(
                f"{name}: expected one safetensors file, found {', '.join(found[:5]) or 'none'}: "
                f"name one as {repo}/FILE.safetensors"
            )
        if sizes[found[0]] > MAX_DOWNLOAD:
            raise ArtifactError(f"{name}: {sizes[found[0]]:,} bytes, expected an artifact of at most {MAX_DOWNLOAD:,}")
        path, commit = fetch(repo, found[0], revision)  # by its name, so that it is found offline too
        if commit != info.sha:
            raise ArtifactError(f"{name}: changed while it was read: try again")
        return path, commit
    except ArtifactError:
        raise
    except Exception as fault:
        raise ArtifactError(explain(fault, name)) from fault


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


def first_line(fault: BaseException) -> str:
    """The first line of an error's text, or its type."""
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return lines[0][:300]
