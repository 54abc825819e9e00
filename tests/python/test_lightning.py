"""LibzeroStrategy in Lightning's Trainer: stages against each other and plain Lightning, checkpoints, what is refused.

Run alone it starts its ranks itself, by `zero launch`, by torchrun and by Lightning (ZERO_PROGRAM, default
build/release/zero)."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

try:
    import lightning
    import torch
    from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

from support import command, environment, equal, expect, main, ranks, shared_folder

import libzero
import libzero.lightning
from libzero._checkpoints import Weights
from libzero._loop import with_masters

STAGES = (0, 1, 2, 3)
SMALL = {"stage3_max_live_parameters": 0, "unit_bytes": 4096}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Net(lightning.LightningModule):
    """A small model that keeps what it has seen."""

    def __init__(self, kind: str = "AdamW", late: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        self.seen: dict[str, list[float]] = {"loss": [], "lr": [], "val": []}
        self.net = torch.nn.Identity() if late else self.make()
        self.register_buffer("batches", torch.zeros(()))

    @staticmethod
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
        )

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.batches += 1
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.seen["loss"].append(self.trainer.strategy.reduce(loss.detach().clone().float()).item())
        self.seen["lr"].append(float(self.trainer.optimizers[0].param_groups[-1]["lr"]))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch).float(), sync_dist=True)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen["val"].append(self.trainer.callback_metrics["val"].item())

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.kind)(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Late(Net):
    """Built in configure_model."""

    def __init__(self) -> None:
        super().__init__(late=True)

    def configure_model(self) -> None:
        if isinstance(self.net, torch.nn.Identity):
            self.net = self.make()


class Manual(Net):
    """Steps its optimizer itself, as Lightning would."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()


class Two(Manual):
    """A generator's and a discriminator's optimizer."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[3].parameters(), lr=0.1)]


class NoOptimizer(Net):
    def configure_optimizers(self) -> None:
        return None


class Sometimes(Net):
    """Clips in every other step."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        if self.global_step % 2 == 0:
            self.clip_gradients(optimizer, 0.05, "norm")


class Odd(Net):
    """A group without parameters, a rate that is a tensor, a layer that is frozen in some steps, gradients of zeros, and
    an accumulation that changes."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.net[0].requires_grad_(self.global_step not in (5, 6, 7, 8))

    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> Any:
        groups = [{"params": [], "weight_decay": 0.5}, {"params": list(self.parameters())}]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1e-2))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(samples: int, shuffle: bool = False) -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 8, generator=generator)
    data = torch.utils.data.TensorDataset(x, x[:, :4].sin())
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffle)


def trainer_of(strategy: Any, ranks: int, **more: Any) -> lightning.Trainer:
    given = dict(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=3, gradient_clip_val=0.5, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    return lightning.Trainer(**{**given, **more})


def strategy_of(stage: int | str | None, whole: bool = False, **keywords: Any) -> Any:
    if stage is None or isinstance(stage, str):
        return stage or "ddp"
    config = {"zero_optimization": {"stage": stage, **SMALL}, **keywords}
    return libzero.lightning.LibzeroStrategy(config, whole_checkpoints=whole)


def fit(
    stage: int | str | None, group: Any, module: Any = None, resume: Any = None, samples: int = 56, config: Any = None,
    whole: bool = False, **more: Any,
) -> tuple[lightning.Trainer, Any]:
    """A run at a stage, or by a strategy of Lightning's."""
    module = module or Net()
    trainer = trainer_of(strategy_of(stage, whole, **(config or {})), group.size, **more)
    trainer.fit(module, loader(samples, shuffle=group.size > 1), loader(24), ckpt_path=resume)
    return trainer, module


def weights(trainer: lightning.Trainer) -> dict[str, torch.Tensor]:
    sharded = getattr(trainer.strategy, "sharded", None)
    if sharded is None:
        return trainer.strategy.lightning_module_state_dict()
    return with_masters(sharded, trainer.lightning_module)


def run(stage: int | str | None, group: Any, **more: Any) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    trainer, module = fit(stage, group, **more)
    return module.seen, weights(trainer)


