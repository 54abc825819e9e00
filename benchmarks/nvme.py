#!/usr/bin/env python3
"""`zero bench nvme` beside fio on the same disk: sequential writes and reads, same block size and depth, past the page cache.

    benchmarks/nvme.py /mnt/nvme
    benchmarks/nvme.py /mnt/nvme --block 4194304 --depth 8 --size 4294967296

Each round runs `zero bench nvme`, the same without checksums, and fio in turn. Needs the release build and fio (apt-get install fio).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent


def libzero(options: argparse.Namespace, *more: str) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [options.zero, "bench", "nvme", "--path", options.folder, "--size", str(options.size)]
        command += ["--blocks", str(options.block), "--depths", str(options.depth), "--rounds", "1", "--json", file.name, *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(Path(file.name).read_text())["results"][0]
    return {way: result[f"{way}_gb_per_s"]["median"] for way in ("write", "read")}


def fio(options: argparse.Namespace) -> dict[str, float]:
    rates = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for way in ("write", "read"):
            command = ["fio", "--name=states", f"--filename={folder}/file", f"--rw={way}", f"--bs={options.block}", f"--size={options.size}"]
            command += ["--ioengine=io_uring", "--direct=1", f"--iodepth={options.depth}", "--fallocate=posix", "--output-format=json"]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rates[way] = json.loads(output[output.index("{") :])["jobs"][0][way]["bw_bytes"] * 1e-9
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
    if shutil.which("fio") is None:
        sys.exit("fio is missing: apt-get install fio")
    rounds = [(libzero(options), libzero(options, "--no-checksums"), fio(options)) for _ in range(options.rounds)]
    print(f"{options.size >> 20} MiB, blocks of {options.block} bytes, depth {options.depth}: median GB/s, and libzero's over fio's by round")
    for way in ("write", "read"):
        theirs = [figures[-1][way] for figures in rounds]
        print(f"{way:<6} fio                {median(theirs):6.2f}")
        for i, name in enumerate(("libzero", "without checksums")):
            ours = [figures[i][way] for figures in rounds]
            ratios = [mine / other for mine, other in zip(ours, theirs)]
            print(f"{'':<6} {name:<18} {median(ours):6.2f}   {median(ratios):.2f}x  ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
