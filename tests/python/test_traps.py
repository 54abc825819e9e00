"""What a PyTorch program does by habit: each is right with a sharded model, or an error that says what to write."""

import copy
import gc
import io
import os
import pathlib
import pickle
import re
import tempfile
import threading
import time
import warnings

import torch
from torch import nn

from support import batch, expect, launch, main, mlp, ranks, same, train, weights

import libzero

STAGES = (0, 1, 2, 3)


def sharded(stage, model=None, make=torch.optim.AdamW, **keywords):
    """A model and its optimizer; at stage 3 nothing stays gathered."""
    model = model or mlp()
    zero = {"stage3_max_live_parameters": 0, "stage": stage}
    opt = libzero.shard(model, make(model.parameters(), lr=1e-2), {"zero_optimization": zero, **keywords})
    return model, opt


def loss_of(model, group, step=0):
    return model(batch(group.rank, step)).pow(2).mean()


# --- The old optimizer.


@ranks(1, 2)
def test_old_optimizer(group):
    for stage in STAGES:
        model = mlp()
        old = torch.optim.AdamW(model.parameters(), lr=1e-2)
        opt = libzero.shard(model, old, stage=stage)
        with expect(libzero.Error, "opt.step()"):
            old.step()
        with expect(libzero.Error, "opt.state_dict()"):
            old.state_dict()
        with expect(libzero.Error, "opt.load_state_dict"):
            old.load_state_dict({"state": {}, "param_groups": []})
        for either in (old, opt):
            with expect(libzero.Error, "before libzero.shard"):
                either.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        old.zero_grad()
        loss_of(model, group).backward()
        assert opt.pending
        old.zero_grad()  # drops what opt has
        assert not opt.pending
        loss_of(model, group).backward()
        opt.step()
        assert opt.updated
        opt.close()
        if stage < 3:  # the model is whole again, and the old optimizer is free
            loss_of(model, group).backward()
            old.step()
            old.zero_grad()
            assert model[0].weight.grad is None
        with expect(libzero.Error, "opt.state_dict()"):
            pickle.dumps(opt)


@ranks(2)
def test_scheduler_of_the_old_optimizer(group):
    lr = {}
    for which in ("old", "new"):
        model = mlp()
        old = torch.optim.AdamW(model.parameters(), lr=1e-2)
        early = torch.optim.lr_scheduler.LambdaLR(old, lambda step: 0.5**step) if which == "old" else None
        opt = libzero.shard(model, old, stage=3)
        scheduler = early or torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                loss_of(model, group, step).backward()
                opt.step()
                scheduler.step()
        assert opt.param_groups[0]["lr"] == 1e-2 / 8
        opt.step()
        assert opt._engine.lr(0) == 1e-2 / 8
        lr[which] = weights(opt)
        opt.close()
    assert same(lr["old"], lr["new"])


# --- Gradients.


@ranks(1, 2)
def test_gradients_are_not_read_in_vain(group):
    for stage in STAGES:
        model, opt = sharded(stage)
        p = model[0].weight
        assert p.grad is None
        p.grad = None
        loss_of(model, group).backward()
        for read in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            lambda: p.grad.norm(),
            lambda: [each.grad for each in model.parameters()],
        ):
            with expect(libzero.Error, "opt.clip_grad_norm_", "opt.grad_norm", "opt.gradient(p)", ".weight'"):
                read()
        with expect(libzero.Error, "opt.set_gradient", "0.weight"):
            p.grad = torch.zeros_like(p)
        with expect(libzero.Error, "opt.zero_grad()"):
            p.grad = None
        value = opt.gradient(p)
        assert value.shape == p.shape
        opt.set_gradient(p, torch.zeros_like(value))
        norm = opt.clip_grad_norm_(0.5)
        opt.step()
        assert abs(norm.item() - opt.grad_norm) < 1e-5 * opt.grad_norm
        assert p.grad is None and all(each.grad is None for each in model.parameters())
        with expect(libzero.Error, "opt.set_gradient"):  # it would wait for nobody
            p.grad = torch.zeros(p.shape)
        opt.close()
        if stage < 3:
            p.grad = torch.zeros_like(p)


