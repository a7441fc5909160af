"""What the stages of a command took: seconds and steps by stage."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["StageTimes"]


@dataclass
class StageTimes:
    """Seconds and finished steps by stage; the steps are those of this run, not those of an earlier one."""

    last: float  # when the last step ended
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    _reached: dict[str, int] = field(default_factory=dict)

    def add(self, stage: str, done: int = 1) -> None:
        """Count the time since the last call, and the steps since the last call with this stage."""
        now = self.clock()
        before = self._reached.get(stage, done)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.steps[stage] = self.steps.get(stage, 0) + done - before
        self._reached[stage] = done
        self.last = now
