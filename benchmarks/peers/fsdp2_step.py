"""The training step of PyTorch's FSDP2, as `zero bench step` measures libzero's: the same GPT-2 sizes, random tokens, AdamW and clipping.

    python -m torch.distributed.run --standalone --nproc-per-node 1 benchmarks/peers/fsdp2_step.py --device cuda

Rank 0 prints a line of JSON: step_ms (the mean of the timed steps, the device waited for before and after them), tokens_per_s of all
ranks, peak_bytes of rank 0's allocator (on a device), loss. On the CPU ranks exchange by Gloo, on CUDA by NCCL.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from gpt2 import Block, Gpt2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

# Width, layers, heads: Gpt2Config::preset of zero/models/gpt2.
SIZES = {"gpt2-nano": (384, 6, 6), "gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20), "gpt2-xl": (1600, 48, 25)}


def initialised(make: Callable[[dict], Gpt2], name: str, vocabulary: int = 50257) -> Gpt2:
    width, layers, heads = SIZES[name]
    config = {"n_embd": width, "n_head": heads, "n_layer": layers, "vocab_size": vocabulary, "n_positions": 1024, "layer_norm_epsilon": 1e-5}
    torch.manual_seed(1)
    model = make(config)
    for parameter in model.parameters():  # Conv1D leaves its own empty
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.zeros_(parameter)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.ones_(module.weight)
    return model


def sharded(options: argparse.Namespace, device: torch.device) -> Gpt2:
    model = initialised(Gpt2, options.model).to(device)
    settings = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    if options.dtype == "bf16":  # fp32 shards; operators, gathers and reductions in bf16
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if options.offload:
        settings["offload_policy"] = CPUOffloadPolicy()
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **settings, reshard_after_forward=options.stage == 3)
    fully_shard(model, **settings, reshard_after_forward=False)  # the root's embeddings are needed by backward at once
    return model


def wait_for(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=SIZES, default="gpt2")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--stage", type=int, choices=(2, 3), default=3, help="2: parameters stay gathered between forward and backward")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--offload", action="store_true",
                        help="parameters, gradients and the optimizer on the host (CPUOffloadPolicy), where torch updates; on CUDA")
    options = parser.parse_args()
    if options.offload and options.device != "cuda":
        parser.error("--offload is of --device cuda: on the CPU all is on the host")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cpu")
    if options.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("torch finds no CUDA device")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.offload else backend)  # the norm is of gradients on the host

    model = sharded(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    texts = [torch.randint(50257, (options.micro_batch, options.seq + 1), generator=generator).to(device)
             for _ in range(options.warmup + options.steps)]
    wait = wait_for(device)
    begin, loss = 0.0, torch.zeros(())
    for number, text in enumerate(texts):
        if number == options.warmup:
            wait()
            dist.barrier()
            begin = time.perf_counter()
        loss = model(text[:, :-1], text[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    wait()
    seconds = (time.perf_counter() - begin) / options.steps
    if dist.get_rank() == 0:
        print(json.dumps({
            "run": f"FSDP2, stage {options.stage}" + (", all on the host" if options.offload else ""),
            "torch": torch.__version__,
            "ranks": dist.get_world_size(),
            "step_ms": seconds * 1000,
            "tokens_per_s": dist.get_world_size() * options.micro_batch * options.seq / seconds,
            "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "loss": loss.item(),
        }), flush=True)
    dist.barrier()
    if device.type == "cuda":
        dist.destroy_process_group()
    else:  # Gloo's threads sometimes abort a process that takes its group apart
        os._exit(0)


if __name__ == "__main__":
    main()
