"""The public names of torch's optimizers, of what accelerate, transformers and Lightning call, and torch's functions that
`shard` changes: each is called, and the table of docs/python.md says what came. With LIBZERO_WRITE_TABLE=1 the table is written."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support import batch, main, mlp, need, ranks, shared_folder

need("torch", "accelerate", "transformers", "lightning")

import libzero
from libzero import _tensor

_DOCS = Path(__file__).resolve().parents[2] / "docs/python.md"
_BEGIN, _END = "<!-- Written by LIBZERO_WRITE_TABLE=1 tests/python/test_names.py. -->", "<!-- The end of it. -->"
ACTS, REFUSED, OWN = "acts", "refused", "torch's own"
rows: list[tuple[str, str, str]] = []


def sharded(stage: int = 3) -> tuple[Any, Any]:
    model = mlp()
    opt = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage)
    model(batch(0, 0)).pow(2).mean().backward()
    opt.step()
    return model, opt


def row(name: str, says: str, call: Callable[[], Any], error: str = "") -> None:
    """`call` must return True where the name acts or is torch's own, and raise an error of libzero's where it is
    refused; `error`: a word of that."""
    try:
        result = call()
    except libzero.Error as raised:
        assert error and error in str(raised), (name, str(raised))
        verdict = REFUSED
    else:
        assert not error, f"{name} was not refused"
        assert result is not False, f"{name} did not act"
        verdict = OWN if says.startswith("as always") else ACTS
    rows.append((name, verdict, says))


def table() -> str:
    lines = ["| name | what it does | |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {verdict} | {says} |" for name, verdict, says in rows])


# --- torch.optim.Optimizer.


@ranks(2)
def test_optimizer(group: Any) -> None:
    model, opt = sharded()
    p = model[0].weight
    known: set[str] = set()

    def of(name: str, says: str, call: Callable[[], Any], error: str = "") -> None:
        known.add(re.match(r"\w+", name)[0])  # type: ignore[index]
        row(f"opt.{name}", says, call, error)

    def backward() -> None:
        model(batch(0, 1)).pow(2).mean().backward()

    def closure() -> torch.Tensor:
        loss = model(batch(0, 1)).pow(2).mean()
        loss.backward()
        return loss

    def steps() -> bool:
        before = opt.parameter(p)
        backward()
        opt.step()
        return not torch.equal(opt.parameter(p), before)

    of("step()", "reduces, clips, updates", steps)
    of("step(closure)", "the same, after the closure", lambda: opt.step(closure) > 0 and opt.updated)

    def zeroes() -> bool:
        backward()
        opt.zero_grad(set_to_none=False)
        before = opt.parameter(p)
        opt.step()
        opt.zero_grad()
        return not torch.equal(opt.parameter(p), before)

    of("zero_grad()", "drops the gradients since the last `step`", lambda: (backward(), opt.zero_grad(), not opt.pending)[-1])
    of("zero_grad(set_to_none=False)", "drops them, and puts zeros in their place: decay and momentum go on", zeroes)
    of("add_param_group(group)", "before `shard`", lambda: opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "before libzero.shard")  # fmt: skip
    of("state_dict()", "whole on rank 0, in torch's format; collective", lambda: len(opt.state_dict()["state"]) == 6 or group.rank > 0)
    of("load_state_dict(d)", "rank 0's, absent states included; collective", lambda: opt.load_state_dict(opt.state_dict()))
    of("state", "a view: reading, writing in place, assigning, `del` and `clear()` act on the ranks' states; collective",
       lambda: (opt.state[p]["exp_avg"].zero_(), opt.state[p]["exp_avg"].abs().max() == 0)[-1])  # fmt: skip
    of("state[p][key]", "taking one out, as `del` and `pop`, or adding one", lambda: opt.state[p].pop("exp_avg"), "together")

    def rate() -> bool:
        opt.param_groups[0]["lr"] = 0.0
        before = opt.parameter(p)
        backward()
        opt.step()
        opt.param_groups[0]["lr"] = 1e-2
        return torch.equal(opt.parameter(p), before)

    def option() -> None:
        opt.param_groups[0]["amsgrad"] = True
        backward()
        try:
            opt.step()
        finally:
            opt.param_groups[0]["amsgrad"] = False
            opt.zero_grad()

    def members() -> None:
        opt.param_groups[0]["params"].reverse()
        backward()
        try:
            opt.step()
        finally:
            opt.param_groups[0]["params"].reverse()
            opt.zero_grad()

    of("param_groups", "rates and hyper-parameters (betas, momentum, decay) act from the next `step`", rate)
    of("param_groups", "options that change the update (`amsgrad`, `maximize`)", option, "may change")
    of("param_groups", "the lists of parameters, and the number of groups", members, "libzero.shard was given")
    of("defaults", "as always: of groups that are added, and none are", lambda: opt.defaults["lr"] == 1e-2)
    for kind in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            calls: list[int] = []
            call = getattr(opt, f"register_{kind}_{when}_hook")

            def hooked(kind: str = kind, call: Any = call, calls: list[int] = calls) -> bool:
                handle = call(lambda *_: calls.append(1))
                {"step": opt.step, "state_dict": opt.state_dict}.get(kind, lambda: opt.load_state_dict(opt.state_dict()))()
                handle.remove()
                return calls == [1]

            of(f"register_{kind}_{when}_hook(f)", "called as torch calls it", hooked)
    of("profile_hook_step(f)", "as always", lambda: callable(opt.profile_hook_step(opt.step)))
    known |= {"OptimizerPreHook", "OptimizerPostHook"}  # types
    missing = {name for name in dir(torch.optim.AdamW(mlp().parameters())) if not name.startswith("_")} - known
    assert not missing, missing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
        row("torch.optim.lr_scheduler", "as always, on `opt` or on the first optimizer", lambda: (opt.step(), scheduler.step(), abs(opt.param_groups[0]["lr"] - 1e-3) < 1e-9)[-1])  # fmt: skip
    opt.close()


# --- torch's functions that the first `shard` changes.


@ranks(2)
def test_tensors(group: Any) -> None:
    model, opt = sharded()
    p, plain = model[0].weight, mlp()[0].weight
    waits = lambda: model(batch(0, 0)).pow(2).mean().backward()
    row("p.grad", "outside of a pass and `step`: None", lambda: p.grad is None)
    waits()
    row("p.grad", "while gradients wait for `step`", lambda: p.grad, "opt.gradient")
    row("p.grad = g", "", lambda: setattr(p, "grad", torch.zeros_like(plain)), "opt.set_gradient")
    row("torch.nn.utils.clip_grad_norm_", "and `clip_grad_value_`", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "opt.clip_grad_norm_")  # fmt: skip
    norm = lambda **keywords: opt.clip_grad_norm_(1.0, **keywords)
    row("opt.clip_grad_norm_(x)", "clips the next step alone; `error_if_nonfinite` acts, `foreach` changes nothing", lambda: norm(error_if_nonfinite=True, foreach=True) > 0)  # fmt: skip
    row("opt.clip_grad_norm_(x, norm_type)", "other than 2", lambda: norm(norm_type=1.0), "norm_type")
    row("model.zero_grad()", "as `opt.zero_grad`, `set_to_none` too", lambda: (model.zero_grad(set_to_none=False), not opt.pending)[-1])
    opt.zero_grad()
    waits()
    row("model[0].zero_grad()", "of a part, while gradients wait", lambda: model[0].zero_grad(), "opt.zero_grad()")
    opt.zero_grad()
    before = p.detach().clone()
    row("p.data", "an alias whose writes count", lambda: (p.data.mul_(2.0), torch.equal(opt.parameter(p), 2 * before))[-1])
    row("p.data = t", "at the next pass or `step`", replaced, "replaced")
    for name in ("to", "half", "cuda", "to_empty"):
        call = {"to": lambda: model.to(torch.bfloat16), "half": model.half, "cuda": model.cuda,
                "to_empty": lambda: model.to_empty(device="cpu")}[name]  # fmt: skip
        if name != "cuda":
            row(f"model.{name}(...)", "where it would change a parameter", call, "before libzero.shard")
    row("model.float()", "as always where nothing changes", lambda: model.float() is model)
    for name, call in (("repr(p)", lambda: repr(p)), ("p.tolist()", p.tolist), ("p.numpy()", lambda: p.detach().numpy()),
                       ("p.__array__()", lambda: p.detach().__array__()), ("copy.deepcopy(p)", lambda: p.__deepcopy__({})),
                       ("pickle, torch.save", lambda: p.__reduce_ex__(2))):  # fmt: skip
        row(name, "by a copy at stage 3" + (", read-only" if "numpy" in name or "array" in name else ""), call)
    row("p.data_ptr()", "outside of `gathered` at stage 3", p.data_ptr, "libzero.gathered")
    row("p.__dlpack__()", "the same", p.detach().__dlpack__, "libzero.gathered")
    row("p.share_memory_()", "", p.share_memory_, "before libzero.shard")
    calls: list[int] = []
    p.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    row("p.register_post_accumulate_grad_hook(f)", "called, and the engine still gets the gradient", lambda: (waits(), calls == [1] and opt.pending)[-1])
    opt.step()
    with torch.autocast("cpu", torch.bfloat16):
        row("torch.autocast", "keeps no cast of a weight at stage 3", lambda: (waits(), opt.step(), opt.updated)[-1])
    changed = set(re.findall(r'"(\w+)"', inspect.getsource(_tensor.install))) | set(_tensor._ADDRESSES)
    told = " ".join(name for name, _, _ in rows) + " __repr__ __reduce_ex__ __deepcopy__ __enter__ __exit__ _apply"
    assert all(name in told for name in changed), changed
    opt.close()


def replaced() -> None:
    model, opt = sharded()
    model[0].weight.data = mlp()[0].weight.detach()
    model(batch(0, 0)).sum().backward()


# --- accelerate, transformers, Lightning: each function of theirs that libzero has one in the place of.


class Calls:
    """Counts calls of the functions of a class that are its own."""

    def __init__(self, kind: type) -> None:
        self.names = {name for name, each in vars(kind).items() if inspect.isfunction(each) and not name.startswith("_")}
        self.made: set[str] = set()
        for name in self.names:
            setattr(kind, name, self._counting(getattr(kind, name), name))

    def _counting(self, function: Any, name: str) -> Any:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.made.add(name)
            return function(*arguments, **keywords)

        return counted


@ranks(2)
def test_accelerate_and_the_trainer(group: Any) -> None:
    import libzero.hf
    from libzero._accelerate import LibzeroAccelerator, LibzeroOptimizer

    calls = [Calls(LibzeroAccelerator), Calls(LibzeroOptimizer)]
    accelerator = libzero.hf.accelerator(stage=3)
    model = mlp()
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = accelerator.prepare(model, theirs, torch.optim.lr_scheduler.StepLR(theirs, 1))
    model, optimizer, scheduler = made
    of = lambda name, says, call, error="": row(f"accelerator.{name}", says, call, error)
    of("prepare(...)", "shards the model of an optimizer, which goes to the device; with `device_placement=False` of the accelerator a model stays where it is", lambda: accelerator.sharded(model))
    of("backward(loss, **k)", "of the scaled loss; `retain_graph` and others are torch's", lambda: accelerator.backward(model(batch(0, 0)).sum(), retain_graph=True))
    of("clip_grad_norm_(p, x)", "clips the next step alone; refused with `clip_by_previous_norm`", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0) > 0)
    of("clip_grad_norm_(part, x)", "of a part of the parameters", lambda: accelerator.clip_grad_norm_(model[0].parameters(), 1.0), "model.parameters()")
    of("clip_grad_norm_(p, x, norm_type)", "other than 2", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, 1), "norm_type")
    of("clip_grad_value_(p, x)", "", lambda: accelerator.clip_grad_value_(model.parameters(), 1.0), "clip_grad_norm_")
    of("get_state_dict(model)", "whole on rank 0", lambda: len(accelerator.get_state_dict(model) or ()) == 6 or group.rank > 0)
    row("optimizer.step()", "and `zero_grad(set_to_none)`, `state_dict`, of what `prepare` returned: those of `opt`", lambda: (optimizer.step(), optimizer.zero_grad(set_to_none=False), scheduler.step(), optimizer.optimizer.updated)[-1])
    row("optimizer.step_was_skipped", "a gradient was not finite", lambda: not optimizer.step_was_skipped)
    with shared_folder() as folder:
        of("save_state(folder)", "slices, by each rank; `whole=True`: by rank 0", lambda: accelerator.save_state(folder))
        of("load_state(folder)", "at any stage and number of ranks", lambda: accelerator.load_state(folder))
        of("load_state(folder, strict=False)", "and other arguments of `load_state_dict`", lambda: accelerator.load_state(folder, strict=False), "strict")
        group.barrier()  # nobody reads the folder any more
    for each in calls:
        assert each.names <= each.made | {"adopt"}, each.names - each.made
    accelerator.sharded().close()


@ranks(2)
def test_lightning(group: Any) -> None:
    import logging

    import lightning
    import libzero.lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    calls = Calls(libzero.lightning.LibzeroStrategy)

    class Net(lightning.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = mlp()

        def training_step(self, x: Any, index: int) -> Any:
            return self.net(x[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def fit(**keywords: Any) -> Any:
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batch(0, 0)), batch_size=2)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=libzero.lightning.LibzeroStrategy(stage=3), max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            **{"gradient_clip_val": 0.5, **keywords},
        )  # fmt: skip
        trainer.fit(net := Net(), data, ckpt_path=keywords.pop("ckpt", None))
        return trainer, net

    of = lambda name, says, call, error="": row(f"lightning.Trainer({name})", says, call, error)
    trainer, net = fit()
    of("gradient_clip_val", "clips each step in the engine", lambda: trainer.strategy.sharded._clipping == 0)
    exchange = lambda: trainer.strategy.all_gather(trainer.strategy.reduce(torch.ones(1))).sum() == 2
    row("trainer.strategy.all_gather(x)", "and `reduce`, by torch.distributed's group; as copies on the CPU where it has no backend for the device", exchange)
    with shared_folder() as folder:
        file = os.path.join(folder, "last.ckpt")
        trainer.save_checkpoint(file)
        trainer.strategy.sharded.close()
        shards = sorted(os.listdir(file))

        def resumes() -> bool:
            data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batch(0, 0)), batch_size=2)
            trainer = lightning.Trainer(
                accelerator="cpu", devices=2, strategy=libzero.lightning.LibzeroStrategy(stage=1), max_epochs=2,
                logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(Net(), data, ckpt_path=file)
            steps = trainer.strategy.sharded.steps
            trainer.strategy.sharded.close()
            return len(shards) == 3 and steps == 2

        row("trainer.save_checkpoint(file)", "a folder of slices; with `whole_checkpoints` Lightning's own format", resumes)
        group.barrier()
    of('gradient_clip_algorithm="value"', "", lambda: fit(gradient_clip_algorithm="value"), "by value")
    of("sync_batchnorm=True", "", lambda: fit(sync_batchnorm=True), "sync_batchnorm")
    of('precision="64-true"', "other than 32-true, bf16-mixed, and 16-mixed on a GPU", lambda: fit(precision="64-true"), "bf16-mixed")
    assert calls.names <= calls.made | {"on_exception", "load_model_state_dict"}, calls.names - calls.made


@ranks(2)
def test_table(group: Any) -> None:
    if group.rank > 0:
        return
    text = _DOCS.read_text(encoding="utf-8")
    begin, end = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
    if os.environ.get("LIBZERO_WRITE_TABLE"):
        _DOCS.write_text(f"{text[:begin]}\n{table()}\n{text[end:]}", encoding="utf-8")
    else:
        assert text[begin:end].strip() == table(), "run it with LIBZERO_WRITE_TABLE=1: the table has changed"


main()
