"""Runs fio: what a disk reaches with io_uring, past the page cache, to compare with."""

import json
import os
import shutil
import subprocess
import sys


def require() -> None:
    if shutil.which("fio") is None:
        sys.exit("fio is missing: apt-get install fio")


def gb_per_s(file: str, way: str, *, size: int, block: int, depth: int, huge_pages: bool = True, seconds: int = 0, read_percent: int = 50) -> float:
    """Of reading and writing together. `way` is read, write or rw, whose part of reading is `read_percent`; once over the file, or for some seconds."""
    command = ["fio", "--name=states", f"--filename={file}", f"--rw={way}", f"--bs={block}", f"--size={size}", "--fallocate=posix"]
    command += ["--ioengine=io_uring", "--direct=1", f"--iodepth={depth}", "--output-format=json"]
    if seconds:
        command += ["--time_based", f"--runtime={seconds}"]
    if way == "rw":
        command.append(f"--rwmixread={read_percent}")
    # Buffers in huge pages, as libzero's are: a block of small pages takes several requests to the disk.
    environment = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else {})
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    return (job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) * 1e-9
