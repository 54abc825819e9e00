"""One rank of a trainer in Python: GPT-2 of transformers, with libzero, FSDP2, DeepSpeed or nothing around it.

compare.py starts the ranks (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS are in the environment).
Rank 0 writes OUT/log.jsonl: the file appears just before the model is built, its first line just before the first step, then
a line a step; the last lines have the losses, averaged over the ranks, and what libzero's ledger has counted.

The model, its initial weights, the tokens, the parameter groups and the loop are the same for all. Adam is fused
(torch.optim.AdamW(fused=True), DeepSpeedCPUAdam); bf16 means bf16 weights and operators with fp32 master weights.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "peers"))

from free_memory import return_free_memory  # noqa: E402

Step = Callable[[torch.Tensor], torch.Tensor]  # tokens -> loss, after the update
CLIP, WEIGHT_DECAY = 1.0, 0.1
ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8}


def made(options: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(options.seed)
    sizes = {"gpt2": {}, "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512}}[options.model]
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                                     bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def groups_of(model: torch.nn.Module) -> list[dict]:
    """Weight decay acts on matrices alone."""
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def plain(model: torch.nn.Module, options: argparse.Namespace) -> Step:
    """Torch's loop with nothing around it: each rank trains by itself."""
    parameters = list(model.parameters())
    groups = groups_of(model)
    if options.dtype == "bf16":
        for group in groups:
            group["params"] = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]
        ordered = [p for group in groups_of(model) for p in group["params"]]
        masters = [p for group in groups for p in group["params"]]
        for parameter in parameters:
            parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.AdamW(groups, **ADAM, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        if options.dtype == "bf16":
            for parameter, master in zip(ordered, masters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if options.dtype == "bf16":
            with torch.no_grad():
                torch._foreach_copy_(ordered, masters)
        return loss

    return step


def with_libzero(model: torch.nn.Module, options: argparse.Namespace, stage: int) -> Step:
    import libzero

    optimizer = libzero.shard(model, torch.optim.AdamW(groups_of(model), **ADAM), stage=stage, gradient_clipping=CLIP,
                              bf16=options.dtype == "bf16")
    options.optimizer = optimizer

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def with_fsdp2(model: torch.nn.Module, options: argparse.Namespace, reshard: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings: dict = {"mesh": init_device_mesh("cpu", (options.ranks,))}
    if options.dtype == "bf16":  # fp32 shards; operators, gathers and reductions in bf16
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, GPT2Block):
            fully_shard(module, **settings, reshard_after_forward=reshard)
    # The root holds the embeddings, which the backward pass needs at once: gathering them again would be for nothing.
    fully_shard(model, **settings, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(groups_of(model), **ADAM, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def with_deepspeed(model: torch.nn.Module, options: argparse.Namespace, stage: int) -> Step:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    config: dict = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "steps_per_print": 1 << 30,
        "zero_allow_untested_optimizer": True,
        # As benchmarks/peers/train.py, which says why.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000_000, "overlap_comm": False, "reduce_scatter": stage == 3},
    }
    if options.dtype == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": False}
    optimizer = DeepSpeedCPUAdam(groups_of(model), **ADAM, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


MODES: dict[str, Callable[[torch.nn.Module, argparse.Namespace], Step]] = {
    "plain": plain,
    **{f"libzero{stage}": lambda model, options, stage=stage: with_libzero(model, options, stage) for stage in range(4)},
    "fsdp2-stage2": lambda model, options: with_fsdp2(model, options, reshard=False),
    "fsdp2-stage3": lambda model, options: with_fsdp2(model, options, reshard=True),
    **{f"deepspeed{stage}": lambda model, options, stage=stage: with_deepspeed(model, options, stage) for stage in (1, 2, 3)},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of a trainer; compare.py starts it.")
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for log.jsonl")
    parser.add_argument("--model", choices=("gpt2", "tiny"), default="gpt2")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.rank, options.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return options


def tokens_of(options: argparse.Namespace, vocabulary: int, number: int) -> torch.Tensor:
    """This rank's in a step: random, small ones more often than large ones, so that there is something to learn."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + number * 64 + options.rank)
    uniform = torch.rand(options.micro_batch, options.seq, generator=generator, dtype=torch.float64)
    return (uniform**4 * vocabulary).long()


def main() -> None:
    options = arguments()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    group = None
    # Loaded, and met, before the model, so that their code does not count as the model's memory.
    if options.mode.startswith("libzero"):
        import libzero

        group = libzero.group()
    elif options.mode.startswith("deepspeed"):
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    elif options.mode.startswith("fsdp2"):
        dist.init_process_group("gloo")

    def meet() -> None:
        if group is not None:
            group.barrier()
        elif options.mode != "plain":
            dist.barrier()

    meet()
    log = (options.out / "log.jsonl").open("w", buffering=1) if options.rank == 0 else None

    def write(line: dict) -> None:
        if log is not None:
            log.write(json.dumps(line) + "\n")

    model = made(options)
    vocabulary = model.config.vocab_size
    step = MODES[options.mode](model, options)
    return_free_memory()
    meet()
    write({"event": "config", "mode": options.mode})
    losses = []
    for number in range(1, options.steps + 1):
        tokens = tokens_of(options, vocabulary, number)
        begin = time.perf_counter()
        losses.append(step(tokens).item())
        write({"step": number, "loss": losses[-1], "step_ms": (time.perf_counter() - begin) * 1000})
    mean = torch.tensor(losses, dtype=torch.float64)
    if group is not None:
        mean = group.all_gather_control(mean).view(group.size, -1).mean(0)
        write({"event": "ledger", "peak": options.optimizer.memory()["peak"]})
    elif options.mode != "plain":
        dist.all_reduce(mean)
        mean /= options.ranks
    write({"event": "losses", "losses": mean.tolist()})
    meet()
    if log is not None:
        log.close()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads sometimes abort a process that takes its group apart


if __name__ == "__main__":
    main()
