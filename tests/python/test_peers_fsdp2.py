"""What FSDP2's own tests check, with libzero in its place, at stages 0 to 3 on 2 ranks.

The names are those of pytorch's test/distributed/_composable/fsdp; the tests are written anew."""

from __future__ import annotations

import collections
import gc
import sys
import tempfile
from typing import Any

import support

support.under_launcher(2)

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import libzero  # noqa: E402
from peers import ALL, GROUP, Pair, Suite, adam, config_of, parts_of, raises, train  # noqa: E402

suite = Suite("FSDP2")
TWO_PAIRS = ((0, 1), (2, 3))  # accumulation adds micro-batches first or ranks first


class Mlp(nn.Module):
    def __init__(self, width: int, factor: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.down(F.relu(self.up(x))))


class Decoder(nn.Module):
    """A small language model; its output's weight may be the embedding's."""

    def __init__(self, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        # Without biases: that of the keys has a gradient of rounding errors alone, which Adam makes large.
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, bias=False) for _ in range(3)
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = libzero.checkpoint(block, x) if self.checkpointed and self.training else block(x)
        return self.head(self.norm(x))


def summed(model: nn.Module, x: Any) -> torch.Tensor:
    return model(x).sum()


def squared(model: nn.Module, x: Any) -> torch.Tensor:
    return model(x).square().mean()


def some_tokens() -> torch.Tensor:
    return torch.randint(0, 32, (2, 8))


def cross_entropy(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


# --- Training.


@suite.port("TestFullyShard1DTrainingCore.test_train_parity_single_group")
def single_group(stage: int) -> list[float]:
    # Uneven sizes, one unit for all.
    model = nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 13))
    return train(Pair(model, stage, zero_optimization={"unit_bytes": 1 << 20}), squared, lambda: torch.randn(2, 13))


@suite.port("TestFullyShard1DTrainingCore.test_train_parity_multi_group")
def multi_group(stage: int) -> list[float]:
    # Delays before backward and after it: nothing may depend on who comes first.
    import time

    model = nn.Sequential(nn.LayerNorm(16), *[Mlp(16) for _ in range(3)])

    def late(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = squared(model, x)
        time.sleep(0.02 * GROUP.rank)
        return loss

    return train(Pair(model, stage), late, lambda: torch.randn(4, 16))


@suite.port("TestFullyShard1DTrainingCore.test_train_parity_multi_group_cpu_offload_eager")
def cpu_offload(stage: int) -> list[float]:
    zero = {"offload_optimizer": {"device": "cpu"}, **({"offload_param": {"device": "cpu"}} if stage == 3 else {})}
    model = nn.Sequential(nn.LayerNorm(16), *[Mlp(16) for _ in range(3)])
    return train(Pair(model, stage, zero_optimization=zero), squared, lambda: torch.randn(4, 16))


@suite.port("TestFullyShard1DTrainingCore.test_multi_forward_module")
def multi_forward(stage: int) -> list[float]:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp(12)
            self.outer = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x) + self.inner(self.outer(x)))

    return train(Pair(Twice(), stage), squared, lambda: torch.randn(4, 12))


@suite.port("TestFullyShard1DTrainingCore.test_explicit_prefetching")
def prefetching(stage: int) -> list[float]:
    zero = {"stage3_prefetch_bucket_size": 1000, "stage3_max_live_parameters": 3000}
    return train(Pair(Decoder(), stage, zero_optimization=zero), cross_entropy, some_tokens)


suite.does_not_apply("TestFullyShard1DTrainingCore.test_post_optim_event", "events of CUDA streams")
suite.does_not_apply("TestFullyShard1DTrainingCore.test_non_root_forward_backward", "there is no root: see test_multi_forward_module for parts that run alone")


@suite.port("TestFullyShard1DTrainingCompose.test_train_parity_with_activation_checkpointing")
def checkpointing(stage: int) -> list[float]:
    return train(Pair(Decoder(checkpointed=True), stage), cross_entropy, some_tokens)


@suite.port("TestFullyShardSharedParams.test_train_parity_with_shared_params")
def shared(stage: int) -> list[float]:
    losses = train(Pair(Decoder(tied=True), stage), cross_entropy, some_tokens)
    torch.manual_seed(42)
    again = train(Pair(Decoder(tied=True, checkpointed=True), stage), cross_entropy, some_tokens)
    assert losses == again, "recomputation changes nothing"
    return losses


