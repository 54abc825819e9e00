"""The batches that `zero train` takes: the token files of zero/data and the order of zero/data/token_loader.h."""

from pathlib import Path

import numpy as np
import torch

MASK64 = (1 << 64) - 1
LLM_C_MAGIC = 20240520
LLM_C_HEADER_BYTES = 1024


def mix(x: int) -> int:
    """SplitMix64's finalizer."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def permuted(index: int, size: int, seed: int, epoch: int) -> int:
    """Where zero::Permutation(size, seed, epoch) sends `index`."""
    half_bits = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    keys, state = [], mix(mix(seed) ^ epoch)
    for _ in range(6):
        state = mix(state)
        keys.append(state)
    while True:
        left, right = index >> half_bits, index & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        index = left << half_bits | right
        if index < size:
            return index


class TokenLoader:
    """`folder` was made by `zero data prepare`; its train.bin has 16-bit tokens, in llm.c's format or bare."""

    def __init__(self, folder: Path, sequence: int, micro_batch: int, rank: int, ranks: int, seed: int) -> None:
        file = folder / "train.bin"
        llm_c = int(np.fromfile(file, dtype=np.int32, count=1)[0]) == LLM_C_MAGIC
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r", offset=LLM_C_HEADER_BYTES if llm_c else 0)
        self.sequence, self.micro_batch, self.rank, self.ranks, self.seed = sequence, micro_batch, rank, ranks, seed
        self.sequences = (len(self.tokens) - 1) // sequence
        self.sample = 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, (B, T) int64 each."""
        first = self.sample + self.rank * self.micro_batch
        self.sample += self.ranks * self.micro_batch
        rows = []
        for sample in range(first, first + self.micro_batch):
            epoch, within = divmod(sample, self.sequences)
            begin = permuted(within, self.sequences, self.seed, epoch) * self.sequence
            rows.append(self.tokens[begin : begin + self.sequence + 1].astype(np.int64))
        batch = torch.from_numpy(np.stack(rows))
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
