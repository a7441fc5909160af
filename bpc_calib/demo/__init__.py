"""The bundled model, a folder in the format of transformers: `-m demo` on the command line."""

from pathlib import Path

__all__ = ["DEMO_MODEL"]

DEMO_MODEL = Path(__file__).parent
