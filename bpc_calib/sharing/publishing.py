"""Publish the files of an artifact in a model repository on the Hub, as one commit."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from bpc_calib.errors import BPCError, first_line
from bpc_calib.hub import explain, status_of
from bpc_calib.sharing.card import LIBRARY
from bpc_calib.sharing.names import check_branch, check_repository

__all__ = ["PublishingError", "Target", "look_up", "publish"]

_HARMLESS = re.compile(r"\.gitattributes|README\.md|LICENSE.*")  # in a repository that someone has just made


class PublishingError(BPCError):
    """An artifact cannot be published: no rights, another use of the repository, or no connection."""


@dataclass(frozen=True)
class Target:
    """The branch of a model repository that will have the files; `commit` is None for a new repository."""

    repository: str
    branch: str
    private: bool
    commit: str | None
    new_branch: bool

    @property
    def reference(self) -> str:
        """What `-a` takes to use the newest commit of the branch."""
        return self.repository if self.branch == "main" else f"{self.repository}@{self.branch}"

    def unchanged(self, commit: str) -> bool:
        """Whether a commit was there before; a new branch may begin with it."""
        return commit == self.commit and not self.new_branch


def look_up(repository: str, *, branch: str, private: bool, filename: str) -> Target:
    """Look where files would go. Changes nothing.

    Args:
        private: make a new repository private.
        filename: the artifact's, the only safetensors file that the repository may have.

    Raises:
        PublishingError: there is no token, the name is no Hub id, the repository holds something else or is public in
            spite of `private`, `branch` is a tag, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    check_repository(repository)
    check_branch(branch)
    if get_token() is None:
        raise PublishingError("publishing needs a token: run hf auth login, or set HF_TOKEN to one that may write")
    api = HfApi()
    try:
        info = api.model_info(repository)
        refs = api.list_repo_refs(repository)
        new_branch = branch not in [found.name for found in refs.branches]
        if not new_branch:
            info = api.model_info(repository, revision=branch)
    except RepositoryNotFoundError:
        return Target(repository, branch, private, None, branch != "main")
    except Exception as fault:
        raise PublishingError(_explain(fault, repository)) from fault
    if private and not info.private:
        raise PublishingError(f"{repository} exists and is public: make it private on its page, or omit --private")
    if branch in [tag.name for tag in refs.tags]:
        raise PublishingError(f"{repository}: {branch} is a tag, which never changes: name a branch")
    # Refuse to replace or to confuse what is not ours.
    names = [file.rfilename for file in info.siblings or []]
    foreign = [name for name in names if not _HARMLESS.fullmatch(name)]
    if foreign and (info.card_data is None or info.card_data.get("library_name") != LIBRARY):
        raise PublishingError(
            f"{repository} holds something else than projections of BPC ({', '.join(foreign[:3])}): choose another name"
        )
    if others := [name for name in names if name.endswith(".safetensors") and name != filename]:
        raise PublishingError(
            f"{repository} has another safetensors file, {others[0]}, and must have one: delete it on the page, "
            "or choose another name"
        )
    return Target(repository, branch, bool(info.private), info.sha, new_branch)


def publish(target: Target, files: Mapping[str, bytes]) -> str:
    """Create the repository and the branch where they are missing, commit the files at once, and return the commit.

    Equal files make no new commit.

    Raises:
        PublishingError: the token may not write there, the repository changed after `look_up`, or the connection broke;
            the files are there all or none.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    try:
        if target.commit is None:
            api.create_repo(target.repository, private=target.private)
        if target.new_branch:
            api.create_branch(target.repository, branch=target.branch, revision=target.commit)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the Hub's advice on the card
            commit = api.create_commit(
                target.repository,
                [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in files.items()],
                commit_message="Publish projections of BPC",
                revision=target.branch,
                parent_commit=target.commit,
            )
    except Exception as fault:
        raise PublishingError(_explain(fault, target.repository)) from fault
    return str(commit.oid)


def _explain(fault: Exception, repository: str) -> str:
    """Return one line: what was wrong, and what to do."""
    owner, status = repository.split("/")[0], status_of(fault)
    if status == 401:
        return "the Hub does not accept the token: run hf auth login again, or set HF_TOKEN to a valid one"
    if status == 403:
        return f"{repository}: the token may not write there: use a token with the right to write to {owner}"
    if status in (409, 412):  # it exists already, or the branch has moved
        return f"{repository} was changed meanwhile: run the command again to see what it holds now"
    if status is not None:
        return f"{repository}: the Hub refused ({status}): {first_line(fault)}"
    unreachable = explain(fault, repository)
    if "cannot be reached" in unreachable or "HF_HUB_OFFLINE" in unreachable:
        return f"{repository}: the Hub cannot be reached: check the network, and that HF_HUB_OFFLINE is not set"
    return (
        f"{repository}: the connection to the Hub broke ({type(fault).__name__}): run the command again; "
        "it publishes all files or none"
    )
