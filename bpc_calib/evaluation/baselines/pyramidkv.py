"""SnapKV with more tokens for lower layers."""

from bpc_calib.evaluation.baselines.snapkv import SnapKVLayer

__all__ = ["PyramidKVLayer"]


class PyramidKVLayer(SnapKVLayer):
    """PyramidKV (Cai et al. 2024): SnapKV with more tokens in the lower layers and the same total.

    In addition to the window, the last choosing layer keeps a twentieth of the mean, and each lower one keeps more by
    equal steps. If the prompt is shorter than the share of the first layer, no other layer gets the remainder.
    """

    BETA = 20

    def kept(self, length: int) -> int:
        mean, layers = super().kept(length), self.common.layers
        if len(layers) == 1 or mean == length:
            return mean
        window = self.window(length)
        least = (mean - window) / self.BETA
        most = 2 * (mean - window) - least
        share = layers.index(self.index) / (len(layers) - 1)
        return min(length, max(1, round(window + most + (least - most) * share)))
