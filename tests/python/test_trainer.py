"""LibzeroTrainer and the accelerate plugin: a tiny GPT-2 on random tokens.

Run alone it starts its ranks itself, by `zero launch` and by torchrun (ZERO_PROGRAM, default build/release/zero)."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

try:
    import accelerate
    import safetensors.torch
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import support  # finds libzero in this tree

SAMPLES, LENGTH, VOCABULARY = 64, 16, 128


class Tokens(torch.utils.data.Dataset):
    """Random tokens, the last few of them without a label: ranks have different counts."""

    def __init__(self, seed: int, samples: int = SAMPLES, whole: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
        self.lengths = torch.randint(LENGTH if whole else 4, LENGTH + 1, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def settings(stage: int) -> dict[str, Any]:
    # As for the Trainer's DeepSpeed integration, with its "auto".
    return {
        "zero_optimization": {
            "stage": stage, "stage3_max_live_parameters": 0, "unit_bytes": 16384, "reduce_bucket_size": "auto",
        },
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }  # fmt: skip


def sums(state: dict[str, torch.Tensor]) -> list[str]:
    import hashlib

    bits = [state[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(state)]
    return [hashlib.sha256(each).hexdigest()[:16] for each in bits]


# Both loops may be odd: a group without parameters, a rate that is a tensor, a table that is frozen, and a
# layer that is frozen in steps 2 and 3 (from 0), at the end of which a checkpoint is made.


def oddly(model: Any) -> Any:
    model.transformer.wte.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": [], "weight_decay": 0.5}, {"params": trained}], lr=torch.tensor(1e-3))


def freeze(model: Any, step: int) -> None:
    model.transformer.h[0].requires_grad_(step not in (2, 3))


class Freezes(transformers.TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        freeze(model, state.global_step)


# --- What a rank does. Each job returns what it has seen, as JSON; rank 0's counts.


def arguments(folder: str, per_rank: int, **more: Any) -> Any:
    given = dict(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=per_rank, per_device_eval_batch_size=per_rank,
        max_steps=6, logging_steps=1, learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5,
        save_strategy="no", report_to=[], disable_tqdm=True, seed=3, dataloader_num_workers=0,
    )  # fmt: skip
    return transformers.TrainingArguments(**{**given, **more})


def seen_by(trainer: Any) -> dict[str, Any]:
    history = trainer.state.log_history
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {key: [each[key] for each in history if key in each] for key in keys}


def trainer_job(
    folder: str, size: int, stage: int | None = None, resume: str = "", model: Any = None, evaluate_first: bool = False,
    odd: bool = False, whole: bool = False, fused: bool = False, **more: Any,
) -> dict[str, Any]:
    """One run of LibzeroTrainer, or of Trainer with stage None."""
    model = model or gpt2()
    if fused:
        import libzero.hf

        calls: list[int] = []
        whole_loss = libzero._head.linear_cross_entropy
        libzero._head.linear_cross_entropy = lambda *values, **keywords: calls.append(1) or whole_loss(*values, **keywords)
        libzero.hf.use_linear_cross_entropy(model)
    common: dict[str, Any] = dict(train_dataset=Tokens(1), eval_dataset=Tokens(2, 32, whole=True))
    if odd:
        common |= dict(optimizers=(oddly(model), None), callbacks=[Freezes()])
    if stage is None:
        trainer = transformers.Trainer(model, arguments(folder, 8 // size, **more), **common)
    else:
        import libzero.hf

        trainer = libzero.hf.LibzeroTrainer(
            model, arguments(folder, 8 // size, **more), config=settings(stage), whole_checkpoints=whole, **common
        )
    if evaluate_first:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume or None)
    if fused:
        libzero._head.linear_cross_entropy = whole_loss
        assert len(calls) == trainer.state.max_steps * trainer.args.gradient_accumulation_steps, len(calls)
    seen = seen_by(trainer)
    seen["evaluated"] = [trainer.evaluate()["eval_loss"]]
    predicted = trainer.predict(Tokens(5, 14))
    assert predicted.predictions.shape == (14, LENGTH, VOCABULARY), predicted.predictions.shape
    seen["predicted"] = [float(abs(predicted.predictions).sum())]
    seen["best"] = trainer.state.best_model_checkpoint
    trainer.save_model(os.path.join(folder, "final"))
    if stage is not None:
        assert trainer.sharded is not None
        for checkpoint in filter(lambda name: name.startswith("checkpoint"), os.listdir(folder)):
            files = os.listdir(os.path.join(folder, checkpoint))
            assert ("model.safetensors" in files) == whole and ("libzero" in files) != whole, files
        seen["weights"] = sums(trainer.sharded.full_state_dict())
        if stage == 3:
            pager = trainer.sharded._engine.pager()
            assert pager["gathers"] > 100 and pager["live_bytes"] == 0, pager
    return seen


@contextlib.contextmanager
def no_whole_tensors(owner: Any) -> Iterator[None]:
    """Inside, whatever makes a whole parameter or state on a rank fails."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a whole tensor was made")

    names = ("parameter", "full_state_dict", "state_dict", "save_full", "gathered")
    for name in names:
        setattr(owner, name, refuse)
    try:
        yield
    finally:
        for name in names:
            delattr(owner, name)


