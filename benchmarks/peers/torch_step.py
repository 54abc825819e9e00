"""The training step of plain PyTorch on one device, eager or compiled, as `zero bench step` measures libzero's: the rival that a user has
without ZeRO. fp32 weights, autocast to bf16, the logits of all rows, fused AdamW and clipping.

    python benchmarks/peers/torch_step.py --device cuda --compile --vocabulary 50304

Prints a line of JSON: step_ms (the mean of the timed steps), tokens_per_s, peak_bytes of the device's allocator, loss. --kernels prints a
table of the device's kernels by time instead.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from fsdp2_step import SIZES, initialised, wait_for
from gpt2 import Gpt2


class Rival(Gpt2):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.size(1)]
        for block in self.h:
            x = block(x)
        return F.cross_entropy(F.linear(self.ln_f(x), self.wte.weight).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=SIZES, default="gpt2")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--vocabulary", type=int, default=50257, help="50304 is a multiple of 64, which GPUs multiply faster")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    model = initialised(Rival, options.model, options.vocabulary).to(device)
    run = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(50257, (options.micro_batch, options.seq + 1), generator=generator).to(device)
             for _ in range(options.warmup + options.steps)]

    def step(text: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = run(text[:, :-1], text[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    for text in texts[: options.warmup]:
        loss = step(text)
    wait = wait_for(device)
    wait()
    if options.kernels:
        with torch.profiler.profile() as profile:
            step(texts[-1])
            wait()
        print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=60))
        return
    begin = time.perf_counter()
    for text in texts[options.warmup :]:
        loss = step(text)
    wait()
    seconds = (time.perf_counter() - begin) / options.steps
    vocabulary = "" if options.vocabulary == 50257 else f", vocabulary {options.vocabulary}"
    print(json.dumps({
        "run": f"PyTorch, {'compiled' if options.compile else 'eager'}{vocabulary}",
        "torch": torch.__version__,
        "ranks": 1,
        "step_ms": seconds * 1000,
        "tokens_per_s": options.micro_batch * options.seq / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "loss": loss.item(),
    }), flush=True)


if __name__ == "__main__":
    main()
