#!/usr/bin/env python3
"""Holds DeepSpeed's estimator and accelerate's beside the memory that benchmarks/plan_memory.py has measured, which wrote it with --json.

    PYTHONPATH=build/release/python $(scripts/deepspeed_environment.sh) benchmarks/peers/estimators.py FILE

Both know states alone: neither asks for a batch.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs, model_to_params
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/python"))
from plan_models import MODELS

RANKS = 2


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())
    print("| model, bf16, stage 3 on 2 ranks | held, bytes | libzero.plan | DeepSpeed | accelerate |\n|---|---|---|---|---|")
    for row in rows:
        if row["ranks"] != RANKS or not row["setting"].startswith("bf16, stage 3, micro-batch"):
            continue
        model = MODELS[row["model"]][0]()
        total, largest = model_to_params(model)
        deepspeed = estimate_zero3_model_states_mem_needs(total, largest, num_gpus_per_node=RANKS, cpu_offload=False, cpu_offload_params=False)[1]
        accelerate = max(estimate_training_usage(calculate_maximum_sizes(model)[0], "bfloat16").values())
        off = [f"{estimate:,.0f} ({100 * (estimate / row['held'] - 1):+.1f} %)" for estimate in (row["predicted"], deepspeed, accelerate)]
        print(f"| {row['model']} | {row['held']:,} | {' | '.join(off)} |")
    with torch.device("meta"):
        large = GPT2LMHeadModel(GPT2Config())
    print(f"\nGPT-2 on meta has {sum(p.numel() for p in large.parameters()):,} parameters; DeepSpeed's model_to_params finds {model_to_params(large)[0]:,}.")


main()
