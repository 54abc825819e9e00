"""bitsandbytes itself beside libzero, on the CPU: a folder that it has quantised is read to the values that it reads back itself, bit for bit, and both
quantise to the same codes of NF4.

scripts/bitsandbytes_environment.sh installs it. The folders are written by transformers' save_pretrained."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import support

support.need("torch", "transformers", "accelerate")
cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "libzero/bitsandbytes"
sys.path.append(str(cache))
try:
    import bitsandbytes
except ImportError as error:
    print(f"skipped: {error} (scripts/bitsandbytes_environment.sh)")
    sys.exit(77)

import numpy  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from libzero import _C  # noqa: E402

functional = bitsandbytes.functional
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# Name: the options, and the dtype of the model.
CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "nf4": (FOUR, torch.float32),
    "nf4 in bf16": (FOUR, torch.bfloat16),
    "nf4, double quantisation": (FOUR | {"bnb_4bit_use_double_quant": True}, torch.float32),
    "nf4, double quantisation, in bf16": (FOUR | {"bnb_4bit_use_double_quant": True}, torch.bfloat16),
    "nf4 stored as bf16": (FOUR | {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": torch.bfloat16}, torch.bfloat16),
    "int8": ({"load_in_8bit": True}, torch.float16),
}  # fmt: skip


def base_model(folder: pathlib.Path) -> None:
    """Matrices of sizes that are no multiples of blocks, with rows of different lengths."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=72, intermediate_size=203, num_hidden_layers=2, num_attention_heads=6,
                                      num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(torch.exp(torch.randn(parameter.shape[0], 1)))
    model.save_pretrained(folder)


def read_back(module: torch.nn.Module) -> torch.Tensor:
    """Returns what bitsandbytes itself makes of a layer's weight."""
    weight: Any = module.weight
    if isinstance(module, bitsandbytes.nn.Linear4bit):
        return functional.dequantize_4bit(weight.data, weight.quant_state)
    return functional.int8_vectorwise_dequant(weight.data, weight.SCB)


def through_libzero(folder: pathlib.Path, out: pathlib.Path) -> dict[str, torch.Tensor]:
    """Returns the weights that a run with the rate 0 in fp32 begins and ends with."""
    (numpy.arange(400) % 40).astype(numpy.uint16).tofile(out.with_suffix(".bin"))
    options = {"from": folder, "data": out.with_suffix(".bin"), "out": out, "lr": 0, "min-lr": 0, "steps": 1, "seq": 8, "eval-tokens": 0,
               "sample-tokens": 0, "nproc": 2, "stage": 3}  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run([support.program(), "train", *words], check=True, stdout=subprocess.DEVNULL)
    return load_file(out / "model.safetensors")


def compare_folders(folder: pathlib.Path) -> list[str]:
    problems = []
    base_model(folder / "base")
    for number, (name, (options, dtype)) in enumerate(CASES.items()):
        config = transformers.BitsAndBytesConfig(**options)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config, dtype=dtype, device_map="cpu")
        saved = folder / f"saved{number}"
        model.save_pretrained(saved)
        weights = through_libzero(saved, folder / f"run{number}")
        layers = {path: module for path, module in model.named_modules() if isinstance(module, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt))}
        if len(layers) != 14:
            problems.append(f"{name}: {len(layers)} layers are quantised, not 14")
        elements = differ = 0
        most = 0.0
        for path, module in layers.items():
            wanted = read_back(module).to(dtype).float()
            got = weights[f"{path}.weight"]
            elements += wanted.numel()
            differ += int((got != wanted).sum())
            most = max(most, float(((got - wanted).abs() / wanted.abs().clamp_min(1e-30)).max()))
        print(f"{name}: {differ} of {elements} elements in {len(layers)} matrices differ from bitsandbytes' own, by {most:.1e} of themselves at most")
        if differ:
            problems.append(f"{name}: {differ} elements differ")
    return problems


def compare_codes() -> list[str]:
    """Both quantise a matrix; the first numel / 2 bytes of libzero's are its codes, two a byte."""
    problems = []
    for name, spread in {"rows alike": 0.0, "rows of lengths that differ by 1000": 1.0}.items():
        torch.manual_seed(2)
        weight = torch.randn(512, 1024) * 0.02 * 10 ** (spread * 3 * (torch.arange(512) % 7 / 6 - 1)).unsqueeze(1)
        packed = _C.packed_weight(weight, "nf4")
        ours = torch.ops.zero.unpacked_weight(packed, "nf4", 512, 1024, torch.float32)
        codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        theirs = functional.dequantize_4bit(codes, state)
        single, plain = functional.quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type="nf4")
        exact = functional.dequantize_4bit(single, plain)
        bytes_ = codes.view(-1)
        other = int((packed[: len(bytes_)] != bytes_).sum())

        def error(values: torch.Tensor, weight: torch.Tensor = weight) -> str:
            rows = (values - weight).norm(dim=1) / weight.norm(dim=1)
            return f"{rows.square().mean().sqrt():.4f} (worst row {rows.max():.4f})"

        print(f"{name}: {other} of {len(bytes_)} bytes of codes differ; relative errors of rows: libzero {error(ours)}, bitsandbytes {error(theirs)}, "
              f"without double quantisation {error(exact)}")  # fmt: skip
        if other > len(bytes_) // 10000:
            problems.append(f"{name}: {other} bytes of codes differ")
    return problems


def main() -> int:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(f"bitsandbytes {bitsandbytes.__version__}, transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        problems = compare_folders(pathlib.Path(folder)) + compare_codes()
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
