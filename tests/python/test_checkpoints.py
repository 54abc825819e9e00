"""What `zero ckpt export` writes is read by the programs that it is for: torch.load(weights_only=True), torch.distributed.checkpoint and
safetensors."""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

from support import main, need, ranks

need("torch", "safetensors")

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

_SAMPLES = Path(__file__).resolve().parents[1] / "checkpoint/samples/ckpt-samples.tar.xz"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def zero(*arguments: Any) -> None:
    subprocess.run([os.environ["ZERO_PROGRAM"], "ckpt", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


@ranks(1, alone=True)
def test_exports_are_read(group: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(_SAMPLES) as tar:
            tar.extractall(folder, filter="data")
        sample = folder / "ckpt-samples/ds/z3-fp32"
        expected = load_file(f"{sample}.expected.safetensors")
        masters = {key[5:]: value for key, value in expected.items() if key.startswith("fp32.")}
        zero("import", sample, folder / "own")
        for form in ("hf", "deepspeed", "dcp"):
            zero("export", folder / "own", folder / form, "--to", form)

        weights = load_file(folder / "hf/model.safetensors")
        for key, value in masters.items():
            assert torch.equal(weights[key], value), key
        assert torch.equal(weights["mean"], expected["buffer.mean"])

        step = folder / "deepspeed" / (folder / "deepspeed/latest_universal").read_text()
        for path in step.rglob("*.pt"):
            torch.load(path, weights_only=True)
        for key, value in masters.items():
            assert torch.equal(torch.load(step / "zero" / key / "fp32.pt")["param"], value), key
            for moment in _MOMENTS:
                found = torch.load(step / "zero" / key / f"{moment}.pt")["param"]
                assert torch.equal(found, expected[f"{moment}.{key}"]), (moment, key)
            assert torch.load(step / "zero" / key / "step.pt") == 3
        groups = torch.load(step / "zero/optimizer_state.pt")["param_groups"]
        assert [each["lr"] for each in groups] == [0.01, 0.005] and groups[0]["betas"] == (0.9, 0.95)

        state: dict[str, Any] = {
            "model": {key: torch.zeros_like(value) for key, value in masters.items()},
            "optim": {
                "state": {key: {**{m: torch.zeros_like(value) for m in _MOMENTS}, "step": torch.tensor(0.0)}
                          for key, value in masters.items()},
                "param_groups": [{"lr": 0.0, "betas": None, "params": None} for _ in range(2)],
            },
        }  # fmt: skip
        dcp.load(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
        for key, value in masters.items():
            assert torch.equal(state["model"][key], value), key
            kept = state["optim"]["state"][key]
            assert all(torch.equal(kept[moment], expected[f"{moment}.{key}"]) for moment in _MOMENTS), key
            assert kept["step"] == 3
        assert [each["lr"] for each in state["optim"]["param_groups"]] == [0.01, 0.005]
        assert "emb.weight" in state["optim"]["param_groups"][0]["params"]


main()
