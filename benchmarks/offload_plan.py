"""What lies where with keys and values in main memory, and how fast a step could be: computed, nothing is measured.

    python benchmarks/offload_plan.py

It writes benchmarks/results/offload_plan.json from bytes, the bandwidths below and committed results. The layers of a
step wait for each other, and so do the card and the processor in each of them, so their times add up.
"""

from typing import Any

from report import ROOT, Results, Row, by, keep

from bpc_calib.bench.settings import SHAPES
from bpc_calib.method.budget import attended
from bpc_calib.method.defaults import BUDGET

# Bytes; bytes per second of the card's memory, by its maker; of PCIe 4.0 or 5.0 x16, assumed: what copies from pinned
# memory usually reach of 31.5 and 63 GB/s; and operations per second in bfloat16, by its maker.
CARDS = {
    "RTX 4090, 24 GB": (24e9, 1008e9, 25e9, 165e12),
    "L40S, 48 GB": (48e9, 864e9, 25e9, 362e12),
    "H100, 80 GB": (80e9, 3350e9, 50e9, 989e12),
}
PAGEABLE = 0.5  # of that rate of PCIe, assumed: copies to memory that is not pinned
RESERVE = 1.5e9  # bytes of a card, assumed: CUDA's context, activations, logits and graphs
MAIN = 100e9  # bytes per second of main memory, assumed: two channels of DDR5-6400 at their peak, or a server's several
ROUND_TRIP = 30e-6  # seconds per layer, assumed: the processor waits for the card, starts its threads, the card waits
BITS = {"llama-3.1-8b": (16,), "llama-3.1-70b": (16, 4.5)}  # per weight; 4.5: 4, and 16 for each 32, as GGUF's Q4_0
LENGTHS = (131_072, 262_144, 524_288, 1_048_576)
NUMBER, CODE, INDEX = 2, 9, 8  # bytes: of a number, of 64 bits and a gain, and of the place of a chosen token


def measured(results: Results) -> Row:
    """What committed results say: shares of a bandwidth that kernels reach, and seconds of a layer beyond its bytes."""
    rows = results["gpu_suite_h100"]["parts"]["decode"]["rows"]
    graphs, eager = rows[0]["result"], by(rows, "what")["BPC, eager"]["median"]
    row, layers = graphs["decode"]["rows"][0], graphs["decode"]["whole_layers"]
    times = {"graphs": row["bpc"]["milliseconds"], "eager": eager}
    attends = [
        each["floor_share"]
        for name in ("bench_cpu_layer", "bench_cpu_layer_own_dense")  # two hosts, two cores each
        for each in results[name]["layer"]
        if each["stage"] == "attend" and each["tokens"] >= LENGTHS[0]
    ]
    return {
        "card_share": graphs["memory_bandwidth"]["bytes_per_second"] / CARDS["H100, 80 GB"][1],
        "chosen_shares": [min(attends), max(attends)],
        "seconds_beyond": {name: (each - row["bpc"]["floor"]) / layers / 1e3 for name, each in times.items()},
    }


def plan(card: str, name: str, bits: float, tokens: int, known: Row) -> Row:
    """Bytes by place, bytes of a step by way, and its seconds."""
    memory, rate, pcie, operations = CARDS[card]
    names = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"
    layers, heads, kv_heads, dim, hidden = map(SHAPES[name].__getitem__, names)
    head = SHAPES[name]["vocab_size"] * hidden  # also the embedding, of which a step reads one row
    products = layers * hidden * (2 * heads * dim + 2 * kv_heads * dim + 3 * SHAPES[name]["intermediate_size"])
    read = products + head
    read, held, chosen = read * bits / 8, (read + head) * bits / 8, attended(tokens, BUDGET)
    token = layers * kv_heads * dim * 2 * NUMBER  # bytes of a token's keys and values
    codes = layers * kv_heads * CODE * tokens
    found: Row = {"card": card, "model": name, "bits": bits, "tokens": tokens, "attended": chosen}
    found["held"] = {"weights": held, "codes": codes, "keys_and_values": token * tokens}
    found["fits"] = held + codes + RESERVE <= memory
    found["all_fits"] = held + codes + token * tokens + RESERVE <= memory
    found["moved"] = moved = {
        "card": read + codes,
        "pcie": layers * (2 * heads * dim * NUMBER + kv_heads * chosen * INDEX) + token,  # query, output, places, new
        "main": token * chosen,
    }
    # Of the prompt: keys and values go down once; each token takes part in all products, and attends to half of them.
    attention = 2 * layers * heads * dim * tokens
    found["prompt_seconds"] = {
        "copied": token * tokens / pcie / PAGEABLE,
        "least_computed": tokens * (2 * products + attention) / operations,
    }
    if not found["fits"]:
        return found
    rate *= known["card_share"]
    graphs, eager = (moved["card"] / rate + layers * known["seconds_beyond"][each] for each in ("graphs", "eager"))
    over = moved["pcie"] / pcie + layers * ROUND_TRIP
    cpu = [over + moved["main"] / MAIN / share for share in known["chosen_shares"]]
    seconds = {
        "cpu": [graphs + each for each in cpu],
        "cpu_eager": [eager + each for each in cpu],
        "least_rows_up": graphs + moved["main"] / pcie,
        "least_dense_over_pcie": max(read / rate, token * tokens / pcie),  # copied while the card computes
        "least_dense_on_cpu": read / rate + token * tokens / MAIN,
    }
    if found["all_fits"]:
        seconds["on_card"] = graphs + moved["main"] / rate
    return found | {"seconds": seconds}


def plans(results: Results) -> dict[str, Any]:
    """Every card, model and length."""
    known = measured(results)
    models = [(name, bits) for name, every in BITS.items() for bits in every]
    rows = [plan(card, *model, tokens, known) for card in CARDS for model in models for tokens in LENGTHS]
    about = {"command": "python benchmarks/offload_plan.py", "note": "computed, not measured"}
    return about | {"from": known, "rows": rows}


def main() -> None:
    from tables import load

    keep(ROOT / "benchmarks" / "results" / "offload_plan.json", plans(load()))


if __name__ == "__main__":
    main()
