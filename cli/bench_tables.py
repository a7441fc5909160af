"""The result of `bpc bench` as tables."""

from typing import Any

from bpc_cli.console import print_table, printable

__all__ = ["show"]


def show(result: dict[str, Any]) -> None:
    """Print every table of a result."""
    _about(result)
    if "layer" in result:
        for batch, group in dict.fromkeys((row["batch"], row["group"]) for row in result["layer"]):
            own = [row for row in result["layer"] if (row["batch"], row["group"]) == (batch, group)]
            _stages(own, _shape(result, batch, group))
            _steps(own, _shape(result, batch, group))
    if "decode" in result:
        _decode(result["decode"], result["settings"])
    if "prefill" in result:
        _prefill(result["prefill"])
    for found in result.get("crossover", []):
        _crossover(found, _shape(result, found["batch"], found["group"]))


def _about(result: dict[str, Any]) -> None:
    machine, memory = result["machine"], result["memory_bandwidth"]
    where = machine["gpu"] if result["device"].startswith("cuda") else f"{machine['cpu']}, {machine['threads']} threads"
    print(f"{printable(where)}, backend {result['backend']}")
    rate = f"{memory['bytes_per_second'] / 1e9:.1f} GB/s"
    print(f"Memory bandwidth {rate} ({memory['by']}, {memory['working_set_bytes'] >> 20:,} MiB)")
    if "compile_seconds" in result:
        print(f"First step {result['compile_seconds']} s longer (compiled or loaded once), in no figure below")


def _shape(result: dict[str, Any], batch: int, group: int) -> str:
    made = result["settings"]
    return f"{made['kv_heads']} KV heads, {group} queries each, D={made['head_dim']}, {made['dtype']}, batch {batch}"


def _stages(rows: list[dict[str, Any]], shape: str) -> None:
    from rich.table import Table

    stages = ("encode", "project", "score", "select", "attend", "step")
    table = Table("tokens", "attended", *stages)
    ours = [row for row in rows if row["method"] == "BPC"]
    for tokens, budget in dict.fromkeys((row["tokens"], row["budget"]) for row in ours):
        own = {row["stage"]: row for row in ours if (row["tokens"], row["budget"]) == (tokens, budget)}
        cells = [_number(own[stage]["median"]) for stage in stages]
        table.add_row(f"{tokens:,}", _kept(own["step"]), *cells)
    print_table(f"BPC by stage, us: {shape}", table)


def _steps(rows: list[dict[str, Any]], shape: str) -> None:
    from rich.table import Table

    table = Table("tokens", "attended", "BPC, us", "of floor", "dense", "of floor", "paper", "of floor")
    for name in ("dense / BPC", "paper / BPC"):
        table.add_column(name, justify="right")
    for ours in (row for row in rows if row["method"] == "BPC" and row["stage"] == "step"):
        here = [row for row in rows if row["tokens"] == ours["tokens"] and row.get("best")]
        dense = next((row for row in here if row["method"] == "dense"), None)
        theirs = next((row for row in here if row["method"] == "paper" and row["budget"] == ours["budget"]), None)
        cells = [cell for row in (ours, dense, theirs) for cell in _timed(row)]
        ratios = [_ratio(ours.get("times_dense")), _ratio(ours.get("times_paper"))]
        table.add_row(f"{ours['tokens']:,}", _kept(ours), *cells, *ratios)
    print_table(f"A whole step, beside the fastest dense form and the paper's pipeline: {shape}", table)
    for row in rows:
        if row["median"] is None:
            print(
                f"{row['method']}, {row['tokens']:,} tokens, {row.get('form', row['stage'])}: {printable(row['note'])}"
            )


def _timed(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None or row["median"] is None:
        return "-", ""
    low, high = row["spread"]
    return f"{_number(row['median'])} ({_number(low)}-{_number(high)})", f"{row['floor_share']:.1%}"


def _decode(found: dict[str, Any], settings: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("tokens", "batch", "attended", "full, tok/s", "BPC, tok/s", "BPC / full")
    for name in ("limit, tok/s", "limit reached", "BPC of floor", "peak GB, full", "BPC"):
        table.add_column(name, justify="right")
    for row in found["rows"]:
        ours, full, free = row["bpc"], row["full"], row["free"]
        table.add_row(
            f"{row['tokens']:,}", str(row["batch"]), _kept(row), _rate(full), _rate(ours), _ratio(row["times_full"]),
            _rate(free), f"{row['limit_reached']:.0%}", f"{ours['floor_share']:.0%}",
            f"{full['peak_bytes'] / 1e9:.2f}", f"{ours['peak_bytes'] / 1e9:.2f}",
        )  # fmt: skip
    dense = ",".join(map(str, settings["dense_layers"])) or "none"
    print_table(f"Decoding with {_model(found)}, dense layers {dense}", table)
    print("limit: tokens/s where the sparse layers' attention takes no time (Amdahl)")
    print(f"peak: {found['peak_memory']}")
    if found["projections"] == "random":
        print("Random projections: what is chosen means nothing, the time does not depend on it")
    if found["positions_beyond_limit"]:
        print("Positions go beyond the model's limit, which changes no time")


def _prefill(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("", "tokens", "full, s", "BPC, s", "of it hashing, s", "share")
    for row in found["rows"]:
        seconds = [f"{row[name]['median']:.3f}" if name in row else "" for name in ("full", "bpc", "hashing")]
        share = f"{row['hashing_share']:.1%}" if "hashing_share" in row else ""
        table.add_row(row["what"], f"{row['tokens']:,}", *seconds, share)
    print_table(f"Prefill with {_model(found)}", table)


def _crossover(found: dict[str, Any], shape: str) -> None:
    from rich.table import Table

    table = Table("tokens", "attended", "BPC, us", "dense, us", "dense / BPC", "faster")
    for row in found["rows"]:
        faster = "BPC" if row["sparse_wins"] else "dense"
        times = (_number(row["sparse"]["median"]), _number(row["dense"]["median"]))
        table.add_row(f"{row['tokens']:,}", f"{row['attended']:,}", *times, _ratio(row["times_dense"]), faster)
    print_table(f"Where sparse begins to win, {_say(found['budget'])}: {shape}", table)
    value = found["min_context"]
    if value is None:
        print(f"Dense was faster up to {found['rows'][-1]['tokens']:,} tokens: BPC gains no time in this layer here")
    elif value == 0:
        print("BPC was faster at every length: min_context=0, the default")
    else:
        print(f"BPCCache(min_context={value}), bpc generate --min-context {value}")


def _model(found: dict[str, Any]) -> str:
    made = f"{found['layers']} layers, MLP {found['mlp']}, vocabulary {found['vocabulary']:,}"
    return f"{printable(found['model'])} ({made})"


def _kept(row: dict[str, Any]) -> str:
    return f"{row['attended']:,} ({_say(row['budget'])})"


def _rate(side: dict[str, Any]) -> str:
    return f"{side['tokens_per_second']:.4g}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _say(budget: float | int) -> str:
    return f"{budget} tokens" if isinstance(budget, int) else f"{100 * budget:.3g} %"
