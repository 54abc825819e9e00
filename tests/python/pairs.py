"""Loops that run twice: with sharded states on all ranks, and in plain PyTorch with the batches of all ranks."""

import copy

import torch

from support import batch, mlp

import libzero

STAGES = (0, 1, 2, 3)
KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1),  # runs as it is, at stages 0 and 1
}


def near(got, expected, where, tolerance=2e-5):
    for name, value in expected.items():
        if value.numel() == 0:
            continue
        difference = (got[name].float() - value.detach().float()).abs().max().item()
        assert difference < tolerance, (where, name, difference)


class Pair:
    """The same loop twice: a sharded model, and a plain one that gets the mean of all ranks' losses."""

    # `zero`: more of the section `zero_optimization`; `keywords`: of the configuration.
    def __init__(self, group, stage, make=KINDS["AdamW"], model=None, groups=None, zero=None, **keywords):
        self.group, self.stage = group, stage
        self.model = model() if model is not None else mlp()
        self.plain = copy.deepcopy(self.model)
        groups = groups or (lambda m: list(m.parameters()))
        self.torch = make(groups(self.plain))
        section = {"stage": stage, "stage3_max_live_parameters": 0, **(zero or {})}
        settings = {"zero_optimization": section, "gradient_clipping": 0, **keywords}
        self.micro_batches = keywords.get("gradient_accumulation_steps", 1)
        self.opt = libzero.shard(self.model, make(groups(self.model)), settings)

    def backward(self, step, of=None):
        of = of or (lambda model, x: model(x).pow(2).mean())
        of(self.model, batch(self.group.rank, step)).backward()
        losses = [of(self.plain, batch(rank, step)) for rank in range(self.group.size)]
        (sum(losses) / len(losses) / self.micro_batches).backward()

    def step(self, step, each=lambda optimizer, model: None, of=None):
        self.backward(step, of)
        self.both(each)
        self.update()

    def update(self):
        self.opt.step()
        self.torch.step()
        self.zero_grad()

    def zero_grad(self, **keywords):
        self.opt.zero_grad(**keywords)
        self.torch.zero_grad(**keywords)

    def both(self, action):
        return action(self.opt, self.model), action(self.torch, self.plain)

    def check(self, where, tolerance=2e-5):
        got = {name: self.opt.parameter(name) for name, _ in self.plain.named_parameters()}
        near(got, dict(self.plain.named_parameters()), (where, self.stage), tolerance)

    def close(self, where, tolerance=2e-5):
        self.check(where, tolerance)
        self.opt.close()


def pairs(group, kinds=("AdamW",), **keywords):
    for kind in kinds:
        for stage in STAGES if kind != "NAdam" else STAGES[:2]:
            yield kind, Pair(group, stage, KINDS[kind], **keywords)
