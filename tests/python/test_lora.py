"""LoRA of `zero train` beside peft's: 20 steps from one adapter give its losses in fp32, peft reads the adapter that the
run writes, and transformers reads the merged model, to equal logits. Some tokens are not supervised."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

try:
    import numpy
    import peft
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import support

FIXTURES = pathlib.Path(__file__).parents[1] / "models" / "fixtures"
STEPS, ROWS, LENGTH, RATE = 20, 4, 8, 1e-2
CASES: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "v_proj", "down_proj"], "lora_alpha": 12},
    "gpt2": {"target_modules": r".*\.(c_attn|c_fc)", "use_rslora": True, "fan_in_fan_out": True},
}


def data(folder: pathlib.Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes tokens and marks, of which a step takes all. Returns inputs and targets, one row for each sequence."""
    generator = numpy.random.default_rng(3)
    tokens = generator.integers(1, 40, ROWS * LENGTH + 1).astype(numpy.uint16)
    marks = (generator.random(len(tokens)) < 0.6).astype(numpy.uint8)
    marks[1 : LENGTH + 1] = 0  # of the first sequence nothing is supervised
    tokens.tofile(folder / "answers.bin")
    marks.tofile(folder / "answers.marks.bin")
    targets = numpy.where(marks & 1, tokens.astype(numpy.int64), -100)[1:]
    return (torch.from_numpy(part.astype(numpy.int64)).view(ROWS, LENGTH) for part in (tokens[:-1], targets))


def base_of(source: pathlib.Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)


def trained(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> list[float]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0)
    losses = []
    for _ in range(STEPS):
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def zero(*words: object) -> None:
    subprocess.run([support.program(), *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def close(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    difference = ((one - other).abs().max() / other.abs().max()).item()
    assert difference < 1e-4, f"{what}: {difference}"


def compare(name: str, folder: pathlib.Path) -> None:
    source, start, run, merged = FIXTURES / name, folder / "start", folder / "run", folder / "merged"
    tokens, targets = data(folder)
    torch.manual_seed(7)
    # Dropout would not be the same: the fixture of GPT-2 has some.
    model = peft.get_peft_model(base_of(source), peft.LoraConfig(r=4, **CASES[name])).eval()
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(start)
    expected = trained(model, tokens, targets)

    optimizer = {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0}}
    (folder / "config.json").write_text(json.dumps({"optimizer": optimizer, "gradient_clipping": 0}))
    options = {
        "config": folder / "config.json", "from": source, "adapter": start, "data": folder / "answers.bin", "out": run,
        "seq": LENGTH, "micro-batch": 1, "accumulate": 2, "nproc": 2, "stage": 3, "steps": STEPS, "schedule": "constant",
        "warmup": 0, "dropout": 0, "eval-tokens": 0, "sample-tokens": 0,
    }  # fmt: skip
    zero("train", *(word for key, value in options.items() for word in (f"--{key}", value)), "--lora-merge")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line and "step" in line][:STEPS]
    assert len(losses) == STEPS, losses
    worst = max(abs(a - b) / b for a, b in zip(losses, expected))
    assert worst < 1e-5, f"{name}: losses differ by {worst}: {losses} are not {expected}"

    with torch.no_grad():
        logits = model(tokens).logits
        theirs = load_file(start / "adapter_model.safetensors")
        ours = load_file(run / "adapter_model.safetensors")
        assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
        again = peft.PeftModel.from_pretrained(base_of(source), run).eval()
        close(again(tokens).logits, logits, f"{name}, adapter read by peft")
        zero("merge", "--from", source, "--adapter", run, "--out", merged)
        for place in (merged, run / "merged"):
            close(base_of(place).eval()(tokens).logits, logits, f"{name}, {place.name} of {place.parent.name}")
        whole = again.merge_and_unload().state_dict()
        for key, value in base_of(merged).state_dict().items():
            close(value, whole[key], f"{name}, merged {key}")
    print(f"{name}: {STEPS} losses within {worst:.1e}, from {losses[0]:.4f} to {losses[-1]:.4f}")


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            compare(name, pathlib.Path(folder))


if __name__ == "__main__":
    main()
