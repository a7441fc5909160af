"""What happens as tokens come: the text is printed, the times are noted, the cache is prepared for the next step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bpc_cli.console import printable

__all__ = ["Timing", "token_stream"]


@dataclass
class Timing:
    """When things happened in one generation, in seconds."""

    arrived: list[float] = field(default_factory=list)  # the prompt, then each token
    preparing: float = 0.0  # what hashing the prompt and finding online projections took in all

    @property
    def prefill(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.arrived[1] - self.arrived[0]

    @property
    def decoding(self) -> float:
        """Seconds from the first token to the last, without preparing."""
        return max(0.0, self.arrived[-1] - self.arrived[1] - self.preparing)


def token_stream(
    tokenizer: Any, timing: Timing, *, show: bool, goes_on: Callable[[int, int], bool], prepare: Callable[[], None]
) -> Any:
    """What `model.generate` gives the prompt and then each token, as its streamer.

    `goes_on` takes a token and how many there are, and says whether a step follows; `prepare` is called before each
    step, so that work which a step would do first is timed apart.
    """
    from transformers import TextStreamer

    class Stream(TextStreamer):  # type: ignore[misc]
        def put(self, value: Any) -> None:
            timing.arrived.append(time.perf_counter())
            if show:
                super().put(value)
            if (count := len(timing.arrived) - 1) and goes_on(int(value[0]), count):
                began = time.perf_counter()
                prepare()
                timing.preparing += time.perf_counter() - began

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(printable(text, keep="\n\t"), end="\n" if stream_end else "", flush=True)

        def end(self) -> None:
            if show:
                super().end()

    return Stream(tokenizer, skip_prompt=True, skip_special_tokens=True)
