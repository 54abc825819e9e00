"""Loops as their users write them, beside the same loop in plain PyTorch on one process with the batches of all ranks: at
every stage the weights are torch's, or an error says what to write."""

import copy
import threading
import warnings

import torch
from torch import nn

from pairs import KINDS, STAGES, Pair, near, pairs
from support import batch, expect, main, mlp, ranks, through_a_file

import libzero


class Branches(nn.Module):
    """One of two branches has no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, both=True):
        return self.first(x) + self.second(x) if both else self.first(x)


# --- 1. What is restored is what was saved, absence included.


@ranks(2)
def test_restoring_what_has_no_state(group):
    for kind, pair in pairs(group, KINDS):
        fresh = [copy.deepcopy(optimizer.state_dict()) for optimizer in (pair.opt, pair.torch)]
        for step in range(3):
            pair.step(step)
        pair.opt.load_state_dict(fresh[0])
        pair.torch.load_state_dict(fresh[1])
        for step in range(3, 6):
            pair.step(step)
        pair.close(kind)


@ranks(2)
def test_restoring_in_part(group):
    # A parameter without a gradient when the dict was taken; and a dict that lacks some.
    for kind, pair in pairs(group, KINDS, model=Branches):
        pair.step(0, of=lambda m, x: m(x, both=False).pow(2).mean())
        half = [optimizer.state_dict() for optimizer in (pair.opt, pair.torch)]
        if group.rank == 0 and kind not in ("Adagrad",):
            assert sorted(half[0]["state"]) == sorted(half[1]["state"]) == [0, 1], kind
        half = [torch.load(through_a_file(each), weights_only=True) for each in half]
        for each in half:
            each["state"].pop(1, None)
        if kind == "Adagrad":  # torch's has states from the start, and fails without
            half[1]["state"][1] = {"step": torch.tensor(0.0), "sum": torch.full((8,), 0.1)}
        for step in range(1, 3):
            pair.step(step)
        pair.opt.load_state_dict(half[0])
        pair.torch.load_state_dict(half[1])
        for step in range(3, 6):
            pair.step(step)
        pair.close(kind)


# --- 2. Freezing hides no states.


@ranks(2)
def test_states_of_what_is_frozen(group):
    for kind, pair in pairs(group, ("AdamW", "SGD", "NAdam")):
        for step in range(2):
            pair.step(step)
        pair.both(lambda _, model: model[0].requires_grad_(False))
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in (pair.opt, pair.torch)]
        for step in range(2, 4):
            pair.step(step)
        pair.opt.load_state_dict(saved[0])
        pair.torch.load_state_dict(copy.deepcopy(saved[1]))  # torch keeps what it is given
        pair.both(lambda _, model: model[0].requires_grad_(True))
        for step in range(4, 6):
            pair.step(step)
        pair.close(kind)
        # Loaded while frozen, into a run that has trained otherwise.
        again = Pair(group, pair.stage, KINDS[kind])
        again.step(7)
        again.both(lambda _, model: model[0].requires_grad_(False))
        again.opt.load_state_dict(saved[0])
        again.torch.load_state_dict(copy.deepcopy(saved[1]))
        again.both(lambda _, model: model[0].requires_grad_(True))
        for step in range(2):
            again.step(step)
        again.close(kind)


# --- 3. An empty group has no parameters.


@ranks(2)
def test_empty_groups(group):
    def split(model):
        return [
            {"params": [], "weight_decay": 0.5},
            {"params": list(model.parameters())},
            {"params": [], "lr": 0.9},
        ]

    for kind, pair in pairs(group, ("AdamW", "NAdam"), groups=split):
        for step in range(2):
            pair.step(step, each=lambda opt, _: opt.param_groups[0].update(lr=0.3))
        pair.opt.load_state_dict(pair.opt.state_dict())
        pair.step(2)
        pair.close(kind)
    for stage in STAGES:  # a parameter that is in no group does not fall to an empty one
        model = mlp()
        rest = [{"params": [], "lr": 0.9}, {"params": list(model[2:].parameters())}]
        with expect(libzero.ConfigError, "'0.weight'", "in no parameter group"):
            libzero.shard(model, torch.optim.AdamW(rest), stage=stage)
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone()
        opt = libzero.shard(model, torch.optim.AdamW(rest), stage=stage)
        model(batch(group.rank, 0)).sum().backward()
        opt.step()
        assert torch.equal(opt.parameter("0.weight"), before)
        opt.close()


# --- 4. Arguments of torch's signatures act.


@ranks(2)
def test_gradients_of_zero(group):
    def first(model, x):
        return model(x, both=False).pow(2).mean()

    for kind, pair in pairs(group, ("AdamW", "SGD", "NAdam"), model=Branches):
        pair.backward(0)
        pair.opt.step()
        pair.torch.step()
        for step in range(1, 4):  # a branch is left out, and decays
            pair.zero_grad(set_to_none=False)
            pair.backward(step, first)
            pair.opt.step()
            pair.torch.step()
        pair.check((kind, "decays"))
        pair.both(lambda _, model: model.zero_grad(set_to_none=False))  # torch's name for the same
        pair.opt.step()  # all of it does
        pair.torch.step()
        pair.check((kind, "all decay"))
        pair.zero_grad()
        pair.backward(5, first)  # and stays as it is again
        pair.update()
        pair.close(kind)
    # None of a module's that has dropped them, as Lightning does before it validates, or of a part's.
    for kind, pair in pairs(group, ("SGD", "NAdam"), model=Branches):
        for whose in (lambda model: model, lambda model: model.second):
            pair.backward(0)
            pair.opt.step()
            pair.torch.step()
            for step in range(1, 4):
                if step > 1:
                    pair.both(lambda _, model: whose(model).zero_grad())
                pair.zero_grad(set_to_none=False)
                pair.backward(step, first)
                pair.opt.step()
                pair.torch.step()
            pair.check((kind, "dropped by the module"))
            pair.zero_grad()
        pair.opt.close()
    # What has come is dropped.
    for kind, pair in pairs(group, ("SGD",)):
        pair.step(0)
        pair.backward(8)
        pair.zero_grad(set_to_none=False)
        pair.backward(1)
        pair.update()
        pair.close("dropped")


@ranks(2)
def test_arguments_of_clipping(group):
    for _, pair in pairs(group):
        pair.backward(0)
        norm = pair.opt.clip_grad_norm_(0.5, norm_type=2.0, error_if_nonfinite=True, foreach=False)
        assert abs(norm - nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5)) < 1e-5
        pair.update()
        pair.backward(1)
        with expect(libzero.ConfigError, "norm_type"):
            pair.opt.clip_grad_norm_(0.5, float("inf"))
        pair.update()
        pair.check("clipped")
        (pair.model(batch(group.rank, 2)).sum() * float("inf")).backward()
        with expect(RuntimeError, "not finite"):
            pair.opt.clip_grad_norm_(1.0, error_if_nonfinite=True)
        pair.opt.zero_grad()
        pair.close("not finite")
    for kind, pair in pairs(group, ("SGD", "NAdam"), gradient_clipping_value=0.01):
        for step in range(2):
            pair.backward(step)
            nn.utils.clip_grad_value_(pair.plain.parameters(), 0.01)
            pair.update()
        pair.close((kind, "by value"))
    for _, pair in pairs(group, ("SGD",), gradient_clipping=0.01, clip_by_previous_norm=True):
        norm = None
        for step in range(3):
            pair.backward(step)
            if step == 1:
                with expect(libzero.ConfigError, "clip_by_previous_norm"):
                    pair.opt.clip_grad_norm_(1.0)
            factor = 1 if norm is None else min(1, 0.01 / (norm + 1e-6))
            norm = float(nn.utils.get_total_norm([p.grad for p in pair.plain.parameters()]))
            for p in pair.plain.parameters():
                p.grad *= factor
            pair.update()
        pair.close("by the norm of the step before")


@ranks(2)
def test_hooks_of_states(group):
    for kind, pair in pairs(group, ("AdamW", "NAdam")):
        calls = []
        pair.opt.register_state_dict_pre_hook(lambda opt: calls.append("before saving"))
        pair.opt.register_state_dict_post_hook(lambda opt, saved: {**saved, "mine": len(saved["state"])})
        pair.opt.register_load_state_dict_pre_hook(lambda opt, saved: {k: v for k, v in saved.items() if k != "mine"})
        pair.opt.register_load_state_dict_post_hook(lambda opt: calls.append("after loading"))
        pair.step(0)
        saved = pair.opt.state_dict()
        assert saved["mine"] == (6 if group.rank == 0 else 0)
        pair.opt.load_state_dict(saved)
        assert calls == ["before saving", "after loading"]
        pair.step(1)
        pair.close(kind)


# --- 5. What is public is connected.


@ranks(2)
def test_state_is_a_view(group):
    def restart(optimizer, _):
        optimizer.state.clear()

    def assign(optimizer, _):
        optimizer.state = type(optimizer.state)(dict) if isinstance(optimizer, torch.optim.AdamW) else {}

    def of_one(optimizer, model):
        optimizer.state[model[0].weight] = {}
        del optimizer.state[model[2].weight]

    def in_place(optimizer, model):
        for p in model.parameters():
            optimizer.state[p]["exp_avg"].mul_(0.25)
            optimizer.state[p]["step"].fill_(7)
        views = [optimizer.state[p]["exp_avg_sq"].view(-1) for p in model.parameters()]
        for view in views:
            view[::2] *= 2

    def put(optimizer, model):
        for p in model.parameters():
            optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.01)
            optimizer.state[p]["exp_avg_sq"] += 0.5
        optimizer.state[model[0].bias]["step"] = torch.tensor(0.0)

    for edit in (restart, assign, of_one, in_place, put):
        for kind, pair in pairs(group, ("AdamW", "NAdam") if edit in (restart, of_one) else ("AdamW",)):
            for step in range(2):
                pair.step(step)
            with torch.no_grad():
                pair.both(edit)
            pair.step(2)
            pair.step(3)
            if edit is put and pair.stage == 3:
                pair.both(put)
                saved = pair.opt.state_dict()
                pair.opt.state.clear()
                pair.opt.load_state_dict(saved)
                pair.step(4)
            pair.close((edit.__name__, kind))


@ranks(2)
def test_state_is_read(group):
    for kind, pair in pairs(group, KINDS):
        assert len(pair.opt.state) == 0
        pair.step(0)
        p, q = pair.model[0].weight, pair.plain[0].weight
        mine, theirs = pair.opt.state[p], pair.torch.state[q]
        assert p in pair.opt.state and len(pair.opt.state) == 6
        for key, value in theirs.items():
            assert torch.allclose(torch.as_tensor(mine[key], dtype=torch.float32), torch.as_tensor(value).float(), atol=1e-6)
        assert mine.get("none", 5) == 5
        held = pair.opt.state[p]
        before = {key: torch.as_tensor(value).clone() for key, value in held.items()}
        pair.step(1)
        assert any(not torch.equal(before[key], torch.as_tensor(held[key])) for key in before)  # of now
        if kind != "NAdam":
            with expect(libzero.Error, "together"):
                del held[next(iter(held))]
            with expect(libzero.ConfigError, "'scale'"):
                held["scale"] = 1.0
        with expect(KeyError, "nothing"):
            held["nothing"]
        with expect(libzero.Error, "parameters alone"):
            pair.opt.state["name"]
        pair.close(kind)
    for stage in STAGES:
        pair = Pair(group, stage)
        pair.step(0)
        stale = pair.opt.state[pair.model[0].weight]["exp_avg"]
        pair.step(1)
        stale.zero_()
        pair.backward(2)
        with expect(libzero.Error, "0.weight", "before the last step"):
            pair.opt.step()
        del stale
        lent = pair.opt.state[pair.model[0].weight]["exp_avg"]
        if group.rank == 1:
            lent.zero_()
        with expect(libzero.Error, "0.weight", "'exp_avg'", "on some ranks"):
            pair.opt.step()
        pair.opt.close()


@ranks(2)
def test_param_groups_are_connected(group):
    for kind, pair in pairs(group, ("AdamW", "NAdam")):
        pair.step(0)
        pair.both(lambda opt, _: opt.param_groups.__setitem__(0, {**opt.param_groups[0], "lr": 0.5, "mine": 1}))
        pair.step(1)
        pair.check(kind)
        whole = pair.opt.param_groups[0]["params"]
        for wrong in (
            lambda: pair.opt.param_groups[0].update(params=whole[:2]),
            lambda: pair.opt.param_groups.append({**pair.opt.param_groups[0], "params": []}),
            lambda: pair.opt.param_groups.clear(),
        ):
            saved = [dict(each) for each in pair.opt.param_groups]
            wrong()
            pair.model(batch(group.rank, 2)).sum().backward()
            with expect(libzero.Error, "opt.param_groups"):
                pair.opt.step()
            pair.opt.zero_grad()
            pair.opt.param_groups[:] = saved
        pair.opt.close()


# --- 6. What must be the same on all ranks is.


@ranks(2)
def test_writes_of_one_rank(group):
    class Bounded(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.out = nn.Embedding(64, 4, max_norm=0.5), nn.Linear(4, 4)

        def forward(self, rows):
            return self.out(self.table(rows))

    def load(model):
        model.load_state_dict({key: value.clone() for key, value in mlp(1).state_dict().items()})

    def scale(model):
        model[2].weight.mul_(2.0)

    for stage in STAGES:
        for write, named in ((load, "0.weight"), (scale, "2.weight")):
            pair = Pair(group, stage)
            pair.step(0)
            with torch.no_grad():
                if group.rank == 0:
                    write(pair.model)
                write(pair.plain)
            with expect(libzero.Error, named, "rank 1", "modifier_rank"):
                pair.opt.parameter("0.bias")
            pair.backward(1)
            with expect(libzero.Error, named, "rank 1", "modifier_rank"):
                pair.opt.step()
            with libzero.gathered(pair.model, modifier_rank=0):
                pass  # what the error says: rank 0's for all
            pair.zero_grad()
            pair.step(1)
            pair.step(2)
            pair.close(write.__name__)
        # On every rank, other values.
        pair = Pair(group, stage)
        with torch.no_grad():
            pair.model[0].bias.fill_(float(group.rank))
        pair.backward(0)
        with expect(libzero.Error, "0.bias"):
            pair.opt.step()
        pair.opt.close()
        with expect(libzero.Error, "0.bias"):
            pair = Pair(group, stage)
            with libzero.gathered(pair.model[0].bias, write=True):
                pair.model[0].bias.detach().data.fill_(float(group.rank))
        pair.opt.close()
        model = Bounded()
        opt = libzero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        model(torch.arange(8) + 8 * group.rank).pow(2).mean().backward()
        with expect(libzero.Error, "table.weight"):
            opt.step()
        opt.close()
        # The same on every rank is none.
        pair = Pair(group, stage)
        for step in range(3):
            with torch.no_grad():
                pair.both(lambda _, model: model[0].weight.clamp_(-0.1, 0.1))
            pair.step(step)
        pair.close("the same")


@ranks(2)
def test_values_of_one_rank(group):
    for _, pair in pairs(group):
        pair.step(0)
        pair.backward(1)
        opt, p = pair.opt, pair.model[0].weight
        mine = torch.full(p.shape, float(group.rank))
        for call in (
            lambda: opt.set_parameter(p, mine),
            lambda: opt.set_gradient(p, mine),
            lambda: opt.set_gradient(p, mine if group.rank else None),
            lambda: opt.set_optimizer_state(p, "exp_avg", mine),
            lambda: opt.set_parameter(p, torch.ones(32, 8 + group.rank)),
        ):
            with expect(libzero.Error, "0.weight on rank 1", "libzero.group().broadcast"):
                call()
        pair.update()
        pair.close("refused")


@ranks(2, alone=True)
def test_a_value_that_one_rank_alone_gives(group):
    group = libzero.group(timeout=20)
    pair = Pair(group, 0)
    pair.backward(0)
    with expect(libzero.CommError, "opt.set_gradient 0.weight", "rank 1"):
        if group.rank == 0:
            pair.opt.set_gradient("0.weight", torch.ones(32, 8))
        pair.opt.step()


@ranks(2)
def test_rates_of_one_rank(group):
    def plateau(pair):
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(pair.opt, patience=0)
        scheduler.step(1.0)
        scheduler.step(2.0 if group.rank == 0 else 0.5)

    def clipping(pair):
        pair.opt.set_gradient_clipping(1.0 + group.rank)

    def decay(pair):
        pair.opt.param_groups[0]["weight_decay"] = 0.1 * group.rank

    for stage in STAGES:
        for edit in (plateau, clipping, decay):
            pair = Pair(group, stage)
            pair.step(0)
            edit(pair)
            pair.backward(1)
            with expect(libzero.Error, "rank 1", "learning rate", "mean over ranks"):
                pair.opt.step()
            pair.opt.close()


# --- 7. clip_grad_norm_ is of one step.


@ranks(2)
def test_clipping_is_of_one_step(group):
    for kind, pair in pairs(group, ("SGD", "NAdam")):
        for step, norm in enumerate((0.05, None, 0.5, None, float("inf"), None)):
            pair.backward(step)
            if norm is not None:
                pair.opt.clip_grad_norm_(norm)
                nn.utils.clip_grad_norm_(pair.plain.parameters(), norm)
            pair.update()
            pair.check((kind, step))
        pair.backward(7)  # one after the other
        for norm in (0.1, 0.3):
            got = pair.opt.clip_grad_norm_(norm)
            assert abs(got - nn.utils.clip_grad_norm_(pair.plain.parameters(), norm)) < 1e-4
        pair.update()
        pair.backward(8)  # of gradients that are dropped
        pair.opt.clip_grad_norm_(0.01)
        pair.zero_grad()
        pair.step(9)
        pair.close(kind)
    # It comes before the configuration's, for one step.
    for stage in STAGES:
        pair = Pair(group, stage, KINDS["SGD"], gradient_clipping=0.05)
        for step, norm in enumerate((0.05, 0.2, 0.05)):
            pair.backward(step)
            if norm != 0.05:
                pair.opt.clip_grad_norm_(norm)
            nn.utils.clip_grad_norm_(pair.plain.parameters(), norm)
            pair.update()
        pair.opt.set_gradient_clipping(0.3)  # this one stays
        for step in range(3, 5):
            pair.backward(step)
            nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.3)
            pair.update()
        pair.close("configured")


# --- 8. Every allocation has a dtype of its own.


@ranks(2)
def test_default_dtypes(group):
    for kind, pair in pairs(group, KINDS):
        for default in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(default)
            try:
                of = lambda model, x: model(x.float()).pow(2).mean()
                pair.step(0, of=of)
                pair.opt.parameter("0.weight")
                saved = pair.opt.state_dict()
                pair.opt.load_state_dict(saved)
                pair.opt.state[pair.model[0].weight].items()
                pair.backward(1, of)
                pair.opt.clip_grad_norm_(0.5)
                nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5)
                pair.update()
                pair.zero_grad(set_to_none=False)
                pair.update()
            finally:
                torch.set_default_dtype(torch.float32)
        pair.close(kind)
    for kind, pair in pairs(group, ("AdamW", "NAdam")):  # and a device
        pair.step(0)
        pair.backward(1)
        with torch.device("meta"):
            pair.opt.clip_grad_norm_(0.5)
            pair.opt.step()
            pair.opt.zero_grad(set_to_none=False)
            pair.opt.step()
            pair.opt.load_state_dict(pair.opt.state_dict())
            pair.opt.state[pair.model[0].weight].items()
            pair.opt.parameter("0.weight")
            pair.opt.full_state_dict()
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5)
        pair.torch.step()
        pair.torch.zero_grad(set_to_none=False)
        pair.torch.step()
        pair.close((kind, "meta"))
    for default in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(default)
        try:
            model = mlp().float()
            opt = libzero.shard(model, torch.optim.RMSprop(model.parameters(), lr=1e-2), stage=1, bf16=True)
            model(batch(group.rank, 0).bfloat16()).float().pow(2).mean().backward()
            opt.step()
            assert opt.parameter("0.weight").dtype == torch.float32
            opt.load_state_dict(opt.state_dict())
            opt.close()
        finally:
            torch.set_default_dtype(torch.float32)


# --- 9. Other threads may read.


@ranks(2)
def test_a_thread_that_copies(group):
    for kind, pair in pairs(group):
        stop, failed = threading.Event(), []

        def copies(model=pair.model, opt=pair.opt):
            try:
                while not stop.is_set():
                    [p.detach().clone() for p in model.parameters()]
                    if opt.paged:  # reading in a scope needs no other rank on one host
                        with libzero.gathered(model):
                            model[0].weight.detach().numpy().sum()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=copies)
        thread.start()
        try:
            for step in range(40):
                pair.step(step)
        finally:
            stop.set()
            thread.join()
        assert not failed, failed
        if pair.opt.paged:
            pair.backward(41)
            with libzero.gathered(pair.model), expect(libzero.Error, "libzero.gathered", "opt.step()"):
                pair.opt.step()
            pair.update()
        pair.close("threads")


# --- 10. Parameters without a shape.


@ranks(2)
def test_lazy_modules(group):
    for stage in STAGES:
        for lazy, named in ((nn.LazyLinear(4), "'0.weight'"), (nn.LazyBatchNorm1d(affine=False), "'0.running_mean'")):
            model = nn.Sequential(lazy, nn.Linear(8, 4)) if "weight" not in named else nn.Sequential(lazy)
            parameters = list(model.parameters())
            with expect(libzero.ConfigError, named, "forward once"):
                libzero.shard(model, torch.optim.AdamW(parameters), stage=stage)
        model = nn.Sequential(nn.LazyLinear(4))
        model(batch(0, 0))
        opt = libzero.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
        model(batch(0, 0)).sum().backward()
        opt.step()
        opt.close()


# --- 11. Dtypes that are not the parameters' own.


class Placed(nn.Module):
    """A table of positions in fp32, a layer that is kept in fp32, and a norm of the spectrum."""

    def __init__(self, spectral=False):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        if spectral:
            self.inner = nn.utils.spectral_norm(self.inner)
        self.register_buffer("positions", torch.randn(4, 8))

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x + self.positions)))


@ranks(2)
def test_other_dtypes(group):
    for stage in STAGES:
        def shard(spectral=False, cast=True, **keywords):
            model = Placed(spectral)
            settings = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, **keywords}
            return model, libzero.shard(
                model, torch.optim.AdamW(model.parameters(), lr=1e-2), settings, cast_forward_inputs=cast
            )

        for spectral in (False, True):
            model, opt = shard(spectral)
            with expect(RuntimeError, "dtype", "positions", "data_types.buffer_dtype", "cast_forward_inputs"):
                model(batch(group.rank, 0))
            opt.close()
        for spectral in (False, True):
            model, opt = shard(spectral, data_types={"buffer_dtype": "bf16"})
            assert model.positions.dtype == torch.bfloat16
            model(batch(group.rank, 0)).float().pow(2).mean().backward()
            opt.step()
            assert opt.updated
            opt.close()
        model, opt = shard(data_types={"buffer_dtype": "bf16"}, fp32_modules="head")
        assert model.head.weight.dtype == torch.float32 and model.inner.weight.dtype == torch.bfloat16
        seen = []
        model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        result = model(batch(group.rank, 0))
        assert result.dtype == torch.bfloat16 and seen == [torch.float32]
        result.float().pow(2).mean().backward()
        opt.step()
        opt.close()
        with expect(libzero.ConfigError, "'tail'", "fp32_modules"):
            shard(fp32_modules="tail")


# --- 12. A model that is shared in part.


@ranks(2)
def test_a_shared_encoder(group):
    for stage in STAGES:
        torch.manual_seed(0)
        encoder, one, other = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        first, second = nn.Sequential(encoder, one), nn.Sequential(encoder, other)
        opt = libzero.shard(first, torch.optim.AdamW(first.parameters()), stage=stage)
        with expect(libzero.ConfigError, "'0.weight'"):
            libzero.shard(second, torch.optim.AdamW(second.parameters()), stage=stage)
        with expect(libzero.ConfigError, "'weight'"):
            libzero.shard(encoder, torch.optim.AdamW(encoder.parameters()), stage=stage)
        with expect(libzero.ConfigError, "'0.weight'"):  # frozen parts too
            encoder.requires_grad_(False)
            libzero.shard(second, torch.optim.AdamW(other.parameters()), stage=stage)
        encoder.requires_grad_(True)
        first(batch(group.rank, 0)).sum().backward()
        opt.step()
        assert opt.updated
        opt.close()


# --- 13. Tensors that the program holds are filled.


@ranks(2)
def test_rates_that_are_tensors(group):
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"}}
    for stage in STAGES:
        for keywords in ({"scheduler": schedule}, {}):
            rate = torch.tensor(0.02)
            model = mlp()
            opt = libzero.shard(
                model, torch.optim.AdamW(model.parameters(), lr=rate), {"zero_optimization": {"stage": stage}, **keywords}
            )
            if not keywords:
                scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
            for step in range(2):
                model(batch(group.rank, step)).sum().backward()
                opt.step()
                if not keywords:
                    scheduler.step()
            assert opt.param_groups[0]["lr"] is rate
            assert abs(rate.item() - 0.005) < 1e-6 or keywords
            saved = opt.state_dict()
            saved["param_groups"][0]["lr"] = 0.25
            opt.load_state_dict(saved)
            assert opt.param_groups[0]["lr"] is rate
            assert rate.item() == 0.25 or keywords  # a schedule of the configuration has its own
            opt.close()


# --- 14. Gradients are read in the middle.


@ranks(2)
def test_backward_after_a_gradient(group):
    for kind, pair in pairs(group, ("SGD", "NAdam")):
        for step in range(3):
            pair.backward(step)
            mine = pair.opt.gradient("0.weight")
            near({"": mine}, {"": pair.plain[0].weight.grad}, kind)
            pair.backward(step + 20)
            near({"": pair.opt.gradient("2.weight")}, {"": pair.plain[2].weight.grad}, kind)
            pair.opt.set_gradient("4.bias", torch.ones(4))
            pair.plain[4].bias.grad.fill_(1.0)
            pair.backward(step + 40)
            pair.update()
        pair.close(kind)
    for kind, pair in pairs(group, ("SGD",), model=Branches):  # what is set had none, and gets one
        pair.backward(0, lambda m, x: m(x, both=False).pow(2).mean())
        pair.opt.set_gradient("second.bias", torch.ones(8))
        pair.plain.second.bias.grad = torch.ones(8)
        pair.backward(1)
        pair.update()
        pair.close("set")


main()
