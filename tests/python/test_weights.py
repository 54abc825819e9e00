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
    with expect(libzero.ConfigError, "folder"):
        libzero.init("/tmp", values=False)


main()
