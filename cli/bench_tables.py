"""The result of `bpc bench` as tables."""

from typing import Any

from bpc_calib.bench.settings import DRAFT, RIGHT
from bpc_calib.method.defaults import budget_text
from bpc_cli.console import print_table, printable


def print_benchmark(result: dict[str, Any]) -> None:
    """Print every table of a result."""
    _print_machine(result)
    if "layer" in result:
        for batch, group in dict.fromkeys((row["batch"], row["group"]) for row in result["layer"]):
            own = [row for row in result["layer"] if (row["batch"], row["group"]) == (batch, group)]
            _print_stages(own, _shape(result, batch, group))
            _print_steps(own, _shape(result, batch, group))
    if result.get("decode", {}).get("rows"):
        _print_decoding(result["decode"], result["settings"])
    if result.get("prefill", {}).get("rows"):
        _print_prefill(result["prefill"])
    for found in result.get("crossover", []):
        _print_crossover(found, _shape(result, found["batch"], found["group"]))
    for left_out in result.get("left_out", []):
        print(f"{left_out['what']}: {printable(left_out['note'])}")


def _print_machine(result: dict[str, Any]) -> None:
    machine, memory = result["machine"], result["memory_bandwidth"]
    where = machine["gpu"] if result["device"].startswith("cuda") else f"{machine['cpu']}, {machine['threads']} threads"
    print(f"{printable(where)}, backend {result['backend']}")
    rate = f"{memory['bytes_per_second'] / 1e9:.1f} GB/s"
    print(f"Memory bandwidth {rate} ({memory['by']}, {memory['working_set_bytes'] >> 20:,} MiB)")
    if "compile_seconds" in result:
        seconds = result["compile_seconds"]
        print(f"The first step took {seconds} s longer, to compile or load kernels; no figure includes that")


def _shape(result: dict[str, Any], batch: int, group: int) -> str:
    made = result["settings"]
    return f"{made['kv_heads']} KV heads, {group} queries each, D={made['head_dim']}, {made['dtype']}, batch {batch}"


def _print_stages(rows: list[dict[str, Any]], shape: str) -> None:
    stages = ("encode", "project", "score", "select", "attend", "step")
    table = _table("tokens", "attended", *stages)
    ours = [row for row in rows if row["method"] == "BPC"]
    for tokens, budget in dict.fromkeys((row["tokens"], row["budget"]) for row in ours):
        own = {row["stage"]: row for row in ours if (row["tokens"], row["budget"]) == (tokens, budget)}
        table.add_row(f"{tokens:,}", f"{own['step']['attended']:,}", *(_number(own[each]["median"]) for each in stages))
    print_table(f"BPC by stage, us: {shape}", table)


def _print_steps(rows: list[dict[str, Any]], shape: str) -> None:
    table = _table("tokens", "attended", "", "us", "spread", "of floor", "/ BPC")
    for ours in (row for row in rows if row["method"] == "BPC" and row["stage"] == "step"):
        dense = next((row for row in rows if row["tokens"] == ours["tokens"] and row.get("best")), None)
        lead = (f"{ours['tokens']:,}", f"{ours['attended']:,}")
        for name, row, times in (("BPC", ours, 1.0), ("dense", dense, ours.get("times_dense"))):
            if row is None or row["median"] is None:
                table.add_row(*lead, name, "-", "", "", "")
            else:
                share = f"{row['floor_share']:.1%}"
                table.add_row(*lead, name, _number(row["median"]), _spread(row["median"], row), share, _ratio(times))
            lead = ("", "")
    print_table(f"A whole step, beside the fastest dense form: {shape}", table)
    _print_warm(rows)
    for row in rows:
        if row["median"] is None:
            what = f"{row['method']}, {row['tokens']:,} tokens, {row.get('form', row['stage'])}"
            print(f"{what}: {printable(row['note'])}")


def _print_warm(rows: list[dict[str, Any]]) -> None:
    if lengths := [f"{tokens:,}" for tokens in dict.fromkeys(row["tokens"] for row in rows if not row["cold"])]:
        what = "part of the data may stay in the processor's caches"
        print(f"At {', '.join(lengths)} tokens {what}: more working sets would take too much memory")


