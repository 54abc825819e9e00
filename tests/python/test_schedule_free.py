"""The engine's schedule-free AdamW in Python: the paper's recursion, and schedulefree's class where that is installed."""

import copy
import importlib.util

import torch

from support import batch, expect, main, mlp, ranks

import libzero

VALUES = {"lr": 2e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "warmup_steps": 4}


class Recursion:
    """2405.15682 with x, z and the sum of the weights kept as they are, in fp64."""

    def __init__(self, parameters, lr, betas, eps, weight_decay, warmup_steps):
        self.parameters, self.lr, (self.beta1, self.beta2) = list(parameters), lr, betas
        self.eps, self.decay, self.warmup = eps, weight_decay, warmup_steps
        self.x = [p.detach().double() for p in self.parameters]
        self.z = [x.clone() for x in self.x]
        self.v = [torch.zeros_like(x) for x in self.x]
        self.steps, self.sum = 0, 0.0

    def y(self):
        return [(1 - self.beta1) * z + self.beta1 * x for x, z in zip(self.x, self.z)]

    @torch.no_grad()
    def show(self, values):
        for p, value in zip(self.parameters, values):
            p.copy_(value)

    def eval(self):
        self.show(self.x)

    def train(self):
        self.show(self.y())

    def step(self):
        self.steps += 1
        rate = self.lr * min(1.0, self.steps / self.warmup)
        self.sum += rate**2
        share = rate**2 / self.sum
        for i, (p, y) in enumerate(zip(self.parameters, self.y())):
            g = p.grad.double()
            self.v[i] = self.beta2 * self.v[i] + (1 - self.beta2) * g * g
            root = (self.v[i] / (1 - self.beta2**self.steps)).sqrt()
            self.z[i] = self.z[i] - rate * (g / (root + self.eps) + self.decay * y)
            self.x[i] = (1 - share) * self.x[i] + share * self.z[i]
        self.train()


def makers():
    yield Recursion
    if importlib.util.find_spec("schedulefree"):
        import schedulefree

        yield schedulefree.AdamWScheduleFree


def difference(model, plain):
    return max((p - q).abs().max().item() for p, q in zip(model.parameters(), plain.parameters()))


@ranks(1, 2)
def test_steps_and_means_are_those_of_the_recursion(group):
    for make in makers():
        for stage in (0, 1, 2, 3):
            model = mlp()
            plain = copy.deepcopy(model)
            reference = make(plain.parameters(), **VALUES)
            reference.train()
            section = {"type": "ScheduleFreeAdamW", "params": {**VALUES, "betas": list(VALUES["betas"])}}
            settings = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0, "optimizer": section}
            opt = libzero.shard(model, None, settings)
            for step in range(12):
                model(batch(group.rank, step)).pow(2).mean().backward()
                for p in plain.parameters():
                    p.grad = None
                losses = [plain(batch(rank, step)).pow(2).mean() for rank in range(group.size)]
                (sum(losses) / group.size).backward()
                opt.step()
                reference.step()
                where = (make.__name__, stage, step)
                with libzero.gathered(model):
                    assert difference(model, plain) < 2e-6, (where, difference(model, plain))
                if step % 4 != 3:
                    continue
                opt.eval()
                reference.eval()
                with libzero.gathered(model):
                    assert difference(model, plain) < 2e-6, (where, "mean", difference(model, plain))
                values, mean = opt.full_state_dict(), opt.parameter("0.bias")
                assert group.rank != 0 or torch.equal(values["0.bias"], mean)
                with expect(libzero.Error, "opt.train"):
                    opt.step()
                opt.train()
                reference.train()
            opt.close()


main()
