"""Draw the pictures of the documents from the results of evaluation.py and real_suite.py; needs the extra `plots`.

python benchmarks/pictures.py
"""

import argparse
from pathlib import Path

import evaluation_tables
import real_picture
import tables

from bpc_calib.evaluation import pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=tables.ROOT / "docs" / "pictures")
    arguments = parser.parse_args()
    results = tables.load()
    drawn = pictures.draw(evaluation_tables.evaluation_rows(results), arguments.folder, overwrite=True)
    for path in filter(None, [*drawn, real_picture.draw(results, arguments.folder)]):
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
