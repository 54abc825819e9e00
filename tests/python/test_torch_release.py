"""`import libzero` without torch, with another release, and with a LibTorch from elsewhere in the process: an ImportError that names the remedy."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

package = Path(os.environ["PYTHONPATH"])
built = re.search(r'TORCH = "(\d+\.\d+)', (package / "libzero" / "_built.py").read_text())[1]
install = f"pip install 'torch=={built}.*'"


def run(*lines: str, path: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> str:
    """What a Python prints that runs these lines, with `path` before libzero's folder."""
    environment = os.environ | {"PYTHONPATH": ""}
    prepared = [f"import sys; sys.path[:0] = {[*path, str(package)]!r}", *lines]
    done = subprocess.run([sys.executable, *options, "-c", "\n".join(prepared)], env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


def expect(printed: str, *words: str) -> None:
    last = printed.strip().splitlines()[-1]
    for word in words:
        assert word in last, f"{word!r} is not in the last line of:\n{printed}"
    print("  " + last)


with tempfile.TemporaryDirectory() as folder:
    fake = Path(folder, "torch")
    fake.mkdir()
    for release in ("2.1.0+cpu", f"{built}1.1"):
        (fake / "__init__.py").write_text(f"__version__ = {release!r}\n")
        expect(run("import libzero", path=(folder,)), "ImportError", f"was built with torch {built}", f"has torch {release}", install, "scripts/wheel.sh")
    (fake / "__init__.py").write_text("import not_there\n")  # an error of torch's own stays what it is
    expect(run("import libzero", path=(folder,)), "ModuleNotFoundError", "not_there")

    expect(run("import libzero", options=("-I", "-S")), "ImportError", f"needs torch {built}", "has no torch", install)

    sources = Path(folder, "libzero")  # the package without what a build makes
    sources.mkdir()
    for file in package.joinpath("libzero").glob("*.py"):
        if file.name != "_built.py":
            (sources / file.name).write_text(file.read_text())
    fake.joinpath("__init__.py").unlink()
    fake.rmdir()
    expect(run("import libzero", path=(folder,)), "ImportError", "make python", "pip install ./python")

other = Path(os.environ["ZERO_LIBTORCH"], "lib", "libtorch_cpu.so")
if not other.samefile(Path(torch.__file__).with_name("lib") / other.name):  # libzero may be built with the environment's own
    load = f"import ctypes; ctypes.CDLL({str(other)!r})"
    expect(run(load, "import libzero"), "ImportError", "has loaded", str(other), "Import torch before")

expect(run("import libzero; print('imported', libzero.__name__)"), "imported libzero")
expect(run("import torch, libzero; print('imported', libzero.__name__)"), "imported libzero")
