"""torch.compile over sharded models: eager, aot_eager and Inductor, plain and from Inductor's caches, on 2 ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import support


def in_new_caches() -> None:
    """Runs the script twice: the second process finds the first one's graphs in Inductor's and AOTAutograd's caches."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "LIBZERO_TEST_CACHE": folder}
        for arguments in ([], ["--cached"]):
            command = [sys.executable, __file__, *arguments]
            status = subprocess.run(command, env=environment, check=False).returncode
            if status != 0:
                sys.exit(status)
    sys.exit(0)


if "LIBZERO_TEST_CACHE" not in os.environ:
    in_new_caches()
support.under_launcher(2)

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

import libzero  # noqa: E402

GROUP = libzero.group()
STEPS = 3


def say(text: str) -> None:
    if GROUP.rank == 0:
        print(text, flush=True)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))


def llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=256, max_position_embeddings=64,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def square(model: Any) -> torch.Tensor:
    return model(torch.randn(4, 32)).pow(2).mean()


def language(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, 256, (2, 16))
    return model(input_ids=tokens, labels=tokens).loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor]]] = {
    "MLP": (mlp, square), "Llama": (llama, language), "GPT-2": (gpt2, language),
}  # fmt: skip


def sharded(make: Callable[[], nn.Module], stage: int) -> tuple[nn.Module, libzero.ShardedOptimizer]:
    """Small units, and none kept that no operator uses, so that parameters come and go all the time."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = make()
    zero = {"stage": stage, "unit_bytes": 2000, "stage3_max_live_parameters": 0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, libzero.shard(model, optimizer, {"zero_optimization": zero})


def losses(
    name: str, stage: int, compiled: Callable[[nn.Module], Any], steps: int = STEPS
) -> list[tuple[float, float | None]]:
    """The losses and gradient norms of some steps."""
    make, loss_of = MODELS[name]
    model, optimizer = sharded(make, stage)
    run = compiled(model)
    torch.manual_seed(7 + GROUP.rank)
    result = []
    for _ in range(steps):
        loss = loss_of(run)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append((loss.item(), optimizer.grad_norm))
    optimizer.close()
    return result


def largest_difference(one: list[Any], other: list[Any]) -> float:
    return max(abs(a[0] - b[0]) / abs(b[0]) for a, b in zip(one, other, strict=True))


def check_operators() -> None:
    """Backends that run operators give the bits of the model that is not compiled."""
    for name in MODELS:
        plain = losses(name, 0, lambda model: model)
        assert plain == losses(name, 3, lambda model: model)
        for backend in ("eager", "aot_eager"):
            for stage in (0, 3):
                got = losses(name, stage, lambda model, backend=backend: torch.compile(model, backend=backend))
                assert got == plain, (name, backend, stage, got, plain)
            say(f"{name}, {backend}: stages 0 and 3 have the losses of the model that is not compiled")


def check_inductor(cached: bool) -> None:
    """torch's default: the same bits at stages 0 and 3, near those of the model that is not compiled."""
    for name in MODELS:
        plain = losses(name, 0, lambda model: model)
        first = losses(name, 0, lambda model: torch.compile(model))
        hits = [counters["aot_autograd"]["autograd_cache_hit"]]
        graphs = counters["stats"]["unique_graphs"]
        third = losses(name, 3, lambda model: torch.compile(model))
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
        assert first == third, (name, first, third)
        assert counters["stats"]["unique_graphs"] == graphs, "as many graphs at stage 3"
        assert largest_difference(first, plain) < 1e-5, (name, first, plain)
        if cached:
            assert all(hits), f"{name}: a process that comes later takes its graphs from the caches: {hits}"
        say(f"{name}, inductor: stages 0 and 3 are equal, {largest_difference(first, plain):.1e} from plain; {hits} from the cache")


