"""Weights after 20 steps of PyTorch's and DeepSpeed's own optimizers, for peers_test.cpp: a line each, name and numbers."""
import contextlib
import sys

import torch


def parameter():
    return torch.sin(torch.arange(400, dtype=torch.float64) * 0.7 + 1).to(torch.float32).view(25, 16)


def gradient(step):
    return (torch.cos(torch.arange(400, dtype=torch.float64).square() * 0.013 + 1.3 * step) * 0.5).to(torch.float32).view(25, 16)


def train(name, make):
    p = torch.nn.Parameter(parameter())
    optimizer = make([p])
    for step in range(1, 21):
        p.grad = gradient(step)
        optimizer.step()
    print(name, *(repr(x) for x in p.detach().flatten().tolist()))


def deepspeed_optimizers():
    """Those whose operators this machine can build."""
    with contextlib.redirect_stdout(sys.stderr):
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.lion import DeepSpeedCPULion
    yield "DeepSpeedCPUAdam", lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1)
    yield "DeepSpeedCPUAdagrad", lambda p: DeepSpeedCPUAdagrad(p, lr=1e-2, weight_decay=0.1)
    yield "DeepSpeedCPULion", lambda p: DeepSpeedCPULion(p, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)


train("Adam", lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1))
train("AdamW", lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))
train("SGD", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1))
train("Adagrad", lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.01, weight_decay=0.1))
if hasattr(torch.optim, "Muon"):
    train("Muon", lambda p: torch.optim.Muon(p, lr=1e-2, weight_decay=0.1))
try:
    for name, make in deepspeed_optimizers():
        with contextlib.redirect_stdout(sys.stderr):
            make([torch.nn.Parameter(parameter())])  # builds its operator
        train(name, make)
except Exception as error:  # no DeepSpeed, or no compiler that it takes
    print("without DeepSpeed:", error, file=sys.stderr)