@suite.port("TestFullyShardGradientAccumulation.test_gradient_accumulation", bits=TWO_PAIRS)
def accumulation(stage: int) -> list[float]:
    # Sums of any number of passes before a step, as torch's loops have them.
    model = nn.Sequential(nn.Linear(16, 16), *[Mlp(16) for _ in range(3)])
    return train(Pair(model, stage), squared, lambda: torch.randn(2, 16), micro_batches=3)


@suite.port("TestFullyShardGradientAccumulation.test_1f1b_microbatching", bits=TWO_PAIRS)
def one_forward_one_backward(stage: int) -> list[float]:
    # Two forward passes ahead of their backward passes.
    pair = Pair(Decoder(), stage)
    for _ in range(2):
        batches = [parts_of(some_tokens) for _ in range(3)]
        waiting: list[torch.Tensor] = []
        for parts in batches:
            for part in parts:
                (cross_entropy(pair.reference, part) / len(parts)).backward()
            waiting.append(cross_entropy(pair.model, parts[GROUP.rank]))
            pair.losses.append(waiting[-1].item())
            if len(waiting) == 2:
                waiting.pop(0).backward()
        waiting.pop(0).backward()
        pair.check_gradients()
        pair.step()
        pair.check_weights()
    return pair.close()


@suite.port("TestFullyShardCustomForwardMethod.test_register_fsdp_forward_method")
def other_method(stage: int) -> list[float]:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 4, 4)
            self.head = nn.Linear(16, 8)

        def features(self, images: torch.Tensor) -> torch.Tensor:
            return self.patches(images).flatten(2).mean(2)

    return train(Pair(Vision(), stage), lambda model, x: model.head(model.features(x)).square().mean(), lambda: torch.randn(2, 3, 8, 8))


@suite.port("TestFullyShard1DTrainingCore (optimizer step in backward: test_post_acc_grad_hook_optim_parity)")
def post_accumulate_hooks(stage: int) -> list[float]:
    # A post-accumulate hook that the user has set runs, once a pass and parameter; the step itself is the engine's.
    pair = Pair(nn.Sequential(Mlp(12), nn.Linear(12, 12)), stage)
    seen: list[str] = []
    for name, parameter in pair.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    losses = train(pair, squared, lambda: torch.randn(2, 12), steps=2)
    assert sorted(seen) == sorted(2 * [name for name, _ in pair.reference.named_parameters()]), seen
    return losses


# --- What autograd is asked.


class TwoOutputs(nn.Module):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.both = both

    def forward(self, x: torch.Tensor) -> Any:
        return (self.first(x), self.second(x)) if self.both else self.first(x).relu()


@suite.port("TestFullyShardAutograd.test_unused_forward_output")
def unused_output(stage: int) -> list[float]:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        one, other = model(x)
        return (one * other).mean() if loss_of.both else one.mean()  # type: ignore[attr-defined]

    pair = Pair(TwoOutputs(both=True), stage)
    for number in range(6):
        loss_of.both = number < 3  # type: ignore[attr-defined]
        pair.backward(loss_of, parts_of(lambda: torch.rand(2, 24)))
        pair.check_gradients()
        pair.step()
        pair.check_weights()
    return pair.close()


@suite.port("TestFullyShardAutograd.test_unused_forward_module")
def unused_module(stage: int) -> list[float]:
    return train(Pair(TwoOutputs(both=False), stage), squared, lambda: torch.rand(2, 24))


@suite.port("TestFullyShardAutograd.test_nontensor_activations")
def containers(stage: int) -> list[float]:
    Named = collections.namedtuple("Named", "x y")
    losses: list[float] = []
    for pack, unpack in (
        (lambda x: [x], lambda c: c[0]),
        (lambda x: (x,), lambda c: c[0]),
        (lambda x: {"x": x}, lambda c: c["x"]),
        (lambda x: Named(x, 1), lambda c: c.x),
    ):

        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Mlp(12, 1)

            def forward(self, container: Any) -> Any:
                return pack(self.inner(unpack(container)))  # noqa: B023

        pair = Pair(nn.Sequential(Wrapped(), Wrapped()), stage)
        losses += train(pair, lambda model, x: unpack(model(pack(x))).sum(), lambda: torch.rand(2, 12), steps=3)  # noqa: B023
    return losses


# --- Frozen parameters.


