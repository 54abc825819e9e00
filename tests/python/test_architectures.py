"""Architectures of `transformers`, with small random weights: stages 0 to 3 give the same bits on 2 and 3 ranks, and
stage 0 on one rank is plain PyTorch.

Run alone it starts its ranks itself by `zero launch` (ZERO_PROGRAM, default build/release/zero). Arguments: cases to
run, by parts of their names."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

try:
    import peft
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import support  # finds libzero in this tree

Batch = dict[str, torch.Tensor]
STEPS = 3
VOCABULARY = 128
ROWS, LENGTH = 2, 16


def config(kind: str, **keywords: Any) -> Any:
    return getattr(transformers, kind + "Config")(**keywords)


def decoder(kind: str, **more: Any) -> torch.nn.Module:
    """A decoder of today's usual form: grouped queries, gated MLP, rotary positions."""
    made = config(
        kind, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, **{"num_key_value_heads": 2, **more},
    )  # fmt: skip
    return getattr(transformers, kind + "ForCausalLM")(made)


def gpt2() -> torch.nn.Module:
    made = config("GPT2", n_layer=2, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=64)
    return transformers.GPT2LMHeadModel(made)


def bert() -> torch.nn.Module:
    made = config(
        "Bert", num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BertForMaskedLM(made)


def t5() -> torch.nn.Module:
    made = config("T5", vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    made.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(made)


def vit() -> torch.nn.Module:
    made = config(
        "ViT", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=16,
        patch_size=4, num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(made)


def whisper() -> torch.nn.Module:
    made = config(
        "Whisper", vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=8, max_source_positions=16,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(made)


def mamba() -> torch.nn.Module:
    made = config("Mamba", vocab_size=VOCABULARY, hidden_size=64, state_size=8, num_hidden_layers=2)
    return transformers.MambaForCausalLM(made)


def clip() -> torch.nn.Module:
    text = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    image = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
    heads = {"num_attention_heads": 4}
    text["eos_token_id"] = 2  # the feature is that of the largest token
    made = config("CLIP", text_config=text | heads, vision_config=image | heads, projection_dim=32)
    return transformers.CLIPModel(made)


def wav2vec2() -> torch.nn.Module:
    made = config(
        "Wav2Vec2", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, apply_spec_augment=False,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(made)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "GPT-2": gpt2,
    "Llama": lambda: decoder("Llama"),
    "Qwen3": lambda: decoder("Qwen3", head_dim=16),
    "Mistral": lambda: decoder("Mistral", sliding_window=8),
    "Mixtral": lambda: decoder("Mixtral", num_local_experts=4, output_router_logits=True),
    "Qwen3-MoE": lambda: decoder(
        "Qwen3Moe", head_dim=16, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2
    ),
    "DeepSeek-V3": lambda: decoder(
        "DeepseekV3", num_key_value_heads=4, moe_intermediate_size=48, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=1,
    ),  # fmt: skip
    "Gemma": lambda: decoder("Gemma", head_dim=16),
    "Gemma-2": lambda: decoder("Gemma2", head_dim=16, sliding_window=8),
    "BERT": bert,
    "T5": t5,
    "ViT": vit,
    "CLIP": clip,
    "Whisper": whisper,
    "Wav2Vec2": wav2vec2,
    "Mamba": mamba,
}  # fmt: skip


def tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)


def batch_of(name: str, generator: torch.Generator, padded: bool) -> Batch:
    if name == "ViT":
        labels = torch.randint(10, (ROWS,), generator=generator)
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator), "labels": labels}
    if name == "Whisper":
        return {"input_features": torch.randn(ROWS, 8, 32, generator=generator), "labels": tokens(generator, 12)}
    if name == "Wav2Vec2":
        return {"input_values": torch.randn(ROWS, 400, generator=generator), "labels": tokens(generator, 6)}
    batch = {"input_ids": tokens(generator)}
    if name == "CLIP":
        batch["pixel_values"] = torch.randn(ROWS, 3, 16, 16, generator=generator)
        return batch
    batch["labels"] = tokens(generator, 12) if name == "T5" else batch["input_ids"].clone()
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1:, LENGTH // 2 :] = 0
        if name != "T5":
            batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    bf16: bool = False
    reentrant: bool | None = None  # gradient checkpointing of which form
    accumulate: int = 1
    frozen: str = ""  # parameters with this in their names
    lora: tuple[str, ...] = ()  # modules
    padded: bool = False
    ranks: tuple[int, ...] = (2,)

    @property
    def name(self) -> str:
        words = [f"{self.model:11} {'bf16' if self.bf16 else 'fp32'}"]
        if self.reentrant is not None:
            words.append("checkpointed, reentrant" if self.reentrant else "checkpointed")
        words += [f"{self.accumulate} micro-batches"] * (self.accumulate > 1)
        words += [f"'{self.frozen}' frozen"] * bool(self.frozen)
        words += ["LoRA"] * bool(self.lora) + ["padded"] * self.padded
        return ", ".join(words)

    def build(self) -> torch.nn.Module:
        torch.manual_seed(0)
        model: Any = MODELS[self.model]()
        for name, parameter in model.named_parameters():
            if self.frozen and self.frozen in name:
                parameter.requires_grad_(False)
        if self.lora:
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(self.lora), lora_dropout=0.1))
        if self.reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": self.reentrant})
            if self.reentrant and self.lora:
                model.enable_input_require_grads()
        return model.train()

    def batches(self, rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(100 + rank)
        batches = [batch_of(self.model, generator, self.padded) for _ in range(STEPS * self.accumulate)]
        if self.bf16:
            batches = [
                {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
                for batch in batches
            ]
        return batches


def cases() -> list[Case]:
    every = [Case(name, bf16) for name in MODELS for bf16 in (False, True)]
    return every + [
        Case("GPT-2", ranks=(2, 3), reentrant=True),
        Case("GPT-2", reentrant=False, accumulate=2),
        Case("GPT-2", lora=("c_attn",)),
        Case("Llama", bf16=True, ranks=(2, 3), reentrant=False, padded=True),
        Case("Llama", reentrant=True, lora=("q_proj", "v_proj")),
        Case("Llama", accumulate=3),
        Case("Llama", frozen="mlp"),
        Case("Qwen3", bf16=True, accumulate=2, lora=("q_proj", "down_proj")),
        Case("Mistral", padded=True, reentrant=True),
        Case("Mixtral", ranks=(2, 3), reentrant=False),
        Case("Mixtral", bf16=True, accumulate=2, padded=True),
        Case("Qwen3-MoE", ranks=(2, 3), reentrant=True),
        Case("DeepSeek-V3", reentrant=False, frozen="shared_experts"),
        Case("Gemma", reentrant=False, frozen="embed_tokens"),
        Case("BERT", padded=True, ranks=(2, 3)),
        Case("BERT", bf16=True, frozen="embeddings", reentrant=True),
        Case("T5", padded=True, reentrant=False),
        Case("T5", accumulate=2, frozen="encoder"),
        Case("ViT", reentrant=False, accumulate=2),
        Case("ViT", bf16=True, lora=("q_proj", "query")),
        Case("Whisper", ranks=(2, 3), reentrant=False),
        Case("Whisper", frozen="encoder"),
        Case("Wav2Vec2", frozen="feature_extractor", accumulate=2),
        Case("Mamba", reentrant=False, ranks=(2, 3)),
        Case("Mamba", bf16=True, accumulate=2),
    ]


def loss_of(case: Case, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    more = {"return_loss": True} if case.model == "CLIP" else {}
    return model(**batch, **more).loss


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in trained if p.dim() < 2]
    decayed = [p for name, p in trained if p.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)


@dataclasses.dataclass
class Run:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # largest of each element
    gathers: int = 0
    touches: int = 0

    def bits(self) -> tuple[list[float], list[float], str]:
        data = b"".join(self.weights[name].numpy().tobytes() for name in sorted(self.weights))
        return self.losses, self.norms, hashlib.sha256(data).hexdigest()


def run_libzero(case: Case, stage: int) -> Run:
    import libzero

    model = case.build()
    settings = {
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": case.accumulate,
        "bf16": {"enabled": case.bf16},
        "zero_optimization": {"stage": stage, "unit_bytes": 16384, "stage3_max_live_parameters": 0},
    }
    opt = libzero.shard(model, optimizer_of(model), settings)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 0.5, total_iters=STEPS)
    run = Run([], [], {})
    torch.manual_seed(7 + opt.group.rank)  # for dropout
    for index, batch in enumerate(case.batches(opt.group.rank), 1):
        loss = loss_of(case, model, batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.losses.append(loss.item())
        if index % case.accumulate == 0:
            scheduler.step()
            assert opt.updated and opt.grad_norm is not None
            run.norms.append(opt.grad_norm)
    run.weights = {name: opt.parameter(parameter) for name, parameter in model.named_parameters()}
    if stage == 3:
        pager = opt._engine.pager()
        run.gathers, run.touches = pager["gathers"], pager["touches"]
        assert pager["live_bytes"] == 0, pager
    opt.close()
    return run


def run_plain(case: Case) -> Run:
    model = case.build()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=STEPS)
    run = Run([], [], {})
    torch.manual_seed(7)
    for index, batch in enumerate(case.batches(0), 1):
        loss = loss_of(case, model, batch)
        (loss / case.accumulate).backward()
        run.losses.append(loss.item())
        if index % case.accumulate == 0:
            run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    now = parameter.grad.abs()
                    run.gradients[name] = torch.maximum(now, run.gradients.get(name, now))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    run.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return run


def numbers_apart(a: Run, b: Run) -> float:
    """The largest relative difference of a loss or a norm."""
    pairs = zip(a.losses + a.norms, b.losses + b.norms, strict=True)
    return max(abs(x - y) / max(abs(y), 1e-30) for x, y in pairs)


def weights_apart(run: Run, plain: Run) -> tuple[float, float]:
    """The largest relative difference of a tensor, and the share of elements that are left out: those whose gradient
    is zero in mathematics and not in floating point (the bias of keys, which the softmax takes away), since Adam makes
    of such a gradient a step like any other."""
    largest = max(gradient.max().item() for gradient in plain.gradients.values())
    apart, left_out, count = 0.0, 0, 0
    for name, value in plain.weights.items():
        counts = torch.ones_like(value, dtype=torch.bool)
        if name in plain.gradients:
            gradient = plain.gradients[name]
            counts = gradient > 1e-7 * largest
            if gradient.dim() > 1:
                counts |= gradient == 0  # rows of an embedding that no token has asked for
        difference = (run.weights[name] - value)[counts].double().norm()
        apart = max(apart, (difference / value.double().norm().clamp_min(1e-30)).item())
        left_out, count = left_out + int((~counts).sum()), count + value.numel()
    return apart, left_out / count


def changed(a: Run, b: Run) -> list[str]:
    """What differs, in words."""
    said = [f"losses {a.losses} and {b.losses}"] * (a.losses != b.losses)
    said += [f"norms {a.norms} and {b.norms}"] * (a.norms != b.norms)
    names = [name for name, value in b.weights.items() if not torch.equal(a.weights[name], value)]
    return said + [f"{len(names)} of {len(b.weights)} weights, {names[:3]}"] * bool(names)


def compare_stages(case: Case) -> tuple[bool, str]:
    runs = [run_libzero(case, stage) for stage in range(4)]
    # Gradients of several micro-batches are added in one order at stages 0 and 1, and in another at 2 and 3.
    pairs = [(1, 0), (2, 0), (3, 0)] if case.accumulate == 1 else [(1, 0), (3, 2)]
    for of, base in pairs:
        if runs[of].bits() != runs[base].bits():
            return False, f"stage {of} differs from {base}: {'; '.join(changed(runs[of], runs[base]))}"
    far = numbers_apart(runs[2], runs[0])
    if far > (0.05 if case.bf16 else 1e-5):
        return False, f"stage 2 is {far:.1e} from stage 0"
    # Forward and backward gather every unit anew in each pass.
    if runs[3].gathers < 2 * len(runs[3].losses) or runs[3].touches < runs[3].gathers:
        return False, f"stage 3 did not page: {runs[3].gathers} gathers"
    if len(set(runs[0].losses)) == 1:
        return False, "the loss does not change: nothing is trained"
    apart = f", 2 and 3 {far:.0e} from them" if far else ""
    return True, f"stages equal{apart}; {runs[3].gathers} gathers"


def compare_plain(case: Case) -> tuple[bool, str]:
    run, plain = run_libzero(case, 0), run_plain(case)
    numbers = numbers_apart(run, plain)
    weights, left_out = weights_apart(run, plain)
    said = f"losses and norms {numbers:.1e}, weights {weights:.1e} from plain PyTorch"
    return max(numbers, weights) < 1e-5 and left_out < 0.01, said + f", {left_out:.2%} left out" * (left_out > 0)


def work(wanted: list[str]) -> int:
    """What one rank does; the exit status."""
    import libzero

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    warnings.filterwarnings("ignore", "fan_in_fan_out")
    torch.set_num_threads(1)
    group = libzero.group()
    passed = failed = 0
    for case in cases():
        if wanted and not any(part in case.name for part in wanted):
            continue
        if group.size == 1 and case.bf16 or group.size > 1 and group.size not in case.ranks:
            continue
        started = time.monotonic()
        try:
            equal, said = compare_plain(case) if group.size == 1 else compare_stages(case)
        except Exception as error:
            traceback.print_exc()
            print(f"FAILED {group.size} ranks  {case.name}: {type(error).__name__}: {error}", flush=True)
            return 1  # the other ranks may wait: no more of it
        passed, failed = passed + equal, failed + (not equal)
        if group.rank == 0 or not equal:
            verdict = "ok    " if equal else "FAILED"
            ranks = f"{group.size} rank{'s' * (group.size > 1)}"
            print(f"{verdict} {ranks:8}{case.name:60} {said}  ({time.monotonic() - started:.1f} s)", flush=True)
    if group.rank == 0:
        print(f"{group.size} ranks: {passed} of {passed + failed} cases passed", flush=True)
    return 1 if failed else 0


def main(wanted: list[str]) -> int:
    statuses = [support.launch(ranks, [__file__, "--rank", *wanted]).returncode for ranks in (1, 2, 3)]
    return 1 if any(statuses) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(work(sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
