"""What DeepSpeed's own tests check, with libzero in its place, at stages 0 to 3 on 2 ranks.

The names are those of DeepSpeed's tests/unit/v1/zero and tests/unit/runtime/zero; the tests are written anew."""

from __future__ import annotations

import sys
import tempfile
from collections import namedtuple
from typing import Any

import support

support.under_launcher(2)

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import libzero  # noqa: E402
from peers import GROUP, Pair, Suite, adam, config_of, parts_of, raises, train  # noqa: E402

suite = Suite("DeepSpeed")
TWO_PAIRS = ((0, 1), (2, 3))  # accumulation adds micro-batches first or ranks first
MANAGED = {"train_micro_batch_size_per_gpu": 2}


class Classifier(nn.Module):
    """A chain of layers and a loss."""

    def __init__(self, width: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
        return F.cross_entropy(x, y)


def batch(width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, width), torch.randint(0, width, (2,))


def classified(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(*part)


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


# --- test_zero.py


@suite.port("test_zero.TestZeroUnbalancedGradients.test")
def unbalanced(stage: int) -> list[float]:
    # Every second pass has every second parameter, and another half on each rank.
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def loss_of(model: nn.Module, part: tuple[int, torch.Tensor]) -> torch.Tensor:
        odd, x = part
        for number, layer in enumerate(model):  # type: ignore[arg-type]
            used = [parameter if number % 2 == odd else parameter.detach() for parameter in layer.parameters()]
            x = F.linear(x, *used)
        return x.square().mean()

    pair = Pair(model, stage)
    for number in range(4):
        pair.backward(loss_of, [((number + rank) % 2, torch.randn(2, 4)) for rank in range(GROUP.size)])
        pair.check_gradients()
        pair.step()
    for _ in range(4):  # the same half on all: the other is not updated
        pair.backward(loss_of, [(1, torch.randn(2, 4)) for _ in range(GROUP.size)])
        pair.step()
        pair.check_weights()
    return pair.close()


@suite.port("test_zero.TestZeroUnbalancedGradients.test (by requires_grad)")
def unbalanced_by_switch(stage: int) -> list[float]:
    # As DeepSpeed's test does it: off and on again around each pass, for what was trainable at the beginning.
    pair = Pair(Classifier(layers=4), stage)
    for number in range(4):
        for model in (pair.model, pair.reference):
            for index, parameter in enumerate(model.parameters()):
                parameter.requires_grad_(index % 2 == number % 2)
        pair.backward(classified, parts_of(batch))
        for model in (pair.model, pair.reference):
            model.requires_grad_(True)
        pair.step()
        pair.check_weights()
    return pair.close()


@suite.port("test_zero.TestZero3RepeatForwardLoop.test")
def repeated(stage: int) -> list[float]:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = x + self.linear(x)
            return F.cross_entropy(x, y)

    return train(Pair(Repeated(), stage), classified, batch)


class Products(nn.Module):
    """Three weights that the input is multiplied by, one after the other; what is returned varies."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(3, 5) for _ in range(3))
        self.kind = kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = []
        for weight in self.layers:
            x = weight * x
            hidden.append(x)
        return self.kind(first=hidden[0], second=hidden[1], last=hidden[2], loss=F.l1_loss(x, y, reduction="none"))


Named = namedtuple("Named", "first second last loss")


def products(stage: int, kind: Any = dict, keep: bool = False, dtype: str = "", **zero: Any) -> list[float]:
    """Gradients that were worked out by hand: of layer 3 it is hidden 2, of layer 2 layer 3 times hidden 1, ..."""
    model = Products(kind)
    config = config_of(stage, zero_optimization=zero, **({dtype: {"enabled": True, "loss_scale": 1.0}} if dtype == "fp16" else {}))
    optimizer = libzero.shard(model, torch.optim.Adam(model.parameters(), lr=1.0), config)
    upper = torch.cat([torch.zeros(8), torch.ones(7)]).view(3, 5)  # the half that would be rank 1's
    for number, (name, _) in enumerate(model.named_parameters()):
        optimizer.set_parameter(name, (number + 1) * (1 + upper))
    hidden1 = 1 + upper
    hidden2 = 2 * (1 + upper) * hidden1
    expected = {"first": hidden1, "second": hidden2, "last": 3 * (1 + upper) * hidden2}
    sizes = {"dtype": torch.float16} if dtype == "fp16" else {}
    losses = []
    for number in range(3):
        out = model(torch.ones(3, 5, **sizes), torch.ones(3, 5, **sizes))
        named = out if isinstance(out, dict) else out._asdict() if isinstance(out, Named) else dict(zip(Named._fields, out))
        for name, value in expected.items():
            assert torch.equal(named[name].float(), value), (name, number)
        assert torch.equal(named["loss"].float(), expected["last"] - 1)
        optimizer.backward(named["loss"].sum())
        times = number + 1 if keep else 1
        weights = [each * (1 + upper) for each in (1, 2, 3)]
        gradients = [weights[2] * weights[1], weights[2] * hidden1, hidden2]
        for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
            assert torch.equal(optimizer.gradient(name), times * gradient), (name, number, optimizer.gradient(name))
        if not keep:
            optimizer.zero_grad()
        losses.append(named["loss"].sum().item())
    if not keep:
        optimizer.backward(model(torch.ones(3, 5, **sizes), torch.ones(3, 5, **sizes))["loss"].sum() if kind is dict else model(torch.ones(3, 5), torch.ones(3, 5))[3].sum())
    optimizer.step()
    assert optimizer.updated and optimizer.grad_norm > 0
    optimizer.close()
    return losses


def as_tuple(**values: Any) -> tuple[Any, ...]:
    return tuple(values.values())


def as_list(**values: Any) -> list[Any]:
    return list(values.values())


BASE = "test_zero.TestZero3ParamPartitioningBase."
suite.port(BASE + "test_param_persistence_threshold")(
    lambda stage: products(stage, stage3_max_live_parameters=10) + products(stage, stage3_max_live_parameters=0)
)
suite.port(BASE + "test_fp16_enabled")(lambda stage: products(stage, dtype="fp16"))
suite.port(BASE + "test_offload_optimizer")(lambda stage: products(stage, offload_optimizer={"device": "cpu"}))
# Gradients are read between the passes of an accumulation here, which stages 0 and 1 refuse by name.
suite.port(BASE + "test_zero_grad", stages=(2, 3))(lambda stage: products(stage) + products(stage, keep=True))
suite.port(BASE + "test_prefetching")(lambda stage: products(stage, stage3_prefetch_bucket_size=45))
suite.port(BASE + "test_model_class")(
    lambda stage: products(stage, Named) + products(stage, as_tuple) + products(stage, as_list)
)
suite.does_not_apply(BASE + "test_contiguous_gradients, test_reduce_scatter", "keys without an effect here: there is one way, which is always contiguous")


@suite.port("test_zero.TestZero3ParamPartitioningLargeParam.test", stages=(2, 3))
def large_parameter(stage: int) -> list[float]:
    # One parameter over more than a unit, with a size that ranks cannot share evenly; values of rank 0 alone.
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8101))
            if GROUP.rank == 0:
                with torch.no_grad():
                    self.weight[4051:] = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = Large()
    optimizer = libzero.shard(model, adam(model, 1.0), config_of(stage))
    losses = []
    for number in range(3):
        y = model(torch.ones(8101))
        assert not y[:4051].any() and bool((y[4051:] == 1).all())
        y.sum().backward()
        assert torch.equal(optimizer.gradient("weight"), torch.full((8101,), float(number + 1)))
        losses.append(y.sum().item())
    optimizer.close()
    return losses


@suite.port("test_zero.TestZero3ParamPartitioningManyParams.test")
def many_parameters(stage: int) -> list[float]:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.full((100,), 1 + 0.01 * number) for number in range(100))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = x * weight
            return x

    model = Many()
    optimizer = libzero.shard(model, adam(model), config_of(stage))
    with optimizer.gathered([model.weights[7]], modifier_rank=1):
        if GROUP.rank == 1:
            with torch.no_grad():
                model.weights[7].fill_(2)
    with torch.no_grad():
        expected = torch.ones(100)
        for number in range(100):
            expected = expected * (2 if number == 7 else 1 + 0.01 * number)
    losses = []
    for _ in range(3):
        y = model(torch.ones(100))
        torch.testing.assert_close(y.detach(), expected, rtol=1e-4, atol=0)
        y.sum().backward()
        losses.append(y.sum().item())
    optimizer.close()
    return losses


@suite.port("test_zero.TestZero3InitForParentWeightInitialization.test")
def parent_initialises(stage: int) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 1)
            self.apply(self.initialise)

        def initialise(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                with torch.no_grad():
                    module.weight.fill_(1 + GROUP.rank)

    with libzero.init():
        model = Parent()
    optimizer = libzero.shard(model, adam(model), config_of(stage))
    assert torch.equal(optimizer.parameter("linear.weight"), torch.ones(1, 12)), "rank 0's"
    optimizer.close()


@suite.port("test_zero.TestParamPartitioningSkipInit.test")
def skip_init(stage: int) -> list[float]:
    with libzero.init():
        model = nn.Sequential(nn.utils.skip_init(nn.Linear, 10, 10), nn.Dropout(0.0), nn.Linear(10, 10))
        with torch.no_grad():
            model[0].weight.fill_(0.1)
            model[0].bias.fill_(0.0)
    return train(Pair(model, stage), squared, lambda: torch.randn(4, 10))


@suite.port("test_zero.TestZero3DictFwd.test")
def outputs(stage: int) -> list[float]:
    losses: list[float] = []
    for kind in (tuple, list, dict):

        class Model(nn.Module):
            def __init__(self, kind: type) -> None:
                super().__init__()
                self.linear, self.kind = nn.Linear(10, 10), kind

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
                x = self.linear(x)
                loss = F.cross_entropy(x, y)
                return {"a": x, "loss": loss, "b": 1, "c": None} if self.kind is dict else self.kind((x, loss))

        def loss_of(model: nn.Module, part: Any, key: Any = "loss" if kind is dict else 1) -> torch.Tensor:
            return model(*part)[key]

        losses += train(Pair(Model(kind), stage), loss_of, lambda: batch(10), steps=3)
    return losses


@suite.port("test_zero.TestZeroFrozenWeights.test")
def frozen(stage: int) -> list[float]:
    model = Classifier(10, 3)
    model.linears[1].requires_grad_(False)
    before = model.linears[1].weight.detach().clone()
    pair = Pair(model, stage)
    losses = train(pair, classified, lambda: batch(10))
    assert torch.equal(pair.reference.linears[1].weight, before)
    return losses


@suite.port("test_zero.TestZeroAdamOptimizerStepCount.test", bits=TWO_PAIRS)
def step_count(stage: int) -> list[float]:
    model = Classifier(layers=12)
    optimizer = libzero.shard(model, adam(model, 1e-3), config_of(stage, gradient_accumulation_steps=2, **MANAGED))
    assert optimizer.steps == 0
    losses = []
    for number in range(1, 9):
        loss = model(*parts_of(batch)[GROUP.rank])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert optimizer.updated == (number % 2 == 0) and optimizer.steps == number // 2
        counts = {optimizer._engine.parameter_steps(name) for name, _ in model.named_parameters()}
        assert counts == {number // 2}, counts
    states = optimizer.state_dict()["state"]
    assert GROUP.rank or {states[index]["step"].item() for index in states} == {4.0}
    optimizer.close()
    return losses


@suite.port("test_zero.TestEmptyParameterGroup.test_empty_param_groups")
def empty_group(stage: int) -> None:
    for dtype in ("", "bf16", "fp16"):
        for weights_first in (True, False):
            model = Classifier(4, 4)
            weights = [layer.weight for layer in model.linears]
            biases = [layer.bias for layer in model.linears]
            if weights_first:
                groups = [{"params": weights + biases, "weight_decay": 0.01}, {"params": [], "weight_decay": 0.0}]
            else:
                groups = [{"params": [], "weight_decay": 0.01}, {"params": weights + biases, "weight_decay": 0.0}]
            more = {dtype: {"enabled": True}} if dtype else {}
            optimizer = libzero.shard(model, torch.optim.AdamW(groups, lr=0.1), config_of(stage, **more))
            x, y = batch()
            optimizer.backward(model(x.to(model.linears[0].weight.dtype), y))
            optimizer.step()
            optimizer.state_dict()
            optimizer.close()


@suite.port("test_zero.TestZero3SwitchModes.test")
def switch_modes(stage: int) -> list[float]:
    losses: list[float] = []
    for prefetch in (0, 60, 120):
        pair = Pair(Classifier(10), stage, zero_optimization={"stage3_prefetch_bucket_size": prefetch})
        for _ in range(3):
            pair.model.train()
            for _ in range(4):
                pair.backward(classified, parts_of(lambda: batch(10)))
                pair.step()
            pair.model.eval()
            with torch.no_grad():
                for _ in range(3):
                    x, y = batch(10)
                    torch.testing.assert_close(pair.model(x, y), pair.reference(x, y), rtol=1e-4, atol=1e-5)
        losses += pair.close()
    return losses


@suite.port("test_zero.TestZero3ClientModuleID.test_client_module_id")
def attributes(stage: int) -> None:
    # Nothing of the user's is taken: no attribute is added or changed.
    model = Classifier()
    model.id = 3  # type: ignore[assignment]
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    optimizer = libzero.shard(model, adam(model), config_of(stage))
    assert model.id == 3 and before == {name: sorted(vars(module)) for name, module in model.named_modules()}
    optimizer.close()


@suite.port("test_zero.TestZeroToFP32.test_1_param_group, test_2_param_groups", bits=())
def to_fp32(stage: int) -> None:
    # What is exported whole is what the model holds; frozen parameters and groups too.
    for frozen_layer in (False, True):
        for split in (False, True):
            model = Classifier(3, 5)
            if frozen_layer:
                model.linears[0].requires_grad_(False)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            groups = [
                {"params": [p for p in trained if p.dim() == 2], "weight_decay": 0.01},
                {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
            ]
            optimizer = libzero.shard(
                model, torch.optim.AdamW(groups if split else trained, lr=1e-2), config_of(stage, bf16={"enabled": True})
            )
            for _ in range(3):
                x, y = batch(3)
                optimizer.backward(model(x.bfloat16(), y))
                optimizer.step()
            exact = {name: optimizer.parameter(name) for name, _ in model.named_parameters()}
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.detach().clone(), exact[name].bfloat16()), name
            whole = optimizer.full_state_dict()
            if GROUP.rank == 0:
                assert sorted(whole) == sorted(exact)
                for name, value in whole.items():
                    assert torch.equal(value.float(), exact[name]) or torch.equal(value, exact[name].bfloat16()), name
            optimizer.close()


@suite.port("test_zero.TestZeroOffloadStage1.test, TestZeroOffloadOptim.test")
def offload(stage: int) -> list[float]:
    zero = {"offload_optimizer": {"device": "cpu"}}
    return train(Pair(Classifier(10), stage, zero_optimization=zero), classified, lambda: batch(10))


@suite.port("test_zero.TestBF16OptimizerGradReduction.test_boundary_microbatch_grad_is_reduced", bits=())
def boundary(stage: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    model = Scaled()
    config = config_of(stage, bf16={"enabled": True}, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=1)
    optimizer = libzero.shard(model, adam(model), config)
    for number in range(2):
        x = torch.tensor([1.0, 3, 5, 7]) + 10 * number + 18 * GROUP.rank
        model(x.bfloat16()).backward()
        if number == 0:
            optimizer.step()
    # The mean over micro-batches and ranks.
    assert torch.equal(optimizer.gradient("weight"), torch.tensor([15.0, 17, 19, 21])), optimizer.gradient("weight")
    optimizer.close()


suite.does_not_apply("test_zero.TestGradientAllreduceOp*", "gradients are mean gradients; gradient_allreduce_op is refused by name")
suite.does_not_apply("test_zero.TestPartitionNcclAlignment, TestIncorectAllgatherBucketSize, TestZeroPartitionCache", "insides of DeepSpeed's buckets and caches")

# --- test_zero_user_backward.py

USER = "test_zero_user_backward."


@suite.port(USER + "TestZeroUserBackwardBasic.test_loss_backward_matches_ddp")
def user_backward(stage: int) -> list[float]:
    return train(Pair(Classifier(), stage), classified, batch)


@suite.port(USER + "TestZeroUserBackwardNonScalar.test_non_scalar_backward")
def non_scalar(stage: int) -> list[float]:
    pair = Pair(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stage)
    for _ in range(3):
        parts = parts_of(lambda: torch.randn(2, 4))
        for rank, x in enumerate(parts):
            y = pair.reference(x)
            y.backward(torch.ones_like(y) / len(parts))
        y = pair.model(parts[GROUP.rank])
        y.backward(torch.ones_like(y))
        pair.losses.append(y.sum().item())
        pair.check_gradients()
        pair.step()
        pair.check_weights()
    return pair.close()


@suite.port(USER + "TestZeroUserBackwardGradAccumulation.test_grad_accumulation", bits=TWO_PAIRS)
def managed_accumulation(stage: int) -> list[float]:
    # With the key, as DeepSpeed: the mean over micro-batches, an update at every fourth step().
    pair = Pair(Classifier(), stage, gradient_accumulation_steps=4, **MANAGED)
    for number in range(8):
        parts = parts_of(batch)
        for part in parts:
            (classified(pair.reference, part) / len(parts) / 4).backward()
        loss = classified(pair.model, parts[GROUP.rank])
        loss.backward()
        pair.losses.append(loss.item())
        if number % 4 == 3:
            pair.check_gradients()
            pair.step()
            pair.check_weights()
        else:
            pair.optimizer.step()
    return pair.close()


@suite.port(USER + "TestZeroUserBackwardGradAccumulation.test_grad_accumulation_scale_wrt_gas_false", bits=TWO_PAIRS)
def unscaled_accumulation(stage: int) -> list[float]:
    # Without the key, as torch: the sum over the passes before a step.
    return train(Pair(Classifier(), stage), classified, batch, steps=2, micro_batches=4)


@suite.port(USER + "TestZeroUserBackwardMultipleEngines.test_multiple_engines_combined_loss")
def combined_loss(stage: int) -> list[float]:
    pairs = [Pair(Classifier(), stage) for _ in range(3)]
    losses = []
    for _ in range(2):
        parts = parts_of(batch)
        for part in parts:
            sum(classified(pair.reference, part) / (i + 1) / len(parts) for i, pair in enumerate(pairs)).backward()
        combined = sum(classified(pair.model, parts[GROUP.rank]) / (i + 1) for i, pair in enumerate(pairs))
        combined.backward()
        losses.append(combined.item())
        for pair in pairs:
            pair.check_gradients()
        for pair in pairs:
            pair.step()
            pair.check_weights()
    for pair in pairs:
        pair.close()
    return losses


@suite.port(USER + "TestZeroUserBackwardSeparateLoss.test_separate_loss_function")
def separate_loss(stage: int) -> list[float]:
    criterion = nn.CrossEntropyLoss()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return train(Pair(model, stage), lambda model, part: criterion(model(part[0]), part[1]), batch)


@suite.port(USER + "TestZeroUserBackwardLeafModule.test_leaf_module_backward, test_leaf_module_non_scalar_backward")
def branches(stage: int) -> list[float]:
    # There are no leaf modules to be declared: what a forward pass skips or picks is no matter.
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.branches[0](x) + self.branches[1](x))

    return train(Pair(Branches(), stage), lambda model, x: model(x).sum(), lambda: torch.randn(2, 4))


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def half_step(stage: int, scaled: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(42)
    model = Classifier()
    optimizer = libzero.shard(model, adam(model, 1e-3), config_of(stage, **FP16))
    losses = []
    for _ in range(3):
        x, y = parts_of(batch)[GROUP.rank]
        loss = model(x.half(), y)
        if scaled:
            optimizer.scale(loss).backward()
        else:
            optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    result = {name: optimizer.parameter(name) for name, _ in model.named_parameters()}
    optimizer.close()
    return losses, result


@suite.port(USER + "TestZeroUserBackwardWithScale.test_scale_backward_matches_engine_backward")
def scale_is_backward(stage: int) -> list[float]:
    (one, first), (other, second) = half_step(stage, True), half_step(stage, False)
    assert one == other
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    return one


@suite.port(USER + "TestZeroUserBackwardWithScale.test_error_when_backward_without_scale_fp16, test_needs_scaler_with_fp16", bits=())
def scale_is_needed(stage: int) -> None:
    model = Classifier()
    optimizer = libzero.shard(model, adam(model), config_of(stage, **FP16))
    x, y = batch()
    raises(libzero.Error, ["scale"], lambda: model(x.half(), y).backward())
    optimizer.scale(model(x.half(), y)).backward()
    optimizer.step()
    assert optimizer.updated and optimizer.loss_scale == 256
    optimizer.close()


@suite.port(USER + "TestZeroUserBackwardWithScale.test_needs_scaler_with_bf16, test_scale_backward_matches_ddp", bits=())
def scale_is_not_needed(stage: int) -> None:
    model = Classifier()
    optimizer = libzero.shard(model, adam(model), config_of(stage, bf16={"enabled": True}))
    x, y = batch()
    loss = model(x.bfloat16(), y)
    assert torch.equal(optimizer.scale(loss), loss)
    loss.backward()
    optimizer.step()
    assert optimizer.updated
    optimizer.close()


@suite.port(USER + "TestZeroUserBackwardWithScale.test_scale_with_torch_autocast")
def autocast(stage: int) -> list[float]:
    def loss_of(model: nn.Module, part: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*part)

    return train(Pair(Classifier(), stage, rtol=2e-2, atol=2e-3), loss_of, batch, steps=1)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, frozen: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.reentrant = reentrant
        if frozen:
            self.blocks[1].requires_grad_(False)
            self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.norm(x)


def some_input() -> torch.Tensor:
    return torch.randn(2, 8, requires_grad=True)


def weighted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # Behind a norm a sum of squares would be a constant, and all gradients rounding errors.
    return (model(x) * torch.arange(8.0)).square().mean()


CHECKPOINTED = USER + "TestZeroUserBackwardWithCheckpointing."


@suite.port(CHECKPOINTED + "test_checkpointed_scalar_backward, test_checkpointed_non_scalar_backward")
def checkpointed(stage: int) -> list[float]:
    losses: list[float] = []
    for reentrant in (True, False):
        losses += train(Pair(Checkpointed(reentrant), stage), weighted, some_input)
    return losses


@suite.port(CHECKPOINTED + "test_checkpointed_multiple_backward", bits=TWO_PAIRS)
def checkpointed_often(stage: int) -> list[float]:
    losses: list[float] = []
    for reentrant in (True, False):
        pair = Pair(Checkpointed(reentrant), stage)
        losses += train(pair, weighted, some_input, steps=2, micro_batches=3)
    return losses


@suite.port(USER + "TestZeroUserBackwardFrozenParamCheckpointing.test_checkpointed_frozen_param, TestZeroFrozenParam*")
def checkpointed_frozen(stage: int) -> list[float]:
    losses: list[float] = []
    for reentrant in (True, False):
        pair = Pair(Checkpointed(reentrant, frozen=True), stage)
        for _ in range(3):
            pair.backward(weighted, parts_of(some_input))
            if stage == 3:
                assert pair.optimizer._engine.pager()["live_bytes"] == 0, "frozen parameters go, too"
            pair.check_gradients()
            pair.step()
        losses += pair.close()
    return losses


@suite.port(USER + "TestUnmanagedGradientAccumulation.test_step_always_applies_update, test_unmanaged_varying_backward_count", bits=TWO_PAIRS)
def unmanaged(stage: int) -> list[float]:
    pair = Pair(Classifier(), stage)
    for count in (2, 5, 3):
        for _ in range(count):
            pair.backward(classified, parts_of(batch))
        pair.check_gradients()
        pair.step()
        assert pair.optimizer.updated
        pair.check_weights()
    assert pair.optimizer.steps == 3
    return pair.close()


@suite.port(USER + "TestUnmanagedGradientAccumulation.test_managed_baseline_applies_only_on_boundary", bits=())
def managed(stage: int) -> None:
    model = Classifier()
    optimizer = libzero.shard(model, adam(model), config_of(stage, gradient_accumulation_steps=4, **MANAGED))
    updated = []
    for _ in range(8):
        model(*batch()).backward()
        optimizer.step()
        updated.append(optimizer.updated)
    assert updated == [False, False, False, True] * 2
    optimizer.close()


@suite.port(USER + "TestUnmanagedGradientAccumulation.test_unmanaged_matches_managed, TestUnmanagedGradientAccumulationOffload.*", bits=())
def unmanaged_is_managed(stage: int) -> None:
    for zero in ({}, {"offload_optimizer": {"device": "cpu"}}):
        results = []
        for key in (True, False):
            torch.manual_seed(42)
            model = Classifier()
            more = {"gradient_accumulation_steps": 4, **MANAGED} if key else {}
            optimizer = libzero.shard(model, adam(model, 1e-3), config_of(stage, zero_optimization=dict(zero), **more))
            for number in range(12):
                loss = model(*parts_of(batch)[GROUP.rank])
                (loss if key else loss / 4).backward()
                if key or number % 4 == 3:
                    optimizer.step()
            results.append({name: optimizer.parameter(name) for name, _ in model.named_parameters()})
            optimizer.close()
        for name, value in results[0].items():
            torch.testing.assert_close(value, results[1][name], rtol=1e-5, atol=1e-6)


suite.does_not_apply(USER + "TestZeroUserBackwardScaleErrorDetection.test_error_when_backward_without_scale_sequential", "as test_error_when_backward_without_scale_fp16")
suite.does_not_apply(USER + "TestUnmanagedGradientAccumulation*NvmeOffload*, *OverlapComm*, *Coalesce*, *Pipeline*", "keys that are refused, or tested in C++ (states on disk)")

# --- test_zero_torch_func.py


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).sum()


def through(stage: int, transform: Any, stack: bool = False) -> None:
    """A transform of a sharded model gives what it gives of a plain one, and training goes on."""
    pair = Pair(Tiny(), stage)
    x = torch.randn(8)
    x = torch.stack([x, x + 0.1, x - 0.1]) if stack else x
    torch.testing.assert_close(transform(pair.model)(x), transform(pair.reference)(x))
    train(pair, lambda model, x: model(x), lambda: torch.randn(2, 8), steps=2)


FUNC = "test_zero_torch_func.TestEngineTorchFunc."
suite.port(FUNC + "test_grad_through_engine")(lambda stage: through(stage, torch.func.grad))
suite.port(FUNC + "test_grad_and_value_through_engine")(lambda stage: through(stage, torch.func.grad_and_value))
suite.port(FUNC + "test_jacrev_through_engine")(lambda stage: through(stage, torch.func.jacrev))
suite.port(FUNC + "test_vmap_grad_through_engine")(
    lambda stage: through(stage, lambda model: torch.func.vmap(torch.func.grad(model)), stack=True)
)
suite.port(FUNC + "test_engine_backward_still_works, test_grad_not_scaled_by_gas")(lambda stage: through(stage, torch.func.grad))
suite.does_not_apply("test_zero_torch_func.TestZero0DirectBackwardStillRaises", "loss.backward() is the way here, at stage 0 too")

# --- test_zero_context.py, test_zero_context_return.py, test_zero_nesting_init.py, test_zero_dynamic_class.py


@suite.port("test_zero_context.TestGatherUpdate.test, TestScatterGather.test", bits=())
def gather_update(stage: int) -> None:
    model = nn.Linear(4, 2)
    optimizer = libzero.shard(model, adam(model), config_of(stage))
    with libzero.gathered(model.weight, modifier_rank=1):
        assert model.weight.numel() == 8
        if GROUP.rank == 1:
            with torch.no_grad():
                model.weight.zero_()
    with libzero.gathered(model.weight):
        assert torch.equal(model.weight, torch.zeros(2, 4))
    assert torch.equal(optimizer.parameter("weight"), torch.zeros(2, 4))
    optimizer.close()


@suite.port("test_zero_context.TestSerialContext.test_ext_param_getattr")
def other_modules_weight(stage: int) -> list[float]:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.second(self.first(x)), self.first.weight).mean()

    return train(Pair(Uses(), stage), lambda model, x: model(x), lambda: torch.randn(16))


class Dangling(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(16, 16), nn.Linear(16, 16), kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(self.second(self.first(x)), self.second.bias)  # a parameter leaves its module


class Holder:
    def __init__(self, out: torch.Tensor, bias: torch.Tensor) -> None:
        self.out, self.bias = out, bias


@suite.port("test_zero_context_return.TestReturnParam.test_ext_param_return, test_ext_param_returnobj, test_stage_3_output_type")
def returned_parameter(stage: int) -> list[float]:
    kinds = (
        (lambda out, bias: (out, bias), lambda got: got[0] + got[1]),
        (Holder, lambda got: got.out + got.bias),
        (lambda out, bias: {"loss": out + bias}, lambda got: got["loss"]),
        (lambda out, bias: out + bias, lambda got: got),
    )
    losses: list[float] = []
    for kind, add in kinds:
        losses += train(
            Pair(Dangling(kind), stage), lambda model, x, add=add: add(model(x)).square().mean(), lambda: torch.rand(16), steps=3
        )
    return losses


@suite.port("test_zero_nesting_init.TestNestingInit.test_nesting_init, TestShutdownInNestingInit.test_shutdown_in_nesting_init")
def nested_init(stage: int) -> list[float]:
    with libzero.init():
        with libzero.init():
            first = nn.Linear(4, 4)
        losses = train(Pair(first, stage), squared, lambda: torch.randn(2, 4), steps=2)
        with libzero.init():
            second = nn.Linear(4, 4)
    return losses + train(Pair(second, stage), squared, lambda: torch.randn(2, 4), steps=2)


@suite.port("test_zero_nesting_init.TestNestedParallelInit.test_nested_parallel_init", bits=())
def composed_init(stage: int) -> None:
    # A model that makes its parts by from_pretrained, inside init().
    import transformers

    torch.manual_seed(0)
    parts = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**parts), transformers.BertConfig(**parts)
    )
    plain = transformers.EncoderDecoderModel(config)
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        with libzero.init():
            model = transformers.EncoderDecoderModel.from_pretrained(folder)
    optimizer = libzero.shard(model, adam(model), config_of(stage))
    for name, parameter in plain.named_parameters():
        if GROUP.rank == 0:
            torch.testing.assert_close(optimizer.parameter(name), parameter.detach(), rtol=0, atol=0)
        else:
            optimizer.parameter(name)
    optimizer.close()


@suite.port("test_zero_dynamic_class.TestNewClassDeclaredNestingInit.*, TestNewClassDeclaredInsideNestingInit.*")
def class_inside_init(stage: int) -> list[float]:
    with libzero.init():

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x)

        model = Model()
    return train(Pair(model, stage), squared, lambda: torch.randn(2, 4), steps=2)


# --- test_zero_tensor_fragment.py, test_ignore_unused_parameters.py

FRAGMENT = "test_zero_tensor_fragment."
STATES = ("exp_avg", "exp_avg_sq")


@suite.port(FRAGMENT + "TestTensorFragmentGet.test_zero_fragments, test_bf16_optimizer_fragments", bits=())
def fragments_get(stage: int) -> None:
    for dtype in ("", "bf16"):
        for zero in ({}, {"offload_optimizer": {"device": "cpu"}}):
            for frozen_weights in (False, True):
                model = Classifier(16, 3)
                if frozen_weights:
                    model.linears[1].requires_grad_(False)
                more = {dtype: {"enabled": True}} if dtype else {}
                optimizer = libzero.shard(model, adam(model), config_of(stage, zero_optimization=dict(zero), **more))
                kind = torch.bfloat16 if dtype else torch.float32
                for _ in range(2):
                    x, y = parts_of(lambda: batch(16))[GROUP.rank]
                    optimizer.backward(model(x.to(kind), y))
                    for name, parameter in model.named_parameters():
                        gradient = optimizer.gradient(name) if parameter.requires_grad else None
                        assert (gradient is not None) == parameter.requires_grad
                        assert gradient is None or (gradient.shape == parameter.shape and gradient.dtype == torch.float32)
                    optimizer.step()
                    for name, parameter in model.named_parameters():
                        value = optimizer.parameter(name)
                        assert value.dtype == torch.float32 and torch.equal(value.to(kind), parameter.detach().clone())
                        for state in STATES if parameter.requires_grad else ():
                            assert optimizer.optimizer_state(name, state).shape == parameter.shape
                optimizer.close()


@suite.port(FRAGMENT + "TestTensorFragmentSet.test_zero_fragments", bits=())
def fragments_set(stage: int) -> None:
    for dtype in ("", "bf16"):
        model = Classifier(16, 3)
        more = {dtype: {"enabled": True}} if dtype else {}
        optimizer = libzero.shard(model, adam(model), config_of(stage, **more))
        kind = torch.bfloat16 if dtype else torch.float32
        x, y = batch(16)
        optimizer.backward(model(x.to(kind), y))
        optimizer.step()
        for number, (name, parameter) in enumerate(model.named_parameters()):
            value = torch.full(parameter.shape, 1.0 + number)
            optimizer.set_parameter(name, value)
            assert torch.equal(optimizer.parameter(name), value)
            assert torch.equal(parameter.detach().clone(), value.to(kind)), "the model sees it at once"
            for state in STATES:
                optimizer.set_optimizer_state(name, state, value / 8)
                assert torch.equal(optimizer.optimizer_state(name, state), value / 8)
        optimizer.close()


@suite.port(FRAGMENT + "TestTensorFragmentUpdate.test_zero_fragments", bits=())
def fragments_update(stage: int) -> None:
    # Gradients that were set are what the update uses.
    for zero in ({}, {"offload_optimizer": {"device": "cpu"}}):
        pair = Pair(Classifier(16, 3), stage, zero_optimization=dict(zero))
        for number in range(2):
            pair.backward(classified, parts_of(lambda: batch(16)))
            for index, (name, parameter) in enumerate(pair.reference.named_parameters()):
                gradient = torch.full(parameter.shape, 0.25 * (index + number + 1))
                pair.optimizer.set_gradient(name, gradient)
                parameter.grad = gradient.clone()
                assert torch.equal(pair.optimizer.gradient(name), gradient)
            pair.step()
            pair.check_weights()
        pair.close()


@suite.port("test_ignore_unused_parameters.TestStage2IgnoreUnusedParameters.test")
def unused(stage: int) -> list[float]:
    # Unused parameters need no key: they are not updated, as in torch.
    class Unused(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(4, 4)

    pair = Pair(Unused(), stage)
    before = pair.reference.unused.weight.detach().clone()
    losses = train(pair, classified, batch)
    assert torch.equal(before, pair.reference.unused.weight)
    return losses


if __name__ == "__main__":
    sys.exit(suite.main())