@suite.port("TestFullyShardFrozen.test_train_mixed_requires_grad_per_group")
def frozen_per_group(stage: int) -> list[float]:
    losses: list[float] = []
    for checkpointed in (False, True):
        model = nn.Sequential(*[Mlp(16) for _ in range(3)])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name)

        def loss_of(model: nn.Module, x: torch.Tensor, checkpointed: bool = checkpointed) -> torch.Tensor:
            for layer in model:  # type: ignore[attr-defined]
                x = libzero.checkpoint(layer, x) if checkpointed else layer(x)
            return x.square().mean()

        pair = Pair(model, stage)
        before = GROUP.traffic()["reduce_scatter"]["bytes"]
        losses += train(pair, loss_of, lambda: torch.randn(8, 16))
        if stage >= 2:  # frozen parameters are not reduced: at most the biases, whose units are padded
            sent = GROUP.traffic()["reduce_scatter"]["bytes"] - before
            assert sent <= 5 * 3 * 4 * 1024, sent
    return losses


def train_thawing(stage: int, thaw: bool) -> list[float]:
    model = nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(16, 16), nn.ReLU())])

    def set_trainable(model: nn.Module, trainable: bool) -> None:
        for number in range(0, 12, 4):
            for parameter in model[number].parameters():  # type: ignore[index]
                parameter.requires_grad_(trainable)

    set_trainable(model, False)
    pair = Pair(model, stage, lambda model: torch.optim.Adam(model.parameters(), lr=1e-2))
    for number in range(3):
        if thaw and number == 2:
            set_trainable(pair.reference, True)
            set_trainable(pair.model, True)
        parts = parts_of(lambda: torch.randn(8, 16))
        if number == 1:  # a pass without gradients between two with them
            with torch.no_grad():
                torch.testing.assert_close(squared(pair.model, parts[0]), squared(pair.reference, parts[0]))
            continue
        pair.backward(squared, parts)
        pair.check_gradients()
        pair.step()
        pair.check_weights()
    return pair.close()


@suite.port("TestFullyShardFrozen.test_train_mixed_requires_grad_across_groups")
def frozen_across_groups(stage: int) -> list[float]:
    losses = train_thawing(stage, thaw=False)
    # Thawing behind the engine's back is refused by name: which states there are was decided by `shard`.
    raises(libzero.Error, ["'0.weight' requires a gradient now"], lambda: train_thawing(stage, thaw=True))
    return losses


@suite.port("TestFullyShardFrozen.test_multi_forward_mixed_requires_grad")
def frozen_many_times(stage: int) -> list[float]:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen, self.trained = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(3):
                x = self.frozen(F.relu(self.trained(x)))
                with torch.no_grad():
                    added = F.relu(self.trained(x))
                x = x + added
            return x

    return train(Pair(Loop(), stage), squared, lambda: torch.randn(8, 5))


# --- Norms, precision, communication, memory.


@suite.port("TestClipGradNormWorldSize2.test_clip_grad_norm_1d (norm 2)")
def clipping(stage: int) -> list[float]:
    pair = Pair(Decoder(), stage)
    for _ in range(4):
        pair.backward(cross_entropy, parts_of(some_tokens))
        expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.05)
        assert expected > 0.05, "the clipping must do something"
        norm = pair.optimizer.clip_grad_norm_(0.05)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        pair.step()
        assert abs(pair.optimizer.grad_norm / expected.item() - 1) < 1e-5, "grad_norm is that before clipping"
        pair.check_weights()
    return pair.close()


suite.does_not_apply("TestClipGradNormWorldSize2.test_clip_grad_norm_1d (norms 1 and inf)", "the engine clips by the 2-norm, as DeepSpeed")


@suite.port("TestFullyShardMixedPrecisionTraining.test_grad_acc_with_reduce_dtype", bits=TWO_PAIRS)
def bf16_accumulation(stage: int) -> list[float]:
    # bf16 parameters with fp32 master weights: near the fp32 model, and the parameter is its master weight, rounded.
    torch.manual_seed(42)
    model = nn.Sequential(*[Mlp(16) for _ in range(2)])
    reference = nn.Sequential(*[Mlp(16) for _ in range(2)])
    reference.load_state_dict(model.state_dict())
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    optimizer = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config_of(stage, bf16={"enabled": True}))
    losses = []
    for _ in range(3):
        for _ in range(4):
            parts = parts_of(lambda: torch.randn(4, 16))
            loss = squared(model, parts[GROUP.rank].bfloat16())
            loss.backward()
            losses.append(loss.item())
            for part in parts:
                (squared(reference, part) / len(parts)).backward()
        for name, parameter in reference.named_parameters():
            gradient = optimizer.gradient(name)
            assert parameter.grad is not None and gradient is not None and gradient.dtype == torch.float32
            torch.testing.assert_close(gradient, parameter.grad, rtol=0.1, atol=2e-3)
        optimizer.step()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter.detach().clone(), optimizer.parameter(name).bfloat16()), name
        reference.load_state_dict({name: optimizer.parameter(name) for name, _ in model.named_parameters()})
    optimizer.close()
    return losses


