"""Reads one state of one parameter from a checkpoint: FOLDER PARAMETER STATE OUT.

It knows no more than docs/checkpoint-format.md says, and needs nothing but Python.
"""

import json
import pathlib
import struct
import sys

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def read_tensor(path, name):
    """Returns the bytes of a tensor of a safetensors file."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + begin)
        return file.read(end - begin)


def read_state(folder, manifest, name, state):
    """Returns a parameter's shape, and the format and bytes of its state, in row-major order."""
    names = [parameter["name"] for parameter in manifest["parameters"]]
    number = names.index(name)
    parameter = manifest["parameters"][number]
    form = parameter["states"][state]
    pieces = []
    for file in manifest["files"]:
        for index, begin, end in file["slices"]:
            if index == number:
                values = read_tensor(folder / file["name"], f"{state}.{name}")
                assert len(values) == (end - begin) * BYTES[form]
                pieces.append((begin, values))
    return parameter["shape"], form, b"".join(values for _, values in sorted(pieces))


def main():
    folder, name, state, out = sys.argv[1:]
    folder = pathlib.Path(folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["format"] == "libzero checkpoint" and manifest["version"] in (2, 3)
    for file in manifest["files"]:
        assert (folder / file["name"]).stat().st_size == file["bytes"]
    shape, form, values = read_state(folder, manifest, name, state)
    pathlib.Path(out).write_bytes(values)
    print(f"{state} {tuple(shape)} {form}, step {manifest['steps']}")


main()
