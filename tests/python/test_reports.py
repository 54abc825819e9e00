"""Reports from the peers' trackers, each as a small program beside plain PyTorch, at every stage. docs/reports.md lists
them, with what came of each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pairs import KINDS, STAGES, Pair, near
from support import batch, expect, main, mlp, need, ranks, weights

need("torch", "peft")

import libzero

_PAGE = Path(__file__).resolve().parents[2] / "docs/reports.md"
_told: list[str] = []


def report(number: str, stages: tuple[int, ...] = STAGES) -> Callable[[Any], Any]:
    """A test that runs `program(group, stage)` at each stage on two ranks. `number`: of the report."""
    _told.append(number)

    def add(program: Callable[[Any, int], None]) -> Any:
        def test(group: Any) -> None:
            for stage in stages:
                program(group, stage)

        test.__name__ = program.__name__
        return ranks(2)(test)

    return add


@ranks(2)
def test_the_page_has_each(group: Any) -> None:
    text = _PAGE.read_text(encoding="utf-8")
    missing = [number for number in _told if f"| {number} |" not in text]
    assert not missing and text.count("\n| ") == len(_told) + 1, missing


class Parts(nn.Module):
    """Linear layers, and whatever parameters a report needs."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(8, 7), nn.Linear(7, 4)
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value, value.is_floating_point()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


# --- Passes.


@report("DeepSpeed 8224")
def a_loss_that_goes_through_a_part_too(group: Any, stage: int) -> None:
    pair = Pair(group, stage, gradient_accumulation_steps=2)
    for step in range(3):
        for micro_batch in range(2):
            pair.backward(2 * step + micro_batch, lambda m, x: m(x).pow(2).mean() + m[0](x).sin().mean())
            pair.opt.step()
        pair.torch.step()
        pair.zero_grad()
    pair.close("part")


@report("DeepSpeed 7981")
def several_passes_with_the_optimizer_on_the_host(group: Any, stage: int) -> None:
    pair = Pair(group, stage, zero={"offload_optimizer": {"device": "cpu"}} if stage else None)
    for step, passes in enumerate((1, 3, 2, 4)):
        for each in range(passes):
            pair.backward(10 * step + each)
        pair.update()
    pair.close("host")


@report("DeepSpeed 7665")
def backward_of_what_is_no_scalar(group: Any, stage: int) -> None:
    pair = Pair(group, stage)
    given = torch.linspace(-1, 1, 16).view(4, 4)
    for step in range(3):
        pair.model(batch(group.rank, step)).backward(given)
        for rank in range(group.size):
            pair.plain(batch(rank, step)).backward(given / group.size)
        pair.update()
    # Two results, chosen leaves, and a gradient that was asked for by itself before.
    for step in range(3, 6):
        for model, whose in ((pair.model, [group.rank]), (pair.plain, range(group.size))):
            for rank in whose:
                hidden = model[:3](batch(rank, step))
                first, second = model[3:](hidden), hidden.pow(2)
                weight = torch.autograd.grad(first.sum(), model[4].weight, retain_graph=True)[0].norm().detach()
                scale = weight / len(whose)
                if step == 4:
                    (scale * first.sum()).backward(inputs=[model[0].weight, model[4].bias])
                else:
                    torch.autograd.backward([first, second], [scale * given, torch.full((4, 32), scale)])
        pair.update()
    pair.close("results")


@report("DeepSpeed 3539")
def the_same_loss_twice(group: Any, stage: int) -> None:
    pair = Pair(group, stage, KINDS["SGD"])
    for step in range(3):
        for model, whose in ((pair.model, [group.rank]), (pair.plain, range(group.size))):
            loss = sum(model(batch(rank, step)).pow(2).mean() for rank in whose) / len(whose)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=step == 1)
        pair.update()
    pair.close("twice")