@ranks(1, 2)
def test_zero_grad_of_the_model(group):
    for stage in STAGES:
        runs = []
        for drop in (None, "model", "optimizer"):
            model, opt = sharded(stage)
            if drop:
                loss_of(model, group, 7).backward()
                model.zero_grad() if drop == "model" else opt.zero_grad()
                assert not opt.pending
            runs.append(train(model, opt))
            opt.close()
        assert runs[0] == runs[1] == runs[2]
        model, opt = sharded(stage)
        loss_of(model, group).backward()
        with expect(libzero.Error, "part of a sharded model", "opt.zero_grad()"):
            model[0].zero_grad()
        opt.step()
        model[0].zero_grad()
        opt.close()


@ranks(1)
def test_other_models_are_as_they_were(group):
    model, opt = sharded(3)
    other = mlp()
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    loss_of(model, group).backward()
    loss_of(other, group).backward()
    assert nn.utils.clip_grad_norm_(other.parameters(), 1.0) > 0
    theirs.step()
    other.zero_grad()
    assert other[0].weight.grad is None
    other[0].weight.grad = torch.ones_like(other[0].weight)
    del other[0].weight.grad
    other[0].weight.data = torch.zeros_like(other[0].weight)
    assert other[0].weight.data.data_ptr() == other[0].weight.data_ptr()
    assert other[0].weight.data._version == 0
    other.half().double()
    opt.step()
    opt.close()


@ranks(1)
def test_grad_is_still_torchs(group):
    model, opt = sharded(0)
    from torch.overrides import get_testing_overrides, is_tensor_method_or_property, resolve_name

    assert torch.Tensor.grad.__get__ in get_testing_overrides()
    assert resolve_name(torch.Tensor.grad.__get__)
    assert is_tensor_method_or_property(torch.Tensor.grad.__get__)

    class Tagged(torch.Tensor):
        seen: list = []

        @classmethod
        def __torch_function__(cls, function, types, arguments=(), keywords=None):
            cls.seen.append(getattr(function, "__name__", str(function)))
            return super().__torch_function__(function, types, arguments, keywords or {})

    t = torch.ones(3).as_subclass(Tagged).requires_grad_()
    (t * t).sum().backward()
    assert torch.equal(t.grad.as_subclass(torch.Tensor), torch.full((3,), 2.0)) and "__get__" in Tagged.seen
    t.grad = None
    assert t.grad is None
    twin = copy.deepcopy(nn.Parameter(torch.ones(2)))
    assert twin.grad is None
    plain = mlp()
    params = dict(plain.named_parameters())
    grads = torch.func.grad(lambda values: torch.func.functional_call(plain, values, (batch(0, 0),)).sum())(params)
    assert grads["0.weight"].shape == (32, 8)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(plain, backend=backend, fullgraph=True)
        compiled(batch(0, 0)).sum().backward()
        assert plain[0].weight.grad is not None
        plain.zero_grad()

    def reads(x):
        y = x.data * 2
        return y + 1 if x.grad is None else y + x.grad

    x = torch.ones(3, requires_grad=True)
    assert torch.equal(torch.compile(reads, backend="eager")(x), torch.full((3,), 3.0))
    x.grad = torch.full((3,), 5.0)
    assert torch.equal(torch.compile(reads, backend="eager")(x), torch.full((3,), 7.0))

    @torch.compile(backend="eager")
    def sgd():
        for p in plain.parameters():
            if p.grad is not None:
                with torch.no_grad():
                    p.sub_(p.grad)

    plain(batch(0, 0)).sum().backward()
    before = plain[0].bias.detach().clone()
    expected = before - plain[0].bias.grad
    sgd()
    assert torch.allclose(plain[0].bias, expected)
    optimizer = torch.optim.AdamW(plain.parameters())
    torch.compile(optimizer.step, backend="eager")()
    opt.close()


