"""A conversation whose KV cache is kept: each turn feeds the model only what is new."""

from dataclasses import dataclass, field
from typing import Any

from bpc_cli import decoding
from bpc_cli.chat_template import Message, message, template_tokens

__all__ = ["Conversation"]


@dataclass
class Conversation:
    """The messages so far, and the cache with their tokens."""

    decoder: decoding.Decoder
    cache: Any
    name: str  # of the model
    limit: int | None  # tokens that the model takes in all
    opening: list[Message]  # the system message, if there is one
    messages: list[Message] = field(init=False)
    tokens: list[int] = field(init=False)  # of the cache, and at most one more

    def __post_init__(self) -> None:
        """Begin without a message."""
        self.reset()

    def reset(self) -> None:
        """Begin anew: forget every message except the system message."""
        self.messages, self.tokens = list(self.opening), []
        self.cache.reset()

    def ask(self, text: str, most: int, show: bool, **more: Any) -> dict[str, Any]:
        """Answer a message with at most `most` tokens; return what `decode` measures, and the bytes.

        The message and its answer join the conversation, also where the answer was stopped. If this fails, the
        conversation is as before, and the next turn feeds all of it again. `more` are arguments of `model.generate`.

        Raises:
            InputError: the model takes no token after this message.
        """
        messages = [*self.messages, message("user", text)]
        ids = template_tokens(self.decoder.tokenizer, messages, self.name)
        length = ids.shape[1]
        room = self._room(length, most)
        keep_common(self.cache, self.tokens, ids[0].tolist())
        try:
            turn = decoding.decode(self.decoder, ids, self.cache, room, show, **more)
        except BaseException:  # Ctrl-C too: a part of the layers may hold the tokens of a pass that did not end
            self.cache.reset()
            self.tokens = []
            raise
        self.messages = [*messages, message("assistant", turn["text"])]
        self.tokens = ids[0].tolist() + turn["tokens"]
        count = len(turn["tokens"])
        at_limit = self.limit is not None and length + count >= self.limit
        return {"prompt_tokens": length, **turn, "at_limit": at_limit, **decoding.kv_bytes(self.cache, length, count)}

    def _room(self, length: int, most: int) -> int:
        """How many tokens the answer may have."""
        from bpc_calib import InputError

        if self.limit is None:
            return most
        if length >= self.limit:
            raise InputError(
                f"with this message the conversation has {length:,} tokens, and {self.name} takes {self.limit:,}: send "
                "a shorter one, or begin anew with /reset"
            )
        return min(most, self.limit - length)


def keep_common(cache: Any, tokens: list[int], wanted: list[int]) -> None:
    """Crop the cache, which holds the first of these tokens, to those that the wanted tokens begin with.

    At least one wanted token is left to feed. A template may write an earlier answer in other tokens, or leave its
    reasoning out.
    """
    from bpc_calib import InputError

    held = cache.get_seq_length()
    pairs = enumerate(zip(tokens[:held], wanted[:-1], strict=False))
    common = next((place for place, (one, other) in pairs if one != other), min(held, len(wanted) - 1))
    if common == held:
        return
    try:
        cache.crop(common - held)
    except InputError:  # a sliding window no longer has the tokens before
        cache.reset()
