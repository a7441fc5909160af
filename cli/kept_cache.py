"""The files of --prompt-cache and --session: the cache of a text, so that no later run has to read the text again."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bpc_cli.console import fail, note, size_text
from bpc_cli.ranks import ranks

if TYPE_CHECKING:
    from bpc_calib.models.description import ModelDescription

MOST = 0.9  # share of a prompt that its file must hold not to be written again, and of a file that a prompt begins with


def check_cache_file(path: Path | None) -> dict[str, Any] | None:
    """Check before any work that a cache can be written to a file; return what an earlier run noted in it.

    None: there is no file, or it is empty.
    """
    if path is None:
        return None
    from bpc_artifacts.replacing import try_replacing
    from bpc_calib.runtime.saved_cache import KIND, opened

    try_replacing(path, 0, True, KIND)
    if not _written(path):
        return None
    with opened(path) as saved:
        return dict(saved.metadata["about"])


def _written(path: Path) -> bool:
    """Whether there is a file with something in it."""
    return path.exists() and path.stat().st_size > 0


def check_config(path: Path | None, model: "ModelDescription") -> None:
    """Refuse the cache of another model before the weights are loaded."""
    from bpc_calib.runtime.saved_cache import opened

    if path is not None and _written(path):
        with opened(path) as saved:
            saved.check_config(model)


def fill_cache(path: Path, cache: Any, model: Any) -> list[int]:
    """Give an empty cache what a file holds; return the tokens of its text."""
    from bpc_calib.runtime.saved_cache import opened

    with opened(path, model) as saved:
        if len(saved.tokens) > 1:
            fail(f"{path}: holds {len(saved.tokens)} texts at once, and the commands keep one: open it in Python")
        saved.fill(cache, model.device)
        return list(saved.tokens[0].tolist())


@contextmanager
def only_chat(path: Path | None) -> Iterator[None]:
    """In the block, no other chat goes on with the conversation of this file; None: there is no file."""
    from bpc_calib.calibration.durable import locked

    if path is None:
        yield
        return
    lock = path.with_name(f".{path.name}.lock")
    with locked(lock, f"{path}: another chat goes on with it: wait until that ends, or give another --session"):
        yield


def save_cache(path: Path, cache: Any, model: Any, tokens: list[int], about: Mapping[str, Any], quiet: bool) -> None:
    """Write a cache, in place of one that the file holds, and say so."""
    import torch

    began = time.perf_counter()
    size = cache.save(path, model, torch.tensor([tokens]), about=about, overwrite=True)
    if not quiet:
        note(f"Saved the cache of {cache.get_seq_length():,} tokens: {path}, {size_text(size)}, "
             f"{time.perf_counter() - began:.1f} s")  # fmt: skip


def check_prompt_cache(path: Path | None) -> None:
    """Refuse a file of --prompt-cache, before any work, that cannot be one."""
    if path is not None and ranks() > 1:
        raise typer.BadParameter("--prompt-cache: each process of torchrun holds a part of the cache: leave it out")
    if (kept := check_cache_file(path)) is not None and kept:
        fail(f"{path}: holds a conversation of bpc chat --session: give another --prompt-cache")


def fill_from_prompt_cache(
    path: Path | None, cache: Any, model: Any, wanted: list[int], quiet: bool
) -> Callable[[], None] | None:
    """Give an empty cache as much of a prompt as the file holds; return what to call when the whole prompt is read.

    None: there is nothing to write.
    """
    if path is None:
        return None
    if _written(path):
        tokens = fill_cache(path, cache, model)[: cache.get_seq_length()]
        another = keep_common(cache, tokens, wanted) < MOST * len(tokens)
        if not quiet:
            note(f"{cache.get_seq_length():,} of the {len(wanted):,} tokens of the prompt are in {path}")
            if another:
                note(f"{path} holds another text of {len(tokens):,} tokens and stays as it is")
        if another:
            return None
    if cache.get_seq_length() >= MOST * len(wanted):
        return None
    return lambda: _try_save(path, cache, model, wanted, quiet)


def _try_save(path: Path, cache: Any, model: Any, tokens: list[int], quiet: bool) -> None:
    """Write a prompt's cache; if that fails, say so, and let the answer come."""
    from bpc_calib import CacheFileError

    try:
        save_cache(path, cache, model, tokens, {}, quiet)
    except CacheFileError as fault:
        note(f"Not saved: {fault}")


def keep_common(cache: Any, tokens: list[int], wanted: list[int]) -> int:
    """Crop the cache, which holds the first of these tokens, to those that the wanted tokens begin with.

    At least two wanted tokens are left to feed: a pass over one alone would choose, where a prompt's attends to all. A
    template may write an earlier answer in other tokens, or leave its reasoning out.

    Returns how many first tokens both texts share.
    """
    from bpc_calib import InputError

    held = cache.get_seq_length()
    pairs = zip(tokens[:held], wanted, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    kept = max(0, min(shared, len(wanted) - 2))
    if kept < held:
        try:
            cache.crop(kept - held)
        except InputError:  # a sliding window no longer has the tokens before
            cache.reset()
    return shared
