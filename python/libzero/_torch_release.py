"""Whether the torch of this process is the one that libzero was built with."""

import os
import sys


def release(version: str) -> str:
    """Major and minor number: "2.11" of "2.11.0+cpu". LibTorch's C++ interface stays the same within one."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def mapped(library: str) -> set[str]:
    """The files of this name that are mapped into this process."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            lines = [line.rstrip("\n") for line in maps if library in line]
    except OSError:  # a system without /proc
        return set()
    return {line[line.index("/") :] for line in lines if line.endswith("/" + library)}


def check() -> None:
    """Imports torch. Throws an ImportError that names the remedy, unless it is of the release that libzero was built with and the only
    LibTorch of this process."""
    try:
        from ._built import TORCH as built
    except ModuleNotFoundError:
        raise ImportError(
            f"{os.path.dirname(__file__)} holds libzero's sources, without its extension module. Build it: `make python`, then import it from "
            "build/release/python; or `pip install ./python`."
        ) from None
    needed = release(built)
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"libzero needs torch {needed}, and {sys.executable} has no torch. Install it: pip install 'torch=={needed}.*'"
        ) from None
    if release(torch.__version__) != needed:
        raise ImportError(
            f"libzero was built with torch {needed}, and {sys.executable} has torch {torch.__version__}. Install the one that it needs: "
            f"pip install 'torch=={needed}.*'; or build libzero with yours: PYTHON={sys.executable} LIBTORCH={os.path.dirname(os.path.dirname(torch.__file__))} scripts/wheel.sh"
        )
    own = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    for other in sorted(mapped("libtorch_cpu.so")):
        if os.path.exists(other) and os.path.exists(own) and not os.path.samefile(other, own):
            raise ImportError(
                f"libzero needs the LibTorch of the imported torch, {own}, and this process has loaded {other}. Import torch before what loads that one, "
                "and take it out of LD_LIBRARY_PATH and LD_PRELOAD."
            )