def check_ways() -> None:
    """Other ways to Inductor: equal at stages 0 and 3."""

    def module_compile(model: nn.Module) -> nn.Module:
        model.compile()
        return model

    def each_layer(model: nn.Module) -> nn.Module:
        for layer in model.children():
            layer.compile()
        return model

    ways: dict[str, Callable[[nn.Module], Any]] = {
        "backend=libzero.backend": lambda model: torch.compile(model, backend=libzero.backend),
        "options of the backend": lambda model: torch.compile(
            model, backend=libzero.backend, options={"epilogue_fusion": True}
        ),
        "model.compile()": module_compile,
        "layer.compile()": each_layer,
        'mode="reduce-overhead"': lambda model: torch.compile(model, mode="reduce-overhead"),
        'mode="max-autotune"': lambda model: torch.compile(model, mode="max-autotune"),
        "cpp_wrapper": lambda model: torch.compile(model, options={"cpp_wrapper": True}),
    }
    for name, way in ways.items():
        assert losses("MLP", 0, way) == losses("MLP", 3, way), name
        say(f"MLP, {name}: equal")


def check_no_recompilation() -> None:
    """What comes and goes is no reason to compile anew."""
    model, optimizer = sharded(mlp, 3)
    run = torch.compile(model)
    square(run).backward()
    optimizer.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            square(run).backward()
            optimizer.step()
            optimizer.zero_grad()
            with optimizer.gathered():
                square(run).backward()
            optimizer.zero_grad()
            optimizer.set_parameter("0.weight", optimizer.parameter("0.weight"))
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    optimizer.close()
    say("absent, present, gathered, written: one graph")


def check_writes() -> None:
    """What a kernel writes to a parameter counts, as what an operator writes."""
    model, optimizer = sharded(mlp, 3)
    before = optimizer.parameter("0.weight"), optimizer.parameter("1.bias")

    @torch.compile
    def halve(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
            model[1].bias.add_(1)
        return model(x)

    with torch.no_grad():
        halve(torch.randn(4, 32))
    optimizer.step()  # without gradients: takes over what was written
    assert torch.equal(optimizer.parameter("0.weight"), before[0] * 0.5)
    assert torch.equal(optimizer.parameter("1.bias"), before[1] + 1)
    optimizer.close()
    say("a compiled function writes parameters: kept")


def check_whole_step() -> None:
    """A compiled training step: its backward pass and step() run as they are."""
    results = []
    for compiled in (False, True):
        model, optimizer = sharded(mlp, 3)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.compile(step, backend="aot_eager") if compiled else step
        torch.manual_seed(7 + GROUP.rank)
        results.append([run(torch.randn(4, 32)).item() for _ in range(STEPS)])
        optimizer.close()
    assert results[0] == results[1], results
    say("a whole training step compiled: equal")


def check_refused() -> None:
    """What would keep a copy of the weights is refused, and says so."""
    import torch._inductor.config as config

    model, optimizer = sharded(mlp, 3)
    x = torch.randn(4, 32)
    try:
        with config.patch(freezing=True), torch.no_grad():
            torch.compile(model)(x)
    except Exception as error:
        assert "freezing" in str(error) and "full_state_dict" in str(error), error
    else:
        raise AssertionError("freezing was accepted")
    try:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            square(model).backward()
    except libzero.Error as error:
        assert "Compiled autograd" in str(error) and ".weight" in str(error), error
    else:
        raise AssertionError("compiled autograd was accepted")
    optimizer.zero_grad()
    exported = torch.export.export(model, (x,))  # holds the parameters themselves
    with torch.no_grad():
        assert torch.equal(exported.module()(x), model(x))
    if GROUP.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            with optimizer.gathered():
                torch.export.save(exported, os.path.join(folder, "model.pt2"))
            loaded = torch.export.load(os.path.join(folder, "model.pt2"))
        with torch.no_grad():
            assert torch.equal(loaded.module()(x), model(x))
    GROUP.barrier()
    optimizer.close()
    say("freezing and compiled autograd are refused; torch.export runs, and saves inside gathered()")


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--cached"]:
        check_inductor(cached=True)
        return
    check_operators()
    check_inductor(cached=False)
    check_ways()
    check_no_recompilation()
    check_writes()
    check_whole_step()
    check_refused()


if __name__ == "__main__":
    main()
