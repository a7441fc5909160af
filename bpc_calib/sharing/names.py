"""Where an artifact may be published. Importing this file is cheap: `bpc push` checks with it."""

import re

from bpc_calib.errors import InputError

__all__ = ["check_branch", "check_repository"]


def check_repository(name: str) -> None:
    """Raise `InputError` unless this can be the name of a repository of somebody."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
        if "/" not in name:
            raise HFValidationError
    except HFValidationError:
        raise InputError("expected the repository as ORG/NAME, such as alice/Qwen3-8B-bpc64") from None


def check_branch(name: str) -> None:
    """Raise `InputError` if this is a commit."""
    if re.fullmatch("[0-9a-f]{40}", name):
        raise InputError(f"{name} is a commit, which never changes: name a branch")
