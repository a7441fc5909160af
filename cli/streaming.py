"""Text on stdout while a model writes it."""

from dataclasses import dataclass, field
from typing import Any

from bpc_cli.console import printable

KEPT = 4  # tokens before the newest: some tokenizers write a token otherwise at the beginning of a text
# Beside what shows: new lines, tabs, soft hyphens, and marks without which emoji and Persian, Thai and Indic words fall
# apart.
LAYOUT = "\n\t\u00ad\u200b\u200c\u200d"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what stands for the first bytes of a character


@dataclass
class TextPrinter:
    """Prints what each new token adds, at once but for a character of which only some bytes have come.

    The streamer of transformers holds text back until a space comes, so Chinese text or a long identifier would appear
    at its end, and be lost where the answer is stopped.
    """

    tokenizer: Any
    tokens: list[int] = field(default_factory=list)  # the newest
    shown: int = 0  # characters of their text that are printed

    def put(self, token: int) -> None:
        """Print what the token adds."""
        self.tokens.append(token)
        text = self._text()
        whole = text.rstrip(UNFINISHED)
        self._print(whole)
        if whole == text:
            self.tokens = self.tokens[-KEPT:]
            self.shown = len(self._text())

    def end(self) -> None:
        """Print what is left, and end the line."""
        self._print(self._text())
        self.tokens, self.shown = [], 0
        print(flush=True)

    def _text(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=True)

    def _print(self, text: str) -> None:
        print(printable(text[self.shown :], keep=LAYOUT), end="", flush=True)
        self.shown = max(self.shown, len(text))
