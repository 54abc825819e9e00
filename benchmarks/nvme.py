#!/usr/bin/env python3
"""`zero bench nvme` beside fio on the same disk: sequential writes and reads, same block size and depth, past the page cache.

    benchmarks/nvme.py /mnt/nvme
    benchmarks/nvme.py /mnt/nvme --block 4194304 --depth 8 --size 4294967296

Each round runs `zero bench nvme`, the same without checksums, fio, and fio in huge pages, in which libzero's buffers are, in turn. All write a
file that was written before, as training does from its second step on. Needs the release build and fio (apt-get install fio).
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import fio

ROOT = Path(__file__).resolve().parent.parent


def libzero(options: argparse.Namespace, *more: str) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [options.zero, "bench", "nvme", "--path", options.folder, "--size", str(options.size)]
        command += ["--blocks", str(options.block), "--depths", str(options.depth), "--rounds", "1", "--json", file.name, *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(Path(file.name).read_text())["results"][0]
    return {way: result[f"{way}_gb_per_s"]["median"] for way in ("write", "read")}


def with_fio(options: argparse.Namespace, huge_pages: bool) -> dict[str, float]:
    rates = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for way in ("write", "write", "read"):  # what is written for the first time is slower
            rates[way] = fio.gb_per_s(f"{folder}/file", way, size=options.size, block=options.block, depth=options.depth, huge_pages=huge_pages)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="on the disk")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of the file [1073741824]")
    parser.add_argument("--block", type=int, default=1 << 20, help="bytes of a transfer [1048576]")
    parser.add_argument("--depth", type=int, default=32, help="transfers under way [32]")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of each [5]")
    parser.add_argument("--zero", default=str(ROOT / "build/release/zero"), help="the program [build/release/zero]")
    options = parser.parse_args()
    fio.require()
    runs = {
        "libzero": lambda: libzero(options),
        "libzero, no checksums": lambda: libzero(options, "--no-checksums"),
        "fio": lambda: with_fio(options, huge_pages=False),
        "fio, huge pages": lambda: with_fio(options, huge_pages=True),
    }
    rounds = [{name: run() for name, run in runs.items()} for _ in range(options.rounds)]
    print(f"{options.size >> 20} MiB, blocks of {options.block} bytes, depth {options.depth}: median GB/s, and libzero's over it by round")
    for way in ("write", "read"):
        for name in runs:
            ratios = [figures["libzero"][way] / figures[name][way] for figures in rounds]
            speed = median(figures[name][way] for figures in rounds)
            beside = "" if name == "libzero" else f"   {median(ratios):.2f}x  ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{way:<6} {name:<22} {speed:6.2f}{beside}")


if __name__ == "__main__":
    main()
