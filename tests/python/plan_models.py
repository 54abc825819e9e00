"""Small models whose memory is predicted and measured: for test_plan.py and benchmarks/plan_memory.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import libzero

SEQUENCE = 128


class Convolutions(nn.Module):
    """Convolutions, batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(images.to(self.last.weight.dtype)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.last = nn.Linear(256, 2000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(self.embedding(tokens))[0])


def gpt2() -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=3, n_embd=128, n_head=4, vocab_size=2000, n_positions=SEQUENCE, attn_pdrop=0.0
        )
    )  # fmt: skip


def llama() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=3, hidden_size=128, intermediate_size=352, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=2000, max_position_embeddings=SEQUENCE,
        )
    )  # fmt: skip


def bert() -> Any:
    import transformers

    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=3, hidden_size=128, intermediate_size=512, num_attention_heads=4, vocab_size=2000,
            max_position_embeddings=SEQUENCE,
        )
    )  # fmt: skip


def loss_of_images(model: nn.Module, samples: int) -> torch.Tensor:
    classes = torch.zeros(samples, dtype=torch.long)
    return nn.functional.cross_entropy(model(torch.zeros(samples, 3, 64, 64)).float(), classes)


def loss_of_tokens(model: nn.Module, samples: int) -> torch.Tensor:
    tokens = torch.zeros(samples, SEQUENCE, dtype=torch.long)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def loss_of_language(model: nn.Module, samples: int) -> torch.Tensor:
    tokens = torch.zeros(samples, SEQUENCE, dtype=torch.long)
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


Loss = Callable[[nn.Module, int], torch.Tensor]
MODELS: dict[str, tuple[Callable[[], Any], Loss]] = {
    "GPT-2": (gpt2, loss_of_language),
    "convolutions": (Convolutions, loss_of_images),
    "LSTM": (Recurrent, loss_of_tokens),
    "Llama": (llama, loss_of_language),
    "BERT": (bert, loss_of_language),
}


def held(group: Any, model: nn.Module, loss: Loss, config: dict[str, Any]) -> dict[str, int]:
    """The most bytes of each category that this rank holds in its third step."""
    optimizer = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config=config)
    before = 0
    for step in range(3):
        if step == 2:
            group.barrier()
            group.reset_peaks()
            before = group.memory()["activations"][0]
        for _ in range(config["gradient_accumulation_steps"]):
            loss(model, config["train_micro_batch_size_per_gpu"]).backward()
            optimizer.step()
    peaks = {name: both[1] for name, both in group.memory().items()}
    peaks["activations"] -= before
    optimizer.close()
    return peaks