@ranks(1, 2)
def test_hooks(group):
    for stage in STAGES:
        runs = []
        for hooked in (False, True):
            model, opt = sharded(stage)
            calls = []
            if hooked:
                for p in model.parameters():
                    p.register_hook(lambda g: calls.append("tensor"))
                    p.register_post_accumulate_grad_hook(lambda q: calls.append(("post", q.grad is not None)))
                    p.register_post_accumulate_grad_hook(lambda q: calls.append(("second", q.grad is not None)))
                model[0].register_forward_hook(lambda *_: calls.append("forward"))
                model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
            runs.append(train(model, opt))
            if hooked:
                for expected in ("tensor", ("post", True), ("second", True)):
                    assert calls.count(expected) == 3 * 6, (stage, expected, calls.count(expected))
                assert calls.count("forward") == calls.count("backward") == 3
            opt.close()
        assert runs[0] == runs[1]
        # A hook that changes the gradient.
        model, opt = sharded(stage)
        model[0].weight.register_hook(lambda g: torch.zeros_like(g))
        loss_of(model, group).backward()
        assert opt.gradient("0.weight").abs().max() == 0
        opt.close()
        # One from before is called too, and is there again afterwards.
        model = mlp()
        early = []
        handle = model[0].weight.register_post_accumulate_grad_hook(lambda q: early.append(1))
        model, opt = sharded(stage, model)
        train(model, opt, 1)
        assert early == [1]
        handle.remove()
        train(model, opt, 1)
        assert early == [1]
        opt.close()


# --- Values.


@ranks(1, 2)
def test_conversions(group):
    for stage in STAGES:
        model, opt = sharded(stage)
        before = train(model, opt, 1)
        model.to("cpu").float().to(torch.float32).train()
        for convert in (
            model.half, model.double, model.bfloat16, lambda: model.to(torch.bfloat16), lambda: model.to("meta"),
            lambda: model.to_empty(device="cpu"),
        ):  # fmt: skip
            with expect(libzero.Error, "'0.weight'", "before libzero.shard"):
                convert()
        assert train(model, opt, 1) and before
        opt.close()
    with expect(libzero.ConfigError, "'0.weight'", "Double", "libzero.shard"):
        sharded(3, mlp().double())


@ranks(1, 2)
def test_replaced_values(group):
    for stage in STAGES:
        for replace in (
            lambda m: setattr(m[0].weight, "data", torch.zeros(32, 8)),
            lambda m: nn.utils.vector_to_parameters(torch.zeros(1476), m.parameters()),
        ):
            model, opt = sharded(stage)
            replace(model)
            loss = loss_of(model, group)
            with expect(libzero.Error, "'0.weight'", "replaced", "libzero.gathered", "opt.set_parameter"):
                loss.backward()
            opt.close()
        model, opt = sharded(stage)
        model.load_state_dict({k: v.clone() for k, v in mlp(1).state_dict().items()}, assign=True)
        loss_of(model, group).backward()
        with expect(libzero.Error, "'0.", "replaced", "opt.set_parameter"):
            opt.step()
        opt.close()
        model, opt = sharded(stage)
        model.register_parameter("late", nn.Parameter(torch.zeros(3)))
        loss_of(model, group).backward()
        with expect(libzero.Error, "'late'", "libzero.shard"):
            opt.step()
        opt.close()
        model = mlp()
        model[0].requires_grad_(False)
        model, opt = sharded(stage, model)
        model[0].requires_grad_()
        loss = loss_of(model, group)
        with expect(libzero.Error, "'0.weight'", "libzero.shard"):
            loss.backward()
        opt.close()
        model, opt = sharded(stage)
        assert nn.utils.parameters_to_vector(model.parameters()).shape == (1476,)
        frozen = opt.parameter("0.weight")
        model[0].requires_grad_(False)
        train(model, opt, 1)
        assert torch.equal(opt.parameter("0.weight"), frozen)
        model[0].requires_grad_()
        train(model, opt, 1)
        assert not torch.equal(opt.parameter("0.weight"), frozen)
        opt.close()


