"""BPC's cache layer with its steps as one call of the backend."""

from torch import Tensor

from bpc_calib.backends.dispatch import step
from bpc_calib.method.appending import Slots
from bpc_calib.method.stepping import Hashed
from bpc_calib.runtime.growing import writable
from bpc_calib.runtime.hashed_layer import BPCLayer

__all__ = ["WholeStepLayer"]


class WholeStepLayer(BPCLayer):
    """A layer that does the same as `BPCLayer`, with fewer calls; to choose otherwise, extend `BPCLayer` instead."""

    def attend(self, query: Tensor, k: int | Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
        """Hash the new token, choose and attend at once, where no other token needs a code and none is padding."""
        hashed = self.ready()
        if hashed is None or visible is not None or isinstance(k, Tensor):
            return super().attend(query, k, visible, scale)
        self.scaling = self.scaling if scale is None else scale
        grouped = query.squeeze(2).unflatten(1, (self.keys.shape[1], -1))
        out = step(grouped, hashed, k, self.choice())
        self.hashed = hashed.length
        return out.flatten(1, 2).unsqueeze(1)

    def ready(self) -> Hashed | None:
        """Return the buffers for a step that hashes the newest token alone; None if `hash` has more to do."""
        length, buffers, encoder = self.get_seq_length(), self.buffers, self.encoder
        if self.projection is None or encoder is None or self.hashed != length - 1:
            return None
        kept = [buffers.get(name) for name in ("codes", "gain", "error")]
        if any(buffer is not None and (buffer.shape[2] < length or not writable(buffer)) for buffer in kept):
            return None  # `append` makes room
        slots = Slots(buffers["keys"], buffers["values"], *kept)
        return Hashed(self.projection, encoder, slots, length, self.worst())