def accelerate_job(
    folder: str, size: int, stage: int | None = None, resume: str = "", steps: int = 6, bf16: bool = False,
    own_schedule: bool = False, odd: bool = False, whole: bool = False,
) -> dict[str, Any]:
    """A loop over accelerate, with micro-batches; plain Accelerator with stage None."""
    common: dict[str, Any] = dict(gradient_accumulation_steps=2, step_scheduler_with_optimizer=not own_schedule)
    if stage is None:
        accelerator = accelerate.Accelerator(cpu=True, **common)
    else:
        import libzero.hf

        accelerator = libzero.hf.accelerator(
            settings(stage), mixed_precision="bf16" if bf16 else None, **common
        )
    model = gpt2()
    optimizer = oddly(model) if odd else torch.optim.AdamW(model.parameters(), lr=1e-3)
    # accelerate steps a scheduler once for each process.
    divisor = 1 if own_schedule else size
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / divisor))
    generator = torch.Generator().manual_seed(4)
    loader = torch.utils.data.DataLoader(Tokens(1, 128), batch_size=8 // size, shuffle=True, generator=generator)
    optimizer, model, loader, scheduler = accelerator.prepare(optimizer, model, loader, scheduler)
    if resume:
        accelerator.load_state(resume)
        loader = accelerator.skip_first_batches(loader, 6)
    seen: dict[str, Any] = {"loss": [], "grad_norm": [], "lr": [], "mine": []}
    for batch in loader:
        if odd:
            freeze(model, len(seen["lr"]) + 3 * bool(resume))
        with accelerator.accumulate(model):
            # Of one length, so that means over ranks are means over the batch.
            loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            seen["loss"].append(accelerator.gather(loss.detach().reshape(1)).mean().item())
            seen["mine"].append(batch["input_ids"].sum().item())
            if accelerator.sync_gradients:
                clip = 0.5 if (len(seen["lr"]) + 3 * bool(resume)) % 2 == 0 else float("inf")  # it is for one step
                seen["grad_norm"].append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            if accelerator.sync_gradients or not own_schedule:
                scheduler.step()
            optimizer.zero_grad(set_to_none=not odd or len(seen["lr"]) + 3 * bool(resume) > 1)
        if accelerator.sync_gradients:
            seen["lr"].append(float(scheduler.get_last_lr()[-1]))
            if len(seen["lr"]) == 3 and not resume:
                state = os.path.join(folder, "state")
                if stage is None or whole:
                    accelerator.save_state(state, **({"whole": True} if whole else {}))
                else:
                    with no_whole_tensors(accelerator.sharded()):
                        accelerator.save_state(state)
                    assert "libzero" in os.listdir(state) and "model.safetensors" not in os.listdir(state)
        if len(seen["lr"]) == steps:
            break
    everyone = accelerator.gather(torch.tensor([seen["mine"]]))
    assert size == 1 or not torch.equal(everyone[0], everyone[-1]), "ranks have the same batches"
    accelerator.unwrap_model(model).save_pretrained(
        os.path.join(folder, "pretrained"), is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    accelerator.save_model(model, os.path.join(folder, "saved"))
    accelerator.wait_for_everyone()
    if stage is not None:
        whole = accelerator.get_state_dict(model)
        seen["weights"] = sums(whole)
        if accelerator.is_main_process:
            for name in ("pretrained", "saved"):
                file = os.path.join(folder, name, "model.safetensors")
                saved = safetensors.torch.load_file(file)
                assert sums(saved) == sums({name: whole[name] for name in saved}), name
    del seen["mine"]
    return seen


def refusals_job(folder: str, size: int) -> dict[str, Any]:
    """What cannot be is said."""
    import libzero.hf

    def said(function: Any) -> str:
        try:
            function()
        except libzero.ConfigError as error:
            return str(error)
        raise AssertionError("nothing was refused")

    def trainer(config: dict[str, Any], **more: Any) -> Any:
        return libzero.hf.LibzeroTrainer(gpt2(), arguments(folder, 4, **more), config=config)

    capped = transformers.Gemma2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                       num_key_value_heads=1, head_dim=8, final_logit_softcapping=30.0)  # fmt: skip
    gemma = libzero.hf.use_linear_cross_entropy(transformers.Gemma2ForCausalLM(capped))
    words = torch.arange(8).reshape(1, 8)
    assert gemma.eval()(words, labels=words).logits.shape == (1, 8, 32)
    phi = transformers.PhiConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    t5 = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    taken = libzero.hf.use_linear_cross_entropy(gpt2())
    assert "logits" not in pickle.loads(pickle.dumps(taken))(words, labels=words)
    prepared = gpt2()
    prepared.forward = prepared.forward
    said_of = {
        "softcapping": lambda: gemma.train()(words, labels=words),
        "without bias": lambda: libzero.hf.use_linear_cross_entropy(transformers.PhiForCausalLM(phi)),
        "loss_function": lambda: libzero.hf.use_linear_cross_entropy(transformers.T5ForConditionalGeneration(t5)),
        "wrapped already": lambda: libzero.hf.use_linear_cross_entropy(prepared),
    }
    for word, function in said_of.items():
        assert word in said(function), word
    return {
        "clipping": said(lambda: trainer({"gradient_clipping": 2.0})),
        "micro-batches": said(lambda: trainer({"gradient_accumulation_steps": 4})),
        "optimizer": said(lambda: trainer({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}})),
        "full eval": said(lambda: trainer({}, bf16_full_eval=True)),
        "model": said(lambda: libzero.hf.accelerator().prepare(torch.optim.SGD(gpt2().parameters(), lr=1.0))),
    }


