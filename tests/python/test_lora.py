"""LoRA of `zero train` beside peft's: 20 steps from one adapter give its losses in fp32, peft reads the adapter that the
run writes, and transformers reads the merged model, to equal logits. Some tokens are not supervised. With a quantised base
peft's model has the weights that the definition gives, which are computed here, in double."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

try:
    import numpy
    import peft
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import support

FIXTURES = pathlib.Path(__file__).parents[1] / "models" / "fixtures"
STEPS, ROWS, LENGTH, RATE = 20, 4, 8, 1e-2
NF4 = numpy.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "v_proj", "down_proj"], "lora_alpha": 12, "modules_to_save": ["lm_head", "model.norm"]},
    "gpt2": {"target_modules": r".*\.(c_attn|c_fc)", "use_rslora": True, "fan_in_fan_out": True},
    "dora": {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 12, "use_dora": True},
}
FOLDERS = {"dora": "llama"}


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


def seventeen_bits(value: numpy.float32) -> numpy.float32:
    """Returns a scale with 17 significant bits, which is at least 2^-117."""
    fraction, exponent = numpy.frexp(value)
    return numpy.float32(max(numpy.ldexp(numpy.rint(numpy.ldexp(float(fraction), 17)), exponent - 17), 2.0**-117))


def through_nf4(weight: torch.Tensor) -> torch.Tensor:
    """Returns a matrix as it is read back from NF4 with double quantisation (docs/fine-tuning.md)."""
    numbers = weight.flatten().numpy()
    blocks = numpy.zeros((-(-len(numbers) // 64), 64), numpy.float32)
    blocks.ravel()[: len(numbers)] = numbers
    scales = numpy.abs(blocks).max(1)
    codes = numpy.abs(blocks[:, :, None].astype(float) - NF4 * scales[:, None, None].astype(float)).argmin(2)

    def rounded(offset: numpy.float32) -> tuple[float, Any]:
        """Returns the sum of the squares of relative errors, and the scales."""
        read = scales - offset
        for begin in range(0, len(read), 256):
            part = read[begin : begin + 256]
            unit = seventeen_bits(numpy.abs(part).max() / numpy.float32(448))
            fp8 = torch.from_numpy(part * (1 / unit)).to(torch.float8_e4m3fn).float().numpy()
            read[begin : begin + 256] = fp8 * unit + offset
        errors = (read.astype(float) - scales)[scales > 0] / scales[scales > 0]
        return (errors**2).sum(), read

    around_mean = rounded(numpy.float32(scales.astype(float).mean()))
    around_zero = rounded(numpy.float32(0))
    scales = around_zero[1] if around_zero[0] < around_mean[0] else around_mean[1]
    values = NF4[codes].astype(numpy.float32) * scales[:, None]
    return torch.from_numpy(values.ravel()[: len(numbers)]).view(weight.shape)


def through_int8(weight: torch.Tensor) -> torch.Tensor:
    """Returns a matrix as it is read back from INT8 by blocks of 128 (docs/fine-tuning.md)."""
    numbers = weight.flatten().numpy()
    values = numbers.copy()
    for begin in range(0, len(numbers), 128):
        part = numbers[begin : begin + 128]
        unit = seventeen_bits(numpy.abs(part).max() / numpy.float32(127))
        values[begin : begin + 128] = numpy.rint(part * (1 / unit)) * unit
    return torch.from_numpy(values).view(weight.shape)


THROUGH = {"nf4": through_nf4, "int8": through_int8}


def quantised(source: pathlib.Path, folder: pathlib.Path, base: str) -> pathlib.Path:
    """Writes the model with the weights of its layers' linear layers as they are read back."""
    model = base_of(source)
    with torch.no_grad():
        for layer in model.model.layers.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(THROUGH[base](layer.weight))
    model.save_pretrained(folder)
    return folder


def with_positions(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Copies a model whose file also holds whole numbers that no parameter has, as old files do."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "position_ids": torch.arange(8)}, file, {"format": "pt"})
    return folder


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


def compare(name: str, folder: pathlib.Path, quantise: str = "") -> None:
    source, start, run, merged = FIXTURES / FOLDERS.get(name, name), folder / "start", folder / "run", folder / "merged"
    if name == "gpt2":
        source = with_positions(source, folder / "source")
    base = quantised(source, folder / "base", quantise) if quantise else source
    as_ours = ["--lora-quantize-base", quantise] if quantise else []
    tokens, targets = data(folder)
    torch.manual_seed(7)
    # Dropout would not be the same: the fixture of GPT-2 has some.
    model = peft.get_peft_model(base_of(base), peft.LoraConfig(r=4, **CASES[name])).eval()
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(start)
    # To libzero "norm" is "model.norm" alone. To peft, which reads the run's adapter, it would be "input_layernorm" too.
    file = start / "adapter_config.json"
    file.write_text(file.read_text().replace('"model.norm"', '"norm"'))
    expected = trained(model, tokens, targets)

    optimizer = {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0}}
    (folder / "config.json").write_text(json.dumps({"optimizer": optimizer, "gradient_clipping": 0}))
    options = {
        "config": folder / "config.json", "from": source, "adapter": start, "data": folder / "answers.bin", "out": run,
        "seq": LENGTH, "micro-batch": 1, "accumulate": 2, "nproc": 2, "stage": 3, "steps": STEPS, "schedule": "constant",
        "warmup": 0, "dropout": 0, "eval-tokens": 0, "sample-tokens": 0,
    }  # fmt: skip
    zero("train", *(word for key, value in options.items() for word in (f"--{key}", value)), "--lora-merge", *as_ours)
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
        again = peft.PeftModel.from_pretrained(base_of(base), run).eval()
        close(again(tokens).logits, logits, f"{name}, adapter read by peft")
        zero("merge", "--from", source, "--adapter", run, "--out", merged, *as_ours)
        for place in (merged, run / "merged"):
            close(base_of(place).eval()(tokens).logits, logits, f"{name}, {place.name} of {place.parent.name}")
        whole = again.merge_and_unload().state_dict()
        for key, value in base_of(merged).state_dict().items():
            close(value, whole[key], f"{name}, merged {key}")
    print(f"{name}{quantise and ', ' + quantise}: {STEPS} losses within {worst:.1e}, from {losses[0]:.4f} to {losses[-1]:.4f}")


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name, *quantise in (("llama",), ("gpt2",), ("dora",), ("llama", "nf4"), ("dora", "int8")):
        with tempfile.TemporaryDirectory() as folder:
            compare(name, pathlib.Path(folder), *quantise)


if __name__ == "__main__":
    main()
