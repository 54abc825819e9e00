"""Python's loops on a device: tests/device's simulated one, which computes with the CPU's kernels, so that losses, norms and
weights must have the CPU's bits. Run alone it starts itself under `zero launch`.

One rank has one device, and the host carries what several exchange (Note [Ranks and devices] in _device.py). accelerate
has no group of torch.distributed for such a device, so its loop and the Trainer's run on one rank here."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from support import batch, difference, equal, expect, main, need, program, ranks, shared_folder

need("torch", "transformers", "accelerate", "lightning")
warnings.filterwarnings("ignore")

import torch

LIBRARY = Path(program()).parent / "tests/device/libzero_simulated.so"
if not LIBRARY.exists():
    print(f"skipped: {LIBRARY} is not built (the target zero_simulated)")
    sys.exit(77)


def register() -> None:
    """Makes torch in Python know the device: what a package of a device's maker does."""
    torch.ops.load_library(str(LIBRARY))
    torch.utils.rename_privateuse1_backend("simulated")
    module = types.ModuleType("torch.simulated")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 4
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.manual_seed_all = lambda seed: None  # the CPU's generator serves the device
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch._register_device_module("simulated", module)


register()
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # until a test says otherwise

import lightning

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

import libzero
import libzero.lightning

SMALL = {"stage3_max_live_parameters": 0, "unit_bytes": 1024, "reduce_bucket_size": 512}


def ordered() -> None:
    """No wait was missing on the device so far."""
    reports = torch.ops.simulated.reports()
    assert not reports, reports


def of_rank(kind: str, group: Any) -> torch.device:
    return torch.device(kind, group.rank) if kind != "cpu" else torch.device("cpu")


# --- libzero.shard.


