"""One rank of a peer: trains the GPT-2 of `zero train` with what PyTorch or DeepSpeed offers, each at its best setting.

compare.py starts the ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS and the allocator are in the environment).
Rank 0 writes OUT/log.jsonl as `zero train` does: the file appears just before the model is built, its first line just before the
first step, then a line a step; the last line has the losses, averaged over the ranks.

What was chosen and why:
- Adam is fused everywhere: torch.optim.AdamW(fused=True), DeepSpeedCPUAdam. Clipping uses foreach.
- Gloo is the only backend of the wheels that reduces CPU tensors; it talks through the loopback device (compare.py sets it).
- bf16 means bf16 weights and operators with fp32 master weights: DeepSpeed and FSDP2 offer it; for independent trainers and DDP
  it is written out below. ZeroRedundancyOptimizer has no master weights, so it takes fp32 only.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from free_memory import return_free_memory
from gpt2 import Block, Gpt2, load_gpt2
from tokens import TokenLoader

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens, targets -> loss, after the update
CLIP = 1.0
WEIGHT_DECAY = 0.1


def adamw(options: argparse.Namespace) -> dict:
    return {"lr": options.lr, "betas": (0.9, 0.95), "eps": 1e-8}


def make_step(model: torch.nn.Module, clipped: Iterable[torch.Tensor], optimizer) -> Step:
    clipped = list(clipped)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(clipped, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def make_master_weights_step(model: torch.nn.Module, parameters: list, masters: list, optimizer) -> Step:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        return loss

    return step


def replicated(model: Gpt2, options: argparse.Namespace, wrap: Callable[[Gpt2], torch.nn.Module]) -> Step:
    """Every rank holds and updates everything."""
    groups = model.parameter_groups(WEIGHT_DECAY)
    parameters = [p for group in groups for p in group["params"]]
    if options.dtype == "fp32":
        return make_step(wrap(model), parameters, torch.optim.AdamW(groups, **adamw(options), fused=True))
    for group in groups:
        group["params"] = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]
    masters = [p for group in groups for p in group["params"]]
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.AdamW(groups, **adamw(options), fused=True)
    return make_master_weights_step(wrap(model), parameters, masters, optimizer)


def independent(model: Gpt2, options: argparse.Namespace) -> Step:
    return replicated(model, options, lambda plain: plain)


def wrap_ddp(model: Gpt2) -> torch.nn.Module:
    # Gradients are views of the buckets (no copy, no second set); a static graph spares the search for unused parameters.
    return torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)


def ddp(model: Gpt2, options: argparse.Namespace) -> Step:
    return replicated(model, options, wrap_ddp)


def zero_redundancy(model: Gpt2, options: argparse.Namespace) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = wrap_ddp(model)
    # Parameters as views of one buffer a rank: one broadcast each instead of one a parameter.
    optimizer = ZeroRedundancyOptimizer(
        model.parameter_groups(WEIGHT_DECAY), torch.optim.AdamW, parameters_as_bucket_view=True, **adamw(options), fused=True)
    return make_step(wrapped, model.parameters(), optimizer)


def fsdp2(model: Gpt2, options: argparse.Namespace, reshard: bool, hybrid: bool = False) -> Step:
    """`hybrid`: sharded over the ranks of a host, replicated over hosts (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    local = int(os.environ["LOCAL_WORLD_SIZE"]) if hybrid else options.ranks
    shape = (options.ranks // local, local) if hybrid else (options.ranks,)
    settings = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape):])}
    if options.dtype == "bf16":  # fp32 shards; operators, gathers and reductions in bf16
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **settings, reshard_after_forward=reshard)
    # The root holds the embeddings, which the backward pass needs at once: gathering them again would be for nothing.
    fully_shard(model, **settings, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameter_groups(WEIGHT_DECAY), **adamw(options), fused=True)
    return make_step(model, model.parameters(), optimizer)