def near(one: dict[str, list[float]], other: dict[str, list[float]], within: float = 1e-5) -> None:
    assert list(one) == list(other)
    for key in other:
        assert len(one[key]) == len(other[key]) > 0, (key, one[key], other[key])
        for a, b in zip(one[key], other[key]):
            assert abs(a - b) <= within * abs(b), (key, one[key], other[key])


@ranks(1, 2)
def test_stages(group: Any) -> None:
    plain, _ = run(None, group)
    expected = run(0, group)
    near(expected[0], plain)
    for stage in STAGES[1:]:
        equal(run(stage, group), expected, f"stage {stage}")


@ranks(2)
def test_accumulation(group: Any) -> None:
    # 7 batches: the last stands alone.
    more = {"accumulate_grad_batches": 2}
    plain, _ = run(None, group, **more)
    got = {stage: run(stage, group, **more) for stage in STAGES}
    for stage in STAGES:
        near(got[stage][0], plain)
    equal(got[1], got[0], "stages 1 and 0")  # the pairs of stages 2 and 3 add in another order
    equal(got[3], got[2], "stages 3 and 2")


@ranks(2)
def test_clipping(group: Any) -> None:
    without, _ = run(None, group, gradient_clip_val=None)
    near(run(3, group, gradient_clip_val=None)[0], without)
    clipped, _ = run(None, group, gradient_clip_val=0.05)
    assert clipped["loss"] != without["loss"]
    near(run(3, group, gradient_clip_val=0.05)[0], clipped)
    near(
        run(3, group, module=Sometimes(), gradient_clip_val=None)[0],
        run(None, group, module=Sometimes(), gradient_clip_val=None)[0],
    )
    by_file = run(3, group, gradient_clip_val=None, config={"gradient_clipping": 0.05})
    equal(by_file, run(3, group, gradient_clip_val=0.05), "gradient_clipping of the configuration")