@suite.port("TestFullyShardCommunication.test_fully_shard_communication_count")
def communication(stage: int) -> None:
    model = nn.Sequential(*[Mlp(16) for _ in range(3)])
    optimizer = libzero.shard(model, adam(model), config_of(stage))
    formula = optimizer.traffic()["formula"]
    for number in range(4):
        before = GROUP.traffic()
        squared(model, torch.randn(4, 16)).backward()
        optimizer.step()
        now = GROUP.traffic()
        if number < 2:
            continue  # the first step learns, the second has the plan
        for kind in ("reduce_scatter", "all_reduce"):
            assert now[kind]["bytes"] - before[kind]["bytes"] == formula[kind], (kind, stage)
        if stage < 3:  # at stage 3 how often a unit is gathered is the plan's
            assert now["all_gather"]["bytes"] - before["all_gather"]["bytes"] == formula["all_gather"]
    optimizer.close()


@suite.port("TestFullyShardMemory.test_fully_shard_training_memory")
def training_memory(stage: int) -> None:
    model = nn.Sequential(*[Mlp(16) for _ in range(3)])
    optimizer = libzero.shard(model, adam(model), config_of(stage))
    GROUP.reset_peaks()
    for _ in range(3):
        squared(model, torch.randn(4, 16)).backward()
        optimizer.step()
    memory = optimizer.memory()
    for name, bytes_ in memory["formula"].items():
        counted = memory["peak" if name == "gradients" else "now"][name]
        assert counted == bytes_, (stage, name, counted, bytes_)
    optimizer.close()


@suite.port("TestFullyShardMemory.test_fully_shard_del_memory")
def deletion(stage: int) -> None:
    # close() frees at once; an optimizer that is dropped is freed at the next shard(), where the ranks meet.
    def held() -> dict[str, int]:
        return {name: both[0] for name, both in GROUP.memory().items() if name not in ("activations", "communication")}

    def one() -> tuple[nn.Module, libzero.ShardedOptimizer]:
        model = Decoder()
        optimizer = libzero.shard(model, adam(model), config_of(stage))
        cross_entropy(model, some_tokens()).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = one()  # also ends what earlier tests have dropped
    with_one = held()
    optimizer.close()
    del model, optimizer  # at stages 0 to 2 the closed model still has its parameters
    gc.collect()
    none = held()
    assert none["parameters"] == none["optimizer"] == none["gradients"] == 0, none
    model, optimizer = one()
    assert held() == with_one
    del model, optimizer
    gc.collect()
    GROUP.barrier()
    model, optimizer = one()
    assert held() == with_one, "one model's states, not two"
    optimizer.close()
    del model, optimizer
    gc.collect()
    assert held() == none


@suite.port("TestFullyShard1DTrainingCore.test_param_registration_after_backward", stages=(3,))
def absent_after_backward(stage: int) -> None:
    model = nn.Sequential(*[Mlp(16) for _ in range(3)])
    optimizer = libzero.shard(model, adam(model), config_of(stage))
    kinds = [(name, type(parameter), parameter.shape) for name, parameter in model.named_parameters()]
    for _ in range(3):
        squared(model, torch.randn(4, 16)).backward()
        assert kinds == [(name, type(parameter), parameter.shape) for name, parameter in model.named_parameters()]
        assert optimizer._engine.pager()["live_bytes"] == 0
        optimizer.step()
    optimizer.close()


@suite.port("TestFullyShardUnshardMultiProcess.test_unshard_async (manual gathers)", stages=(3,))
def manual_gathers(stage: int) -> list[float]:
    pair = Pair(nn.Sequential(*[Mlp(16) for _ in range(2)]), stage)
    for _ in range(3):
        with pair.optimizer.gathered():
            assert pair.optimizer._engine.pager()["live_bytes"] > 0
            assert pair.model[0].up.weight.data_ptr() != 0
            pair.backward(squared, parts_of(lambda: torch.randn(4, 16)))
        assert pair.optimizer._engine.pager()["live_bytes"] == 0
        pair.check_gradients()
        pair.step()
        pair.check_weights()
    return pair.close()


# --- States.


