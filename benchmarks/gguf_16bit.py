"""Write the weights of a quantised GGUF file in 16 bits, for engines that read GGUF files.

    python benchmarks/gguf_16bit.py MODEL.gguf MODEL-f16.gguf

Matrices become float16, with which llama.cpp is faster on a CPU than with bfloat16; vectors become float32, as it wants
them. Needs the extra `gguf`.
"""

import argparse
import os
from pathlib import Path

import numpy as np

__all__ = ["write"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    write(arguments.source, arguments.target)
    print(arguments.target)


def write(source: Path, target: Path) -> None:
    """Write `target`, whole or not at all: the metadata of `source`, and its tensors in 16 bits."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    beside = target.with_name(target.name + ".new")
    writer = gguf.GGUFWriter(beside, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE):
            continue
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else gguf.GGMLQuantizationType.F16
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(beside, target)


if __name__ == "__main__":
    main()