class Net(torch.nn.Module):
    """Tied weights, a buffer that each pass changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = torch.nn.Linear(8, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 8)
        self.head.weight = torch.nn.Parameter(torch.randn(8, 32) / 6)
        self.third = torch.nn.Linear(32, 32)
        self.third.weight = self.second.weight
        self.drop = torch.nn.Dropout(0.1)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        hidden = torch.nn.functional.gelu(self.second(torch.nn.functional.gelu(self.first(x))))
        return self.head(self.drop(self.third(hidden)))


def plain(
    kind: str, group: Any, stage: int, optimizer: str = "AdamW", moves: bool = False, model: Any = None,
    compiled: bool = False, **more: Any,
) -> tuple[Any, dict[str, Any]]:
    """A loop with what a program may do between its steps; `moves`: the engine moves the model."""
    device = of_rank(kind, group)
    model = model or Net()
    if not moves:
        model.to(device)
    own = {} if optimizer == "AdamW" else {"foreach": False}  # torch's choice for a CPU
    run = torch.compile(model, backend="aot_eager") if compiled else model
    opt = libzero.shard(
        run, getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, **own),
        {"zero_optimization": {"stage": stage, **SMALL}, "gradient_clipping": 0.5, **more.pop("config", {})},
        device=device if moves else None, cast_forward_inputs=True, **more,
    )  # fmt: skip
    assert all(each.device == device for each in (*model.parameters(), *model.buffers()))
    assert model.to(device) is model  # changes nothing
    if kind != "cpu":
        with expect(libzero.Error, "is sharded", str(device)):
            model.to("cpu")
    torch.manual_seed(group.rank)
    seen: dict[str, Any] = {"loss": [], "norm": []}
    for step in range(6):
        loss = run(batch(group.rank, step).to(device)).float().pow(2).mean()
        loss.backward()
        if step == 2:
            norm = opt.clip_grad_norm_(0.1)
            assert norm.device == device
            seen["norm"].append(norm.item())
        if step == 3:
            opt.set_gradient(model.head.bias, torch.ones(8, device=device))
        opt.step()
        seen["loss"].append(loss.item())
        seen["norm"].append(opt.grad_norm)
        opt.zero_grad(set_to_none=step != 1)
        if step == 4:
            opt.set_parameter("first.bias", opt.parameter("first.bias") * 2)
            if optimizer == "AdamW":
                opt.state[model.head.weight]["exp_avg"].mul_(0.5)
            opt.load_state_dict(opt.state_dict())
    seen["weights"] = opt.full_state_dict()
    seen["states"] = opt.state_dict()["state"]
    assert all(each.device.type == "cpu" for each in seen["weights"].values())
    seen["masters"] = {name: opt.parameter(name).cpu() for name in opt._engine.parameter_names}
    opt.kept = model, run
    return opt, seen


@ranks(1, 2)
def test_shard(group: Any) -> None:
    cases: list[dict[str, Any]] = [dict(stage=stage, config={"bf16": {"enabled": stage > 1}}) for stage in range(4)]
    cases += [dict(stage=stage, moves=stage == 3) for stage in (0, 3)]
    cases += [dict(stage=1, optimizer="NAdam", moves=True), dict(stage=1, optimizer="NAdam", bf16=True)]
    cases += [dict(stage=3, moves=True, compiled=True)] if group.size == 1 else []  # Inductor has no kernels for the device
    for case in cases:
        opt, expected = plain("cpu", group, **case)
        opt.close()
        opt, found = plain("simulated", group, **case)
        memory = opt.memory()["now"]["parameters"]
        assert memory >= 4 * 8 * 32 / group.size, memory
        opt.close()
        ordered()
        equal(found, expected, str(case))


@ranks(1, 2)
def test_files(group: Any) -> None:
    # What is saved on a device goes on on the CPU, and the other way round.
    with shared_folder() as folder:
        for there, back in (("simulated", "cpu"), ("cpu", "simulated")):
            opt, expected = plain(there, group, 3)
            opt.save(folder / there)
            opt.save_full(folder / f"{there}.safetensors")
            opt.close()
            for load in ("load", "load_full"):
                opt, _ = plain(back, group, 2)
                getattr(opt, load)(folder / (there if load == "load" else f"{there}.safetensors"))
                masters = {name: opt.parameter(name).cpu() for name in opt._engine.parameter_names}
                equal(masters, expected["masters"], f"{load} of {there}")
                opt.close()
        # Straight into shards on the device: from a file, and from a model that lies on a disk.
        opt, _ = plain("cpu", group, 3)
        whole = opt.full_state_dict()
        opt.close()
        if group.rank == 0:
            import safetensors.torch

            safetensors.torch.save_file({k: v for k, v in whole.items() if k != "third.weight"}, folder / "model.safetensors")
        group.barrier()
        seen = {}
        for kind in ("cpu", "simulated"):
            with libzero.init(values=False):
                model = Net()
            model.passes = torch.zeros(())
            opt, seen[kind] = plain(kind, group, 3, moves=True, model=model, weights=folder / "model.safetensors")
            opt.close()
            with libzero.init(folder):
                model = Net()
            opt, seen[f"{kind} from disk"] = plain(kind, group, 3, moves=True, model=model)
            opt.close()
        equal(seen["simulated"], seen["cpu"], "from a file")
        equal(seen["simulated from disk"], seen["cpu from disk"], "from a disk")


@ranks(1, 2)
def test_refused(group: Any) -> None:
    from libzero import _device

    gpu = torch.device("cuda", 0)  # what a launcher may show each rank of its own
    for identity, shared in (("GPU-a", group.size > 1), (f"GPU-{group.rank}", False)):
        with mock.patch.object(_device, "_identity", lambda device: identity):
            assert _device.shared(group, gpu) == shared

    def shard(place: Any, **more: Any) -> None:
        model = torch.nn.Linear(4, 4).to(more.pop("lies", "cpu"))
        libzero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), device=place, **more)

    with expect(libzero.ConfigError, "simulated:7", "finds 4", "0 to 3"):
        shard("simulated:7")
    with expect(libzero.ConfigError, "nonsense", "no device"):
        shard("nonsense")
    with expect(libzero.ConfigError, "xpu", "finds no device"):
        shard("xpu")
    with expect(libzero.ConfigError, "simulated:1", "lies on simulated:0", "model.to"):
        shard("simulated:1", lies="simulated:0")
    if not torch.cuda.is_available():
        with expect(libzero.ConfigError, "CUDA"):
            shard("cuda")


# --- accelerate and transformers.


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, accelerate takes this process for the only one, and makes no group of torch.distributed."""
    with mock.patch.dict(os.environ):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        yield


