"""ZeRO-1 around any torch optimizer: its bits are those of the optimizer itself with the mean gradients."""

import copy
import io

import torch
from torch import nn

from support import batch, expect, main, mlp, ranks, same, train, weights

import libzero


class Decayed(torch.optim.Optimizer):
    """A third-party optimizer: a state of another shape, a number, and an option that changes."""

    def __init__(self, parameters, lr=0.01, decay=0.9):
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["scale"] = torch.zeros(1)
                state["count"] += 1
                state["scale"].mul_(group["decay"]).add_(p.grad.abs().mean())
                p.addcdiv_(p.grad, state["scale"] + 1e-8, value=-group["lr"] / state["count"])


MAKERS = {
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Decayed": Decayed,
}


def no_vectors(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32, bias=False), nn.Tanh(), nn.Linear(32, 4, bias=False))


def follow(model, make, steps=4, groups=lambda m: list(m.parameters()), **keywords):
    """Trains it, and a copy with the optimizer alone that gets the mean gradients. Returns both optimizers."""
    plain = copy.deepcopy(model)
    reference = make(groups(plain))
    opt = libzero.shard(model, make(groups(model)), gradient_clipping=0, native=False, **keywords)

    def step_reference(step):
        for p, q in zip(model.parameters(), plain.parameters()):
            q.grad = opt.gradient(p)
        reference.step()

    train(model, opt, steps, each=step_reference)
    for p, q in zip(model.parameters(), plain.parameters()):
        difference = (p - q).abs().max().item()
        assert difference == 0, (type(reference).__name__, keywords, difference)
    return opt, reference


@ranks(1, 2, 3)
def test_bits(group):
    for name, make in MAKERS.items():
        for stage in (0, 1):
            opt, reference = follow(mlp(), make, stage=stage)
            saved, expected = opt.state_dict(), reference.state_dict()
            if group.rank == 0:
                assert same(saved["state"], expected["state"]), name
                assert saved["param_groups"][0]["lr"] == expected["param_groups"][0]["lr"]
            else:
                assert saved["state"] == {}
            opt.close()
    opt, _ = follow(no_vectors(), lambda p: torch.optim.Muon(p, lr=1e-2), stage=1)
    opt.close()
    opt, _ = follow(mlp(), lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True), stage=1)
    opt.close()


@ranks(2, 3)
def test_states_are_parted(group):
    model = mlp()
    opt = libzero.shard(model, torch.optim.RMSprop(model.parameters(), lr=1e-2), stage=1)
    train(model, opt, 1)
    mine = torch.tensor([opt.memory()["partitioned"]], dtype=torch.int64)
    all_ranks = group.all_gather_control(mine)
    total = 4 * sum(p.numel() for p in model.parameters()) + 4 * len(list(model.parameters()))  # and a count each
    assert int(all_ranks.sum()) == total
    largest = 4 * max(p.numel() for p in model.parameters())
    assert int(all_ranks.max()) - int(all_ranks.min()) <= largest + 4 * 6
    before = opt.traffic()["sent"]["broadcast"]["bytes"]
    train(model, opt, 2)
    traffic = opt.traffic()
    assert traffic["sent"]["broadcast"]["bytes"] - before == 2 * traffic["partitioned"] > 0
    whole = libzero.shard(other := mlp(), torch.optim.RMSprop(other.parameters(), lr=1e-2), stage=0)
    train(other, whole, 1)
    assert whole.memory()["partitioned"] == total
    whole.close()
    opt.close()


