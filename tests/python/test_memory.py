"""A model that is larger than the memory of a rank is built by libzero.init(), by its constructor and by
from_pretrained, and trains at stage 3 with its states on disk. Needs to make a memory cgroup, as root does."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

try:
    import transformers  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import support  # finds libzero in this tree

LIMIT = 1800  # MiB of both ranks together
RANKS = 2
LIMITED = str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks/limited.sh")
SCRIPT = """
import contextlib, sys
import torch, transformers
import libzero

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
how, folder = sys.argv[1:]
group = libzero.group(timeout=60)
config = transformers.LlamaConfig(
    num_hidden_layers=20, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, vocab_size=2000,
    max_position_embeddings=128,
)
with libzero.init(folder) if how != "whole" else contextlib.nullcontext():
    if how == "pretrained":
        model = transformers.LlamaForCausalLM.from_pretrained(folder + "/model", dtype=torch.float32)
    else:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
count = sum(p.numel() for p in model.parameters())
if how == "save":
    model.save_pretrained(folder + "/model")
    sys.exit()
assert count * 4 > LIMIT / RANKS * 2**20, count
disk = {"device": "nvme", "nvme_path": folder}
opt = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), {"zero_optimization": {
    "stage": 3, "stage3_max_live_parameters": 0, "offload_param": disk,
    "offload_optimizer": {**disk, "gradients": True}}})
model.gradient_checkpointing_enable()
losses = []
for step in range(2):
    tokens = (torch.arange(32) * 7 + group.rank).view(1, 32)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
memory = opt.memory()
assert memory["now"]["parameters"] == memory["now"]["optimizer"] == 0, memory
if group.rank == 0:
    print("losses", *losses, flush=True)
"""


def outcome(how: str, folder: pathlib.Path, limited: bool) -> tuple[int, str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("LIMIT / RANKS", f"{LIMIT} / {RANKS}"))
    arguments = [str(script), how, str(folder)]
    command = [sys.executable, *arguments] if how == "save" else support.command(RANKS, arguments)
    if limited:
        command = ["sh", LIMITED, f"{LIMIT}M", *command]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, env=support.environment()
    )
    return done.returncode, done.stdout + done.stderr


def main() -> None:
    if subprocess.run(["sh", LIMITED, "64M", "true"], capture_output=True, check=False).returncode:
        print("skipped: no memory cgroup can be made here (that takes root, or systemd)")
        sys.exit(77)
    with tempfile.TemporaryDirectory(prefix="libzero-") as name:
        folder = pathlib.Path(name)
        status, text = outcome("save", folder, limited=False)
        assert status == 0, text
        losses = []
        for how in ("constructed", "pretrained"):
            status, text = outcome(how, folder, limited=True)
            assert status == 0, f"{how}: {text}"
            losses.append(next(line for line in text.splitlines() if "losses" in line))
            print(f"passed {how}: {losses[-1]}")
        assert losses[0] == losses[1], losses
        status, text = outcome("whole", folder, limited=True)
        assert status != 0, "built whole it fits, so this test shows nothing"
        print("passed: built whole it does not fit")


if __name__ == "__main__":
    main()
