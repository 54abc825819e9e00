"""BERT beside transformers: three steps of a classification on 2 ranks give its losses and weights, `zero eval` gives its
logits, loss and accuracy, of files of torch.save too, and its logits of masked tokens."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import support

FIXTURES = pathlib.Path(__file__).parents[1] / "models" / "fixtures"
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the a film was is it good bad fair very not and but old new long short".split()
STEPS, RATE = 3, 0.1


def tokenizer_in(folder: pathlib.Path) -> Any:
    tokenizer = transformers.BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})
    tokenizer.save_pretrained(folder)
    return tokenizer


def lines() -> list[dict[str, str]]:
    texts = []
    for index in range(15):
        words = [WORDS[5 + (index * (place + 3)) % 17] for place in range(2 + index % 5)]
        line = {"text": " ".join(words), "label": ("bad", "fair", "good")[index % 3]}
        if index % 4 == 1:
            line["text_pair"] = "it was " + words[0]
        texts.append(line)
    return texts


def encoded(tokenizer: Any, texts: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    both = [(line["text"], line["text_pair"]) if "text_pair" in line else line["text"] for line in texts]
    single = [tokenizer(*([text] if isinstance(text, str) else text)) for text in both]
    return tokenizer.pad({key: [one[key] for one in single] for key in single[0]}, return_tensors="pt")


def zero(*words: object) -> str:
    done = subprocess.run([support.program(), *map(str, words)], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def close(one: torch.Tensor, other: torch.Tensor, what: str, bound: float = 1e-5) -> None:
    difference = ((one - other).abs().max() / other.abs().max()).item()
    assert difference < bound, f"{what}: {difference}"


def classify(folder: pathlib.Path) -> None:
    source, run = folder / "start", folder / "run"
    shutil.copytree(FIXTURES / "bert-classes", source)
    tokenizer = tokenizer_in(source)
    texts = lines()
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    zero("data", "prepare", "--classify", folder / "lines.jsonl", "--out", folder / "data", "--tokenizer", source,
         "--validation", 0.25)  # fmt: skip
    count = (folder / "data" / "train.labels.bin").stat().st_size // 4
    assert count == 12, count

    model = transformers.BertForSequenceClassification.from_pretrained(source).eval()
    numbers = {name: number for number, name in model.config.id2label.items()}
    labels = torch.tensor([numbers[line["label"]] for line in texts])
    inputs = encoded(tokenizer, texts)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    expected = []
    for _ in range(STEPS):
        loss = model(**{key: value[:count] for key, value in inputs.items()}, labels=labels[:count]).loss
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (folder / "config.json").write_text(json.dumps({"optimizer": {"type": "SGD", "params": {"lr": RATE}},
                                                    "gradient_clipping": 0}))  # fmt: skip
    options = {
        "config": folder / "config.json", "from": source, "data": folder / "data", "out": run, "seq": 24, "steps": STEPS,
        "micro-batch": 2, "accumulate": 3, "nproc": 2, "stage": 3, "schedule": "constant", "warmup": 0, "dropout": 0,
        "eval-tokens": 0,
    }  # fmt: skip
    zero("train", *(word for key, value in options.items() for word in (f"--{key}", value)))
    found = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in found if "loss" in line and "step" in line][:STEPS]
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    assert worst < 1e-5, f"losses differ by {worst}: {losses} are not {expected}"
    again = transformers.BertForSequenceClassification.from_pretrained(run).eval()
    assert again.config.id2label == model.config.id2label
    for (name, one), other in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        if one.is_floating_point():
            close(one, other, name)

    with torch.no_grad():
        logits = again(**inputs).logits
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    correct = int((logits.argmax(1) == labels).sum())
    # The same weights as torch.save keeps them.
    torch.save(again.state_dict(), folder / "pytorch_model.bin")
    shutil.copytree(run, folder / "torch")
    (folder / "torch" / "model.safetensors").unlink()
    shutil.move(folder / "pytorch_model.bin", folder / "torch")
    for place in (run, folder / "torch"):
        for ranks in (1, 3):
            (folder / "logits.safetensors").unlink(missing_ok=True)  # a file that is there is refused
            said = zero("eval", "--from", place, "--data", folder / "lines.jsonl", "--nproc", ranks, "--stage", 3,
                        "--logits", folder / "logits.safetensors")  # fmt: skip
            written = load_file(folder / "logits.safetensors")
            assert torch.equal(written["labels"], labels)
            close(written["logits"], logits, f"logits of {place.name} on {ranks} ranks")
            words = said.split()
            assert abs(float(words[1].rstrip(",")) - loss) < 2e-6, f"{said} is not {loss}"
            assert f"({correct} of 15 texts)" in said, said
    print(f"classes: {STEPS} losses within {worst:.1e}; {said.strip()}")


def masked(folder: pathlib.Path) -> None:
    source = folder / "masked"
    shutil.copytree(FIXTURES / "bert", source)
    tokenizer_in(source)
    (folder / "text.txt").write_text("\n".join(line["text"] for line in lines()) + "\n")
    said = zero("eval", "--from", source, "--data", folder / "text.txt", "--seq", 8, "--nproc", 2, "--stage", 3, "--logits",
                folder / "logits.safetensors")  # fmt: skip
    written = load_file(folder / "logits.safetensors")
    model = transformers.BertForMaskedLM.from_pretrained(source).eval()
    with torch.no_grad():
        out = model(written["tokens"], labels=written["targets"])
    ours = torch.stack([written[f"logits.{index}"] for index in range(len(out.logits))])
    close(ours, out.logits, "logits of masked tokens")
    assert abs(float(said.split()[1].rstrip(",")) - out.loss.item()) < 1e-5 * out.loss.item(), f"{said} is not {out.loss}"
    assert (written["tokens"] == WORDS.index("[MASK]")).any()
    print("masked tokens:", said.strip())


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        classify(pathlib.Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        masked(pathlib.Path(folder))


if __name__ == "__main__":
    main()
