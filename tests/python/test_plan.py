"""libzero.plan traces modules of Python's torch, predicts the memory of real sharded steps of them, leaves them as they
are, and names what it cannot use."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from support import expect, main, need, program, ranks

need("torch", "transformers")

from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import libzero
from plan_models import MODELS, held

_HERE: dict[str, Any] = {"device": "epyc 9654", "per_host": 2}
_TINY = GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=32, vocab_size=100, bos_token_id=0, eos_token_id=0)
_STATES = ("parameters", "gradients", "optimizer")


class Tied(nn.Module):
    """An embedding that is the head too, a buffer, a constant, and layers that recompute when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.norm = nn.LayerNorm(64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(64))
        self.constant = torch.ones(64)
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(x)) * self.scale + self.constant * torch.tensor([2.0])
        for layer in self.layers:
            step = lambda h, layer=layer: nn.functional.gelu(layer(h))  # noqa: E731
            hidden = libzero.checkpoint(step, hidden) if self.recomputes else step(hidden)
        return self.head(hidden)


def loss_of_tied(model: nn.Module, samples: int) -> torch.Tensor:
    tokens = torch.zeros(samples, 32, dtype=torch.long)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def under_autocast(loss: Any) -> Any:
    def cast(model: nn.Module, samples: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, samples)

    return cast


def candidate(plan: Any, stage: int, micro_batch: int, special: str = "") -> dict[str, Any]:
    """The one of these, with states in fp32: "recomputed", with its optimizer "on the disk", or neither."""
    return next(
        each
        for each in plan.candidates
        if (each["stage"], each["micro_batch"]) == (stage, micro_batch)
        and [word for word in ("8-bit", "recomputed", "on the disk") if word in each["configuration"]] == ([special] if special else [])
    )


# A plan has the two largest micro-batches of each way: of 8 samples, and two of 4.
@ranks(2)
def test_predicts_the_memory_of_real_steps(group: Any) -> None:
    settings = [
        ("convolutions", 0, "fp32", 8, ""),
        ("convolutions", 2, "bf16", 8, ""),
        ("convolutions", 3, "fp32", 8, ""),
        ("Llama", 0, "bf16", 8, ""),
        ("Llama", 1, "fp32", 8, ""),
        ("Llama", 2, "fp32", 4, ""),
        ("Llama", 2, "bf16", 8, "on the disk"),
        ("Llama", 3, "bf16", 8, ""),
        ("Llama", 3, "fp32", 8, "recomputed"),
        ("Llama", 0, "autocast", 8, ""),
        ("Llama", 2, "autocast", 4, ""),
        ("Llama", 3, "autocast", 8, ""),
        ("Llama", 3, "autocast", 8, "recomputed"),
        ("convolutions", 1, "autocast", 8, ""),
        ("BERT", 0, "fp32", 8, ""),
        ("BERT", 1, "bf16", 4, ""),
        ("BERT", 3, "fp32", 8, "recomputed"),
    ]
    off = []
    plans: dict[tuple[str, str], Any] = {}
    for name, stage, dtype, micro_batch, special in settings:
        make, loss = MODELS[name]
        torch.manual_seed(1)
        model = make()
        if (name, dtype) not in plans:
            numbers = {"autocast": "bf16"} if dtype == "autocast" else {"dtype": dtype}
            plans[name, dtype] = libzero.plan(model, loss, batch=16, hardware={**_HERE, "nvme": 1e9}, **numbers)
        plan = plans[name, dtype]
        chosen = candidate(plan, stage, micro_batch, special)
        if special == "recomputed":
            model.gradient_checkpointing_enable()
        config = json.loads(json.dumps(plan.config_of(chosen)).replace("/local_nvme", tempfile.gettempdir()))
        real = held(group, model, under_autocast(loss) if dtype == "autocast" else loss, config)
        predicted = chosen["memory"]
        words = f"{name}, {dtype}, {chosen['configuration']}"
        for state in _STATES:
            assert predicted[state] == real[state], (words, state, predicted[state], real[state])
        total = sum(real.values())
        off.append(sum(predicted.values()) / total - 1)
        if group.rank == 0:
            parts = {key: (value, predicted[key]) for key, value in real.items() if value != predicted[key]}
            print(f"{words:<60} {total:>11} bytes, predicted {100 * off[-1]:+.2f} %  {parts}")
    median, worst = statistics.median(map(abs, off)), max(map(abs, off))
    if group.rank == 0:
        print(f"off by {100 * median:.2f} % in the median, {100 * worst:.2f} % at the most")
    assert median < 0.002 and worst < 0.02, off