class Experts(nn.Module):
    """Each batch goes to the expert of its rank; the third has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.out(self.experts[expert](x))


@report("pytorch 126616")
def experts_of_one_rank(group: Any, stage: int) -> None:
    for kind in ("AdamW", "SGD"):
        pair = Pair(group, stage, KINDS[kind], Experts)
        for step in range(4):
            pair.model(batch(group.rank, step), group.rank if step != 2 else 0).pow(2).mean().backward()
            for rank in range(group.size):
                loss = pair.plain(batch(rank, step), rank if step != 2 else 0).pow(2).mean()
                (loss / group.size).backward()
            pair.update()
        pair.close(kind)


@report("pytorch 150799")
def a_loss_over_all_ranks_results(group: Any, stage: int) -> None:
    class Gathered(torch.autograd.Function):
        """All ranks' results; each gets the sum of the gradients that the ranks have for its own."""

        @staticmethod
        def forward(ctx: Any, mine: torch.Tensor) -> torch.Tensor:
            return group.all_gather_control(mine.detach(), "results").view(group.size, *mine.shape)

        @staticmethod
        def backward(ctx: Any, gradients: torch.Tensor) -> torch.Tensor:
            whole = gradients.contiguous()
            group.all_reduce(whole.view(-1), "gradients of results")
            return whole[group.rank]

    def contrast(all_results: torch.Tensor) -> torch.Tensor:
        rows = F.normalize(all_results.flatten(0, 1), dim=1)
        return F.cross_entropy(rows @ rows.roll(1, 0).T, torch.arange(len(rows)))

    pair = Pair(group, stage)
    for step in range(3):
        contrast(Gathered.apply(pair.model(batch(group.rank, step)))).backward()
        contrast(torch.stack([pair.plain(batch(rank, step)) for rank in range(group.size)])).backward()
        pair.update()
    pair.close("contrast")


@report("Lightning 21534")
def an_accumulation_that_changes(group: Any, stage: int) -> None:
    pair = Pair(group, stage, KINDS["SGD"])
    for step, passes in enumerate((1, 2, 4, 3)):
        for each in range(passes):
            pair.backward(10 * step + each, lambda m, x: m(x).pow(2).mean() / passes)
        norm = pair.opt.clip_grad_norm_(0.05)
        assert abs(norm - nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)) < 1e-5
        pair.update()
    pair.close("accumulation")


# --- Modes.


@report("ArcticTraining 265")
def evaluation_in_inference_mode(group: Any, stage: int) -> None:
    for live in (0, 10**9):
        pair = Pair(group, stage, zero={"stage3_max_live_parameters": live})
        for step in range(3):
            for model in (pair.model, pair.plain):
                model.eval()
                with torch.inference_mode():
                    kept = model(batch(0, 50))
                    assert kept.is_inference() and torch.isfinite(model[0].weight.norm())
                model.train()
            pair.step(step)
        pair.close(live)


@report("pytorch 186998")
def frozen_at_the_first_pass(group: Any, stage: int) -> None:
    runs = []
    for frozen in (False, True):
        model = mlp()
        opt = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, bf16=True)
        for step in range(4):
            x = batch(group.rank, step).bfloat16()
            if frozen and step in (0, 2):
                model.requires_grad_(False)
                model(x.requires_grad_()).sum().backward()
                model.requires_grad_(True)
                opt.zero_grad()
            model(x.detach()).float().pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        runs.append(weights(opt))
        opt.close()
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


# --- Parameters.


@report("DeepSpeed 8279")
def parameters_without_elements(group: Any, stage: int) -> None:
    def of(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).pow(2).mean() + F.linear(x, model.none).sum() + model.end.sum()

    for kind in ("AdamW", "SGD"):  # torch's Adafactor divides by their number
        pair = Pair(group, stage, KINDS[kind], lambda: Parts(none=torch.zeros(0, 8), end=torch.zeros(3, 0)))
        for step in range(2):
            pair.step(step, of=of)
        assert pair.model.none.shape == (0, 8) and pair.opt.parameter("end").shape == (3, 0)
        pair.opt.load_state_dict(pair.opt.state_dict())
        pair.step(2, of=of)
        pair.close(kind)


@report("pytorch 130810")
def parameters_without_dimensions(group: Any, stage: int) -> None:
    def of(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * model.scale.exp() + model.shift).pow(2).mean()

    for kind in KINDS if stage < 2 else ("AdamW", "SGD", "Adafactor"):
        pair = Pair(group, stage, KINDS[kind], lambda: Parts(scale=torch.tensor(0.3), shift=torch.tensor([0.1])))
        for step in range(2):
            pair.step(step, of=of)
        saved = [optimizer.state_dict() for optimizer in (pair.opt, pair.torch)]
        pair.opt.load_state_dict(saved[0])
        if group.rank == 0:
            pair.torch.load_state_dict(copy.deepcopy(saved[0]))  # torch's takes ours
        pair.step(2, of=of)
        assert pair.model.scale.shape == () and isinstance(pair.model.scale.item(), float)
        if group.rank == 0:
            pair.check(kind)
        else:
            weights(pair.opt)
        pair.opt.close()


@report("DeepSpeed 8276")
def addresses_are_aligned(group: Any, stage: int) -> None:
    model = nn.ModuleList(nn.Linear(n, n + 2) for n in (1, 3, 5, 7, 9))
    opt = libzero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, bf16=True)
    with libzero.gathered(model):
        assert all(p.data_ptr() % 64 == 0 for p in model.parameters())
    opt.close()


