"""Prints what DeepSpeed's own schedulers do, for tests/optim/schedule_peer_test.cpp.

Reads the JSON file that it is given: [{"type": ..., "params": {...}, "lr": ..., "steps": ...}, ...], and prints a line for each update:
case, update, rate, and beta1 and beta2 where the optimizer has them, with 17 digits.
"""
import json
import logging
import sys

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)

for number, case in enumerate(json.load(open(sys.argv[1], encoding="utf-8"))):
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=case["lr"], betas=(0.9, 0.999))
    scheduler = getattr(lr_schedules, case["type"])(optimizer, **case["params"])
    for update in range(1, case["steps"] + 1):
        group = optimizer.param_groups[0]
        print(number, update, repr(float(group["lr"])), repr(float(group["betas"][0])), repr(float(group["betas"][1])))
        scheduler.step()
