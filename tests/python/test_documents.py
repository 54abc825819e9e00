"""Attention inside of packed documents beside transformers: logits, losses and five steps are those with explicit
`position_ids` and a mask of blocks, and those that transformers finds by `position_ids` alone."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

try:
    import numpy
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import support

SOURCE = pathlib.Path(__file__).parents[1] / "models/fixtures"
ROWS, LENGTH, STEPS, RATE = 8, 24, 5, 1e-2


def zero(command: str, **options: Any) -> None:
    words = [str(word) for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)]
    subprocess.run([support.program(), command, "--document-attention", *words], check=True, stdout=subprocess.DEVNULL)


def documents(folder: pathlib.Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes documents of 1 to 14 tokens, half of which are supervised; returns their rows: tokens, targets, positions."""
    generator = numpy.random.default_rng(5)
    count = ROWS * LENGTH + 1
    tokens = generator.integers(1, 40, count)
    begins = numpy.zeros(count, bool)
    begins[numpy.cumsum(generator.integers(1, 15, count)).clip(max=count - 1)] = True
    begins[0] = True
    supervised = (generator.random(count) < 0.5) & ~begins
    tokens.astype(numpy.uint16).tofile(folder / "answers.bin")
    (supervised + 2 * begins).astype(numpy.uint8).tofile(folder / "answers.marks.bin")
    positions = numpy.zeros(count, int)
    for i in range(count):
        positions[i] = 0 if begins[i] or i % LENGTH == 0 else positions[i - 1] + 1
    targets = numpy.where(supervised, tokens, -100)[1:]
    rows = [torch.from_numpy(each).view(ROWS, LENGTH) for each in (tokens[:-1], targets, positions[:-1])]
    return rows[0], rows[1], rows[2]


def block_mask(positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """What each token sees, (ROWS, 1, LENGTH, LENGTH): no more than the window of what is before it in its document."""
    number = (positions == 0).cumsum(1)
    seen = (number.unsqueeze(2) == number.unsqueeze(1)).tril()
    return (seen if window is None else seen.triu(1 - window)).unsqueeze(1)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name, window in (("llama", None), ("mistral", 5), ("gpt2", None)):
        with tempfile.TemporaryDirectory() as place:
            folder = pathlib.Path(place)
            tokens, targets, positions = documents(folder)
            model = transformers.AutoModelForCausalLM.from_pretrained(SOURCE / name, dtype=torch.float32).eval()
            allowed = block_mask(positions, window)
            mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)

            def loss_of(logits: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

            with torch.no_grad():
                expected = model(tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
                found = model(tokens, position_ids=positions, use_cache=False).logits
                across = model(tokens, use_cache=False).logits
            assert (expected - found).abs().max() < 1e-6, "transformers finds the same documents"
            assert (expected - across).abs().max() > 1e-2, "documents make a difference"

            zero("eval", **{"from": SOURCE / name}, data=folder / "answers.bin", seq=LENGTH, nproc=2, stage=3,
                 logits=folder / "logits.safetensors")  # fmt: skip
            file = load_file(folder / "logits.safetensors")
            assert torch.equal(file["tokens"], tokens) and torch.equal(file["targets"], targets)
            ours = torch.stack([file[f"logits.{row}"] for row in range(ROWS)])
            difference = ((ours - expected).abs().max() / expected.abs().max()).item()
            assert difference < 1e-5, f"{name}: logits differ by {difference}"

            optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0)
            losses = []
            for _ in range(STEPS):
                loss = loss_of(model(tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            settings = {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0}}
            (folder / "config.json").write_text(json.dumps({"optimizer": settings, "gradient_clipping": 1}))
            zero("train", **{"from": SOURCE / name}, config=folder / "config.json", data=folder / "answers.bin",
                 out=folder / "run", seq=LENGTH, nproc=2, stage=3, micro_batch=2, accumulate=2, steps=STEPS, dropout=0,
                 schedule="constant", warmup=0, eval_tokens=0, sample_tokens=0)  # fmt: skip
            lines = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
            seen = [line["loss"] for line in lines if "loss" in line and "step" in line][:STEPS]
            worst = max(abs(a - b) / b for a, b in zip(seen, losses, strict=True))
            assert worst < 1e-5, f"{name}: losses differ by {worst}: {seen}, {losses}"
            print(f"{name}: logits within {difference:.1e}, losses of {STEPS} steps within {worst:.1e}")


if __name__ == "__main__":
    main()