@report("peft 2833")
def weights_in_8_bits(group: Any, stage: int) -> None:
    # Adapters over a frozen quantised weight.
    quantised = torch.arange(-28, 28, dtype=torch.int8).view(8, 7)

    def of(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (model(x) + (x @ (model.base.float() / 50)) @ model.adapter).pow(2).mean()

    make = lambda: Parts(base=quantised.clone(), adapter=torch.full((7, 4), 0.1))
    with expect(libzero.ConfigError, "'base'", "Char", "register it as a buffer"):
        Pair(group, stage, model=make, groups=lambda model: [p for p in model.parameters() if p.requires_grad])

    def as_a_buffer() -> nn.Module:
        model = make()
        del model.base
        model.register_buffer("base", quantised.clone())
        return model

    pair = Pair(group, stage, model=as_a_buffer)
    for step in range(3):
        pair.step(step, of=of)
    assert torch.equal(pair.model.base, quantised)
    pair.close("adapters")


@report("transformers 41959")
def a_table_that_is_replaced(group: Any, stage: int) -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))
    opt = libzero.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
    rows = torch.arange(16)
    larger = nn.Embedding(20, 8)
    with torch.no_grad():
        larger.weight[:16] = model[0].weight
    assert torch.equal(larger.weight[:16], opt.parameter("0.weight"))  # whole, not a shard
    model[0] = larger
    model(rows).sum().backward()
    with expect(libzero.Error, "'0.weight'", "libzero.shard"):
        opt.step()
    opt.close()


# --- Optimizers.


class Averaged(torch.optim.SGD):
    """As schedule-free optimizers: `eval` puts averages in the place of the weights, `train` takes these back."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for p in self.trained():
            self.state[p]["mean"] = torch.lerp(self.state[p].get("mean", p), p, 0.5)
        return result

    def trained(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None or p in self.state]

    @torch.no_grad()
    def eval(self) -> None:
        for p in self.trained():
            self.state[p]["weights"] = p.clone()
            p.copy_(self.state[p]["mean"])

    @torch.no_grad()
    def train(self) -> int:
        for p in self.trained():
            p.copy_(self.state[p].pop("weights"))
        return 7


@report("accelerate 4159", (0, 1))
def functions_of_an_optimizers_own(group: Any, stage: int) -> None:
    for bf16 in (False, True):
        pair = Pair(group, stage, lambda p: Averaged(p, lr=0.05), bf16={"enabled": bf16})
        dtype = torch.bfloat16 if bf16 else torch.float32
        of = lambda model, x: model(x.to(model[0].weight.dtype)).float().pow(2).mean()
        for step in range(3):
            pair.step(step, of=of)
        pair.both(lambda optimizer, _: optimizer.eval())
        near(dict(pair.model.named_parameters()), dict(pair.plain.named_parameters()), "eval", 1e-2 if bf16 else 2e-5)
        assert pair.opt.diverged_parameters() == [] and pair.model[0].weight.dtype == dtype
        assert pair.both(lambda optimizer, _: optimizer.train()) == (7, 7)
        pair.step(3, of=of)
        pair.close("train", 1e-2 if bf16 else 2e-5)
    model = mlp()
    opt = libzero.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
    with expect(AttributeError, "eval"):
        opt.eval()
    opt.close()


@report("fairscale 605")
def one_gradient_is_dropped(group: Any, stage: int) -> None:
    for kind in ("AdamW", "SGD") + (("NAdam",) if stage < 2 else ()):
        pair = Pair(group, stage, KINDS[kind])
        for step in range(4):
            pair.backward(step)
            if step % 2:
                for name in ("2.weight", "0.bias"):
                    pair.opt.set_gradient(name, None)
                    pair.plain.get_parameter(name).grad = None
                assert pair.opt.gradient("2.weight") is None
            if step == 3:
                pair.backward(30)  # what comes then counts
            norm = pair.opt.clip_grad_norm_(0.5)
            assert abs(norm - nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5)) < 1e-5
            pair.update()
        pair.close(kind)


@report("Megatron-LM 7288")
def groups_with_names(group: Any, stage: int) -> None:
    pair = Pair(group, stage, groups=lambda model: reversed(list(model.named_parameters())))
    pair.step(0)
    saved = pair.opt.state_dict()
    assert saved["param_groups"][0]["param_names"][0] == "4.bias"
    if group.rank == 0:
        pair.torch.load_state_dict(copy.deepcopy(saved))
    saved["param_groups"][0].pop("param_names")  # of an earlier torch, or by position
    pair.opt.load_state_dict(saved)
    assert pair.opt.param_groups[0]["param_names"][0] == "4.bias"
    pair.step(1)
    pair.close("names") if group.rank == 0 else weights(pair.opt)
    pair.opt.close()


@report("torchtitan 848")
def states_of_another_optimizer(group: Any, stage: int) -> None:
    for kind in ("AdamW", "SGD", "Adafactor"):
        pair = Pair(group, stage, KINDS[kind])
        pair.step(0)
        before = weights(pair.opt)
        for other in ("AdamW", "SGD", "Adafactor"):
            wrong = Pair(group, stage, KINDS[other])
            wrong.step(1)
            saved = wrong.opt.state_dict()
            wrong.opt.close()
            if other == kind:
                if group.rank == 0:
                    saved["state"][0] = {k: v[:1] if v.dim() else v for k, v in saved["state"][0].items()}
            for group_of in saved["param_groups"]:
                group_of.update(lr=0.7)
            with expect(libzero.ConfigError, "'0.weight'", "tate"):
                pair.opt.load_state_dict(saved)
        with expect(libzero.ConfigError, "param_groups"):
            pair.opt.load_state_dict(dict(pair.model.state_dict()))
        assert all(torch.equal(before[name], value) for name, value in weights(pair.opt).items())
        pair.step(2)
        pair.close(kind)


# --- Copies and files.


class Followed(nn.Module):
    """A model and the frozen one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = mlp(1), mlp(2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.online(x) - self.target(x)


@report("trl 1971")
def a_reference_that_follows(group: Any, stage: int) -> None:
    trained = lambda model: [p for p in model.parameters() if p.requires_grad]
    pair = Pair(group, stage, model=Followed, groups=trained)
    copies = copy.deepcopy(pair.model.online), copy.deepcopy(pair.plain.online)
    for step in range(4):
        pair.step(step)
        for model, other in zip((pair.model, pair.plain), copies):
            for target, online, copied in zip(model.target.parameters(), model.online.parameters(), other.parameters()):
                target.data.mul_(0.9).add_(online.data, alpha=0.1)
                copied.data.lerp_(online.data, 0.25)
    near(dict(copies[0].named_parameters()), dict(copies[1].named_parameters()), "copies")
    pair.close("followed")


@report("Lightning 21124")
def a_state_dict_of_the_models_own(group: Any, stage: int) -> None:
    class Own(Parts):
        def state_dict(self) -> Any:  # of what is trained, and nothing else
            return {f"mine.{name}": value for name, value in super().state_dict().items() if name.startswith("first")}

    model = Own()
    opt = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage)
    model(batch(group.rank, 0)).sum().backward()
    opt.step()
    whole = opt.full_state_dict()
    assert list(whole) == (["mine.first.weight", "mine.first.bias"] if group.rank == 0 else [])
    value = opt.parameter("first.weight")
    assert group.rank or torch.equal(whole["mine.first.weight"], value)
    opt.close()


