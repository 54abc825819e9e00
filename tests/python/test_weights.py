"""A model that was built without values gets those of files, each rank its own part: training goes on as from
transformers' from_pretrained, bit for bit."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
import warnings
from typing import Any

from support import expect, main, need, ranks

need("torch", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import libzero  # noqa: E402

FIXTURES = pathlib.Path(__file__).parents[1] / "models/fixtures"


def empty(folder: pathlib.Path) -> Any:
    with libzero.init(values=False):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


def losses(model: Any, group: Any, stage: int, **keywords: Any) -> list[float]:
    model.eval()  # without dropout
    opt = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, group=group, **keywords)
    tokens = (torch.arange(24) * 5 + group.rank).remainder(40).view(2, 12)
    made = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        made.append(loss.item())
    opt.close()
    return made


@ranks(1, 2)
def test_training_goes_on_as_from_pretrained(group: Any) -> None:
    for name in ("llama", "gpt2"):  # the second is tied
        folder = FIXTURES / name
        for stage in (0, 2, 3):
            usual = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            wanted = losses(usual, group, stage)
            model = empty(folder)
            assert all(parameter.is_meta for parameter in model.parameters())
            got = losses(model, group, stage, weights=folder)
            assert got == wanted, f"{name}, stage {stage}: {got}, {wanted}"


class Net(torch.nn.Module):
    """One parameter has two places, an LSTM refers to its own, and one has an attribute."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.nn.Parameter(torch.randn(6, 6))
        self.first = torch.nn.Linear(6, 6)
        self.first.weight = both
        self.lstm = torch.nn.LSTM(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.last = torch.nn.Linear(6, 6)
        self.last.weight = both
        self.last.bias.decayed = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.lstm(self.first(x))[0]))


@ranks(1, 2)
def test_any_module(group: Any) -> None:
    torch.manual_seed(3)
    usual = Net()
    with tempfile.TemporaryDirectory() as place:
        files = pathlib.Path(place) / "net.pt"
        torch.save(usual.state_dict(), files)
        with libzero.init(values=False):
            model = Net()
        assert model.first.weight is model.last.weight
        outputs = []
        for each, weights in ((usual, None), (model, files)):
            opt = libzero.shard(each, torch.optim.SGD(each.parameters(), lr=0.1), stage=3, group=group, weights=weights)
            each(torch.ones(4, 6)).square().sum().backward()
            opt.step()
            outputs.append(each(torch.ones(4, 6)))
            opt.close()
        assert torch.equal(*outputs)
        assert model.last.bias.decayed is False


@ranks(1)
def test_a_failed_read_leaves_no_values(group: Any) -> None:
    source = FIXTURES / "llama"
    with tempfile.TemporaryDirectory() as place:
        save_file({"unknown": torch.ones(2)}, pathlib.Path(place) / "model.safetensors")
        for stage in (0, 3):
            model = empty(source)
            adam = torch.optim.AdamW(model.parameters())
            with expect(libzero.CheckpointError, "embed_tokens"):
                libzero.shard(model, adam, stage=stage, group=group, weights=place)
            with expect(RuntimeError):
                model.lm_head.weight.sum()
            libzero.shard(model, adam, stage=stage, group=group, weights=source).close()
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with expect(libzero.ConfigError, "running_mean", "meta"):
        libzero.shard(model, torch.optim.AdamW(model.parameters()), group=group, weights=source)
    model = empty(source)
    with expect(libzero.ConfigError, "RMSprop"):
        libzero.shard(model, torch.optim.RMSprop(model.parameters()), group=group, weights=source)
    with expect(libzero.ConfigError, "dict"):
        libzero.shard(model, torch.optim.AdamW(model.parameters()), group=group, weights={})


@ranks(2)
def test_what_files_lack_is_named(group: Any) -> None:
    source = FIXTURES / "llama"
    model = empty(source)
    adam = torch.optim.AdamW(model.parameters())
    with expect(libzero.ConfigError, "embed_tokens", "meta", "weights="):
        libzero.shard(model, adam, stage=3, group=group)
    with expect(libzero.CheckpointError, "nowhere"):
        libzero.shard(model, adam, stage=3, group=group, weights="/nowhere")
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "model"
        shutil.copytree(source, folder)
        tensors = load_file(folder / "model.safetensors")
        gone = tensors.pop("model.norm.weight")
        save_file(tensors, folder / "model.safetensors")
        with expect(libzero.CheckpointError, "norm.weight"):
            libzero.shard(model, adam, stage=3, group=group, weights=folder)
        save_file({**tensors, "model.norm.weight": gone, "unknown": gone.clone()}, folder / "model.safetensors")
        group.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt = libzero.shard(model, adam, stage=3, group=group, weights=folder)  # the same model may be tried again
            assert (group.rank == 0) == any("unknown" in str(each.message) for each in caught)
        opt.close()
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        net.register_buffer("scratch", torch.ones(1), persistent=False)
        held = {name: value for name, value in net.state_dict().items() if not name.endswith("running_mean")}
        file = pathlib.Path(place) / f"net{group.rank}.pt"
        torch.save(held, file)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            libzero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, group=group, weights=file).close()
            told = [str(each.message) for each in caught if "no values for these buffers" in str(each.message)]
            assert len(told) == (group.rank == 0) and all("1.running_mean" in each and "scratch" not in each for each in told), told
    with expect(libzero.ConfigError, "folder"):
        libzero.init("/tmp", values=False)


main()
