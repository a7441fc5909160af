"""The memory that a calibration takes."""

from typing import TYPE_CHECKING, Any

from bpc_cli.memory_use import memory_now

if TYPE_CHECKING:
    from bpc_calib.calibration.forecast import Needs

__all__ = ["calibration_memory"]


def calibration_memory(needs: "Needs", weights_bytes: int, device: Any) -> dict[str, int | None]:
    """Peaks in bytes: of main memory, with and without what this process takes now, and of the GPU (None: no GPU).

    What this process takes now are mostly the libraries, which a calibration loads, too.
    """
    on_device, on_cpu = weights_bytes + max(needs.pass_bytes, needs.fit_bytes), device.type == "cpu"
    added = on_device if on_cpu else needs.fit_bytes
    return {
        "memory_bytes": (memory_now() or 0) + added,
        "added_memory_bytes": added,
        "gpu_memory_bytes": None if on_cpu else on_device,
    }
