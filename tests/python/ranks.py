"""For test scripts that run on several ranks."""

from __future__ import annotations

import os
import subprocess
import sys


def under_launcher(ranks: int, timeout: float = 600) -> None:
    """Goes on as one of `ranks` ranks: started otherwise, the script is run again under `zero launch` (the program's
    path is in ZERO_PROGRAM), and its exit status is this process's. Status 77 where the environment lacks something."""
    if os.environ.get("LIBZERO_TEST_RANKS") == str(ranks):
        return
    try:
        import libzero  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}")
        sys.exit(77)
    program = os.environ.get("ZERO_PROGRAM", "build/release/zero")
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "LIBZERO_TEST_RANKS": str(ranks)}
    command = [program, "launch", "-n", str(ranks), "--", sys.executable, *sys.argv]
    sys.exit(subprocess.run(command, env=environment, timeout=timeout, check=False).returncode)