@ranks(1, 2)
def test_writes_count(group):
    def no_grad(w):
        with torch.no_grad():
            w.mul_(2.0)

    writes = {
        "no_grad": no_grad,
        "data": lambda w: w.data.mul_(2.0),
        "detach": lambda w: w.detach().mul_(2.0),
        "row of data": lambda w: w.data[1].mul_(2.0),
        "init": nn.init.ones_,
        "copy": lambda w: w.data.copy_(torch.full_like(w, 0.25)),
        "setitem": lambda w: w.data.__setitem__(slice(0, 2), 7.0),
    }
    for stage in STAGES:
        for bf16 in (False, True):
            for name, write in writes.items():
                model, opt = sharded(stage, bf16={"enabled": bf16}, make=torch.optim.SGD)
                expected = model[2].weight.detach().clone()
                write(expected)
                write(model[2].weight)
                assert torch.equal(model[2].weight, expected), (stage, bf16, name)
                opt.param_groups[0]["lr"] = 0.0
                model(batch(group.rank, 0).to(expected.dtype)).float().pow(2).mean().backward()
                opt.step()
                assert torch.equal(model[2].weight, expected), (stage, bf16, name, "after the step")
                master = opt.parameter("2.weight")
                assert torch.equal(master.to(expected.dtype), expected), (stage, bf16, name, "master")
                opt.close()
        model, opt = sharded(stage)
        model.load_state_dict(mlp(5).state_dict())
        train(model, opt, 1)
        other, reference = sharded(0, mlp(5))
        train(other, reference, 1)
        assert same(weights(opt), weights(reference))
        opt.close()
        reference.close()


# --- Memory.


@ranks(1, 2)
def test_copies_where_memory_is_wanted(group):
    for stage in STAGES:
        model, opt = sharded(stage)
        plain = mlp()
        w, q = model[2].weight, plain[2].weight
        if group.rank == group.size - 1:  # by one rank alone
            assert repr(w) == repr(q) and str(w.detach()) == str(q.detach())
            assert w.tolist() == q.tolist() and w[1, 2].item() == q[1, 2].item() and f"{w[0, 0]:.3f}"
            array = w.detach().numpy()
            assert (array == q.detach().numpy()).all()
            if opt.paged:
                with expect(ValueError, "read-only"):
                    array[0] = 1.0
            import numpy

            assert (numpy.asarray(w.detach()) == q.detach().numpy()).all()
            with expect(RuntimeError, "requires grad"):
                w.numpy()
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            assert same(dict(torch.load(file)), dict(plain.state_dict()))
            for value in (w, model):
                file = io.BytesIO()
                torch.save(value, file)
                file.seek(0)
                back = torch.load(file, weights_only=False)
                back = back if isinstance(back, nn.Parameter) else back[2].weight
                assert isinstance(back, nn.Parameter) and back.requires_grad and torch.equal(back, q)
            assert torch.equal(pickle.loads(pickle.dumps(w)), q)
            assert same(dict(copy.deepcopy(model.state_dict())), dict(plain.state_dict()))
            twin = copy.deepcopy(model)
            assert torch.equal(twin[2].weight, q) and twin[2].weight.data_ptr()
            loss_of(twin, group).backward()
            assert twin[2].weight.grad is not None  # a model of its own
        train(model, opt, 1)
        opt.close()


