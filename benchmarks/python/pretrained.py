#!/usr/bin/env python3
"""Loads a Llama from its files onto two ranks and trains it, with libzero and with transformers' own sharding, in turns.

    benchmarks/python/pretrained.py [--rounds 3] [--layers 8] [--width 768]

It needs torch and transformers (scripts/python_environment.sh), and a build with the Python package. transformers shards by
from_pretrained(distributed_config=DistributedConfig(fsdp_size=2)), which is FSDP2. Prints a line for each: how much
loading added to the greatest resident memory of a rank, the greatest of the whole run, tokens per second, and the losses.
docs/benchmarks.md has what it printed."""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS, ROWS, LENGTH, STEPS = 2, 1, 256, 6


def resident(key):
    """Bytes that this process holds: VmRSS now, VmHWM at most since it began."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def libzeros(folder):
    import libzero
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with libzero.init(values=False):
        model = transformers.AutoModelForCausalLM.from_config(config)
    group = libzero.group()
    opt = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), stage=3, gradient_clipping=1.0, group=group,
                        weights=folder)  # fmt: skip

    def step(tokens):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    return step, opt.close


def transformers_own(folder):
    import torch
    import torch.distributed as dist
    import transformers
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=RANKS)
    )
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.item()

    return step, dist.destroy_process_group


ARMS = {"libzero": libzeros, "transformers": transformers_own}


def rank(arm, folder):
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    number = int(os.environ["RANK"])
    torch.manual_seed(number)
    vocabulary = transformers.AutoConfig.from_pretrained(folder).vocab_size
    before = resident("VmRSS")
    begin = time.monotonic()
    step, end = ARMS[arm](folder)
    loading = time.monotonic() - begin
    loaded = resident("VmHWM") - before
    losses, times = [], []
    for _ in range(STEPS):
        begin = time.monotonic()
        losses.append(step(torch.randint(vocabulary, (ROWS, LENGTH))))
        times.append(time.monotonic() - begin)
    end()
    made = {"loading_s": loading, "loaded": loaded, "peak": resident("VmHWM") - before, "losses": losses,
            "tokens_per_s": RANKS * ROWS * LENGTH / statistics.median(times[1:])}  # fmt: skip
    pathlib.Path(folder, f"{arm}.{number}.json").write_text(json.dumps(made))


def run(arm, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for number in range(RANKS):
        environment = {
            **os.environ, "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "build/release/python"),
        }  # fmt: skip
        ranks.append(subprocess.Popen([sys.executable, __file__, "--rank", arm, str(folder)], env=environment))
    if any([each.wait() for each in ranks]):
        sys.exit(f"{arm} failed")
    return [json.loads((folder / f"{arm}.{number}.json").read_text()) for number in range(RANKS)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=32000, hidden_size=options.width, intermediate_size=options.width * 11 // 4,
            num_hidden_layers=options.layers, num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(folder)
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count:,} parameters, {4 * count / 1e6:.0f} MB in fp32; {RANKS} ranks, {ROWS} x {LENGTH} tokens each")
        found = {arm: [] for arm in ARMS}
        for turn in range(options.rounds):
            for arm in list(ARMS)[:: 1 if turn % 2 == 0 else -1]:
                found[arm].append(run(arm, folder))
    for arm, rounds in found.items():
        of = {key: statistics.median(max(each[key] for each in ranks) for ranks in rounds) for key in ("loaded", "peak", "loading_s")}
        speed = [min(each["tokens_per_s"] for each in ranks) for ranks in rounds]
        losses = [statistics.mean(each) for each in zip(*(ranks["losses"] for ranks in rounds[0]))]
        print(f"{arm:13} loading {of['loaded'] / 1e6:5.0f} MB a rank in {of['loading_s']:.1f} s, whole run {of['peak'] / 1e6:5.0f} MB; "
              f"{statistics.median(speed):5.0f} tokens/s ({min(speed):.0f} to {max(speed):.0f}); losses "
              + " ".join(f"{loss:.5f}" for loss in losses))  # fmt: skip


if __name__ == "__main__":
    main()
