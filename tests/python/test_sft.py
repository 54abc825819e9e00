"""Fine-tuning on answers alone beside transformers' Trainer: five steps on sequences of which unequal numbers of tokens are
supervised (in one none) give its losses and weights, on 1, 2 and 3 ranks with accumulation."""

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

SOURCE = pathlib.Path(__file__).parents[1] / "models/fixtures/llama"
STEPS, ROWS, LENGTH, RATE = 5, 12, 8, 1e-2


class Recorded(transformers.Trainer):
    """Records the loss of each micro-batch: its part of the step's."""

    parts: list[float] = []

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        part = super().training_step(*arguments, **keywords)
        self.parts.append(part.item())
        return part


def of_transformers(tokens: Any, supervised: Any, folder: pathlib.Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    rows = []
    for row in range(ROWS):
        place = slice(row * LENGTH, (row + 1) * LENGTH + 1)
        labels = numpy.where(supervised[place], tokens[place], -100)
        labels[0] = -100  # the row before predicts it
        rows.append({"input_ids": torch.from_numpy(tokens[place]), "labels": torch.from_numpy(labels)})
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=3, gradient_accumulation_steps=4, max_steps=STEPS,
        learning_rate=RATE, lr_scheduler_type="constant", adam_beta2=0.95, max_grad_norm=1, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32)
    trainer = Recorded(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    steps = numpy.array(trainer.parts).reshape(STEPS, -1).sum(1)
    return list(steps), model.state_dict()


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    generator = numpy.random.default_rng(3)
    tokens = generator.integers(1, 40, ROWS * LENGTH + 1)
    # Row r has about r / ROWS of its tokens supervised.
    supervised = generator.random(len(tokens)) < numpy.arange(len(tokens)) // LENGTH / ROWS
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        tokens.astype(numpy.uint16).tofile(folder / "answers.bin")
        supervised.astype(numpy.uint8).tofile(folder / "answers.marks.bin")
        expected, weights = of_transformers(tokens, supervised, folder)
        optimizer = {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0}}
        (folder / "config.json").write_text(json.dumps({"optimizer": optimizer, "gradient_clipping": 1}))
        for ranks, rows, stage in ((1, 12, 0), (1, 3, 0), (2, 2, 2), (3, 1, 3)):
            run = folder / f"{ranks}x{rows}"
            options = {
                "config": folder / "config.json", "from": SOURCE, "data": folder / "answers.bin", "out": run, "seq": LENGTH,
                "task": "sft", "nproc": ranks, "micro-batch": rows, "accumulate": ROWS // ranks // rows, "stage": stage,
                "steps": STEPS, "schedule": "constant", "warmup": 0, "eval-tokens": 0, "sample-tokens": 0,
            }  # fmt: skip
            words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
            subprocess.run([support.program(), "train", *words], check=True, stdout=subprocess.DEVNULL)
            lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
            losses = [line["loss"] for line in lines if "loss" in line and "step" in line][:STEPS]
            worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
            assert worst < 1e-5, f"{ranks} ranks, micro-batch {rows}: losses differ by {worst}: {losses}, {expected}"
            ours = load_file(run / "model.safetensors")
            differences = {name: (value - weights[name]).abs().max().item() for name, value in ours.items()}
            assert max(differences.values()) < 1e-5, f"{ranks} ranks, micro-batch {rows}: {differences}"
            print(f"{ranks} ranks, micro-batch {rows}: losses within {worst:.1e}, weights {max(differences.values()):.1e}")


if __name__ == "__main__":
    main()