@report("Soup 351")
def names_of_a_compiled_model(group: Any, stage: int) -> None:
    from support import shared_folder

    def sharded(wrapped: bool) -> tuple[Any, Any]:
        model = mlp(3 if wrapped else 4)
        model = torch.compile(model, backend="eager") if wrapped else model
        return model, libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage)

    with shared_folder() as folder:
        model, opt = sharded(True)
        model(batch(group.rank, 0)).sum().backward()
        opt.step()
        opt.save_full(folder / "full.safetensors")
        opt.save(folder / "shards")
        saved = weights(opt)
        assert "0.weight" in saved
        with expect(libzero.ConfigError, "'0.wrong'"):
            opt.parameter("0.wrong")
        opt.close()
        for load in ("load_full", "load", "load_weights"):
            model, opt = sharded(False)
            getattr(opt, load)(folder / ("shards" if load == "load" else "full.safetensors"))
            assert all(torch.equal(saved[name], value) for name, value in weights(opt).items()), load
            opt.close()
        group.barrier()


@report("peft 2946", (0, 3))
def adapters_with_tokens_and_whole_modules(group: Any, stage: int) -> None:
    import peft
    import transformers

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            tie_word_embeddings=False,
        )  # fmt: skip
        settings = peft.LoraConfig(
            r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["lm_head"],
            trainable_token_indices={"wte": [3, 5]},
        )  # fmt: skip
        return peft.get_peft_model(transformers.GPT2LMHeadModel(config), settings)

    def of(model: Any, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 8).long() % 8
        return model(input_ids=ids, labels=ids).loss

    trained = lambda model: [p for p in model.parameters() if p.requires_grad]
    pair = Pair(group, stage, model=adapted, groups=trained)
    for step in range(2):
        pair.step(step, of=of)
    got, expected = map(peft.get_peft_model_state_dict, (pair.model, pair.plain))
    assert list(got) == list(expected) and any("token" in name for name in got)
    near(got, expected, stage)
    pair.opt.close()


main()
