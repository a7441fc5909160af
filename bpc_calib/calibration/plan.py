"""What a calibration will do, checked before any work."""

from dataclasses import dataclass

from bpc_artifacts.schema import SHARES
from bpc_calib.calibration.numbers import SEQUENCE_LENGTH, fitted_keys, held_out_samples, spread
from bpc_calib.calibration.projection_method import DEFAULT_METHOD, PROJECTION_METHODS, ProjectionMethod
from bpc_calib.errors import InputError
from bpc_calib.method.codes import default_bits
from bpc_calib.method.shares import LONG_FROM, SHORT
from bpc_calib.models.description import ModelDescription

__all__ = ["Plan", "make_plan"]

KEYS_PER_HEAD = 65_536
MEASURED = 4  # one sample in so many measures needs, within `FEWEST` and `MOST`; it takes about 7 times a pass
FEWEST, MOST = 2, 6
LEAST_LENGTH = 1024  # tokens of a sample that can measure needs: 2 % of fewer are too few to tell heads apart
LONG = 8192  # tokens of it that do, and `SHORT`: what heads need on either serves the other badly
LEAST_GROUP, MOST_GROUPS = 4, 64  # samples whose queries' moments are summed together; each group takes disk


@dataclass(frozen=True)
class Plan:
    """The settings of a calibration, checked (`make_plan`)."""

    model: ModelDescription
    method: ProjectionMethod
    bits: int
    samples: int
    sequence_length: int
    keys_per_head: int
    position_shift: bool
    seed: int

    @property
    def held_out(self) -> list[int]:
        """The samples whose keys are kept aside to measure the projections."""
        return held_out_samples(self.samples)

    @property
    def fitted(self) -> list[int]:
        """The samples whose keys are fitted."""
        return sorted(set(range(self.samples)) - set(self.held_out))

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return self.samples * self.sequence_length

    @property
    def summed(self) -> list[int]:
        """The samples whose queries' moments are summed for the query metric."""
        return self.fitted if self.method.metric else []

    @property
    def measured(self) -> list[tuple[int, int]]:
        """The samples on which needs are measured, and on how many of their first tokens, the long ones first.

        None where samples are too short, or the model is sharded.
        """
        if not self.method.needs or self.sequence_length < LEAST_LENGTH or self.model.ranks > 1:
            return []
        some = spread(self.samples, min(self.samples, max(FEWEST, min(MOST, self.samples // MEASURED))))
        lengths = [min(self.sequence_length, LONG)] + [SHORT] * (self.sequence_length >= LONG_FROM)
        return [(sample, length) for length in lengths for sample in some]

    @property
    def group_size(self) -> int:
        """Samples in a group. The moments are summed in each group, then over the groups: a sum in a fixed order."""
        return max(LEAST_GROUP, -(-self.samples // MOST_GROUPS))

    @property
    def groups(self) -> list[range]:
        """The samples of each group, in order."""
        size = self.group_size
        return [range(first, min(first + size, self.samples)) for first in range(0, self.samples, size)]

    @property
    def held_out_keys_per_head(self) -> int:
        """Keys per KV head that are kept aside: every held-out sample has as many as a fitted one, at least one."""
        return len(self.held_out) * max(1, self.keys_per_head // len(self.fitted))

    def key_bytes(self, itemsize: int) -> int:
        """Return the bytes of the keys of all layers in the work folder, for keys of `itemsize` bytes per number."""
        model = self.model
        keys = self.keys_per_head + self.held_out_keys_per_head
        return len(model.full_layers) * model.kv_heads * keys * model.head_dim * itemsize

    def work_bytes(self, itemsize: int, ranks: int = 1) -> int:
        """Return about the most bytes of the work folder, for keys of `itemsize` bytes per number."""
        model = self.model
        moments = len(model.full_layers) * model.kv_heads * model.head_dim**2 * 8 if self.summed else 0
        tokens = self.tokens * 4
        groups = len(self.groups)
        # Every rank replaces one file of moments at a time; the layers, and the artifact that joins them.
        tables = (groups + ranks) * moments + 2 * self.artifact_bytes + tokens
        files = self.samples + groups + len(model.full_layers) + len(self.measured) + 8
        return self.key_bytes(itemsize) + tables + files * (4096 + 256 * len(model.full_layers))

    @property
    def artifact_bytes(self) -> int:
        """Bytes of the artifact's tensors; its header adds a few kilobytes."""
        model = self.model
        method, dim = self.method, model.head_dim
        rows, steps = (4 * self.bits, self.bits // 4) if method.nibbles else (self.bits, self.bits)
        numbers = rows * dim + steps + 1 + method.metric * dim * dim + method.centred * dim
        numbers += SHARES * len({length for _, length in self.measured})
        return len(model.full_layers) * model.kv_heads * numbers * 4


def make_plan(
    model: ModelDescription,
    *,
    samples: int = 180,
    sequence_length: int | None = None,
    bits: int | None = None,
    method: str = DEFAULT_METHOD,
    position_shift: bool | None = None,
    keys_per_head: int = KEYS_PER_HEAD,
    seed: int = 0,
) -> Plan:
    """Plan a calibration: check the numbers and fill in the defaults.

    Args:
        model: the description of the model (`describe`).
        samples: forward passes, one text sample each.
        sequence_length: tokens per sample; None: 8,192, or the model's limit if that is lower.
        bits: code length: 32, 64 or 128; None: `default_bits` of the `head_dim`.
        method: a name of `PROJECTION_METHODS`.
        position_shift: start samples at random positions; None: as the method does, where the model allows it.
        keys_per_head: keys kept per KV head, at most one per token.
        seed: of text, positions and the decomposition.

    Raises:
        InputError: a number is out of range, there are too few keys for the bits, samples are longer than the model's
            limit, the method is unknown, or the model does not allow a position shift.
    """
    bits = default_bits(model.head_dim) if bits is None else bits
    limit = model.context_limit
    length = sequence_length if sequence_length is not None else min(SEQUENCE_LENGTH, limit or SEQUENCE_LENGTH)
    kept = fitted_keys(samples, length, keys_per_head, bits, seed)
    if limit and length > limit:
        raise InputError(f"a sequence length of {length} is over the limit of {model.id}, {limit} tokens")
    if method not in PROJECTION_METHODS:
        raise InputError(f"unknown method {method!r}: known are {', '.join(PROJECTION_METHODS)}")
    chosen = PROJECTION_METHODS[method]
    if position_shift and not model.can_shift:
        raise InputError(f"{model.id} does not allow a position shift: no RoPE, or one that depends on the length")
    shifts = (chosen.shift and model.can_shift) if position_shift is None else position_shift
    return Plan(
        model=model,
        method=chosen,
        bits=bits,
        samples=samples,
        sequence_length=length,
        keys_per_head=kept,
        position_shift=shifts,
        seed=seed,
    )