def deepspeed(model: Gpt2, options: argparse.Namespace, stage: int, lean: bool = False) -> Step:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # Buckets of 200 MB: the default of 2 GB would hold all gradients of a small model at once. There are no streams on a CPU that
    # could overlap, so double buffers would only cost; and Gloo's all-reduce of a bucket takes fewer cycles than its reduces to owners.
    zero = {"stage": stage, "reduce_bucket_size": 50_000_000, "overlap_comm": False, "reduce_scatter": stage == 3}
    if lean:  # nothing stays gathered, small buckets
        zero |= {"reduce_bucket_size": 10_000_000, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0,
                 "stage3_prefetch_bucket_size": 0}
    zero |= options.deepspeed
    config = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "steps_per_print": 1 << 30,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if options.dtype == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": False}
    optimizer = DeepSpeedCPUAdam(model.parameter_groups(WEIGHT_DECAY), **adamw(options), adamw_mode=True)
    if stage == 3:
        deepspeed.zero.register_external_parameter(model, model.wte.weight)
        deepspeed.zero.register_external_parameter(model, model.wpe.weight)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


MODES: dict[str, Callable[[Gpt2, argparse.Namespace], Step]] = {
    "independent": independent,
    "ddp": ddp,
    "zero-redundancy": zero_redundancy,
    "fsdp2-stage2": lambda model, options: fsdp2(model, options, reshard=False),
    "fsdp2-stage3": lambda model, options: fsdp2(model, options, reshard=True),
    "fsdp2-hsdp": lambda model, options: fsdp2(model, options, reshard=True, hybrid=True),
    "deepspeed1": lambda model, options: deepspeed(model, options, 1),
    "deepspeed2": lambda model, options: deepspeed(model, options, 2),
    "deepspeed3": lambda model, options: deepspeed(model, options, 3),
    "deepspeed3-lean": lambda model, options: deepspeed(model, options, 3, lean=True),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of a peer; compare.py starts it.")
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="folder with config.json and model.safetensors")
    parser.add_argument("--data", type=Path, required=True, help="folder made by `zero data prepare`")
    parser.add_argument("--out", type=Path, required=True, help="folder for log.jsonl")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deepspeed", type=json.loads, default={}, help="JSON object over the settings of zero_optimization")
    options = parser.parse_args()
    options.rank, options.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.mode == "zero-redundancy" and options.dtype == "bf16":
        parser.error("ZeroRedundancyOptimizer has no master weights: --dtype fp32 only")
    return options


def main() -> None:
    options = arguments()
    alone = options.mode == "independent"
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    loader = TokenLoader(options.data, options.seq, options.micro_batch, options.rank, options.ranks, options.seed)
    if options.mode.startswith("deepspeed"):
        import deepspeed  # loaded before the model, so that its code does not count as the model's memory

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    elif not alone:
        dist.init_process_group("gloo")

    if not alone:
        dist.barrier()
    log = (options.out / "log.jsonl").open("w", buffering=1) if options.rank == 0 else None

    def write(line: dict) -> None:
        if log is not None:
            log.write(json.dumps(line) + "\n")

    step = MODES[options.mode](load_gpt2(options.weights), options)
    return_free_memory()
    if not alone:
        dist.barrier()
    write({"event": "config", **{key: str(value) for key, value in vars(options).items()}})

    losses = []
    for number in range(1, options.steps + 1):
        begin = time.perf_counter()
        losses.append(step(*loader.next()).item())
        write({"step": number, "loss": losses[-1], "step_ms": (time.perf_counter() - begin) * 1000})

    mean = torch.tensor(losses, dtype=torch.float64)
    if not alone:
        dist.all_reduce(mean)
        mean /= options.ranks
    write({"event": "losses", "losses": mean.tolist()})
    if log is not None:
        log.close()
    if not alone:
        dist.barrier()
    # Without taking the process group apart: Gloo's threads sometimes abort a process that does so.
    os._exit(0)


if __name__ == "__main__":
    main()
