"""What `zero ckpt export` writes goes on in the real programs with the losses of the run that was saved.

    exports_in_peers.py torch|deepspeed ZERO

ctest runs both under the label `peers`. DeepSpeed is taken from the Python that ZERO_DEEPSPEED_PYTHON names, from that of
scripts/deepspeed_environment.sh or benchmarks/peers/setup.sh, or from the one that runs this."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_PEERS = Path(__file__).resolve().parents[2] / "benchmarks/peers"
sys.path.insert(0, str(_PEERS))

from universal import RANKS_SAVED, STEP, batch, import_sample, model_of_the_samples  # noqa: E402


def deepspeeds_python() -> str | None:
    """A Python that has DeepSpeed and torch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "libzero"
    candidates = [os.environ.get("ZERO_DEEPSPEED_PYTHON"), cache / "deepspeed/bin/python", cache / "peers/bin/python", sys.executable]
    look = "import importlib.util as u, sys; sys.exit(not (u.find_spec('deepspeed') and u.find_spec('torch')))"
    for python in filter(None, candidates):
        if os.path.exists(python) and subprocess.run([python, "-c", look], check=False).returncode == 0:
            return str(python)
    return None


def in_deepspeed(zero: str) -> int:
    python = deepspeeds_python()
    if python is None:
        print(
            "skipped: DeepSpeed is not installed, so it is left out that it loads the universal checkpoints of `zero ckpt "
            "export --to deepspeed` with equal losses. scripts/deepspeed_environment.sh installs it."
        )
        return 77
    command = [python, _PEERS / "universal.py", zero, "--stages", "1", "2", "--ranks", "2"]
    return subprocess.run(command, check=False).returncode


def in_torch(zero: str) -> int:
    """A plain loop over a DCP folder: the next loss is that of the run that was saved, the one after its update too."""
    import torch
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, expected = import_sample(zero, folder)
        export = [zero, "ckpt", "export", folder / "own", folder / "dcp", "--to", "dcp"]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)

        model = model_of_the_samples()
        names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        moments = {name: {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")} for name, p in names.items()}
        groups: list[dict[str, Any]] = [dict.fromkeys(("lr", "betas", "eps", "weight_decay", "params")) for _ in range(2)]
        state: dict[str, Any] = {
            "model": model.state_dict(),
            "optim": {
                "state": {name: {**each, "step": torch.tensor(0.0)} for name, each in moments.items()},
                "param_groups": groups,
            },
        }
        dcp.load(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
        model.load_state_dict(state["model"])
        groups = state["optim"]["param_groups"]
        optimizer = torch.optim.AdamW([{**each, "params": [names[name] for name in each["params"]]} for each in groups])
        for name, parameter in names.items():
            optimizer.state[parameter] = state["optim"]["state"][name]
        for step in (0, 1):
            losses = [model(*batch(STEP + step, rank)) for rank in range(RANKS_SAVED)]
            wanted = [each["next_losses"][step][0] for each in expected]
            found = [loss.item() for loss in losses]
            assert all(abs(a - b) <= 1e-6 * abs(b) for a, b in zip(found, wanted, strict=True)), (step, found, wanted)
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            torch.nn.utils.clip_grad_norm_(list(names.values()), 1.0)
            optimizer.step()
    print("torch goes on from `zero ckpt export --to dcp` with the losses of the run that was saved")
    return 0


if __name__ == "__main__":
    sys.exit({"torch": in_torch, "deepspeed": in_deepspeed}[sys.argv[1]](os.path.abspath(sys.argv[2])))