@ranks(1, 2)
def test_groups_and_scheduler(group):
    def groups(model):
        return [{"params": list(model[0].parameters()), "lr": 0.02}, {"params": list(model[2:].parameters())}]

    model, plain = mlp(), mlp()
    old = torch.optim.NAdam(groups(model), lr=1e-2)
    early = torch.optim.lr_scheduler.StepLR(old, 2, gamma=0.5)
    opt = libzero.shard(model, old, stage=1, gradient_clipping=0)
    reference = torch.optim.NAdam(groups(plain), lr=1e-2)
    theirs = torch.optim.lr_scheduler.StepLR(reference, 2, gamma=0.5)
    for step in range(5):
        model(batch(group.rank, step)).pow(2).mean().backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            q.grad = opt.gradient(p)
        opt.step()
        opt.zero_grad()
        reference.step()
        early.step()
        theirs.step()
        assert [each["lr"] for each in opt.param_groups] == [each["lr"] for each in reference.param_groups]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    opt.close()


@ranks(1, 2, 3)
def test_clipping_and_accumulation(group):
    model, plain = mlp(), mlp()
    opt = libzero.shard(
        model, torch.optim.RMSprop(model.parameters(), lr=1e-2), stage=1, gradient_clipping=0.05,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    reference = torch.optim.RMSprop(plain.parameters(), lr=1e-2)
    for step in range(6):
        model(batch(group.rank, step)).pow(2).mean().backward()
        if step % 2:
            for p, q in zip(model.parameters(), plain.parameters()):
                q.grad = opt.gradient(p)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            reference.step()
        opt.step()
        assert opt.updated == bool(step % 2)
        if step % 2:
            assert abs(opt.grad_norm - norm.item()) < 1e-5 * opt.grad_norm
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(p, q, atol=1e-6)
    opt.close()


@ranks(1, 2)
def test_not_finite_is_left_out(group):
    model = mlp()
    opt = libzero.shard(model, torch.optim.RMSprop(model.parameters(), lr=1e-2), stage=1)
    train(model, opt, 1)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(batch(group.rank, 0)).pow(2).mean() * (float("inf") if group.rank == group.size - 1 else 1.0)
    loss.backward()
    opt.step()
    assert not opt.updated
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    opt.close()


@ranks(1, 2, 3)
def test_bf16_has_masters(group):
    model, plain = mlp(), mlp()
    old = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    opt = libzero.shard(model, old, stage=1, bf16=True, gradient_clipping=0)
    reference = torch.optim.RMSprop(plain.parameters(), lr=1e-3)
    for step in range(4):
        model(batch(group.rank, step).bfloat16()).float().pow(2).mean().backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            q.grad = opt.gradient(p)
        reference.step()
        opt.step()
        opt.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert p.dtype == torch.bfloat16
        assert torch.equal(p.detach(), q.detach().bfloat16())
        assert torch.equal(opt.parameter(p), q.detach())
    with torch.no_grad():
        model[0].weight.fill_(0.5)  # what is written counts
    assert not torch.equal(opt.parameter(model[2].weight), model[2].weight.float())
    model(batch(group.rank, 9).bfloat16()).float().pow(2).mean().backward()
    opt.step()
    assert (model[0].weight.detach().float() - 0.5).abs().max() < 0.02
    opt.close()


@ranks(1, 2, 3)
def test_state_dict_round_trip(group):
    model = mlp()
    opt = libzero.shard(model, torch.optim.NAdam(model.parameters(), lr=1e-2), stage=1)
    train(model, opt, 2)
    saved, values = opt.state_dict(), opt.full_state_dict()
    rest = train(model, opt, 2, first=2)
    final = weights(opt)
    opt.close()
    # Into plain torch, and a run on one rank's worth of memory goes on from it.
    if group.rank == 0:
        plain = mlp()
        plain.load_state_dict(values)
        reference = torch.optim.NAdam(plain.parameters(), lr=1.0)
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        reference.load_state_dict(torch.load(file, weights_only=True))
        assert same(reference.state_dict()["state"], saved["state"])
        back = reference.state_dict()
    else:
        plain, back = mlp(1), saved
    # And back, at the other stage too.
    for stage in (0, 1):
        other = mlp(1)
        if group.rank == 0:
            other.load_state_dict(values)
        again = libzero.shard(other, torch.optim.NAdam(other.parameters(), lr=1.0), stage=stage)
        again.load_state_dict(back)
        assert again.param_groups[0]["lr"] == 1e-2
        assert again.param_groups[0]["params"] == list(other.parameters())
        assert train(other, again, 2, first=2) == rest
        assert same(weights(again), final)
        state = again.optimizer_state("0.weight", "exp_avg")
        assert state.shape == (32, 8)
        with expect(libzero.ConfigError, "exp_average", "exp_avg"):
            again.optimizer_state("0.weight", "exp_average")
        again.close()


@ranks(1, 2)
def test_frozen_unused_tied(group):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight
            self.unused, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.b(self.frozen(torch.tanh(self.a(x))))

    torch.manual_seed(0)
    model = Net()
    before = [p.detach().clone() for p in model.unused.parameters()]
    plain = copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    reference = torch.optim.RMSprop([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    opt = libzero.shard(model, torch.optim.RMSprop(trained, lr=1e-2, weight_decay=0.1), stage=1, gradient_clipping=0)

    def step_reference(step):
        for p, q in zip(model.parameters(), plain.parameters()):
            if p.requires_grad:
                q.grad = opt.gradient(p)
        reference.step()

    train(model, opt, 3, each=step_reference)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(model.unused.parameters(), before))
    opt.close()


@ranks(2)
def test_one_rank_without_gradients(group):
    model, plain = mlp(), mlp()
    opt = libzero.shard(model, torch.optim.RMSprop(model.parameters(), lr=1e-2), stage=1, gradient_clipping=0)
    reference = torch.optim.RMSprop(plain.parameters(), lr=1e-2)
    for step in range(2):
        (plain(batch(1, step)).pow(2).mean() / 2).backward()  # the mean of it and of none
        reference.step()
        reference.zero_grad()
        if group.rank == 1:
            model(batch(1, step)).pow(2).mean().backward()
        opt.step()
        assert opt.updated
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    opt.step()  # nothing on any rank
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    opt.close()


@ranks(1)
def test_refusals(group):
    def shard(make, model=None, **keywords):
        model = model or mlp()
        return libzero.shard(model, make(model.parameters()), **keywords)

    for stage in (2, 3):
        with expect(libzero.ConfigError, "RMSprop", f"stage {stage}", "stage 1", "AdamW"):
            shard(torch.optim.RMSprop, stage=stage)
    with expect(libzero.ConfigError, "native=True"):
        shard(torch.optim.AdamW, stage=3, native=False)
    with expect(libzero.ConfigError, "LBFGS"):
        shard(torch.optim.LBFGS, stage=1)
    with expect(libzero.ConfigError, "SparseAdam", "AdamW"):
        shard(torch.optim.SparseAdam, stage=1)
    with expect(libzero.ConfigError, "'0'", "sparse=False"):
        shard(torch.optim.RMSprop, nn.Sequential(nn.Embedding(8, 4, sparse=True)), stage=1)
    with expect(libzero.ConfigError, "fp16", "bf16=True"):
        shard(torch.optim.RMSprop, stage=1, fp16=True)
    with expect(libzero.ConfigError, "clip_by_previous_norm", "as it is"):
        shard(torch.optim.RMSprop, stage=1, gradient_clipping=1.0, clip_by_previous_norm=True)
    with expect(libzero.ConfigError, "1 parameters that the model does not have"):
        libzero.shard(mlp(), torch.optim.RMSprop([nn.Parameter(torch.zeros(2))]), stage=1)
    model = mlp()
    with expect(libzero.ConfigError, "'2.weight'", "freeze it"):
        libzero.shard(model, torch.optim.RMSprop(model[0].parameters()), stage=1)
    old = torch.optim.RMSprop(model.parameters())
    opt = libzero.shard(model, old, stage=1)
    with expect(libzero.Error, "opt.step()"):
        old.step()
    for function in (opt.save, opt.load, opt.save_full, opt.load_full):
        with expect(libzero.Error, "RMSprop", "opt.state_dict()"):
            function("/nowhere")
    opt.close()


main()