@ranks(1)
def test_leaves_the_module_as_it_is(group: Any) -> None:
    model = Tied().eval()
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    model.register_buffer("filled", None)

    def loss(made: Tied, samples: int) -> torch.Tensor:
        made.filled = torch.ones(3)  # as a mask that the first pass makes
        made.cache = made.filled * 2
        return loss_of_tied(made, samples)

    plan = libzero.plan(model, loss, batch=8, sequence=32, dtype="fp32", hardware=_HERE)
    assert model.filled is None and not hasattr(model, "cache")
    parameters = sum(p.numel() for p in model.parameters())
    assert plan.answer["parameters"] == plan.answer["trained"] == parameters == 64 * 1000 + 2 * 64 + 4 * (64 * 64 + 64)
    assert plan.fits and plan.best["tokens_per_second"] > 0
    assert not model.training and model.head.weight is model.embedding.weight and not model.recomputes
    for name, value in model.state_dict(keep_vars=True).items():
        assert id(value) == before[name][0] and torch.equal(value, before[name][1]), name
    loss_of_tied(model, 2).backward()
    # The plan is a configuration that shard takes, and a text.
    config = {**plan.config, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    libzero.shard(model, torch.optim.AdamW(model.parameters()), config=config).close()
    assert "Tied in fp32, 0.1 M parameters; 8 sequences of 32 tokens; 2 EPYC 9654 on 1 host" in str(plan)
    assert "A rank of the first one, by category" in str(plan) and "ZeRO is" in str(plan)


@ranks(1)
def test_activations_follow_batch_and_recomputation(group: Any) -> None:
    switch = lambda model, on: setattr(model, "recomputes", on)  # noqa: E731
    plan = libzero.plan(Tied(), loss_of_tied, batch=16, sequence=32, dtype="fp32", hardware=_HERE, recompute=switch)
    activations = lambda *which: candidate(plan, 0, *which)["memory"]["activations"]  # noqa: E731
    # Logits, their logarithms and gradients are by far the most of it.
    assert activations(4) > 3 * 4 * 32 * 1000 * 4
    assert abs(activations(8) / activations(4) - 2) < 0.05
    assert activations(8, "recomputed") < activations(8)


class Workspaces(TorchDispatchMode):
    """Counts what kernels of recurrent layers keep for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        results = function(*arguments, **(keywords or {}))
        if function is torch.ops.aten.mkldnn_rnn_layer.default:
            self.bytes += results[-1].nbytes
        return results


# The weights of recurrent layers are in a list of their own besides.
@ranks(1)
def test_recurrent_layers(group: Any) -> None:
    model, loss = MODELS["LSTM"][0](), MODELS["LSTM"][1]
    plan = libzero.plan(model, loss, batch=4, dtype="fp32", hardware=_HERE)
    assert plan.answer["trained"] == sum(p.numel() for p in model.parameters())
    bound = next(bound["bytes"] for bound in plan.answer["bounds"] if "lstm" in bound["operator"])
    with Workspaces() as workspaces:
        loss(model, plan.best["micro_batch"]).backward()
    assert workspaces.bytes <= bound < 1.5 * workspaces.bytes, (workspaces.bytes, bound)
    assert model.lstm.weight_ih_l0.grad is not None


# In 16 bits a CPU's convolutions have copies of their operands, which a trace does not: each is named with a bound.
@ranks(1)
def test_convolutions_have_bounds(group: Any) -> None:
    model, loss = MODELS["convolutions"][0](), MODELS["convolutions"][1]
    assert not libzero.plan(model, loss, batch=4, dtype="fp32", hardware=_HERE).answer["bounds"]
    plan = libzero.plan(model, loss, batch=4, dtype="bf16", hardware=_HERE)
    bounds = [bound for bound in plan.answer["bounds"] if "conv" in bound["operator"]]
    assert {bound["module"] for bound in bounds} >= {"layers.0", "layers.4", "layers.8"}, bounds
    assert all(bound["bytes"] > 0 for bound in bounds)


# A scope around the call, one in the loss and the argument are the same; a planned GPU has its own lists.
@ranks(1)
def test_autocast(group: Any) -> None:
    def ask(loss: Any = loss_of_tied, **keywords: Any) -> Any:
        return libzero.plan(Tied(), loss, batch=8, sequence=32, **{"hardware": _HERE, **keywords})

    given = ask(autocast="bf16")
    assert given.best["ds_config"]["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "torch_autocast" not in given.config and "fp32 under autocast to bf16" in str(given)
    with torch.autocast("cpu", torch.bfloat16):
        around = ask()
    assert around.answer == given.answer and torch.is_autocast_cache_enabled()
    plain, within = ask(dtype="fp32"), ask(under_autocast(loss_of_tied), dtype="fp32")
    for mine, theirs, uncast in zip(given.candidates, within.candidates, plain.candidates):
        assert mine["memory"] == theirs["memory"]
        # Logits are in 16 bits, and casts of weights live beside them.
        assert mine["memory"]["activations"] != uncast["memory"]["activations"]
    assert given.best["step_seconds"]["compute"] < plain.best["step_seconds"]["compute"]

    def normed(model: Any, samples: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            return loss_of_tied(model, samples).double() * nn.functional.softmax(model.layers[0](model.constant), 0).sum()

    of_gpu = {"hardware": None, "device": "h100", "per_host": 2, "dtype": "fp32"}
    on, off = ask(normed, **of_gpu), ask(**of_gpu)
    assert on.best["memory"]["activations"] < off.best["memory"]["activations"]
    unsafe = lambda model, n: nn.functional.binary_cross_entropy(torch.sigmoid(model.layers[0](model.constant)), model.constant)  # noqa: E731
    with expect(libzero.Error, "unsafe to autocast"):
        ask(unsafe, autocast="fp16", hardware=None, device="h100", per_host=2)


@ranks(1)
def test_other_clusters_and_trainings(group: Any) -> None:
    plan = libzero.plan(Tied(), loss_of_tied, batch=8, sequence=32, hardware=_HERE, scale=(1, 8), tokens=1e9, price=2)
    assert [point["ranks"] for point in plan.scale] == [1, 2, 4, 8]
    assert "of a rank" in str(plan) and "tokens take" in str(plan)
    at_two = plan.scale[1]
    assert at_two["configuration"] == plan.best["configuration"] and at_two["training"] == plan.training
    assert plan.training is not None
    assert abs(plan.training["seconds"] * plan.best["tokens_per_second"] / 1e9 - 1) < 1e-6
    assert abs(plan.training["cost"] / (2 * 2 * plan.training["seconds"] / 3600) - 1) < 1e-6
    assert libzero.plan(Tied(), loss_of_tied, batch=8, hardware=_HERE).scale == ()


# The states of a model are those that the program finds for the model of its own, and so are the keys of what it says.
@ranks(1)
def test_says_what_the_program_says(group: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="libzero-") as name:
        folder = Path(name)
        model = MODELS["Llama"][0]()
        model.config.save_pretrained(folder)
        (folder / "here.json").write_text(json.dumps(_HERE))
        subprocess.run(
            [program(), "plan", "--model", folder / "config.json", "--batch", "16", "--seq", "128", "--dtype", "bf16",
             "--hardware", folder / "here.json", "--most-micro-batch", "8", "--json", folder / "plan.json"],
            check=True, capture_output=True,
        )  # fmt: skip
        theirs = json.loads((folder / "plan.json").read_text())
        plan = libzero.plan(model, batch=16, sequence=128, hardware=folder / "here.json", most_micro_batch=8)
    assert plan.answer["parameters"] == theirs["options"]["parameters"]
    assert plan.cluster == theirs["options"]["cluster"]
    by_words = {each["configuration"]: each for each in theirs["results"]}
    compared = 0
    for mine in plan.candidates:
        other = by_words.get(mine["configuration"])
        if other is None:
            continue
        compared += 1
        assert mine.keys() == other.keys() and mine["ds_config"] == other["ds_config"]
        assert all(mine["memory"][state] == other["memory"][state] for state in _STATES), mine["configuration"]
    assert compared >= 8, compared


# Without a function of the loss: labels are tokens, or one a sample; and a sample has as many tokens as the model takes.
@ranks(1)
def test_losses_of_transformers(group: Any) -> None:
    sentence = "8 sequences of 32 tokens"
    assert sentence in str(libzero.plan(GPT2LMHeadModel(_TINY), batch=8, hardware=_HERE))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    for kind, labels in ((None, 3), (None, 1), ("multi_label_classification", 3), ("regression", 2)):
        config = BertConfig(**sizes, max_position_embeddings=32, num_labels=labels, problem_type=kind)
        model = BertForSequenceClassification(config)
        assert sentence in str(libzero.plan(model, batch=8, hardware=_HERE)), kind
        assert model.config.problem_type == kind


# BatchNorm1d trains no single sample: other micro-batches are planned, and the text says so.
@ranks(1)
def test_leaves_out_micro_batches_that_the_model_refuses(group: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    loss = lambda made, n: made(torch.zeros(n, 64, dtype=made[0].weight.dtype)).float().sum()  # noqa: E731
    plan = libzero.plan(model, loss, batch=8, hardware=_HERE)
    assert {each["micro_batch"] for each in plan.candidates} == {2, 4}
    assert "below 2 are left out" in str(plan) and "Expected more than 1 value" in str(plan)
    plan = libzero.plan(model, loss, batch=8, hardware={**_HERE, "memory": 1e3, "host_memory": 1e3})
    assert not plan.fits and {each["micro_batch"] for each in plan.candidates} == {2, 4}
    with expect(ValueError, "Expected more than 1 value"):
        libzero.plan(model, loss, batch=2, hardware=_HERE)


@ranks(1)
def test_bad_input_is_named(group: Any) -> None:
    def fails(kind: type[BaseException], word: str, *arguments: Any, **keywords: Any) -> None:
        model = Tied()
        with expect(kind, word):
            libzero.plan(model, *arguments, **{"batch": 8, "hardware": _HERE, **keywords})
        assert not any(p.is_meta for p in model.parameters())

    fails(libzero.ConfigError, "h1000", loss_of_tied, hardware=None, device="h1000")
    fails(libzero.ConfigError, "Give a multiple of 2", loss_of_tied, batch=7)
    fails(libzero.ConfigError, "'fp64'", loss_of_tied, dtype="fp64")
    fails(libzero.ConfigError, "autocast is 'fp8'", loss_of_tied, autocast="fp8")
    fails(libzero.ConfigError, "use 'bf16' for both", loss_of_tied, autocast="fp16", dtype="bf16")
    fails(libzero.ConfigError, "scale is (8, 4)", loss_of_tied, scale=(8, 4))
    fails(libzero.ConfigError, "3 ranks do not fill hosts of 2", loss_of_tied, scale=(3, 4))
    fails(libzero.ConfigError, "tokens is -1", loss_of_tied, tokens=-1)
    fails(libzero.ConfigError, "give tokens=", loss_of_tied, price=2)
    fails(libzero.ConfigError, "'network' is 10, which is 10 bytes", loss_of_tied, hardware={**_HERE, "network": 10})
    fails(libzero.ConfigError, "batch is 0", loss_of_tied, batch=0)
    fails(libzero.ConfigError, "sequence is -1", loss_of_tied, sequence=-1)
    fails(libzero.ConfigError, "sequence is 1.5", loss_of_tied, sequence=1.5)
    fails(libzero.ConfigError, "most_micro_batch is 'many'", loss_of_tied, most_micro_batch="many")
    fails(libzero.ConfigError, "hardware= and device=", loss_of_tied, device="h100")
    fails(libzero.ConfigError, "hardware= and hosts=", loss_of_tied, hosts=2)
    fails(libzero.ConfigError, "here= and hardware=", loss_of_tied, here=True)
    fails(libzero.ConfigError, "here= and hosts=", loss_of_tied, hardware=None, here=True, hosts=2)
    fails(libzero.ConfigError, "'lazily' is no time of updates", loss_of_tied, updates=["lazily"])
    fails(libzero.ConfigError, "must be a list of names", loss_of_tied, updates="delayed")
    fails(libzero.ConfigError, "'link' is missing", loss_of_tied,
          hardware={"flops": 1e12, "memory": 1e11, "bandwidth": 1e11, "cpu": True, "per_host": 2})  # fmt: skip
    fails(libzero.ConfigError, "'wires' is unknown", loss_of_tied, hardware={**_HERE, "wires": 3})
    fails(libzero.ConfigError, "must be a whole number", loss_of_tied, hardware={**_HERE, "hosts": 0})
    fails(libzero.ConfigError, "'bandwidth' is 0", loss_of_tied, hardware={"device": "h100", "bandwidth": 0})
    fails(libzero.ConfigError, "cannot be read", loss_of_tied, hardware="/nowhere.json")
    fails(libzero.ConfigError, "AdamX", loss_of_tied, optimizer="AdamX")
    fails(libzero.ConfigError, "NoneType", loss_of_tied, optimizer=None)
    fails(libzero.ConfigError, "needs a function of its loss")
    fails(libzero.ConfigError, "returned no tensor", lambda model, n: 3.0)
    fails(libzero.ConfigError, "has 32 elements", lambda model, n: model.embedding(torch.zeros(32, dtype=torch.long))[:, 0])
    fails(libzero.ConfigError, "depends on no parameter that is trained", lambda model, n: torch.ones(()))
    fails(libzero.Error, "aten::item", lambda model, n: loss_of_tied(model, n) * loss_of_tied(model, n).item())
    fails(libzero.Error, "cannot be traced", lambda model, n: model(torch.zeros(n, 32, dtype=torch.long)).view(7))
    fails(ValueError, "what I said", lambda model, n: (_ for _ in ()).throw(ValueError("what I said")))
    fails(libzero.ConfigError, "sequence is 0", loss_of_tied, sequence=0)
    fails(libzero.ConfigError, "type object is not JSON", loss_of_tied, hardware={"device": object()})
    fails(libzero.ConfigError, "hardware is a list", loss_of_tied, hardware=["h100"])
    with expect(libzero.ConfigError, "at most 32 tokens"):
        libzero.plan(GPT2LMHeadModel(_TINY), batch=8, sequence=64, hardware=_HERE)
    with expect(libzero.ConfigError, "nn.Module"):
        libzero.plan(loss_of_tied, batch=8)  # type: ignore[arg-type]
    with expect(libzero.ConfigError, "has no shape yet"):
        libzero.plan(nn.LazyLinear(4), loss_of_tied, batch=8)
    nothing = libzero.plan(Tied(), loss_of_tied, batch=8, hardware={**_HERE, "memory": 1e4, "host_memory": 1e4})
    with expect(libzero.ConfigError, "Nothing fits"):
        _ = nothing.config
    assert libzero.plan(Tied(), loss_of_tied, batch=8, hardware=_HERE).fits  # the thread can trace again


main()
