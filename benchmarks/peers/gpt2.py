"""GPT-2 in PyTorch: the model of zero/models/gpt2/gpt2.h, with the same names, operators and initial weights."""

import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file


class Conv1D(nn.Module):
    """y = x W + b with W as (in, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(width, 3 * width)
        self.c_proj = Conv1D(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        # unbind: its backward writes the three gradients side by side once, where three slices would add zero-padded ones
        q, k, v = self.c_attn(x).view(batch, sequence, 3, self.heads, width // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, sequence, width))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = Conv1D(width, 4 * width)
        self.c_proj = Conv1D(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of hidden (N, C) times weight (V, C) transposed, with the logits in chunks and the gradients computed
    in the forward pass, as zero/models/layers/cross_entropy.h does it: else the peers would pay for N x V logits three times over."""

    LOGITS_BYTES = 64 << 20

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        count = hidden.size(0)
        chunk = max(1, LinearCrossEntropy.LOGITS_BYTES // (4 * weight.size(0)))
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.empty_like(weight)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for begin in range(0, count, chunk):
            rows = slice(begin, min(begin + chunk, count))
            picked = targets[rows, None]
            values = torch.log_softmax(hidden[rows] @ weight.t(), dim=-1, dtype=torch.float32)
            total -= values.gather(1, picked).sum()
            # softmax minus one at the target, over N
            values.exp_().scatter_add_(1, picked, torch.full(picked.shape, -1.0, device=hidden.device))
            gradient = values.div_(count).to(weight.dtype)
            torch.mm(gradient, weight, out=grad_hidden[rows])
            grad_weight.addmm_(gradient.t(), hidden[rows], beta=0 if begin == 0 else 1)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / count

    @staticmethod
    def backward(ctx, grad_loss: torch.Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_loss.item() != 1:
            grad_hidden, grad_weight = grad_hidden * grad_loss, grad_weight * grad_loss
        return grad_hidden, grad_weight, None


class Gpt2(nn.Module):
    """`config` is Hugging Face's config.json."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        width, heads = config["n_embd"], config["n_head"]
        eps = config["layer_norm_epsilon"]
        self.wte = nn.Embedding(config["vocab_size"], width)
        self.wpe = nn.Embedding(config["n_positions"], width)
        self.h = nn.ModuleList(Block(width, heads, eps) for _ in range(config["n_layer"]))
        self.ln_f = nn.LayerNorm(width, eps=eps)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.size(1)]
        for block in self.h:
            x = block(x)
        return LinearCrossEntropy.apply(self.ln_f(x).flatten(0, 1), self.wte.weight, targets.flatten())

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        """Weight decay acts on matrices alone."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def load_gpt2(folder: Path) -> Gpt2:
    """The model and fp32 weights that `zero train` wrote to a run's folder."""
    with torch.device("meta"):
        model = Gpt2(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
    for parameter in model.parameters():  # memory of PyTorch's own rather than a view of the file
        parameter.data = parameter.data.clone()
        parameter.requires_grad_(True)
    return model
