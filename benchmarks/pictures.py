"""Draw the pictures of docs/demo-results.md from the results of evaluation.py; needs the extra `plots`.

python benchmarks/pictures.py
"""

import argparse
from pathlib import Path

import evaluation_tables
import tables

from bpc_calib.evaluation import pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=tables.ROOT / "docs" / "pictures")
    arguments = parser.parse_args()
    for path in pictures.draw(evaluation_tables.evaluation_rows(tables.load()), arguments.folder, overwrite=True):
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
