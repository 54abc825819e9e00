"""Python's loops on a device, for gpu_check.sh: gpu_loops.py cuda|cpu OUT.json, on every rank under `zero launch`.

Trains small models by libzero.shard, accelerate, transformers' Trainer and Lightning, and writes their losses. Then
gpu_loops.py compare ONE.json OTHER.json says how far they are apart. A loop whose package is missing is left out."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from typing import Any

WITHIN = {"": 1e-4, "bf16": 2e-2}  # relative
PACKAGES = {"accelerator": ("accelerate", "transformers"), "trainer": ("accelerate", "transformers"), "lightning": ("lightning",)}


def compare(files: list[str]) -> None:
    one, other = (json.load(open(file, encoding="utf-8")) for file in files)
    failed = set(one) ^ set(other)
    for name in sorted(failed):
        print(f"{name}: losses of one run alone")
    for name in sorted(set(one) & set(other)):
        a, b = one[name], other[name]
        worst = max((abs(x - y) / abs(y) for x, y in zip(a, b)), default=float("inf"))
        within = WITHIN["bf16" if "bf16" in name else ""]
        good = len(a) == len(b) and worst <= within
        print(f"{name}: {len(a)} losses, at most {worst:.1e} from the CPU's (relative){'' if good else f', more than {within}'}")
        failed |= set() if good else {name}
    sys.exit(1 if failed else 0)


if sys.argv[1] == "compare":
    compare(sys.argv[2:])

import torch

import libzero

group = libzero.group()
cuda = sys.argv[1] == "cuda"
device = torch.device("cuda", group.local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
# NCCL takes one rank a GPU; libzero itself lets ranks share one, through the host.
backend = "gloo" if cuda and group.local_size > torch.cuda.device_count() else None
if cuda:
    torch.cuda.set_device(device)


def model_of(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(64, 8))


def batch(step: int) -> torch.Tensor:
    return torch.sin(torch.arange(96.0) * (step + 1 + group.rank)).view(6, 16)


def plain(stage: int, optimizer: str = "SGD", compiled: bool = False, moves: bool = False, **more: Any) -> list[float]:
    model: Any = model_of()
    if not moves:
        model.to(device)
    if compiled:
        model = torch.compile(model)
    given = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    opt = libzero.shard(model, given, stage=stage, cast_forward_inputs=True, device=device if moves else None, **more)
    losses = []
    for step in range(5):
        logits = model(batch(step).to(device)).float()
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(6, device=device))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    opt.close()
    return losses


def gpt2() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, samples: int) -> None:
        self.ids = torch.randint(128, (samples, 32), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def accelerator(folder: str) -> dict[str, list[float]]:
    import accelerate

    import libzero.hf

    handlers = [accelerate.InitProcessGroupKwargs(backend=backend)] if backend else []
    loop = libzero.hf.accelerator(stage=3, kwargs_handlers=handlers, **({} if cuda else {"cpu": True}))
    assert loop.device.type == device.type, loop.device
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Tokens(6 * 2 * group.size), batch_size=2)
    model, optimizer, loader = loop.prepare(model, optimizer, loader)
    losses = []
    for number, each in enumerate(loader):
        loss = model(**each).loss
        loop.backward(loss)
        loop.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loop.gather(loss.detach().reshape(1)).mean().item())
        if number == 2:
            loop.save_state(os.path.join(folder, "state"))
            loop.load_state(os.path.join(folder, "state"))
    return {"accelerator": losses}


def trainer(folder: str) -> dict[str, list[float]]:
    import transformers

    import libzero.hf

    def losses(resume: bool, **more: Any) -> list[float]:
        arguments = transformers.TrainingArguments(
            os.path.join(folder, "bf16" if more.get("bf16") else "fp32"), use_cpu=not cuda, ddp_backend=backend,
            per_device_train_batch_size=2, max_steps=6, logging_steps=1, save_steps=3, report_to=[], disable_tqdm=True,
            learning_rate=1e-3, log_level="error", **more,
        )  # fmt: skip
        made = libzero.hf.LibzeroTrainer(
            gpt2(), arguments, config={"zero_optimization": {"stage": 3}}, train_dataset=Tokens(64), eval_dataset=Tokens(8)
        )
        made.remove_callback(transformers.PrinterCallback)
        first = [] if resume else [made.evaluate()["eval_loss"]]
        made.train(resume_from_checkpoint=os.path.join(arguments.output_dir, "checkpoint-3") if resume else None)
        return first + [each["loss"] for each in made.state.log_history if "loss" in each] + [made.evaluate()["eval_loss"]]

    return {"Trainer": losses(False), "Trainer, resumed": losses(True), "Trainer, bf16": losses(False, bf16=True)}


def lightning_(folder: str) -> dict[str, list[float]]:
    import logging

    import lightning

    import libzero.lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = model_of(), []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(batch[0]).pow(2).mean()
            self.log("loss", loss, sync_dist=True)
            self.losses.append(self.all_gather(loss.detach()).float().mean().item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def losses(precision: str) -> list[float]:
        module = Module()
        x = torch.randn(8 * group.size, 16, generator=torch.Generator().manual_seed(1))
        loop = lightning.Trainer(
            accelerator="gpu" if cuda else "cpu", devices=group.local_size, num_nodes=group.hosts, precision=precision,
            strategy=libzero.lightning.LibzeroStrategy(stage=3), max_epochs=2, gradient_clip_val=0.5, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        loop.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2))
        loop.save_checkpoint(os.path.join(folder, f"{precision}.ckpt"))
        return module.losses

    return {"Lightning": losses("32-true"), "Lightning, bf16": losses("bf16-mixed")}


def run(folder: str) -> dict[str, list[float]]:
    found = {f"shard, stage {stage}": plain(stage) for stage in range(4)}
    found["shard, moved by the engine"] = plain(3, moves=True)
    found["shard, torch's NAdam"] = plain(1, optimizer="NAdam")
    found["shard, bf16"] = plain(2, optimizer="AdamW", bf16=True)
    found["shard, compiled"] = plain(3, compiled=True) if cuda else plain(3)
    for loop in (accelerator, trainer, lightning_):
        name = loop.__name__.strip("_")
        missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{name} was not run: this Python has no {', '.join(missing)}")
        elif name == "lightning" and backend:
            print("lightning was not run: it starts no more ranks than there are GPUs")
        else:
            found |= loop(folder)
    return found


warnings.filterwarnings("ignore")
with contextlib.ExitStack() as stack:
    # One folder of all ranks; the ranks of other hosts have their own.
    made = stack.enter_context(tempfile.TemporaryDirectory()) if group.rank == 0 else ""
    name = torch.zeros(256, dtype=torch.uint8)
    name[: len(made)] = torch.tensor(list(made.encode()), dtype=torch.uint8)
    group.broadcast(name, 0, "folder")
    result = run(bytes(name.tolist()).rstrip(b"\0").decode())
    group.barrier()
if group.rank == 0:
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(result, file)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
