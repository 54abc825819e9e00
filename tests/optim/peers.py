"""peers.py torch|transformers|deepspeed: weights after 20 steps of their own optimizers, for peers_test.cpp. A line each: name and numbers,
or "absent", name and reason."""
import contextlib
import sys

import torch


def parameter():
    return torch.sin(torch.arange(400, dtype=torch.float64) * 0.7 + 1).to(torch.float32).view(25, 16)


def gradient(step):
    return (torch.cos(torch.arange(400, dtype=torch.float64).square() * 0.013 + 1.3 * step) * 0.5).to(torch.float32).view(25, 16)


def train(name, make, shape=(25, 16)):
    p = torch.nn.Parameter(parameter().view(shape))
    optimizer = make([p])
    for step in range(1, 21):
        p.grad = gradient(step).view(shape)
        optimizer.step()
    print(name, *(repr(x) for x in p.detach().flatten().tolist()))


def torch_optimizers():
    train("Adam", lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1))
    train("AdamW", lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))
    train("SGD", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1))
    train("Adagrad", lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.01, weight_decay=0.1))
    if hasattr(torch.optim, "Adafactor"):
        train("Adafactor", lambda p: torch.optim.Adafactor(p, lr=1e-1, weight_decay=0.1))
        train("AdafactorVector", lambda p: torch.optim.Adafactor(p, lr=1e-1, weight_decay=0.1), shape=(400,))
        train("AdafactorValues", lambda p: torch.optim.Adafactor(p, lr=1e-2, beta2_decay=-0.6, eps=(0.05, 0.5), d=1.05))
    else:
        print("absent Adafactor: this torch has none")
        print("absent AdafactorVector: this torch has none")
        print("absent AdafactorValues: this torch has none")
    if hasattr(torch.optim, "Muon"):
        train("Muon", lambda p: torch.optim.Muon(p, lr=1e-2, weight_decay=0.1))
    else:
        print("absent Muon: this torch has none")


def transformers_optimizers():
    try:
        from transformers.optimization import Adafactor
    except ImportError as error:
        print(f"absent transformers: {error}")
        return
    train("Adafactor", lambda p: Adafactor(p))
    train("AdafactorVector", lambda p: Adafactor(p), shape=(400,))
    train("AdafactorWarmup", lambda p: Adafactor(p, warmup_init=True, clip_threshold=0.7, decay_rate=-0.6))
    train("AdafactorRate", lambda p: Adafactor(p, lr=1e-2, eps=(1e-6, 1e-3), scale_parameter=False, relative_step=False))


def deepspeed_optimizers():
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed.ops
    except ImportError as error:
        print(f"absent DeepSpeed: {error}")
        return
    makers = {
        "DeepSpeedCPUAdam": lambda p: deepspeed.ops.adam.DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1),
        "DeepSpeedCPUAdagrad": lambda p: deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(p, lr=1e-2, weight_decay=0.1),
        "DeepSpeedCPULion": lambda p: deepspeed.ops.lion.DeepSpeedCPULion(p, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)}
    for name, make in makers.items():
        try:
            with contextlib.redirect_stdout(sys.stderr):
                make([torch.nn.Parameter(parameter())])  # builds its operator
        except Exception as error:  # no compiler that it takes
            print(f"absent {name}: {' '.join(str(error).split())}")
            continue
        train(name, make)


{"torch": torch_optimizers, "transformers": transformers_optimizers, "deepspeed": deepspeed_optimizers}[sys.argv[1]]()