@ranks(1, 2)
def test_gathered_is_memory(group):
    import safetensors.torch

    for stage in STAGES:
        model, opt = sharded(stage)
        plain = mlp()
        w = model[2].weight
        for reach in (
            lambda: w.data_ptr(), lambda: w.untyped_storage().data_ptr(), lambda: w.detach().__dlpack__(),
            lambda: torch.utils.dlpack.to_dlpack(w.detach()), lambda: safetensors.torch.save(model.state_dict()),
        ):  # fmt: skip
            if opt.paged:
                with expect(RuntimeError, "libzero.gathered"):
                    reach()
            else:
                reach()
        with expect(libzero.Error, "'0.weight'", "libzero.shard"):
            model.share_memory()
        model(batch(group.rank, 0))  # whatever stays gathered
        if opt.paged:
            with expect(libzero.Error, "'2.weight'", "libzero.gathered(p)", "opt.parameter(p)"):
                w.data_ptr()
        with libzero.gathered(model):
            assert w.data_ptr() and w.untyped_storage().data_ptr()
            w.detach().numpy()  # the memory itself
            assert torch.equal(torch.from_dlpack(w.detach()), plain[2].weight)
            back = safetensors.torch.load(safetensors.torch.save(model.state_dict()))
            assert same(dict(sorted(back.items())), dict(sorted(plain.state_dict().items())))
            with tempfile.TemporaryDirectory() as folder:
                safetensors.torch.save_model(model, f"{folder}/model.safetensors")
                assert safetensors.torch.load_model(mlp(3), f"{folder}/model.safetensors") == (set(), [])
        with libzero.gathered([w], write=True):
            w.detach().numpy()[:] = 0.5
        assert (opt.parameter(w) == 0.5).all()
        with libzero.gathered(w):
            pass
        values = opt.full_state_dict()
        assert bool(values) == (group.rank == 0)
        train(model, opt, 1)
        opt.close()


@ranks(2)
def test_save_pretrained(group):
    try:
        import transformers
    except ImportError:
        print("test_save_pretrained: skipped, no transformers")
        return
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, opt = sharded(3, model)
    with tempfile.TemporaryDirectory() as folder:
        with expect(RuntimeError, "libzero.gathered"):
            model.save_pretrained(folder + "/vain")
        with libzero.gathered(model):
            model.save_pretrained(folder + "/gathered")
        whole = opt.full_state_dict()
        names = ["gathered"]
        if group.rank == 0:
            model.save_pretrained(folder + "/whole", state_dict=whole)
            names.append("whole")
        for name in names:
            back = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/{name}")
            assert same(dict(back.state_dict()), expected)
    opt.close()


# --- Autocast.


def wide(layers=8):
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(256, 256), nn.ReLU())])


@ranks(1, 2)
def test_autocast_keeps_no_copies(group):
    runs = {}
    copies = 8 * 256 * 256 * 2  # of all weights in bf16
    for stage in (0, 3):
        model, opt = sharded(stage, wide())
        group.reset_peaks()
        runs[stage] = []
        for step in range(3):
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(group.rank + step))
            before = opt.memory()["now"]["activations"]
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().pow(2).mean()
            kept = opt.memory()["now"]["activations"] - before
            loss.backward()
            opt.step()
            runs[stage].append((loss.item(), opt.grad_norm))
            if opt.paged:
                assert kept < copies // 4, (kept, copies)
            else:  # autograd needs them but the first
                assert kept >= copies * 7 // 8, (kept, copies)
        runs[stage].append(weights(opt))
        opt.close()
    assert same(runs[0], runs[3])
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()


@ranks(2)
def test_autocast_is_still_torchs(group):
    model, opt = sharded(3)
    plain = mlp()
    x = batch(0, 0)

    @torch.autocast("cpu", torch.bfloat16)
    def twice(m, inner):
        y = m(x)
        with torch.autocast("cpu", enabled=False):
            y = y.float() * inner
        with torch.autocast("cpu", torch.bfloat16):
            return (y.float() + m(x).float()).sum()

    for other in (plain, model):  # of a model that is not sharded, too
        twice(other, 2.0).backward()
    assert torch.equal(opt.gradient("0.weight"), plain[0].weight.grad)
    plain.zero_grad()
    from torch.utils.checkpoint import checkpoint

    with torch.autocast("cpu", torch.bfloat16):
        checkpoint(plain, x, use_reentrant=False).float().sum().backward()
        opt.zero_grad()
        checkpoint(model, x, use_reentrant=False).float().sum().backward()
    assert torch.equal(opt.gradient("0.weight"), plain[0].weight.grad)
    opt.zero_grad()
    # Autograd's own check is still made.
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.ones(3, requires_grad=True) * 2
        z = (y * y).sum()
    y.detach().add_(1)
    with expect(RuntimeError, "modified by an inplace operation"):
        z.backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    with torch.no_grad():
        model[2].weight.add_(1)
    with expect(RuntimeError, "modified by an inplace operation"):
        loss.backward()
    # Graphs let go of what they have saved.
    opt.zero_grad()
    gc.collect()
    before = opt.memory()["now"]["activations"]
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model(x).exp()
    gc.disable()
    assert opt.memory()["now"]["activations"] == before
    gc.enable()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), model(x))

    @torch.compile(backend="aot_eager")
    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x).float().sum()
    assert torch.equal(inside(x), expected)
    opt.close()


