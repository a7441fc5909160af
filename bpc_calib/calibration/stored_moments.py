"""The running sums of the queries' moments in a work folder.

They are sums over the fitted samples in order, because the order decides the last bits. The sums after the last two
samples are kept: where the newest file is damaged, one sample is run again.
"""

from pathlib import Path

from torch import Tensor

from bpc_calib.calibration.plan import Plan
from bpc_calib.calibration.stored_tensors import DamagedError, is_intact, keep_intact, read_tensors, write_tensors
from bpc_calib.errors import WorkError

__all__ = ["newest_moments", "write_moments"]

KEPT = 2


def write_moments(folder: Path, sample: int, moments: dict[int, Tensor]) -> None:
    """Write the sums by layer after this sample, float64 `[kv_heads, head_dim, head_dim]`. Raises `WorkError`."""
    write_tensors(
        folder / "moments" / f"{sample:06}.safetensors", {str(layer): each for layer, each in moments.items()}
    )
    for old in sorted((folder / "moments").glob("*.safetensors"))[:-KEPT]:
        old.unlink()


def newest_moments(folder: Path, plan: Plan) -> tuple[int, dict[int, Tensor]]:
    """Return the last sample of the newest intact sums, and the sums; -1 and an empty dict without any."""
    files = {int(path.stem): path for path in sorted((folder / "moments").glob("*.safetensors"))}
    names = {str(layer) for layer in plan.model.full_layers}
    intact = keep_intact(files, lambda path: is_intact(path, names))
    if not intact:
        return -1, {}
    try:
        sums = read_tensors(files[max(intact)])
    except DamagedError:
        raise WorkError(f"{files[max(intact)]}: damaged since it was checked: run the same command again") from None
    return max(intact), {layer: sums[str(layer)].clone() for layer in plan.model.full_layers}
