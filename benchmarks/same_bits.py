#!/usr/bin/env python3
"""Trains with two builds of `zero` and compares losses and final weights as bytes.

    benchmarks/same_bits.py BEFORE AFTER [--untied] [--only WORD]

BEFORE and AFTER are programs (build/release/zero of two commits). Every setting of the grid below is
run with both, on the same text, for a few steps of a small model. Prints a line a setting and exits
with 1 where any differs. Only the standard library is used.
"""
import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile

MODEL = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4,
         "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
COMMON = ["--seq", "48", "--micro-batch", "2", "--steps", "6", "--lr", "1e-3", "--sample-tokens", "0",
          "--bucket-size", "100000", "--live-parameters", "60000", "--seed", "7"]


def settings(disk):
    """(name, options) of every run."""
    nvme = ["--offload-optimizer", "nvme", "--nvme-path", disk]
    everything = nvme + ["--offload-param", "nvme", "--offload-gradients"]
    for ranks in (1, 2, 3):
        for stage in (0, 1, 2, 3):
            for dtype in ("fp32", "bf16"):
                base = ["--nproc", str(ranks), "--stage", str(stage), "--dtype", dtype]
                name = f"{ranks} ranks, stage {stage}, {dtype}"
                yield name, base
                if ranks == 1:
                    continue
                yield name + ", accumulate 3", base + ["--accumulate", "3"]
                yield name + ", optimizer on the host", base + ["--offload-optimizer", "cpu"]
                yield name + ", optimizer on disk", base + nvme
                yield name + ", delayed", base + nvme + ["--delayed-update-after", "2"]
                if stage >= 2:
                    yield name + ", in backward", base + ["--update-in-backward", "--clip", "0"]
                if stage == 3:
                    yield name + ", all on disk", base + everything
                    yield name + ", all on the host", base + ["--offload-optimizer", "cpu", "--offload-param", "cpu"]
                    yield (name + ", layer-major, recomputed",
                           base + ["--accumulate", "3", "--layer-major", "--recompute", "1"])
                if dtype == "bf16":
                    yield name + ", split master weights", base + ["--split-master-weights"]


def result(program, options, data, model, folder):
    """Losses as they read back, and a digest of the weights."""
    command = [program, "train", "--model", str(model), "--data", str(data), "--out", str(folder), "--overwrite",
               "--threads", "1", *COMMON, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    losses = [(line["loss"], line["grad_norm"]) for line in lines if "step" in line and "loss" in line and "event" not in line]
    return losses, hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--only", default="", help="run the settings whose name has this word")
    parser.add_argument("--untied", action="store_true", help="the output projection is a parameter of its own")
    arguments = parser.parse_args()
    differing = 0
    count = 0
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        (work / "disk").mkdir()
        (work / "model.json").write_text(json.dumps(MODEL | {"tie_word_embeddings": not arguments.untied}))
        text = "".join(f"{i} times {i} is {i * i}, and the digits of it add to {sum(map(int, str(i * i)))}.\n"
                       for i in range(4000))
        (work / "text.txt").write_text(text)
        subprocess.run([arguments.after, "data", "prepare", work / "text.txt", "--out", work / "data", "--tokenizer", "bytes"],
                       check=True, capture_output=True)
        for setting, options in settings(str(work / "disk")):
            if arguments.only not in setting:
                continue
            before = result(arguments.before, options, work / "data", work / "model.json", work / "before")
            after = result(arguments.after, options, work / "data", work / "model.json", work / "after")
            count += 1
            same = before == after
            differing += not same
            print(f"{'same' if same else 'DIFFERS':8} {setting}: {len(after[0])} losses, the last {after[0][-1][0]}", flush=True)
    print(f"{count - differing} of {count} settings give the same bytes")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
