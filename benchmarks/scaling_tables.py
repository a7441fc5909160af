"""The tables of docs/scaling.md: two are computed from the sizes of models, one is measured."""

from dataclasses import dataclass

from markdown_table import Results, table

from bpc_calib import make_plan
from bpc_calib.calibration.plan import Plan
from bpc_calib.models.description import ModelDescription

__all__ = ["ranks_time", "scaling_calibration", "scaling_token"]

VOCABULARY, KV_HEADS, DIM = 128_256, 8, 128
FLOPS, READS = 300e12, 2e12  # per second and GPU: products, and bytes of memory in the fits
TIMES_READ = 1152  # the float64 keys, in the fit of a layer
CONTEXT, BUDGET, DENSE_LAYERS, CODE = 131_072, 0.02, 2, 9  # tokens, share, layers, bytes of a code with its gain


@dataclass(frozen=True)
class Shape:
    """A Llama model in bfloat16."""

    name: str
    layers: int
    query_heads: int
    hidden: int
    inner: int

    @property
    def parameters(self) -> int:
        """All weights."""
        layer = 2 * self.hidden**2 + 2 * self.hidden * KV_HEADS * DIM + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + 2 * VOCABULARY * self.hidden + self.hidden

    def plan(self) -> Plan:
        """The default calibration."""
        rope, types = {"rope_type": "llama3"}, ["full_attention"] * self.layers
        sizes = self.layers, KV_HEADS, self.query_heads, DIM
        return make_plan(
            ModelDescription(self.name, None, "", "llama", *sizes, rope, types, CONTEXT, VOCABULARY, False)
        )


SMALL = Shape("Llama 3.1 8B", 32, 32, 4096, 14_336)
LARGE = Shape("Llama 3.1 70B", 80, 64, 8192, 28_672)


def scaling_calibration(results: Results) -> str:
    """What a calibration takes, by ranks."""
    lines = [
        _calibration(SMALL, "one GPU", 1),
        _calibration(SMALL, "8 GPUs, 8 ranks", 8),
        _calibration(SMALL, "two machines of 8 GPUs, 16 ranks", 16),
        _calibration(LARGE, "8 GPUs, one rank, `--device-map auto`", 1),
        _calibration(LARGE, "two machines of 8 GPUs, 2 ranks, `--device-map auto`", 2),
        _calibration(LARGE, "8 GPUs, 8 ranks, `--tensor-parallel`", 8, shared=True),
    ]
    return table(["model, GPUs", "weights per rank", "collecting keys", "decomposing", "work folder"], lines)


def _calibration(shape: Shape, where: str, ranks: int, shared: bool = False) -> list[str]:
    plan = shape.plan()
    attention = 2 * shape.layers * shape.query_heads * DIM * plan.sequence_length  # a token sees half of its sample
    sample = plan.sequence_length * (2 * shape.parameters + attention) / FLOPS
    samples = min(plan.samples, -(-len(plan.groups) // ranks) * plan.group_size)  # of the rank with most
    collecting = plan.samples * sample / ranks if shared else samples * sample
    layer = KV_HEADS * plan.keys_per_head * DIM * 8 * TIMES_READ / READS
    parts = ranks if shared else 1
    return [
        f"{shape.name}, {where}",
        f"{2 * shape.parameters / parts / 1e9:.3g} GB",
        f"{collecting / 60:.1f} min" if collecting >= 90 else f"{collecting:.0f} s",
        f"{-(-shape.layers // ranks) * layer:.2g} s",
        f"{plan.work_bytes(2, ranks) / 1e9:.1f} GB",
    ]


def scaling_token(results: Results) -> str:
    """What a step of the large model reads."""
    pair = KV_HEADS * DIM * 2 * 2
    sparse = LARGE.layers - DENSE_LAYERS
    full = CONTEXT * LARGE.layers * pair
    parts = [
        (f"BPC: codes and gains of {sparse} layers", CONTEXT * sparse * KV_HEADS * CODE),
        ("BPC: chosen keys and values", int(BUDGET * CONTEXT) * sparse * pair),
        ("BPC: the two dense layers", CONTEXT * DENSE_LAYERS * pair),
    ]
    ours = sum(size for _, size in parts)
    rows = [
        ("weights, read once for the whole batch", 2 * LARGE.parameters),
        ("full attention: keys and values", full),
        *parts,
        (f"BPC in all, {100 * ours / full:.1f} %", ours),
    ]
    lines = [[name, *(f"{size / ranks / 1e9:.2f} GB" for ranks in (1, 8))] for name, size in rows]
    return table(["per sequence and step", "in all", "a rank of 8"], lines)


def ranks_time(results: Results) -> str:
    """Calibration on one, two and four processes of one thread."""
    found = results["ranks_time"]
    lines = []
    for row in found["rows"]:
        stages = [f"{row['seconds_by_stage'][stage]:.1f}" for stage in ("keys", "decompose")]
        first = found["rows"][0]["wall_seconds"]
        lines.append([row["processes"], f"{row['wall_seconds']:.1f}", *stages, f"{first / row['wall_seconds']:.2f}"])
    return table(["processes", "seconds", "collecting keys", "decomposing", "times faster"], lines)