# --- Errors, threads, the end.


@ranks(1)
def test_messages_name_python(group):
    root = pathlib.Path(__file__).parents[2] / "zero"
    if not root.is_dir():
        return
    literals = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s+"(?:[^"\\\n]|\\.)*")*')
    seen = 0
    for file in [*root.glob("engine/*.cpp"), *root.glob("engine/*.h"), *root.glob("paging/*.cpp")]:
        if file.name in ("flops_profiler.cpp", "operator_cost.cpp", "anomaly_watch.cpp", "step_profile.cpp"):
            continue  # names of operators, and classes that Python does not have
        code = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith(("//", "#")))
        for found in literals.findall(code):
            text = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', found))
            told = libzero._C.python_text(text)
            seen += told != text
            for word in ("Engine", "zero::", "set_data", "Module::"):
                assert word not in told, (file.name, told)
    assert seen > 40


@ranks(2, alone=True)
def test_hook_raises_on_one_rank(_):
    group = libzero.group(timeout=5)
    model, opt = sharded(3)
    train(model, opt, 1)

    class Mine(Exception):
        pass

    def hook(gradient):
        raise Mine("from the hook")

    if group.rank == 1:
        model[0].weight.register_hook(hook)
    loss = loss_of(model, group)
    with expect(Mine if group.rank == 1 else libzero.CommError, "from the hook" if group.rank == 1 else "rank 1"):
        loss.backward()
        opt.step()


@ranks(2, alone=True)
def test_forward_raises_on_one_rank(_):
    group = libzero.group(timeout=5)
    model, opt = sharded(3, one_sided_gather=False)  # so that forward waits for the others
    train(model, opt, 1)
    try:
        if group.rank == 1:
            raise KeyError("from the data")
        with expect(libzero.CommError, "rank 1"):
            model(batch(0, 0))
    except KeyError:
        time.sleep(7)


@ranks(2)
def test_threads_go_on_while_ranks_wait(group):
    for stage in (0, 3):
        model, opt = sharded(stage)
        train(model, opt, 1)
        beats = []
        stop = threading.Event()

        def beat():
            while not stop.is_set():
                beats.append(time.monotonic())
                time.sleep(0.01)

        loss = loss_of(model, group)
        loss.backward()
        thread = threading.Thread(target=beat)
        thread.start()
        if group.rank == 1:
            time.sleep(0.5)
        opt.step()
        group.barrier()
        stop.set()
        thread.join()
        assert max(b - a for a, b in zip(beats, beats[1:])) < 0.4, "a thread stood still"
        assert len(beats) > 5
        opt.close()


@ranks(2)
def test_data_loader_workers(group):
    data = torch.utils.data.TensorDataset(torch.randn(32, 8))
    for stage in (0, 3):
        model, opt = sharded(stage)
        seen = 0
        for (x,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2):
            model(x).pow(2).mean().backward()
            opt.step()
            seen += len(x)
        assert seen == 32 and opt.steps == 4
        opt.close()


