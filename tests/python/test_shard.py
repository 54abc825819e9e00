"""libzero.shard in plain loops, on one, two and three ranks: against PyTorch itself, between stages, over saves."""

from __future__ import annotations

import copy
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import support
from support import main, ranks

import libzero

Optimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Net(torch.nn.Module):
    """Layers whose sizes nothing divides, a tied weight, a norm with statistics, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = torch.nn.Linear(7, 33)
        self.norm = torch.nn.LayerNorm(33)
        self.b = torch.nn.Linear(33, 33)
        self.tied = torch.nn.Linear(33, 33)
        self.tied.weight = self.b.weight
        self.frozen = torch.nn.Linear(33, 33).requires_grad_(False)
        self.c = torch.nn.Linear(33, 3)
        self.register_buffer("shift", torch.full((3,), 0.25))
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.b(self.norm(self.a(x))))
        return self.c(torch.tanh(self.frozen(torch.tanh(self.tied(h))))) + self.shift


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, 7, generator=generator), torch.randn(6, 3, generator=generator)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return torch.nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)


def grouped(kind: Any, **options: Any) -> Optimizer:
    """Two groups with rates of their own; no decay for vectors."""

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return kind(
            [
                {"params": [p for p in trained if p.dim() > 1]},
                {"params": [p for p in trained if p.dim() < 2], "lr": 2e-2, "weight_decay": 0.0},
            ],
            lr=1e-2,
            weight_decay=0.05,
            **options,
        )

    return make


OPTIMIZERS = {
    "AdamW": grouped(torch.optim.AdamW, betas=(0.8, 0.95)),
    "Adam": grouped(torch.optim.Adam),
    "SGD": grouped(torch.optim.SGD, momentum=0.9, nesterov=True),
    "SGD without momentum": grouped(torch.optim.SGD),
    "Adafactor": grouped(torch.optim.Adafactor, beta2_decay=-0.6),
    "Adagrad": grouped(torch.optim.Adagrad, lr_decay=0.01, initial_accumulator_value=0.1),
}
SMALL = {"unit_bytes": 1500, "stage3_max_live_parameters": 0}


FIXED = 10**9  # the cycle of a schedule that changes no rate: those are not in saves


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **SMALL}, "gradient_clipping": 0, **more}


def train(opt: libzero.ShardedOptimizer, model: torch.nn.Module, first: int, steps: int, cycle: int = 10) -> list[Any]:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, cycle)
    seen = []
    for step in range(first, first + steps):
        loss = loss_of(model, opt.group.rank, step)
        loss.backward()
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        opt.step()
        opt.zero_grad()
        scheduler.step()
        seen.append((loss.item(), opt.grad_norm))
    return seen


def plain(make: Optimizer, ranks: int, steps: int, clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """PyTorch alone, with the batches of all ranks."""
    model = Net()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    norms = []
    for step in range(steps):
        (sum(loss_of(model, rank, step) for rank in range(ranks)) / ranks).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return norms, model.state_dict()


@ranks(1, 2, 3)
def test_equals_pytorch_and_every_stage(group: Any) -> None:
    for name, make in OPTIMIZERS.items():
        norms, weights = plain(make, group.size, 6, 0.5)
        first: Any = None
        for stage in range(4):
            model = Net()
            opt = libzero.shard(model, make(model), settings(stage), gradient_clipping=0.5)
            assert type(make(model)).__name__ in repr(opt)
            seen = train(opt, model, 0, 6)
            got = opt.full_state_dict()
            bits = (seen, {key: value.clone() for key, value in got.items()})
            if first is None:
                first = bits
                for mine, theirs in zip(seen, norms):
                    assert abs(mine[1] - theirs) <= 1e-5 * theirs, (name, mine, theirs)
                if group.rank == 0:
                    assert list(got) == list(weights), "the names, in PyTorch's order"
                    for key, value in weights.items():
                        torch.testing.assert_close(got[key], value, rtol=2e-5, atol=2e-6, msg=f"{name}: {key}")
            support.equal(bits, first, f"{name}, stage {stage}")
            assert opt.memory()["formula"]["optimizer"] == opt.memory()["now"]["optimizer"]
            opt.close()


@ranks(1, 2, 3)
def test_accumulation_by_the_configuration_and_by_hand(group: Any) -> None:
    for stage in range(4):
        runs = []
        for by_hand in (False, True):
            model = Net()
            keys = {} if by_hand else {"gradient_accumulation_steps": 4}
            opt = libzero.shard(model, OPTIMIZERS["AdamW"](model), settings(stage, **keys))
            norms = []
            for step in range(12):
                loss = loss_of(model, group.rank, step)
                (loss / 4 if by_hand else loss).backward()
                if not by_hand or step % 4 == 3:
                    opt.step()
                    opt.zero_grad()  # in the middle of an accumulation there is nothing to drop
                if step % 4 == 3:
                    norms.append(opt.grad_norm)
                    assert opt.updated
                elif not by_hand:
                    assert opt.grad_norm is None and not opt.updated
            assert opt.steps == 3
            runs.append((norms, opt.full_state_dict()))
            opt.close()
        for mine, theirs in zip(runs[0][0], runs[1][0]):
            assert abs(mine - theirs) <= 1e-6 * theirs, (stage, mine, theirs)


@ranks(1, 2, 3)
def test_zero_grad_drops_what_came(group: Any) -> None:
    for stage in range(4):
        runs = []
        for disturbed in (False, True):
            model = Net()
            opt = libzero.shard(model, OPTIMIZERS["SGD"](model), settings(stage))
            for step in range(3):
                opt.zero_grad()
                if disturbed:
                    loss_of(model, group.rank, 50 + step).backward()
                    opt.zero_grad()
                loss_of(model, group.rank, step).backward()
                opt.step()
            runs.append(opt.full_state_dict())
            opt.close()
        support.equal(runs[0], runs[1], f"stage {stage}")


@ranks(1, 2, 3)
def test_precisions_are_equal_at_every_stage(group: Any) -> None:
    for precision in ({"bf16": True}, {"fp16": {"enabled": True, "initial_scale_power": 8}}):
        first: Any = None
        for stage in range(4):
            model = Net()
            opt = libzero.shard(model, OPTIMIZERS["AdamW"](model), settings(stage), **precision)
            seen = []
            for step in range(4):
                loss = loss_of(model, group.rank, step)
                if step == 0:
                    opt.scale(loss).backward()
                else:
                    opt.backward(loss)
                opt.step()
                seen.append((loss.item(), opt.grad_norm, opt.loss_scale))
            bits = (seen, opt.full_state_dict())
            first = first or bits
            support.equal(bits, first, f"{precision}, stage {stage}")
            if "fp16" in precision:
                support.raises(libzero.Error, "scale(loss)", lambda: loss_of(model, group.rank, 9).backward())
            opt.close()


@ranks(1, 2, 3)
def test_state_dicts_go_to_torch_and_back(group: Any) -> None:
    for name, make in OPTIMIZERS.items():
        model = Net()
        opt = libzero.shard(model, make(model), settings(3))
        train(opt, model, 0, 3)
        states, weights = opt.state_dict(), opt.full_state_dict()
        after = train(opt, model, 3, 2)
        expected = opt.full_state_dict()
        opt.close()
        if group.rank == 0:
            reference = Net()
            reference.load_state_dict(weights)
            optimizer = make(reference)
            optimizer.load_state_dict(copy.deepcopy(states))  # torch keeps the tensors of the steps
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
            for step in range(3, 5):
                (sum(loss_of(reference, rank, step) for rank in range(group.size)) / group.size).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            for key, value in reference.state_dict().items():
                torch.testing.assert_close(expected[key], value, rtol=2e-5, atol=2e-6, msg=f"{name}: {key}")
            states = torch.load(support.through_a_file(states), weights_only=True)
        for stage in (0, 2):
            again = Net()
            opt = libzero.shard(again, make(again), settings(stage))
            for key, value in support.from_rank_0(weights, Net().state_dict()).items():
                if key in opt._engine.parameter_names:
                    opt.set_parameter(key, value)
            opt.load_state_dict(states)
            assert opt.steps == 3
            support.equal((train(opt, again, 3, 2), opt.full_state_dict()), (after, expected), f"{name}, stage {stage}")
            opt.close()


@ranks(1, 2, 3)
def test_saves_go_on_at_other_stages(group: Any) -> None:
    with support.shared_folder() as folder:
        model = Net()
        opt = libzero.shard(model, OPTIMIZERS["AdamW"](model), settings(3))
        train(opt, model, 0, 3, FIXED)
        opt.save_full(folder / "full.safetensors")
        opt.save(folder / "sharded", {"rank": str(group.rank)}, background=True, staging_bytes=1000)
        after = (train(opt, model, 3, 2, FIXED), opt.full_state_dict())
        opt.complete_save()
        opt.close()
        for stage, load in ((3, "sharded"), (0, "full.safetensors"), (1, "full.safetensors"), (3, "full.safetensors")):
            again = Net()
            opt = libzero.shard(again, OPTIMIZERS["AdamW"](again), settings(stage))
            if load == "sharded":
                assert opt.load(folder / load) == {"rank": str(group.rank)}
            else:
                opt.load_full(folder / load)
            support.equal((train(opt, again, 3, 2, FIXED), opt.full_state_dict()), after, f"{load}, stage {stage}")
            opt.close()
        again = Net()
        opt = libzero.shard(again, OPTIMIZERS["AdamW"](again), settings(2))
        support.raises(libzero.CheckpointError, "nowhere", lambda: opt.load_full(folder / "nowhere.safetensors"))
        opt.load_weights(folder / "full.safetensors")
        assert opt.steps == 0
        opt.close()
        group.barrier()


@ranks(2)
def test_a_save_leaves_a_delayed_update_delayed(group: Any) -> None:
    more = settings(3)
    more["zero_optimization"]["offload_optimizer"] = {"delayed_update_after": 1}
    with support.shared_folder() as folder:

        def run(first: int, saves: bool = False) -> Any:
            model = Net()
            opt = libzero.shard(model, OPTIMIZERS["AdamW"](model), more)
            if first:
                opt.load(folder / str(first))
            seen = []
            for step in range(first, 5):
                seen += train(opt, model, step, 1, FIXED)
                if saves:
                    opt.save(folder / str(step + 1), background=step % 2 == 0)
            opt.complete_save()
            values = opt.full_state_dict()
            opt.close()
            return seen, values

        seen, values = run(0)
        support.equal(run(0, saves=True), (seen, values), "with saves")
        support.equal(run(3), (seen[3:], values), "resumed")
        group.barrier()


@ranks(1, 2, 3)
def test_configurations(group: Any) -> None:
    make = OPTIMIZERS["AdamW"]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "ds_config.json"
        file.write_text(
            '{ // as DeepSpeed takes it\n"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,\n'
            '"optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.8, 0.9]}},\n'
            '"zero_optimization": {"stage": 2,},\n}\n'
        )
        model = Net()
        with libzero.shard(model, None, file) as opt:
            resolved = json.loads(opt._engine.config)
            assert resolved["zero_optimization"]["stage"] == 2 and resolved["gradient_accumulation_steps"] == 3
            assert opt.param_groups[0]["lr"] == 0.02
        support.raises(
            libzero.ConfigError, "keywords cannot be added", lambda: libzero.shard(Net(), None, file, stage=3)
        )
        file.write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
        model = Net()
        with libzero.shard(model, make(model), str(file), stage=3, bf16=False, gradient_clipping=2.0) as opt:
            resolved = json.loads(opt._engine.config)
            assert resolved["zero_optimization"]["stage"] == 3 and resolved["gradient_clipping"] == 2.0
            assert model.a.weight.dtype == torch.float32
        for config, clips in ((file, 1.0), ({"zero_optimization": {"stage": 0}}, 1.0), (None, 0.0)):
            model = Net()
            with libzero.shard(model, make(model), config) as opt:
                assert json.loads(opt._engine.config)["gradient_clipping"] == clips
    support.raises(libzero.ConfigError, "no_such_file", lambda: libzero.shard(Net(), None, "no_such_file.json"))
    support.raises(libzero.ConfigError, "optimizer", lambda: libzero.shard(Net(), None, stage=1))
    support.raises(libzero.ConfigError, "gradient_clipping", lambda: libzero.shard(Net(), None, gradient_cliping=1.0))
    model = Net()
    support.raises(libzero.ConfigError, "stage", lambda: libzero.shard(model, make(model), stage=7))
    support.raises(libzero.ConfigError, "torch.nn.Module", lambda: libzero.shard(make(model), make(model)))  # type: ignore[arg-type]
    support.raises(libzero.ConfigError, "torch.optim.Optimizer", lambda: libzero.shard(model, 3))  # type: ignore[arg-type]
    support.raises(
        libzero.ConfigError, "2 parameters", lambda: libzero.shard(model, torch.optim.SGD(torch.nn.Linear(2, 2).parameters()))
    )
    support.raises(
        libzero.ConfigError, "amsgrad", lambda: libzero.shard(model, torch.optim.AdamW(model.parameters(), amsgrad=True))
    )
    assert torch.equal(model.a.weight, Net().a.weight), "what was refused has changed nothing"
    stepped = make(model)
    loss_of(model, 0, 0).backward()
    stepped.step()
    support.raises(libzero.ConfigError, "stepped already", lambda: libzero.shard(model, stepped))


@ranks(1, 2)
def test_the_files_schedule_acts(group: Any) -> None:
    rates = []
    section = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4,
                                              "warmup_type": "linear"}}  # fmt: skip
    for given in (True, False):
        model = Net()
        config = settings(3, scheduler=section, optimizer={"type": "AdamW", "params": {"lr": 0.5}})
        with libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.5) if given else None, config) as opt:
            for step in range(7):
                loss_of(model, group.rank, step).backward()
                opt.step()
                rates.append(opt.param_groups[0]["lr"])
    assert rates[:7] == rates[7:]
    # DeepSpeed's counts from the second update on.
    for got, expected in zip(rates[:7], (0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01)):
        assert abs(got - expected) < 1e-9, rates
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}}
    model = Net()
    with libzero.shard(model, torch.optim.AdamW(model.parameters()), settings(0, scheduler=cycle)) as opt:
        loss_of(model, group.rank, 0).backward()
        opt.step()
        assert opt.param_groups[0]["lr"] == 1e-3 and opt.param_groups[0]["betas"][0] == 0.8
    model = Net()
    for key, value in (
        ("torch_autocast", {"enabled": True, "dtype": "bfloat16"}),
        ("layer_major_accumulation", True),
        ("activation_checkpointing", {"every": 1}),
    ):
        support.raises(
            libzero.ConfigError, key, lambda: libzero.shard(model, OPTIMIZERS["SGD"](model), settings(0, **{key: value}))
        )
    support.raises(libzero.ConfigError, "stage=3", lambda: libzero.shard(model, OPTIMIZERS["SGD"](model), 3))  # type: ignore[arg-type]
    support.raises(
        libzero.ConfigError, "JSON", lambda: libzero.shard(model, OPTIMIZERS["SGD"](model), gradient_clipping=float("inf"))
    )


@ranks(1, 2, 3)
def test_rank_0s_state_dict_counts(group: Any) -> None:
    plain_model = Net()
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=1e-4, momentum=0.9)
    loss_of(plain_model, 0, 0).backward()
    optimizer.step()
    model = Net()
    with libzero.shard(model, torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9), settings(0)) as opt:
        opt.load_state_dict(optimizer.state_dict() if group.rank == 0 else {})
        assert opt.param_groups[0]["lr"] == 1e-4
        loss_of(model, group.rank, 0).backward()
        opt.step()
        assert opt.diverged_parameters() == []
    model = Net()
    with libzero.shard(model, torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.5), settings(3)) as opt:
        opt.load_state_dict(optimizer.state_dict())
        assert opt.param_groups[0]["momentum"] == 0.9
    model = Net()
    with libzero.shard(model, torch.optim.SGD(model.parameters(), lr=1e-1), settings(3)) as opt:
        support.raises(libzero.ConfigError, "momentum_buffer", lambda: opt.load_state_dict(optimizer.state_dict()))
        assert opt.param_groups[0]["lr"] == 1e-1 and opt.param_groups[0]["momentum"] == 0
        loss_of(model, group.rank, 0).backward()
        opt.step()


@ranks(1, 2)
def test_cycled_momentum_and_weight_decay_are_torchs(group: Any) -> None:
    def cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)

    kinds: tuple[Any, ...] = (
        lambda trained: torch.optim.SGD(trained, lr=1e-2, momentum=0.9),
        lambda trained: torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1),
        lambda trained: torch.optim.Adafactor(trained, lr=1e-2, weight_decay=0.1),
    )
    for number, kind in enumerate(kinds):
        for stage in (0, 3):
            plain, model = Net(), Net()
            plain.load_state_dict(model.state_dict())
            reference, opt = kind(plain.parameters()), libzero.shard(model, kind(model.parameters()), stage=stage)
            both = (reference, opt)
            schedulers = [cycle(each) for each in both] if number < 2 else []
            for step in range(5):
                for each in both:
                    each.param_groups[0]["weight_decay"] = 0.1 * step
                loss_of(model, 0, step).backward()
                opt.step()
                reference.zero_grad()
                loss_of(plain, 0, step).backward()
                reference.step()
                for scheduler in schedulers:
                    scheduler.step()
            whole = opt.full_state_dict()
            if group.rank == 0:
                for name, value in plain.state_dict().items():
                    assert (whole[name] - value).abs().max() < 1e-5, (number, stage, name)
            opt.close()


@ranks(1, 2, 3)
def test_hyper_parameters_may_change_or_say_so(group: Any) -> None:
    model = Net()
    opt = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), settings(2))
    opt.param_groups[0]["betas"] = (0.5, 0.6)
    loss_of(model, group.rank, 0).backward()
    opt.step()
    opt.param_groups[0]["amsgrad"] = True
    loss_of(model, group.rank, 1).backward()
    support.raises(libzero.Error, "amsgrad", opt.step)
    opt.param_groups[0]["amsgrad"] = False
    opt.step()
    support.raises(libzero.Error, "parameter group", lambda: opt.add_param_group({"params": [torch.zeros(1)]}))
    assert opt.steps == 2
    opt.close()


@ranks(1, 2, 3)
def test_clipping_as_torch_does(group: Any) -> None:
    for stage in range(4):
        runs = []
        for by_call in (False, True):
            model = Net()
            keys = {} if by_call else {"gradient_clipping": 0.1}
            opt = libzero.shard(model, OPTIMIZERS["SGD"](model), settings(stage, **keys))
            for step in range(3):
                loss_of(model, group.rank, step).backward()
                if by_call:
                    norm = opt.clip_grad_norm_(0.1).item()
                opt.step()
                if by_call:
                    assert abs(norm - opt.grad_norm) <= 1e-6 * norm, (norm, opt.grad_norm)
            runs.append(opt.full_state_dict())
            opt.close()
        support.equal(runs[0], runs[1], f"stage {stage}")


@ranks(1, 2, 3)
def test_states_by_name(group: Any) -> None:
    for stage in range(4):
        model = Net()
        with libzero.shard(model, OPTIMIZERS["AdamW"](model), settings(stage)) as opt:
            loss_of(model, group.rank, 0).backward()
            gradient = opt.gradient(model.a.weight)
            reference = Net()
            (sum(loss_of(reference, rank, 0) for rank in range(group.size)) / group.size).backward()
            torch.testing.assert_close(gradient, reference.a.weight.grad, rtol=1e-5, atol=1e-7)
            opt.set_gradient("a.weight", torch.zeros_like(gradient))
            opt.step()
            assert not opt.optimizer_state("a.weight", "exp_avg").any()
            opt.set_parameter(model.a.weight, torch.ones(33, 7))
            assert torch.equal(opt.parameter("a.weight"), torch.ones(33, 7))
            with libzero.gathered(model.a.weight, write=True):
                model.a.weight.data.numpy()[:] = 2.0
            assert torch.equal(opt.parameter("a.weight"), torch.full((33, 7), 2.0))
            support.raises(libzero.ConfigError, "a.weight", lambda: opt.parameter("a.weigth"))
            support.raises(libzero.ConfigError, "no parameter", lambda: opt.parameter(torch.zeros(1)))
            assert opt.diverged_parameters() == []
            sent = opt.traffic()
            assert set(sent["formula"]) >= {"all_gather", "reduce_scatter", "all_reduce"}
    support.raises(libzero.ConfigError, "0 sharded models", lambda: libzero.gathered(Net()))


@ranks(1, 2, 3)
def test_several_optimizers_become_one(group: Any) -> None:

    def make(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        trained = [p for p in model.parameters() if p.requires_grad]
        return [
            torch.optim.Muon([p for p in trained if p.dim() == 2], lr=1e-2, weight_decay=0.05),
            torch.optim.AdamW([p for p in trained if p.dim() < 2], lr=1e-3),
        ]

    reference = Net()
    both = make(reference)
    for step in range(5):
        (sum(loss_of(reference, rank, step) for rank in range(group.size)) / group.size).backward()
        for each in both:
            each.step()
            each.zero_grad()
    first: Any = None
    for stage in range(4):
        model = Net()
        both = make(model)
        schedulers = [torch.optim.lr_scheduler.ConstantLR(each, factor=1.0) for each in both]
        with libzero.shard(model, both, settings(stage)) as opt:
            seen = []
            for step in range(5):
                loss = loss_of(model, group.rank, step)
                loss.backward()
                opt.step()
                opt.zero_grad()
                for scheduler in schedulers:
                    scheduler.step()
                seen.append((loss.item(), opt.grad_norm))
            bits = (seen, opt.full_state_dict())
            first = first or bits
            support.equal(bits, first, f"stage {stage}")
            if group.rank == 0:
                for key, value in reference.state_dict().items():  # Muon's products are of bf16 in PyTorch
                    torch.testing.assert_close(bits[1][key], value, rtol=1e-2, atol=3e-3, msg=key)
    model = Net()
    mixed = [*make(model)[:1], torch.optim.RMSprop(p for p in model.parameters() if p.dim() < 2)]
    support.raises(libzero.ConfigError, "RMSprop", lambda: libzero.shard(model, mixed))


@ranks(1, 2, 3)
def test_two_models_in_one_loss(group: Any) -> None:
    for stage in range(4):
        models = [Net(), Net()]
        opts = [libzero.shard(model, OPTIMIZERS["SGD"](model), settings(stage)) for model in models]
        for step in range(2):
            sum(loss_of(model, group.rank, step + i) for i, model in enumerate(models)).backward()
            for opt in opts:
                opt.step()
        alone = Net()
        with libzero.shard(alone, OPTIMIZERS["SGD"](alone), settings(stage)) as opt:
            for step in range(2):
                loss_of(alone, group.rank, step + 1).backward()
                opt.step()
            support.equal(opts[1].full_state_dict(), opt.full_state_dict(), f"stage {stage}")
        for opt in opts:
            opt.close()


main()
