"""Write the tables of measured numbers in README.md and docs/ from the results in benchmarks/results/.

    python benchmarks/tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function below. Edit the function, not the
table: a test compares the two.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import aggregation_tables
import code_tables
import default_tables
import evaluation_tables
import measurement_tables
import performance_tables
import projection_tables
import real_tables
import scaling_tables
import spending_tables
import study_tables
from markdown_table import Results

__all__ = ["BLOCK", "TABLES", "fill", "load", "pages"]

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)

TABLES: dict[str, Callable[[Results], str]] = {
    "headline": projection_tables.headline,
    "headline-both": projection_tables.headline_both,
    "codes": projection_tables.codes,
    "code-quality": code_tables.code_quality,
    "code-time": code_tables.code_time,
    "hashing-time": projection_tables.hashing_time,
    "defaults": default_tables.defaults,
    "tried": default_tables.tried,
    "study": study_tables.study,
    "layer": performance_tables.layer,
    "layer-short": performance_tables.layer_short,
    "decode": performance_tables.decode,
    "step-bytes": performance_tables.step_bytes,
    "model-bytes": performance_tables.model_bytes,
    "kernel-cost": performance_tables.kernel_cost,
    "kernel-cost-launches": performance_tables.kernel_cost_launches,
    "bench": performance_tables.bench,
    "serving": performance_tables.serving,
    "aggregation": aggregation_tables.aggregation,
    "evaluation-files": evaluation_tables.evaluation_files,
    "evaluation": evaluation_tables.evaluation,
    "shift-made-text": measurement_tables.shift_made_text,
    "shift-real-text": measurement_tables.shift_real_text,
    "calibration-plan": measurement_tables.calibration_plan,
    "calibration-time": measurement_tables.calibration_time,
    "fitting-time": measurement_tables.fitting_time,
    "key-counts": measurement_tables.key_counts,
    "keys-per-head": measurement_tables.keys_per_head,
    "needles-made-text": measurement_tables.needles_made_text,
    "needles-real-text": measurement_tables.needles_real_text,
    "outlier-needle": measurement_tables.outlier_needle,
    "soak": measurement_tables.soak,
    "steady-decode": measurement_tables.steady_decode,
    "ranks-time": scaling_tables.ranks_time,
    "scaling-calibration": scaling_tables.scaling_calibration,
    "scaling-token": scaling_tables.scaling_token,
    "spending": spending_tables.spending,
    "spending-all": spending_tables.spending_all,
    **real_tables.TABLES,
}


def main() -> None:
    """Rewrite the pages in place."""
    results = load()
    for page in pages():
        text = page.read_text()
        filled = fill(text, results)
        if filled != text:
            page.write_text(filled)
            print(f"Wrote {page.relative_to(ROOT)}")


def load() -> Results:
    """The committed results by file name, without its suffix."""
    return {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}


def pages() -> list[Path]:
    """Every page that may hold a table."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fill(text: str, results: Results) -> str:
    """The page with every marked table made again."""
    return BLOCK.sub(lambda found: f"{found[1]}{found[2]}\n{TABLES[found[1]](results)}\n\n", text)


if __name__ == "__main__":
    main()
