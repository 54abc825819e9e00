"""`zero train --from DIR` reads transformers' folders, and transformers reads what it writes, to equal logits.

The models are those of tests/models/fixtures, with each variant of their config.json."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

try:
    import numpy
    import torch
    import transformers
    from safetensors import safe_open
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import support

FIXTURES = pathlib.Path(__file__).parents[1] / "models" / "fixtures"


def logits(folder: pathlib.Path, tokens: torch.Tensor) -> torch.Tensor:
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    with torch.no_grad():
        return getattr(transformers, kind).from_pretrained(folder).eval()(tokens).logits


def round_trip(source: pathlib.Path, variant: str, changes: dict[str, Any], folder: pathlib.Path) -> None:
    start, out = folder / "start", folder / "out"
    shutil.copytree(source, start)
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**config, **changes}))
    (start / "merges.txt").write_text("#version: 0.2\n")
    (numpy.arange(400) % 40).astype(numpy.uint16).tofile(folder / "tokens.bin")
    options = {"from": start, "data": folder / "tokens.bin", "out": out, "lr": 0, "min-lr": 0, "steps": 1, "seq": 8,
               "eval-tokens": 0, "sample-tokens": 0}
    if "bert" in source.name:
        options |= {"task": "mlm", "mask-token": 4}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run([support.program(), "train", *words], check=True, stdout=subprocess.DEVNULL)
    tokens = torch.arange(1, 25).view(1, 24)
    assert torch.equal(logits(out, tokens), logits(start, tokens)), f"{source.name} {variant}"
    assert (out / "merges.txt").read_text() == "#version: 0.2\n"


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    # test_bert.py has the classifier.
    for source in sorted(path for path in FIXTURES.iterdir() if path.is_dir() and path.name != "bert-classes"):
        with safe_open(source / "expected.safetensors", "pt") as expected:
            variants = {name: json.loads(text) for name, text in expected.metadata().items()}
        for variant, changes in variants.items():
            with tempfile.TemporaryDirectory() as folder:
                round_trip(source, variant, changes, pathlib.Path(folder))
            print("equal logits:", source.name, variant)


if __name__ == "__main__":
    main()