@ranks(2)
def test_odd_loops(group: Any) -> None:
    def more() -> Any:
        return {"module": Odd(), "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}

    plain, _ = run("ddp_find_unused_parameters_true", group, **more())
    with shared_folder() as folder:
        for stage in STAGES:
            saver = ModelCheckpoint(folder / str(stage), filename="{epoch}", save_top_k=-1)
            given = more()
            given["callbacks"].append(saver)
            trainer, module = fit(stage, group, enable_checkpointing=True, **given)
            near(module.seen, plain)
            if stage == 3:  # while the layer is frozen
                final = weights(trainer)
                seen, values = run(2, group, resume=folder / "3" / "epoch=0.ckpt", **more())
                rest = {key: value[-len(seen[key]) :] for key, value in module.seen.items()}
                near(seen, rest)
                assert group.rank or all(torch.allclose(values[name], final[name], atol=1e-6) for name in final)


@ranks(2)
def test_hooks(group: Any) -> None:
    expected = run(2, group, gradient_clip_val=None)
    for stage in (2, 3):
        for module in (Manual(), Late()):
            name = f"{type(module).__name__}, stage {stage}"
            equal(run(stage, group, module=module, gradient_clip_val=None), expected, name)
    near(run(1, group, module=Net("RMSprop"))[0], run(None, group, module=Net("RMSprop"))[0])


@ranks(2)
def test_bf16(group: Any) -> None:
    fp32, _ = run(0, group)
    expected = run(0, group, precision="bf16-mixed")
    near({"loss": expected[0]["loss"]}, {"loss": fp32["loss"]}, within=0.05)
    assert expected[0] != fp32
    for stage in STAGES[1:]:
        equal(run(stage, group, precision="bf16-mixed"), expected, f"stage {stage}")
    equal(run(3, group, config={"bf16": {"enabled": True}}), expected, "bf16 of the configuration")
    trainer, module = fit(3, group, precision="bf16-mixed")
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    if group.rank == 0:
        assert {value.dtype for value in weights(trainer).values()} == {torch.float32}
    else:
        weights(trainer)
    config = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    fp16 = run(0, group, config=config)
    equal(run(3, group, config=config), fp16, "fp16")
    near({"loss": fp16[0]["loss"]}, {"loss": fp32["loss"]}, within=0.02)


@ranks(2)
def test_resume(group: Any) -> None:
    with shared_folder() as folder:
        kinds: Any = (("fp32", {}), ("bf16", {"precision": "bf16-mixed"}), ("RMSprop", {}), ("whole", {"whole": True}))
        for name, more in kinds:
            kind = "RMSprop" if name == "RMSprop" else "AdamW"
            stages = (0, 1) if kind == "RMSprop" else (3,) if name == "whole" else STAGES
            last = stages[-1]
            saver = ModelCheckpoint(folder / name, filename="{epoch}", save_top_k=-1)
            trainer, module = fit(
                last, group, module=Net(kind), callbacks=[saver], enable_checkpointing=True, **more
            )
            whole, final = module.seen, weights(trainer)
            file = folder / name / "epoch=0.ckpt"
            names = sorted(os.listdir(file)) if file.is_dir() else []
            shards = ["manifest.json", "rank-0-of-2.safetensors", "rank-1-of-2.safetensors"]
            assert names == (shards if name in ("fp32", "bf16") else []), (name, names)
            for stage in stages:
                seen, values = run(stage, group, module=Net(kind), resume=file, **more)
                rest = {key: value[-len(seen[key]) :] for key, value in whole.items()}
                assert len(rest["loss"]) == 14, rest
                equal((seen, values), (rest, final), f"{name}, resumed at stage {stage}")
        # Lightning without libzero reads it, and the other way round.
        file = folder / "whole" / "epoch=0.ckpt"
        seen, _ = run(None, group, resume=file)
        near(seen, {key: value[-len(seen[key]) :] for key, value in run(3, group)[0].items()})
        fit(None, group, max_epochs=1)[0].save_checkpoint(folder / "plain.ckpt")
        near(run(3, group, resume=folder / "plain.ckpt")[0], seen)
        module = Net.load_from_checkpoint(folder / "whole" / "epoch=2.ckpt", weights_only=True)
        if group.rank == 0:
            expected = dict(Weights(folder / "fp32" / "epoch=2.ckpt"))
            equal(dict(module.state_dict()), {name: expected[name] for name in module.state_dict()}, "both forms")
        group.barrier()


@ranks(2)
def test_around_fit(group: Any) -> None:
    with shared_folder() as folder:
        for stage in (2, 3):
            for precision in ("32-true", "bf16-mixed"):
                saver = ModelCheckpoint(folder / f"{stage} {precision}", filename="{epoch}", save_top_k=-1)
                trainer = trainer_of(
                    strategy_of(stage), 2, callbacks=[saver, EarlyStopping("val", patience=9)],
                    enable_checkpointing=True, precision=precision,
                )  # fmt: skip
                module = Net()
                before = trainer.validate(module, loader(24), verbose=False)
                trainer.fit(module, loader(56, shuffle=True), loader(24))
                assert trainer.strategy.sharded.steps == 21
                values = module.seen["val"]
                assert values[-1] < values[1] < before[0]["val"], (before, values)
                for epoch in (2, 0):
                    file = folder / f"{stage} {precision}" / f"epoch={epoch}.ckpt"
                    tested = trainer.test(module, loader(24), ckpt_path=file, verbose=False)
                    assert tested[0]["val"] == values[epoch + 1], (epoch, tested, values)
                loaded, saved = weights(trainer), Weights(file)
                if group.rank == 0:
                    assert set(loaded) == set(saved), (set(loaded), set(saved))
                    equal(loaded, {name: saved[name] for name in loaded}, "what test() has loaded")
                if precision == "32-true":  # a module that is not sharded takes it too
                    fresh = trainer_of(strategy_of(stage), 2).validate(Net(), loader(24), file, verbose=False)
                    assert fresh == [{"val": values[epoch + 1]}], (fresh, values)
                predicted = torch.cat(trainer.predict(module, loader(24)))
                assert predicted.shape == (12, 4), predicted.shape
                strategy = trainer.strategy
                assert strategy.broadcast({"from": group.rank}) == {"from": 0}
                assert strategy.all_gather(torch.tensor([group.rank])).tolist() == [[0], [1]]
                assert strategy.reduce(torch.tensor(float(group.rank)), reduce_op="sum").item() == 1.0
                strategy.barrier()


@ranks(1)
def test_refusals(group: Any) -> None:
    Config = libzero.ConfigError

    def refused(*words: str, module: Any = None, config: Any = None, **more: Any) -> None:
        with expect(Config, *words):
            fit(3, group, module=module, config=config, **more)

    refused("bf16-true", "bf16-mixed", precision="bf16-true")
    refused("64-true", precision="64-true")
    refused("by value", gradient_clip_algorithm="value")
    refused("2 optimizers", module=Two(), gradient_clip_val=None)
    refused("`optimizer`", config={"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}})
    refused("gradient_accumulation_steps=4", config={"gradient_accumulation_steps": 4})
    refused("gradient_clipping=2", "gradient_clip_val=0.5", config={"gradient_clipping": 2.0})
    refused("'bf16'", config={"bf16": {"enabled": False}}, precision="bf16-mixed")
    refused("sync_batchnorm", sync_batchnorm=True)
    with expect(Config, "rank 0 of 2", "rank 0 of 1"):
        trainer_of(strategy_of(3), 2).strategy.setup_environment()
    for stage in (0, 3):
        trainer, module = fit(stage, group)
        with expect(Config, "sharded already", "ckpt_path"):
            trainer.fit(module, loader(8))

    refused("0 optimizers", module=NoOptimizer())


# --- What starts the ranks.


class Fails(Net):
    """On rank 1, while the other waits in torch's group."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.trainer.global_rank == 1 and index == 3:
            raise ValueError("a bad batch")
        return super().training_step(batch, index)


def loader_of(ranks: int) -> torch.utils.data.DataLoader:
    """The same batches in all, whatever the number of ranks."""
    return torch.utils.data.DataLoader(loader(56).dataset, batch_size=8 // ranks)


def as_a_script(folder: str, devices: int, resume: str) -> None:
    module = Fails() if resume == "fails" else Net()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = trainer_of(
        libzero.lightning.LibzeroStrategy(stage=3), devices, callbacks=[saver], enable_checkpointing=True
    )
    trainer.fit(module, loader_of(devices), loader(24), ckpt_path=resume if resume.endswith("ckpt") else None)
    if trainer.is_global_zero:
        Path(folder, "seen.json").write_text(json.dumps(module.seen), encoding="utf-8")


def launchers() -> None:
    """Every way to start the ranks brings the same losses, and one rank goes on where two have saved."""
    with tempfile.TemporaryDirectory() as parent:

        def seen_by(name: str, *start: str, ranks: int = 2, resume: str = "") -> dict[str, list[float]]:
            folder = os.path.join(parent, name)
            done = [__file__, "--script", folder, str(ranks), resume]
            subprocess.run([*start, *done], env=environment(), check=True, timeout=300)
            print(f"by {name}: ended", flush=True)
            return json.loads(Path(folder, "seen.json").read_text(encoding="utf-8"))

        expected = seen_by("zero launch", *command(2, []))
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        equal(seen_by("torchrun", *torchrun), expected, "torchrun")
        equal(seen_by("Lightning", sys.executable), expected, "Lightning")
        checkpoint = os.path.join(parent, "torchrun", "epoch=0.ckpt")
        alone = seen_by("one rank", sys.executable, ranks=1, resume=checkpoint)
        near(alone, {key: value[-len(alone[key]) :] for key, value in expected.items()})
        script = [__file__, "--script", os.path.join(parent, "fails"), "2", "fails"]
        failed = subprocess.run(command(2, script), env=environment(), capture_output=True, text=True, timeout=120)
        assert failed.returncode != 0 and "a bad batch" in failed.stdout + failed.stderr, failed
        print("a rank that fails ends the others", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--script"]:
        as_a_script(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        if len(sys.argv) == 1 and "LIBZERO_TEST_RANKS" not in os.environ:
            launchers()
        main()