@ranks(1, 2)
def test_linear_cross_entropy(group):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(37, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, tokens):
            return self.norm(self.tokens(tokens))

    def words(rank, step):
        torch.manual_seed(97 * step + rank)
        return torch.randint(0, 37, (2, 9))

    def plain(model, tokens, **keywords):
        logits = model(tokens[:, :-1]) @ model.tokens.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), **keywords)

    def fused(model, tokens, **keywords):
        return libzero.linear_cross_entropy(model(tokens[:, :-1]), model.tokens.weight, tokens[:, 1:], **keywords)

    torch.manual_seed(1)
    first = Tied()
    for keywords in ({}, {"label_smoothing": 0.1}, {"ignore_index": 3}, {"reduction": "sum"}):
        expected = copy.deepcopy(first)
        reference = torch.optim.SGD(expected.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            parts = [plain(expected, words(rank, step), **keywords) for rank in range(group.size)]
            losses.append(parts[group.rank].item())
            (sum(parts) / group.size).backward()
            reference.step()
            reference.zero_grad()
        found = []
        for stage in STAGES:
            model, opt = sharded(stage, copy.deepcopy(first), torch.optim.SGD, gradient_clipping=0)
            here = []
            for step in range(3):
                loss = fused(model, words(group.rank, step), **keywords)
                loss.backward()
                opt.step()
                opt.zero_grad()
                here.append(loss.item())
            opt.close()
            torch.testing.assert_close(torch.tensor(here), torch.tensor(losses), rtol=1e-5, atol=1e-6)
            found.append(here)
        assert all(here == found[0] for here in found), found
    tokens = words(0, 0)
    assert torch.allclose(fused(first, tokens, divisor=8), plain(first, tokens, reduction="sum") / 8)
    for keywords, word in (({"reduction": "none"}, "reduction"), ({"divisor": 0}, "divisor"), ({"label_smoothing": 2}, "label_smoothing")):
        with expect(libzero.ConfigError, word):
            fused(first, tokens, **keywords)
    with expect(libzero.ConfigError, "targets"):
        libzero.linear_cross_entropy(first(tokens), first.tokens.weight, tokens[:, 1:])
    with expect(libzero.Error, "vocabulary"):
        libzero.linear_cross_entropy(first(tokens), first.tokens.weight, tokens + 37)


@ranks(1, 2)
def test_close(group):
    for stage in STAGES:
        model, opt = sharded(stage)
        train(model, opt, 1)
        opt.close()
        opt.close()
        assert "closed" in repr(opt) and not opt.open
        for use in (opt.step, opt.zero_grad, lambda: opt.parameter("0.weight"), opt.state_dict, lambda: opt.steps):
            with expect(libzero.Error, "closed"):
                use()
        paged = stage == 3 and group.size > 1
        if paged:
            for use in (lambda: model(batch(0, 0)), lambda: model[0].weight.clone(), lambda: model[0].weight.tolist()):
                with expect(RuntimeError, "'0.", "opt.full_state_dict()"):
                    use()
        else:
            loss_of(model, group).backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
        # The optimizer goes out of scope while the model lives: no rank waits in the garbage collector.
        model, opt = sharded(stage)
        train(model, opt, 1)
        del opt
        gc.collect()
        assert loss_of(model, group).item() > 0
        # The model goes, and the optimizer lives.
        model, opt = sharded(stage)
        train(model, opt, 1)
        del model
        gc.collect()
        assert opt.parameter("0.weight").shape == (32, 8)
        opt.close()
        with sharded(stage)[1] as opt:
            assert opt.open
        assert not opt.open


END = """
import sys
sys.path.insert(0, {tests!r})
from support import batch, mlp
import torch, libzero
model = mlp()
opt = libzero.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
model(batch(opt.group.rank, 0)).sum().backward()
{last}
print("end", flush=True)
"""


@ranks(1)
def test_exit_without_close(group):
    tests = os.path.dirname(os.path.abspath(__file__))
    for last in ("opt.step()", "pass", "scope = libzero.gathered(model); scope.__enter__()"):
        # A folder of its own: Python imports from the script's folder before all others.
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder, "end.py")
            script.write_text(END.format(tests=tests, last=last))
            done = launch(2, [str(script)], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.count("end") == 2 and "Traceback" not in done.stderr, done.stderr


main()