def begin(kind: str) -> None:
    """accelerate forgets what it has chosen, and chooses this device."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu" if kind == "cpu" else f"{kind}:0"


def gpt2() -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, resid_pdrop=0.1, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, seed: int, samples: int) -> None:
        self.ids = torch.randint(64, (samples, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def accelerated(kind: str, folder: Path, resume: bool = False, placed: bool = False, **more: Any) -> dict[str, Any]:
    """A loop of accelerate, which saves its state in the middle, or goes on from there."""
    import libzero.hf

    begin(kind)
    accelerator = libzero.hf.accelerator(stage=3, gradient_accumulation_steps=2, **more)
    place = accelerator.device
    assert place.type == kind, place
    model = gpt2()
    if placed:  # by the loop, before there is an optimizer
        model = accelerator.prepare(model)
        assert model.lm_head.weight.device == place
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(Tokens(1, 24), batch_size=2)
    if placed:
        optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)
    else:
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    torch.manual_seed(1)
    if resume:
        accelerator.load_state(str(folder / "state"))
        loader = accelerator.skip_first_batches(loader, 6)
    seen: dict[str, Any] = {"loss": [], "norm": []}
    for batch in loader:
        assert batch["input_ids"].device == place
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                assert norm.device == place
                seen["norm"].append(norm.item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen["loss"].append(accelerator.gather(loss.detach()).item())
        if len(seen["loss"]) == 6 and not resume:
            accelerator.save_state(str(folder / "state"))
            accelerator.save_state(str(folder / "whole"), whole=True)
    seen["weights"] = accelerator.get_state_dict(model)
    accelerator.sharded(model).close()
    return seen


@ranks(1)
def test_accelerator(group: Any) -> None:
    import libzero.hf

    with alone(), shared_folder() as folder:
        for more in ({}, {"mixed_precision": "bf16", "placed": True}):
            expected = accelerated("cpu", folder / "cpu", **more)
            found = accelerated("simulated", folder / "there", **more)
            equal(found, expected, str(more))
            expected = accelerated("cpu", folder / "cpu", resume=True, **more)  # a loader that begins draws a number
            equal(accelerated("simulated", folder / "there", resume=True, **more), expected, f"resumed, {more}")
            ordered()
        begin("simulated")
        accelerator = libzero.hf.accelerator(stage=0)
        weights = accelerator.prepare(gpt2())  # without an optimizer: moved, and not sharded
        accelerator.load_state(str(folder / "there/whole"))
        assert weights.lm_head.weight.device.type == "simulated"
        begin("simulated")
        os.environ["ACCELERATE_TORCH_DEVICE"] = "simulated:9"
        with expect(libzero.ConfigError, "simulated:9", "does not exist"):
            libzero.hf.accelerator(stage=0)


def trained(kind: str, folder: Path, resume: bool = False, bf16: bool = False, **more: Any) -> dict[str, Any]:
    import transformers

    import libzero.hf

    begin(kind)
    arguments = transformers.TrainingArguments(**{**dict(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=6, logging_steps=1, learning_rate=1e-3,
        warmup_steps=2, max_grad_norm=0.5, save_steps=3, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True,
        report_to=[], disable_tqdm=True, seed=3, log_level="error",
    ), **more})  # fmt: skip
    assert arguments.device.type == kind, arguments.device
    arguments._n_gpu = 2  # as where this rank sees two
    model = gpt2()
    trainer = libzero.hf.LibzeroTrainer(
        model, arguments, config={"zero_optimization": {"stage": 3}, "bf16": {"enabled": bf16}},  # TrainingArguments ask CUDA
        train_dataset=Tokens(1, 40), eval_dataset=Tokens(2, 8),
    )  # fmt: skip
    assert arguments.n_gpu == 1 and trainer.args.train_batch_size == 4
    trainer.remove_callback(transformers.PrinterCallback)
    before = [] if resume else [trainer.evaluate()["eval_loss"]]
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    assert model.lm_head.weight.device.type == kind
    history = trainer.state.log_history
    seen = {key: [each[key] for each in history if key in each] for key in ("loss", "grad_norm", "eval_loss")}
    seen["eval_loss"] = seen["eval_loss"][not resume :]
    seen["before"] = before
    seen["after"] = trainer.evaluate()["eval_loss"]
    seen["predicted"] = torch.as_tensor(trainer.predict(Tokens(5, 6)).predictions)
    seen["weights"] = trainer.sharded.full_state_dict()
    trainer.save_model(str(folder / "saved"))
    saved = transformers.GPT2LMHeadModel.from_pretrained(folder / "saved", dtype="auto")
    assert not difference(saved.lm_head.weight.detach(), seen["weights"]["lm_head.weight"])
    trainer.sharded.close()
    return seen


@ranks(1)
def test_trainer(group: Any) -> None:
    with alone(), shared_folder() as folder:
        for more in ({}, {"bf16": True, "gradient_accumulation_steps": 2}):
            expected = trained("cpu", folder / "cpu", **more)
            found = trained("simulated", folder / "there", **more)
            equal(found, expected, str(more))
            on = trained("simulated", folder / "there", resume=True, **more)
            for key in ("weights", "after", "predicted"):
                equal(on[key], expected[key], f"{key} of the resumed run, {more}")
            ordered()


# --- Lightning.


class Simulated(lightning.pytorch.accelerators.Accelerator):
    """What a program gives to lightning.Trainer for a device that Lightning does not know."""

    def setup_device(self, device: torch.device) -> None:
        torch.simulated.set_device(device)

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None:
        return None

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("simulated", index) for index in range(int(devices))]

    @staticmethod
    def auto_device_count() -> int:
        return 4

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "simulated"


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.seen: dict[str, list[float]] = {"loss": [], "val": []}

    def loss(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        assert x.device == self.device == self.trainer.strategy.root_device, (x.device, self.device)
        return self.net(x).pow(2).mean()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.seen["loss"].append(self.all_gather(loss.detach()).float().mean().item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch).float(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen["val"].append(self.trainer.callback_metrics["val"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(kind: str, group: Any, folder: Path, resume: bool = False, stage: int = 3, **more: Any) -> dict[str, Any]:
    module = Module()
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(2))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=2)
    strategy = libzero.lightning.LibzeroStrategy({"zero_optimization": {"stage": stage, **SMALL}}, **more.pop("own", {}))
    trainer = lightning.Trainer(
        accelerator="cpu" if kind == "cpu" else Simulated(), devices=group.size, strategy=strategy, max_epochs=2,
        gradient_clip_val=0.5, logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        enable_checkpointing=False, **more,
    )  # fmt: skip
    torch.manual_seed(group.rank)
    if not resume:
        trainer.validate(module, loader, verbose=False)
        torch.manual_seed(group.rank)
        trainer.fit_loop.max_epochs = 1
        trainer.fit(module, loader, loader)
        trainer.save_checkpoint(folder / "one.ckpt")
    else:
        trainer.fit(module, loader, loader, ckpt_path=folder / "one.ckpt")
    assert all(each.device.type == kind for each in module.parameters())
    trainer.validate(module, loader, verbose=False)
    seen = dict(module.seen, weights=strategy.sharded.full_state_dict(), metric=trainer.callback_metrics["val"].item())
    strategy.sharded.close()
    return seen


@ranks(1, 2)
def test_lightning(group: Any) -> None:
    with shared_folder() as folder:
        for more in ({}, {"precision": "bf16-mixed", "stage": 2}):
            expected = fitted("cpu", group, folder / "cpu", **more)
            found = fitted("simulated", group, folder / "there", **more)
            equal(found, expected, str(more))
            on = fitted("cpu", group, folder / "cpu", resume=True, **more)
            equal(fitted("simulated", group, folder / "there", resume=True, **more), on, f"resumed, {more}")
            ordered()
        # On a device, where Lightning has precision="16-mixed".
        expected = fitted("cpu", group, folder / "cpu", own={"fp16": True})
        equal(fitted("simulated", group, folder / "there", precision="16-mixed"), expected, "fp16")


main()
