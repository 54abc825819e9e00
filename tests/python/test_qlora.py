"""A frozen base in 4 or 8 bits from Python: it has the values of its definition, peft's adapter trains over it at each stage to the same bits, as
over a model with those values, and ranks hold and gather bytes."""

from __future__ import annotations

import pathlib
from typing import Any

from support import expect, main, need, ranks

need("torch", "transformers", "peft")

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from test_lora import THROUGH  # noqa: E402

import libzero  # noqa: E402
from libzero._quantize import PackedLinear  # noqa: E402

LLAMA = pathlib.Path(__file__).parents[1] / "models/fixtures/llama"


def adapted(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=dtype)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)).eval()


def frozen_layers(model: Any) -> dict[str, Any]:
    """Those but the head, which stays."""
    layers = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear and not module.weight.requires_grad}
    return {name: layer for name, layer in layers.items() if layer is not model.get_output_embeddings()}


def losses(model: Any, group: Any, stage: int, held: dict[str, Any] | None = None) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with libzero.shard(model, torch.optim.AdamW(trained, lr=1e-2), stage=stage, group=group) as opt:
        tokens = (torch.arange(24) * 5 + group.rank).remainder(40).view(2, 12)
        made = []
        for _ in range(4):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            made.append(loss.item())
        if held is not None:
            held.update(opt.memory())
    return made


@ranks(1, 2)
def test_stages_have_the_bits_of_a_model_with_these_values(group: Any) -> None:
    for format, through in THROUGH.items():
        plain = adapted()
        with torch.no_grad():
            for layer in frozen_layers(plain).values():
                layer.weight.copy_(through(layer.weight))
        wanted = losses(plain, group, 0)
        for stage in (0, 2, 3):
            model = adapted()
            layers = frozen_layers(model)
            values = {name: through(layer.weight.detach()) for name, layer in layers.items()}
            assert libzero.quantize_frozen(model, format) == len(layers)
            for name, expected in values.items():
                layer = model.get_submodule(name)
                assert isinstance(layer, PackedLinear) and torch.equal(layer.values(), expected), name
            got = losses(model, group, stage)
            assert got == wanted, f"{format}, stage {stage}: {got}, {wanted}"


@ranks(1)
def test_a_model_that_casts_to_the_dtype_of_a_weight_is_told(group: Any) -> None:
    """T5 casts what goes into `wo` to its weight's dtype: bytes would be other numbers."""

    def t5() -> Any:
        config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q", "v"])).eval()

    tokens = torch.arange(12).view(1, 12)
    model = t5()
    libzero.quantize_frozen(model)
    with torch.autocast("cpu", torch.bfloat16):
        with expect(libzero.ConfigError, "skip=('wo',)"):
            model(input_ids=tokens, labels=tokens)
    model = t5()
    libzero.quantize_frozen(model, skip=("wo",))
    model(input_ids=tokens, labels=tokens).loss.backward()


@ranks(2)
def test_adapters_in_16_bits_and_what_a_rank_holds(group: Any) -> None:
    for format in THROUGH:
        model = adapted(torch.bfloat16)
        count = libzero.quantize_frozen(model, format)
        packed = [module.weight for module in model.modules() if isinstance(module, PackedLinear)]
        assert len(packed) == count and all(weight.dtype == torch.uint8 for weight in packed)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        padding = 64 * len(list(model.parameters()))  # a slice ends at a multiple of 64 bytes
        held: dict[str, Any] = {}
        made = losses(model, group, 3, held)
        assert made[-1] < made[0], made
        share = held["formula"]["parameters"]
        assert held["now"]["parameters"] == share
        assert whole / 2 <= share <= whole / 2 + padding, (whole, share)


@ranks(1)
def test_autocast(group: Any) -> None:
    plain, model = adapted(), adapted()
    with torch.no_grad():
        for layer in frozen_layers(plain).values():
            layer.weight.copy_(THROUGH["int8"](layer.weight))
    libzero.quantize_frozen(model, format="int8")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, got = losses(plain, group, 0), losses(model, group, 0)
    assert max(abs(one - other) for one, other in zip(got, wanted, strict=True)) < 2e-2, (got, wanted)


@ranks(1)
def test_what_is_refused(group: Any) -> None:
    with expect(libzero.ConfigError, "Freeze them first"):
        libzero.quantize_frozen(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with expect(libzero.ConfigError, "'int4'", "'int8'"):
        libzero.quantize_frozen(torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False), "int4")
    with expect(libzero.ConfigError, "module that holds it"):
        libzero.quantize_frozen(torch.nn.Linear(4, 4).requires_grad_(False))
    with expect(libzero.ConfigError, "0.weight", "meta"):
        libzero.quantize_frozen(torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta")).requires_grad_(False))
    mixed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, device="meta")).requires_grad_(False)
    with expect(libzero.ConfigError, "1.weight", "meta"):
        libzero.quantize_frozen(mixed)
    assert type(mixed[0]) is torch.nn.Linear  # what is refused is left as it was
    tied = torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 6)).requires_grad_(False)
    tied[1].weight = tied[0].weight
    assert libzero.quantize_frozen(tied) == 1 and type(tied[1]) is torch.nn.Linear


if __name__ == "__main__":
    main()
