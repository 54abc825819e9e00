#!/usr/bin/env python3
"""Times how a text becomes tokens: by libzero and by Hugging Face's `tokenizers`, line by line on one thread.

    benchmarks/python/encode.py FILE TOKENIZER_JSON ...        with tokenizers 0.23, and zero_bench built
"""

import os
import subprocess
import sys
import time
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for path in sys.argv[2:]:
        subprocess.run([ROOT / "build/release/zero_bench", "tokenizer", "--tokenizer", path, "--text", sys.argv[1]], check=True)
        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        best, tokens = float("inf"), 0
        for _ in range(3):
            start = time.perf_counter()
            tokens = sum(len(each.ids) for each in tokenizer.encode_batch(lines, add_special_tokens=False))
            best = min(best, time.perf_counter() - start)
        print(f"tokenizers: {tokens} tokens; {len(text.encode()) / best / 1e6:.1f} MB/s", flush=True)


if __name__ == "__main__":
    main()