@suite.port("TestFullyShardStateDictMultiProcess.test_dp_state_dict_save_load")
def state_dicts(stage: int) -> list[float]:
    # Through a full state dict into another model; and through shards, with the optimizer's states.
    pair = Pair(Decoder(), stage)
    for _ in range(2):
        pair.backward(cross_entropy, parts_of(some_tokens))
        pair.step()
    whole = pair.optimizer.full_state_dict()
    if GROUP.rank == 0:
        fresh = Decoder()
        fresh.load_state_dict(whole)
        for name, value in fresh.state_dict().items():
            torch.testing.assert_close(value, pair.reference.state_dict()[name], rtol=1e-4, atol=1e-5)
    states = pair.optimizer.state_dict()
    torch.manual_seed(7)
    other = Decoder()
    other.load_state_dict({name: value.clone() for name, value in pair.model.state_dict().items()})
    resumed = libzero.shard(other, adam(other), config_of(stage))
    resumed.load_state_dict(states)
    with support.shared_folder() as folder:
        shards = folder / "shards"
        pair.optimizer.save(shards)
        batches = [parts_of(some_tokens) for _ in range(2)]
        results = []
        for model, optimizer in ((pair.model, pair.optimizer), (other, resumed)):
            results.append([])
            for parts in batches:
                loss = cross_entropy(model, parts[GROUP.rank])
                loss.backward()
                optimizer.step()
                results[-1].append(loss.item())
        pair.optimizer.load(shards)
        results.append([])
        for parts in batches:
            loss = cross_entropy(pair.model, parts[GROUP.rank])
            loss.backward()
            pair.optimizer.step()
            results[-1].append(loss.item())
        assert results[0] == results[1] == results[2], results
        GROUP.barrier()
    resumed.close()
    return pair.close()


@suite.port("TestFullyShardMetaDeviceInit.test_meta_device_1d_init", stages=ALL)
def meta_device(stage: int) -> None:
    # A model on the meta device has no values to take: it is refused with what to do. init() builds on disk.
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    raises(libzero.ConfigError, ["meta"], lambda: libzero.shard(model, adam(model), config_of(stage)))
    with tempfile.TemporaryDirectory() as folder, libzero.init(folder):
        torch.manual_seed(3)
        built = nn.Linear(64, 64)
    torch.manual_seed(3)
    plain = nn.Linear(64, 64)
    optimizer = libzero.shard(built, adam(built), config_of(stage))
    assert torch.equal(optimizer.parameter("weight"), plain.weight.detach())
    optimizer.close()


@suite.port("TestFullyShardMetaDeviceInit.test_rank0_broadcast_meta_device_init")
def broadcast_from_rank_0(stage: int) -> None:
    torch.manual_seed(GROUP.rank)  # different values on each rank
    model = nn.Linear(16, 16)
    optimizer = libzero.shard(model, adam(model), config_of(stage))
    torch.manual_seed(0)
    assert torch.equal(model.weight.detach().clone(), nn.Linear(16, 16).weight.detach())
    optimizer.close()


@suite.port("TestFullyShardShardedParameterTensor.test_raise_scalar_parameter")
def scalar_parameter(stage: int) -> list[float]:
    # FSDP2 cannot; here it is a parameter as any other.
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.inner(x)

    return train(Pair(Scaled(), stage), squared, lambda: torch.randn(4, 8))


@suite.port("TestFullyShardCastAfterInit.test_to_float64_after_init")
def cast_after_init(stage: int) -> None:
    # FSDP2 trains on in float64; here parameters are fp32, bf16 or fp16, and the cast is refused by name at the latest
    # where the model is used.
    model = nn.Linear(8, 8)
    optimizer = libzero.shard(model, adam(model), config_of(stage))

    def cast_and_train() -> None:
        model.double()
        squared(model, torch.randn(4, 8, dtype=torch.float64)).backward()
        optimizer.step()

    raises(Exception, [], cast_and_train)
    optimizer.close()


suite.does_not_apply("TestFullyShardHSDPTraining.test_train_parity_hsdp", "no mesh; zero_hpz_partition_size and several hosts are tested in C++")
suite.does_not_apply("TestFullyShardPrefetch.test_set_modules_to_backward_prefetch", "gathers are planned; a plan that does not hold is left, as test_explicit_prefetching here")
suite.does_not_apply("TestFullyShardOverlap.test_fully_shard_training_overlap", "tests assert no times")
suite.does_not_apply("TestFullyShard2DTraining, TestFullyShardNDTraining, TestFullyShardDTensor*", "DTensor and tensor parallelism")
suite.does_not_apply("TestFullyShardProcessGroupInit, TestFullyShardDeviceTensor, TestFullyShardMeshArg", "checks of fully_shard's own arguments")
suite.does_not_apply("TestFullyShardCompile, TestFullyShardCompileCompute", "traces of FSDP's own hooks; test_compile.py is ours")

if __name__ == "__main__":
    sys.exit(suite.main())
