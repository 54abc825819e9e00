#!/usr/bin/env python3
"""Loads a Llama of 8 billion parameters on two ranks that together may hold it once, and tunes it for a step.

    benchmarks/large_model.py [--program build/release/zero] [--folder FOLDER] [--layers 32] [--only LoRA|QLoRA]

Writes a folder with the sizes of Llama 3.1 8B (arXiv 2407.21783) and arbitrary bf16 weights: 16 GB, which are deleted at
the end. Each run trains an adapter of rank 8 for a step, at stage 3 on 2 ranks, in a memory cgroup of its own with that
limit (the page cache counts, too; it needs the right to make cgroups). Prints the ledger's peaks by category beside the
formulas, the cgroup's peak, and seconds. docs/fine-tuning.md has what it printed. Only the standard library is used."""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
          "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
          "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
          "torch_dtype": "bfloat16"}
RUNS = {"LoRA": (17, []), "QLoRA": (8, ["--lora-quantize-base", "nf4"])}  # GiB for both ranks, and options


def tensors(layers):
    """(name, shape) of every tensor, in the order of the model."""
    wide, inner, words = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    narrow = wide // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    yield "model.embed_tokens.weight", (words, wide)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (wide,)
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow), ("o", wide)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, wide)
        yield at + "post_attention_layernorm.weight", (wide,)
        yield at + "mlp.gate_proj.weight", (inner, wide)
        yield at + "mlp.up_proj.weight", (inner, wide)
        yield at + "mlp.down_proj.weight", (wide, inner)
    yield "model.norm.weight", (wide,)
    yield "lm_head.weight", (words, wide)


def write_model(folder, layers):
    """Writes one safetensors file. Its numbers are some thousand that repeat, within +-0.02."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    header, place = {}, 0
    for name, shape in tensors(layers):
        count = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + count]}
        place += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draw = random.Random(1)
    floats = b"".join(struct.pack("<f", draw.uniform(-0.02, 0.02))[2:] for _ in range(1 << 20))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while place > 0:
            place -= file.write(floats[:min(place, len(floats))])
    return sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape in tensors(layers))


class Cgroup:
    """A memory cgroup (version 1 or 2) with a limit in bytes."""

    def __init__(self, limit):
        first = pathlib.Path("/sys/fs/cgroup/memory")
        self.old = first.is_dir()
        self.place = (first if self.old else pathlib.Path("/sys/fs/cgroup")) / f"zero_large_model_{os.getpid()}"
        try:
            self.place.mkdir()
            (self.place / ("memory.limit_in_bytes" if self.old else "memory.max")).write_text(str(limit))
        except OSError as error:
            sys.exit(f"A memory cgroup could not be made ({error}). Run this with the right to make one.")

    def join(self):
        (self.place / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self):
        return int((self.place / ("memory.max_usage_in_bytes" if self.old else "memory.peak")).read_text())

    def remove(self):
        self.place.rmdir()


def tune(program, folder, out, limit, words):
    group = Cgroup(limit)
    command = [program, "train", "--from", folder, "--data", folder / "tokens.bin", "--out", out, "--overwrite", "--nproc",
               "2", "--stage", "3", "--dtype", "bf16", "--threads", "1", "--lora-rank", "8", "--micro-batch", "1", "--seq",
               "128", "--steps", "1", "--eval-tokens", "0", "--sample-tokens", "0", "--live-parameters", "600000000", *words]
    begin = time.monotonic()
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, preexec_fn=group.join, check=False)
    seconds = time.monotonic() - begin
    peak = group.peak()
    group.remove()
    if done.returncode != 0:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
        sys.exit(f"{done.stdout[-3000:]}\nIt ended with {how}.")
    table = re.search(r"memory at its peak.*?\n\n", done.stdout, re.DOTALL)
    step = re.search(r"^ +1 +[0-9.]+ .*$", done.stdout, re.MULTILINE)
    print(table[0] if table else done.stdout)
    print(step[0] if step else "")
    print(f"cgroup's peak {peak / 2**30:.2f} GiB of {limit / 2**30:.2f}; {seconds:.0f} s in all\n", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=pathlib.Path("build/release/zero"))
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--only", choices=RUNS)
    options = parser.parse_args()
    place = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
    try:
        count = write_model(place, options.layers)
        (place / "tokens.bin").write_bytes(random.Random(2).randbytes(1 << 16))
        print(f"{count:,} parameters, {2 * count / 2**30:.2f} GiB in bf16")
        for name, (limit, words) in RUNS.items():
            if options.only in (None, name):
                print(name)
                tune(options.program.absolute(), place, place / "run", limit * 2**30, words)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
