#!/usr/bin/env python3
"""Memory, bytes sent and speed of BERT-Large and GPT-2 at each stage, beside the formulas of ZeRO's paper.

    benchmarks/stages.py build/release/zero [--ranks 2] [--steps 8] [--rounds 2] [--json FILE] [--only bert-large]

It runs `zero train` in bf16 with fp32 master weights (16 bytes a parameter, as the paper's mixed precision) from random weights. States and
bytes are the ledger's of rank 0, and `peak` is the most that it held, without activations. The paper (arXiv 1910.02054) says how many bytes of
states a parameter has on N ranks (Sections 3.1 and 5): 16, 4 + 12/N, 2 + 14/N and 16/N. It says how many elements a rank sends in a step (Section
7): 2 a parameter, and 3 at stage 3, each times (N-1)/N.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}  # fmt: skip
# model, options: BERT's micro-batch and sequence are those of its paper's first phase, at 4 sequences a rank
MODELS: dict[str, tuple[str | dict[str, Any], list[str]]] = {
    "bert-large": (BERT, ["--task", "mlm", "--mask-token", "103", "--micro-batch", "4", "--seq", "128"]),
    "gpt2": ("gpt2", ["--micro-batch", "1", "--seq", "256"]),
}
STATES = ("parameters", "gradients", "optimizer")
SENT = ("all_gather", "reduce_scatter", "all_reduce")
WARM_UP = 2


def run(program: str, folder: Path, name: str, stage: int, ranks: int, steps: int) -> dict[str, float]:
    model, options = MODELS[name]
    if not isinstance(model, str):
        (folder / "config.json").write_text(json.dumps(model))
        model = str(folder / "config.json")
    command = [program, "train", "--model", model, "--data", folder / "text.txt", "--out", folder / "run", "--overwrite", "--nproc", ranks, "--stage", stage, "--dtype", "bf16",
               "--steps", WARM_UP + steps, "--eval-tokens", 0, "--sample-tokens", 0, *options]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(str(word) for word in command)}\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    memory = next(line for line in lines if line.get("event") == "memory")["per_rank"][0]
    traffic = next(line for line in lines if line.get("event") == "traffic")
    rank = traffic["per_rank"][0]
    return {"states": sum(memory[state]["peak"] for state in STATES), "formula": sum(memory[state]["formula"] for state in STATES), "padding": memory["padding"],
            "peak": memory["total"]["peak"], "sent": sum(rank[kind]["logical_bytes"] for kind in SENT) / traffic["steps"], "loss": [line["loss"] for line in lines if "step_ms" in line][-1],
            "step_ms": statistics.median(line["step_ms"] for line in lines if "step_ms" in line and line["step"] > WARM_UP)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=sorted(MODELS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    n = arguments.ranks
    paper_states = (16, 4 + 12 / n, 2 + 14 / n, 16 / n)
    paper_sent = [times * (n - 1) / n for times in (2, 2, 2, 3)]
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(f"line {i % 97}: the quick brown fox jumps over the lazy dog\n" for i in range(20000)))
        print(f"load {os.getloadavg()[0]:.2f} before the start; {n} ranks, bf16 with fp32 master weights\n")
        print(f"{'model':<11} {'stage':>5} {'states MB':>10} {'B/param':>8} {'paper':>6} {'peak MB':>8} {'sent/param':>10} {'paper':>6} {'step ms':>8} {'speed':>6}  loss")
        for model in [arguments.only] if arguments.only else MODELS:
            rounds = [[run(arguments.program, folder, model, stage, n, arguments.steps) for stage in range(4)] for _ in range(arguments.rounds)]
            # Stage 0 holds 16 bytes a parameter and nothing else.
            parameters = (rounds[0][0]["states"] - rounds[0][0]["padding"]) / 16
            base = statistics.median(each[0]["step_ms"] for each in rounds)
            for stage in range(4):
                row = rounds[0][stage]
                milliseconds = statistics.median(each[stage]["step_ms"] for each in rounds)
                results.append({"model": model, "stage": stage, "parameters": parameters, **row, "step_ms": milliseconds})
                print(f"{model:<11} {stage:>5} {row['states'] / 1e6:>10.1f} {row['states'] / parameters:>8.3f} {paper_states[stage]:>6.1f} {row['peak'] / 1e6:>8.0f} "
                      f"{row['sent'] / 2 / parameters:>10.3f} {paper_sent[stage]:>6.2f} {milliseconds:>8.1f} {base / milliseconds:>6.2f}  {row['loss']:.6f}", flush=True)  # fmt: skip
    print(f"\nload {os.getloadavg()[0]:.2f} at the end")
    if arguments.json:
        arguments.json.write_text(json.dumps({"ranks": n, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