def _print_decoding(found: dict[str, Any], settings: dict[str, Any]) -> None:
    dense = ",".join(map(str, settings["dense_layers"])) or "none"
    for batch in dict.fromkeys(row["batch"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["batch"] == batch]
        table = _table("tokens", "attended", "stock", "full", "BPC", "exact", "BPC/full", "limit", "floor")
        for row in rows:
            sides = [row.get("transformers", {"milliseconds": None}), row["full"], row["bpc"]]
            speeds = [f"{side['tokens_per_second']:.4g}" if side["milliseconds"] else "-" for side in sides]
            exact = row.get("exact", {}).get("tokens_per_second")  # older results have none
            speeds.append(f"{exact:.4g}" if exact else "-")
            share = row["bpc"].get("floor_share")
            ratios = (_ratio(row["times_full"]), _ratio(row["limit_times_full"]), f"{share:.0%}" if share else "-")
            table.add_row(f"{row['tokens']:,}", f"{row['attended']:,}", *speeds, *ratios)
        print_table(f"Tokens per second of {_model(found)}, dense layers {dense}, batch {batch}", table)
        for row in rows:
            kept = f"{row['tokens']:,} tokens, {row['attended']:,} attended"
            beside = {name: row[name] for name in ("transformers", "bpc", "verify") if name in row}
            for name, side in (row["dense_forms"] | beside).items():
                if not side["milliseconds"]:
                    print(f"{kept}, {name}: {printable(side['note'])}")
    _explain_decoding(found, dense)


def _explain_decoding(found: dict[str, Any], dense: str) -> None:
    """What the columns mean, and what to keep in mind."""
    forms = ", ".join(dict.fromkeys(row["full"]["form"] for row in found["rows"]))
    print(f"stock: transformers as it is; full: full attention in its fastest form ({forms})")
    print(f"exact: full attention's own text (--exact), if {RIGHT:.0%} of {DRAFT} tokens drafted at once are right")
    print("limit: what BPC/full would be if only the bytes counted that each must read")
    print("floor: the share of BPC's time that its bytes take at the measured bandwidth")
    if any(row["compiled"] for row in found["rows"]):
        print("full and BPC run compiled layers")
    if found["layers"] < found["whole_layers"]:
        print(f"{found['layers']} layers ran; the speeds are those of all {found['whole_layers']}, by time per layer")
        if dense != "none":
            print("So dense layers weigh more than in the whole model: --dense-layers none leaves them out")
    if found["experts"]:
        print("No limit: a step reads only the experts that it needs")
    if found["projections"] == "random":
        print("Random projections: which tokens are chosen means nothing, and the time does not depend on it")
    if found["positions_beyond_limit"]:
        print("Positions exceed the model's limit, which changes no time")


def _print_prefill(found: dict[str, Any]) -> None:
    table = _table("", "tokens", "full, s", "BPC, s", "hashing, s", "share")
    for row in found["rows"]:
        seconds = [f"{row[name]['median']:.3f}" if name in row else "" for name in ("full", "bpc", "hashing")]
        share = f"{row['hashing_share']:.1%}" if "hashing_share" in row else ""
        table.add_row(row["what"], f"{row['tokens']:,}", *seconds, share)
    print_table(f"Prefill with {_model(found)}", table)


def _print_crossover(found: dict[str, Any], shape: str) -> None:
    table = _table("tokens", "attended", "BPC, us", "dense, us", "dense / BPC", "faster")
    for row in found["rows"]:
        faster = "BPC" if row["sparse_wins"] else "dense"
        times = (_number(row["sparse"]["median"]), _number(row["dense"]["median"]))
        table.add_row(f"{row['tokens']:,}", f"{row['attended']:,}", *times, _ratio(row["times_dense"]), faster)
    print_table(f"From which length BPC is faster, {budget_text(found['budget'])}: {shape}", table)
    _print_warm(found["rows"])
    value = found["min_context"]
    if value is None:
        longest = found["rows"][-1]["tokens"]
        print(f"Dense was still faster at {longest:,} tokens: BPC saves no time in this layer on this machine")
    elif value == 0:
        print("BPC was faster at every length: min_context=0, the default")
    else:
        print(f"BPCCache(min_context={value}), bpc generate --min-context {value}")


def _model(found: dict[str, Any]) -> str:
    made = f"{found['layers']} layers, MLP {found['mlp']}, vocabulary {found['vocabulary']:,}"
    return f"{printable(found['model'])} ({made})"


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def _spread(median: float, row: dict[str, Any]) -> str:
    """The fastest and the slowest time, relative to the median."""
    low, high = (100 * (each / median - 1) for each in row["spread"])
    return f"{low:.0f} +{high:.0f} %"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