def dropped_job(folder: str, size: int) -> dict[str, Any]:
    """An optimizer in a cycle goes where a rank's garbage collector runs: nobody waits there."""
    import gc

    import libzero
    from libzero import _dropped

    def train() -> None:
        model = gpt2()
        opt = libzero.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
        opt.myself = opt  # type: ignore[attr-defined]

    train()
    group = libzero.group()
    if group.rank == 0:
        gc.collect()
    torch.distributed.barrier()
    gc.collect()
    train()
    return {"kept": [sum(of is group for of, _ in _dropped._kept.values())]}


def rank(folder: str, jobs: dict[str, Any]) -> None:
    """Runs the jobs, one after the other, and writes what they have seen."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    seen = {}
    for name, (kind, given) in jobs.items():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        if given.pop("lora", False):
            import peft

            settings = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
            given["model"] = peft.get_peft_model(gpt2(), settings)
        jobs_by_kind: dict[str, Any] = {
            "trainer": trainer_job, "accelerate": accelerate_job, "refusals": refusals_job, "dropped": dropped_job,
        }  # fmt: skip
        job = jobs_by_kind[kind]
        print(f"job {name}", flush=True)
        seen[name] = job(os.path.join(folder, name), size, **given)
    if os.environ.get("RANK", "0") == "0":
        with open(os.path.join(folder, "seen.json"), "w", encoding="utf-8") as file:
            json.dump(seen, file)


# --- What starts them.

Seen = dict[str, Any]
Jobs = dict[str, tuple[str, dict[str, Any]]]


def start(folder: str, ranks: int, by: str, jobs: Jobs) -> dict[str, Seen]:
    tail = [__file__, "--rank", folder, json.dumps(jobs)]
    if by.endswith("beside a group"):
        tail.insert(1, "--group")
    if by == "python":
        command = [sys.executable, *tail]
    elif by.startswith("torchrun"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *tail]
    else:
        command = support.command(ranks, tail)
    started = time.monotonic()
    done = subprocess.run(command, env=support.environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}", flush=True)
        raise ChildProcessError(f"FAILED: {by}, {ranks} ranks, exit status {done.returncode}")
    print(f"{len(jobs)} jobs by {by} on {ranks} ranks: {time.monotonic() - started:.0f} s", flush=True)
    with open(os.path.join(folder, "seen.json"), encoding="utf-8") as file:
        return json.load(file)


class Checks:
    def __init__(self) -> None:
        self.count = self.failed = 0

    def holds(self, name: str, holds: bool, *seen: Any) -> None:
        self.count, self.failed = self.count + 1, self.failed + (not holds)
        print(f"{'ok    ' if holds else 'FAILED'} {name}", flush=True)
        for each in () if holds else seen:
            print(f"       {each}", flush=True)

    def equal(self, name: str, a: Seen, b: Seen, but: tuple[str, ...] = ()) -> None:
        keys = [key for key in b if key not in but]
        differ = [key for key in keys if a.get(key) != b[key]]
        self.holds(f"{name}: the same bits", not differ, *[(key, a.get(key), b[key]) for key in differ])

    def near(self, name: str, a: Seen, b: Seen, keys: tuple[str, ...]) -> None:
        """Within 1e-5, relative."""
        pairs = [pair for key in keys for pair in zip(a[key], b[key], strict=True)]
        far = max(abs(x - y) / max(abs(y), 1e-30) for x, y in pairs)
        self.holds(f"{name}: {far:.1e} apart", far < 1e-5, *[(a[key], b[key]) for key in keys])


NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_loss", "evaluated", "predicted")
CHECKPOINTS = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
BEST = {
    "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 3e-2,
    "load_best_model_at_end": True,
}  # fmt: skip
MICRO_BATCHES = {"bf16": True, "gradient_accumulation_steps": 2, "max_steps": 3}


def check_all(checks: Checks, folder: str) -> None:
    checkpoint, state = os.path.join(folder, "stage 3", "checkpoint-3"), os.path.join(folder, "accelerate 3", "state")
    of_plain = os.path.join(folder, "plain", "checkpoint-3")
    odd = {"odd": True, **CHECKPOINTS}
    plain = start(folder, 1, "python", {
        "plain": ("trainer", CHECKPOINTS), "accelerate": ("accelerate", {}),
        "plain, odd": ("trainer", odd), "accelerate, odd": ("accelerate", {"odd": True}),
    })  # fmt: skip
    jobs: Jobs = {f"stage {stage}": ("trainer", {"stage": stage, **CHECKPOINTS}) for stage in (0, 3)}
    jobs |= {f"accelerate {stage}": ("accelerate", {"stage": stage}) for stage in (0, 1, 2, 3)}
    jobs |= {f"resumed {stage}": ("trainer", {"stage": stage, "resume": checkpoint}) for stage in (2, 3)}
    jobs |= {f"fused {stage}": ("trainer", {"stage": stage, "fused": True, **CHECKPOINTS}) for stage in (0, 3)}
    jobs["fused, micro-batches"] = ("trainer", {"stage": 3, "fused": True, **MICRO_BATCHES, "bf16": False})
    jobs["micro-batches"] = ("trainer", {"stage": 3, **MICRO_BATCHES, "bf16": False})
    jobs["plain, resumed"] = ("trainer", {"stage": 3, "resume": of_plain})
    jobs["accelerate, resumed"] = ("accelerate", {"stage": 2, "resume": state, "steps": 3})
    jobs["accelerate, own schedule"] = ("accelerate", {"stage": 3, "own_schedule": True})
    jobs["accelerate, whole"] = ("accelerate", {"stage": 3, "own_schedule": True, "whole": True})
    jobs["whole"] = ("trainer", {"stage": 3, "whole": True, **CHECKPOINTS})
    of_whole = os.path.join(folder, "whole", "checkpoint-3")
    jobs["whole, resumed"] = ("trainer", {"stage": 2, "resume": of_whole})
    jobs["accelerate bf16"] = ("accelerate", {"stage": 3, "bf16": True})
    state_bf16 = os.path.join(folder, "accelerate bf16", "state")
    jobs["accelerate bf16, resumed"] = ("accelerate", {"stage": 2, "bf16": True, "resume": state_bf16, "steps": 3})
    for stage in (0, 3):
        jobs[f"bf16 {stage}"] = ("trainer", {"stage": stage, "bf16": True, "evaluate_first": True})
        jobs[f"fp16 {stage}"] = ("trainer", {"stage": stage, "fp16": True})
        jobs[f"best {stage}"] = ("trainer", {"stage": stage, **BEST})
        jobs[f"LoRA, best {stage}"] = ("trainer", {"stage": stage, "lora": True, **BEST})
    jobs |= {f"micro-batches {stage}": ("trainer", {"stage": stage, **MICRO_BATCHES}) for stage in (2, 3)}
    for stage in (0, 3):
        jobs[f"odd {stage}"] = ("trainer", {"stage": stage, **odd})
        jobs[f"accelerate, odd {stage}"] = ("accelerate", {"stage": stage, "odd": True})
    of_odd = os.path.join(folder, "odd 3", "checkpoint-3"), os.path.join(folder, "accelerate, odd 3", "state")
    jobs["odd, resumed"] = ("trainer", {"stage": 2, "resume": of_odd[0], **odd})
    jobs["accelerate, odd, resumed"] = ("accelerate", {"stage": 2, "resume": of_odd[1], "steps": 3, "odd": True})
    jobs["dropped"] = ("dropped", {})
    two = start(folder, 2, "zero launch", jobs)
    checks.holds("what is dropped on all ranks ends at the next shard", two["dropped"]["kept"][0] <= 2, two["dropped"])

    checks.equal("Trainer, stages 3 and 0 on 2 ranks", two["stage 3"], two["stage 0"], but=("best",))
    checks.near("Trainer, stage 0 on 2 ranks and plain Trainer", two["stage 0"], plain["plain"], NUMBERS)
    for stage in (2, 3):
        resumed = two[f"resumed {stage}"]
        checks.equal(f"Trainer, resumed at stage {stage}", resumed, two["stage 3"], but=("best", "eval_loss"))
    checks.equal("Trainer, losses without logits, stages 3 and 0", two["fused 3"], two["fused 0"], but=("best",))
    checks.near("Trainer, losses without and with logits", two["fused 3"], two["stage 3"], NUMBERS)
    checks.near("the same of 2 micro-batches", two["fused, micro-batches"], two["micro-batches"], NUMBERS[:3])
    checks.equal("Trainer, whole checkpoints", two["whole"], two["stage 3"], but=("best",))
    resumed = two["whole, resumed"]
    checks.equal("Trainer, resumed from a whole checkpoint", resumed, two["stage 3"], but=("best", "eval_loss"))
    checks.near(
        "Trainer, plain Trainer's checkpoint resumed at stage 3", two["plain, resumed"], plain["plain"], NUMBERS[:3]
    )
    checks.equal("Trainer, odd, stages 3 and 0", two["odd 3"], two["odd 0"], but=("best",))
    checks.near("Trainer, odd, stage 0 and plain Trainer", two["odd 0"], plain["plain, odd"], NUMBERS)
    checks.equal("Trainer, odd, resumed while frozen", two["odd, resumed"], two["odd 3"], but=("best", "eval_loss"))
    for stage in (0, 3):
        name = f"accelerate, odd {stage}"
        checks.near(f"{name} and plain accelerate", two[name], plain["accelerate, odd"], ("loss", "grad_norm", "lr"))
    whole = {"weights": two["accelerate, odd 3"]["weights"], "loss": two["accelerate, odd 3"]["loss"][6:]}
    checks.equal("accelerate, odd, load_state while frozen", two["accelerate, odd, resumed"], whole)
    for name in ("bf16", "fp16", "best", "LoRA, best"):
        checks.equal(f"Trainer, {name}, stages 3 and 0", two[f"{name} 3"], two[f"{name} 0"], but=("best",))
    checks.equal("Trainer, bf16, 2 micro-batches, stages 3 and 2", two["micro-batches 3"], two["micro-batches 2"])
    for name in ("best 0", "best 3", "LoRA, best 3"):
        seen = two[name]
        best, last = min(seen["eval_loss"]), seen["eval_loss"][-1]
        found = abs(seen["evaluated"][0] - best) <= 1e-6 * best and (best != last or "LoRA" in name)
        checks.holds(f"Trainer, {name}: the best model is loaded at the end", found, seen)

    # With micro-batches the pairs add in different orders.
    checks.equal("accelerate, stages 1 and 0 on 2 ranks", two["accelerate 1"], two["accelerate 0"])
    checks.equal("accelerate, stages 3 and 2 on 2 ranks", two["accelerate 3"], two["accelerate 2"])
    numbers = ("loss", "grad_norm", "lr")
    checks.near("accelerate, stages 3 and 0", two["accelerate 3"], two["accelerate 0"], numbers)
    checks.near("accelerate, stage 3 and plain accelerate", two["accelerate 3"], plain["accelerate"], numbers)
    for kind, whole in (("", two["accelerate 3"]), (" bf16", two["accelerate bf16"])):
        resumed = two[f"accelerate{kind}, resumed"]
        whole = {"weights": whole["weights"], "loss": whole["loss"][6:]}
        checks.equal(f"accelerate{kind}, load_state at stage 2 of a state of stage 3", resumed, whole)

    jobs = {"one": ("trainer", {"stage": 0, "resume": checkpoint}), "refusals": ("refusals", {})}
    for name, stage, saved in (
        ("accelerate, one", 0, "accelerate, own schedule"), ("accelerate, one of whole", 1, "accelerate, whole"),
        ("accelerate without libzero", None, "accelerate, whole"),
    ):  # fmt: skip
        state = os.path.join(folder, saved, "state")
        jobs[name] = ("accelerate", {"stage": stage, "resume": state, "steps": 3, "own_schedule": True})
    one = start(folder, 1, "zero launch", jobs)
    checks.near("Trainer, resumed on 1 rank at stage 0", one["one"], two["stage 3"], NUMBERS[:3])
    whole = {key: value[-len(one["accelerate, one"][key]) :] for key, value in two["accelerate, own schedule"].items()}
    for name in ("accelerate, one", "accelerate, one of whole", "accelerate without libzero"):
        checks.near(f"{name}: load_state on 1 rank", one[name], whole, numbers)
    for name, text in one["refusals"].items():
        checks.holds(f"refused: {name}", len(text) > 40, text)

    both: Jobs = {"trainer": ("trainer", {"stage": 3, **CHECKPOINTS}), "accelerate": ("accelerate", {"stage": 3})}
    for by in ("torchrun", "zero launch beside a group"):
        more: Jobs = {"DDP": ("accelerate", {})} if by == "torchrun" else {}
        seen = start(folder, 2, by, both | more)
        checks.equal(f"Trainer by {by}", seen["trainer"], two["stage 3"], but=("best",))
        checks.equal(f"accelerate by {by}", seen["accelerate"], two["accelerate 3"])
        if more:
            checks.near("accelerate with DistributedDataParallel", two["accelerate 0"], seen["DDP"], numbers)


def main() -> int:
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder:
        try:
            check_all(checks, folder)
        except ChildProcessError as error:
            checks.holds(str(error), False)
    print(f"{checks.count - checks.failed} of {checks.count} checks passed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    if "--group" in sys.argv:
        sys.argv.remove("--group")
        torch.distributed.init_process_group("gloo")
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(main())
