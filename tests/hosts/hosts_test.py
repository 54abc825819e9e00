#!/usr/bin/env python3
"""Ranks on several hosts, as far as this machine allows; what is left out is named, with the reason.

hosts_test.py loopback|bits|network|slurm|training|transports|bytes INIT_PROGRAM ZERO_PROGRAM
"""
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import hosts
from hosts import CannotRun

INIT, ZERO = sys.argv[2:4]
os.environ.setdefault("TEST_TIMEOUT_S", "60")


def output_of(body):
    """What `body(descriptor)` returns, and what was written meanwhile."""
    with tempfile.TemporaryFile() as file:
        result = body(file.fileno())
        file.seek(0)
        return result, file.read().decode(errors="replace")


def check(condition, what, text):
    if not condition:
        raise AssertionError(f"{what}\n{text}")


def check_sums(status, text, ranks):
    check(status == 0, f"the launcher ended with status {status}", text)
    for rank in range(ranks):
        line = f"rank {rank} of {ranks} sum {ranks * (ranks + 1) // 2}\n"
        check(line in text, f"there is no '{line.strip()}'", text)


def meets_over_loopback(launcher, count, ranks):
    status, text = output_of(lambda out: hosts.run_over_loopback(launcher, count, ranks, [INIT], ZERO, out))
    check_sums(status, text, count * ranks)


def meets_after_a_restart(victim):
    """The ranks of one torchrun end at once, the first time. It counts that; the other, whose ranks wait for them, does not."""
    python, port = hosts.python_with_torch(), hosts.free_port()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        script = f"[ $ZERO_HOST = zh{victim} ] && mkdir {folder}/failed 2>/dev/null && exit 1; exec {INIT}"
        command = [python, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1",
                   "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "7", "--no-python",
                   "sh", "-c", script]
        agents = [subprocess.Popen(command, env={**os.environ, "ZERO_HOST": f"zh{k}"}, stdout=out, stderr=out)
                  for k in (1, 2)]
        status = max(agent.wait() for agent in agents)
        out.seek(0)
        text = out.read().decode(errors="replace")
    check_sums(status, text, 4)


def meets(launcher, count, ranks):
    (status, carried), text = output_of(
        lambda out: hosts.run(launcher, count, ranks, [INIT], zero=ZERO, output=out))
    check_sums(status, text, count * ranks)
    check(all(cable.sent > 0 and cable.received > 0 for cable in carried), f"a cable carried nothing: {carried}", text)


def delivers_what_a_rank_sent_before_it_left(count, ranks):
    """Rank 0 broadcasts 32 MiB over a slow cable and ends: the system still sends when its program is gone."""
    (status, _), text = output_of(
        lambda out: hosts.run("launch", count, ranks, [INIT, "farewell"], rate="100mbit", zero=ZERO, output=out))
    check(status == 0, f"the launcher ended with status {status}", text)
    check(text.count("farewell 7") == count * ranks, "not every rank has what was sent", text)


def refuses_uneven_hosts():
    """mpirun puts 2 ranks on one host and 1 on the other; each says so."""
    with hosts.Network(2) as network:
        hosts.need("mpirun.openmpi")
        command = ["mpirun.openmpi", "--allow-run-as-root", "-n", 3, "--host", "zh1:2,zh2:1", "--bind-to", "none",
                   "--mca", "plm_rsh_agent", hosts.HERE / "rsh", INIT]
        status, text = output_of(lambda out: hosts.run_all(network, [(network.hosts[0], command, {})], out))
    check(status != 0, "uneven hosts were not refused", text)
    check("2 on zh1 (ranks 0, 1), 1 on zh2 (rank 2)" in text and "--map-by ppr:N:node" in text,
          "the refusal does not name the ranks of each host and the remedy", text)


def asks_mpich_for_an_address():
    with hosts.Network(2) as network:
        hosts.need("mpiexec.mpich")
        command = ["mpiexec.mpich", "-launcher", "ssh", "-launcher-exec", hosts.HERE / "rsh", "-hosts", "zh1:1,zh2:1",
                   "-n", 2, INIT]
        status, text = output_of(lambda out: hosts.run_all(network, [(network.hosts[0], command, {})], out))
    check(status != 0 and "-genv MASTER_ADDR HOST" in text, "the error does not say how to pass the address", text)


def names_a_node_that_is_missing():
    """Node 1's launcher is alone: node 0 was never started."""
    with hosts.Network(2) as network:
        command = hosts.start_launcher(network, "launch", 1, [INIT], ZERO)[1]
        os.environ["TEST_TIMEOUT_S"] = "2"
        status, text = output_of(lambda out: hosts.run_all(network, [command], out))
        os.environ["TEST_TIMEOUT_S"] = "60"
    check(status != 0 and "could not reach the job's store at zh1:29500" in text,
          "the error does not name the address", text)


def loopback_name_is_not_listened_at():
    """/etc/hosts of Debian: the host's own name is 127.0.1.1 there, and only there."""
    with hosts.Network(2) as network:
        first = network.hosts[0]
        names = network.folder / "own-names"
        names.write_text("127.0.1.1 zh1\n10.77.0.2 zh2\n")
        check(first.run(["mount", "--bind", names, "/etc/hosts"]) == 0, "no mount", "")
        command = hosts.start_launcher(network, "launch", 1, [INIT], ZERO)[0]
        status, text = output_of(lambda out: hosts.run_all(network, [command], out))
    check(status != 0 and "loopback interface" in text and "/etc/hosts" in text,
          "the error does not say that the name means the loopback interface", text)


def meets_at_a_loopback_name():
    """The same under torchrun, whose store listens everywhere: the ranks tell each other their addresses."""
    with hosts.Network(2) as network:
        names = network.folder / "own-names"
        names.write_text("127.0.1.1 zh1\n10.77.0.2 zh2\n")
        check(network.hosts[0].run(["mount", "--bind", names, "/etc/hosts"]) == 0, "no mount", "")
        commands = hosts.start_launcher(network, "torchrun", 2, [INIT], ZERO)
        status, text = output_of(lambda out: hosts.run_all(network, commands, out))
    check_sums(status, text, 4)


def names_a_killed_rank(count, ranks):
    """Rank 1 kills itself while all reduce again and again: every other rank says so, and nothing else goes wrong."""
    (status, _), text = output_of(
        lambda out: hosts.run("launch", count, ranks, [INIT, "die"], zero=ZERO, output=out))
    check(status != 0, "the launchers ended with status 0", text)
    for rank in range(count * ranks):
        if rank != 1:
            check(re.search(rf"^\[{rank}\] error: .*[Rr]ank 1 \(", text, re.MULTILINE), f"rank {rank} does not name rank 1", text)
    check("rank 1 (pid" in text and "SIGKILL" in text, "the launcher does not name rank 1", text)
    check("terminate called" not in text, "a rank was aborted", text)


def training_command(folder, width=64, steps=20, stage=3, dtype="fp32", sharding=None):
    """`sharding`: keys of zero_optimization besides the stage."""
    text = pathlib.Path(folder) / "text"
    text.write_text("".join(f"line {i % 97}: the quick brown fox jumps over the lazy dog\n" for i in range(800)))
    model = pathlib.Path(folder) / "model.json"
    model.write_text(json.dumps({"model_type": "gpt2", "n_embd": width, "n_layer": 2, "n_head": 2, "n_positions": 64,
                                 "vocab_size": 256, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}))
    settings = []
    if sharding:
        config = pathlib.Path(folder) / "config.json"
        config.write_text(json.dumps({"zero_optimization": sharding}))
        settings = ["--config", config]
    return [ZERO, "train", "--model", model, "--data", text, "--out", pathlib.Path(folder) / "run", "--seq", 32,
            "--micro-batch", 2, "--steps", steps, "--lr", "1e-2", "--warmup", 0, "--threads", 1, "--eval-tokens", 512,
            "--sample-tokens", 8, "--stage", stage, "--dtype", dtype, *settings]


def collectives_tell_what_leaves_a_host():
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "figures.json"
        command = [ZERO, "bench", "collectives", "--sizes", "1MiB", "--repetitions", 2, "--memory", "arena", "--dtype", "fp32",
                   "--json", file]
        status, text = output_of(lambda out: hosts.run_over_loopback("launch", 2, 2, command, ZERO, out))
        check(status == 0, f"the bench ended with status {status}", text)
        check("4 on 2 hosts, 2 on each" in text and "Gbit/s" in text, "it does not tell the hosts and the link's speed", text)
        figures = json.loads(file.read_text())
        check(figures["options"]["hosts"] == 2, f"the options are {figures['options']}", text)
        half = (1 << 20) // 2  # (H-1)/H of the array, of which each rank has one in an all-to-all
        expected = {"all_gather": half, "reduce_scatter": half, "all_reduce": 2 * half, "all_to_all": 2 * half}
        found = {r["operation"]: r["link_bytes"] for r in figures["results"] if r["operation"] in expected}
        check(found == expected, f"bytes that leave a host: {found}, not {expected}", text)


def plan_on_hosts(run, *options):
    """What `zero train --plan` writes, and whether it made the run's folder."""
    with tempfile.TemporaryDirectory() as folder:
        status, text = output_of(lambda out: run([*training_command(folder), "--plan", *options], out))
        return status, text, (pathlib.Path(folder) / "run").exists()


def plans_a_run_on_its_hosts():
    def run(command, out):
        return hosts.run_over_loopback("launch", 2, 2, command, ZERO, out)

    status, text, made = plan_on_hosts(run)
    check(status == 0 and not made, f"it ended with status {status}, and {'made' if made else 'did not make'} the run's folder", text)
    for words in ("8 sequences of 32 tokens; 4 ranks of such machines on 2 hosts", " GB/s between hosts, ", "Its 20 steps take "):
        check(text.count(words) == 1, f"it does not say once '{words}'", text)
    status, text, made = plan_on_hosts(run, "--device", "cuda")
    check(status != 0 and not made and text.count("zero plan --device") == 1, f"a mistake is not told once; status {status}", text)


def plan_measures_the_network():
    """No more than the cable carries, and much of it even on a busy machine."""
    status, text, _ = plan_on_hosts(lambda command, out: hosts.run("launch", 2, 1, command, "1gbit", zero=ZERO, output=out)[0])
    check(status == 0, f"it ended with status {status}", text)
    speed = float(re.search(r"([\d.e-]+) GB/s between hosts", text)[1])
    check(0.03 < speed < 0.13, f"it measured {speed} GB/s of a cable of 0.125", text)
    taken = re.search(r"takes (\d+) % of computing", text)
    check(taken is not None and int(taken[1]) < 90, "messages at 1 Gbit/s take nearly all of computing", text)


def refuses_hosts_that_were_not_started_alike():
    """Another seed on the second host: the users of both are told."""
    with tempfile.TemporaryDirectory() as folder:
        train = training_command(folder, steps=2)
        command = ["sh", "-c", 'case $ZERO_HOST in *1) seed=1;; *) seed=2;; esac; exec "$@" --seed $seed', "sh", *train]
        status, text = output_of(lambda out: hosts.run_over_loopback("launch", 2, 1, command, ZERO, out))
        check(status != 0, "the hosts were not refused", text)
        check(text.count("train.seed 1 -> 2") >= 2, "the seed is not named on both hosts", text)


def names_the_ranks_of_a_dead_launcher(victim):
    """A launcher is killed in training: its ranks end with it, and the other host's say so."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        command = training_command(folder, steps=100000)
        launchers = [subprocess.Popen([str(word) for word in words], env={**os.environ, **environment}, stdout=out, stderr=out)
                     for words, environment in hosts.loopback_commands("launch", 2, 2, command, ZERO, hosts.free_port())]
        log = pathlib.Path(folder) / "run" / "log.jsonl"
        end = time.monotonic() + 60
        while not (log.exists() and log.read_text().count("\n") > 3) and time.monotonic() < end:
            time.sleep(0.05)
        since = time.monotonic()
        launchers[victim].kill()
        try:
            status = launchers[1 - victim].wait(30)
        except subprocess.TimeoutExpired:
            status = 0
        took = time.monotonic() - since
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
        out.seek(0)
        text = out.read().decode(errors="replace")
    check(status != 0, "the other launcher ended with status 0, or not at all", text)
    for rank in range(2 * (1 - victim), 2 * (1 - victim) + 2):
        check(re.search(rf"^\[{rank}\] zero: error: Rank [{2 * victim}{2 * victim + 1}] \(pid \d+, host zh{victim + 1}\) died",
                        text, re.MULTILINE), f"rank {rank} does not name the host's ranks", text)
    return f"after {took:.1f} s"


def steps_in(folder, status, text):
    check(status == 0, f"the launcher ended with status {status}", text)
    lines = (json.loads(line) for line in (pathlib.Path(folder) / "run" / "log.jsonl").read_text().splitlines())
    steps = [line for line in lines if "event" not in line]
    check(len(steps) == 20, f"{len(steps)} steps were logged", text)
    return steps


def losses_in(folder, status, text):
    return [step["loss"] for step in steps_in(folder, status, text)]


@functools.cache
def losses_on_one_host(ranks):
    with tempfile.TemporaryDirectory() as folder:
        words = [str(word) for word in training_command(folder)] + ["--nproc", str(ranks)]
        done = subprocess.run(words, capture_output=True, text=True)
        return losses_in(folder, done.returncode, done.stderr)


def trains(launcher, count, ranks, same):
    """As `same` did: the losses of the run that stands for all."""
    with tempfile.TemporaryDirectory() as folder:
        (status, carried), text = output_of(
            lambda out: hosts.run(launcher, count, ranks, training_command(folder), zero=ZERO, output=out))
        steps = steps_in(folder, status, text)
    losses = [step["loss"] for step in steps]
    check(losses == same(), f"the losses are {losses}, not {same()}", text)
    for step in steps:
        parts = step["link"]
        check(abs(sum(parts.values()) - step["step_ms"]) < 1, f"the link's times {parts} are not those of the step", text)
    check(all(step["link"]["busy_ms"] > 0 for step in steps), "the link was never busy in a step", text)
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f}; a host's cable carried {carried[0].sent / 1e6:.2f} MB out"


@functools.cache
def losses_of_the_first_launcher(count, ranks):
    with tempfile.TemporaryDirectory() as folder:
        (status, _), text = output_of(
            lambda out: hosts.run("launch", count, ranks, training_command(folder), zero=ZERO, output=out))
        return losses_in(folder, status, text)


def outcome_in(folder, status, text):
    """Losses of all steps, and the final weights."""
    losses = losses_in(folder, status, text)
    return losses, hashlib.sha256((pathlib.Path(folder) / "run" / "model.safetensors").read_bytes()).hexdigest()


@functools.cache
def outcome_on_one_host(ranks, block, dtype):
    with tempfile.TemporaryDirectory() as folder:
        words = [str(word) for word in training_command(folder, dtype=dtype)] + ["--nproc", str(ranks)]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "ZERO_SUM_BLOCK": str(block)})
        return outcome_in(folder, done.returncode, done.stderr)


def has_the_bits_of_one_host(count, ranks, dtype, ways, run, environment=()):
    """Each of `ways`, (stage, sharding), has the losses and weights of one host that adds in blocks of `ranks`."""
    for stage, sharding in ways:
        with tempfile.TemporaryDirectory() as folder:
            command = [*environment, *training_command(folder, stage=stage, dtype=dtype, sharding=sharding)]
            status, text = output_of(lambda out: run(command, out))
            outcome = outcome_in(folder, status, text)
        same = outcome_on_one_host(count * ranks, ranks, dtype)
        check(outcome == same, f"stage {stage} {sharding or ''}: {outcome} is not {same}", text)
    return f"{len(ways)} runs of 20 steps"


def ways_to_shard(ranks):
    ways = [(stage, None) for stage in range(4)]
    ways += [(3, {"stage": 3, "mics_shard_size": ranks})]
    ways += [(stage, {"stage": stage, **PACKED}) for stage in (2, 3)]
    return ways + ([(3, {"stage": 3, "zero_hpz_partition_size": ranks})] if ranks > 1 else [])


def has_the_bits_over_loopback(count, ranks, dtype):
    run = lambda command, out: hosts.run_over_loopback("launch", count, ranks, command, ZERO, out)
    return has_the_bits_of_one_host(count, ranks, dtype, ways_to_shard(ranks), run)


def has_the_bits_over(launcher, transport, count, ranks):
    plugin = pathlib.Path(ZERO).parent / f"libzero_rail_{transport}.so"
    if transport != "gloo" and not plugin.exists():
        raise CannotRun(f"{plugin.name} is not built (scripts/setup.sh mpi installs what it needs)")

    def run(command, out):
        status, carried = hosts.run(launcher, count, ranks, command, zero=ZERO, output=out)
        check(status != 0 or all(cable.sent > 1e6 for cable in carried), f"the cables carried {carried}", "")
        return status
    return has_the_bits_of_one_host(count, ranks, "bf16", [way for way in ways_to_shard(ranks) if way[0] == 3], run,
                                    environment=["env", f"ZERO_TRANSPORT={transport}"])


def bytes_of_steps(count, ranks, steps, sharding):
    """(by the cables' counters, by the ledger): what each host sent."""
    with tempfile.TemporaryDirectory() as folder:
        command = training_command(folder, width=512, steps=steps, sharding=sharding)
        (status, carried), text = output_of(
            lambda out: hosts.run("launch", count, ranks, command, rate="10gbit", zero=ZERO, output=out))
        check(status == 0, f"the launcher ended with status {status}", text)
        lines = (json.loads(line) for line in (pathlib.Path(folder) / "run" / "log.jsonl").read_text().splitlines())
        ledger = next(line for line in lines if line.get("event") == "traffic")["per_rank"]
    sent = [sum(part["link_bytes"] for part in rank.values() if isinstance(part, dict) and "link_bytes" in part)
            for rank in ledger]
    return carried, [sum(sent[h * ranks:(h + 1) * ranks]) for h in range(count)]


def cables_carry_what_the_ledger_says(count, ranks, sharding=None):
    """Of two runs, so that what a start and an end take is not counted."""
    few, many = (bytes_of_steps(count, ranks, steps, sharding) for steps in (2, 8))
    said = []
    for host in range(count):
        wire, ledger = (many[which][host] - few[which][host] for which in (0, 1))
        said.append(f"{wire.payload / ledger:.4f} ({wire.sent / ledger:.4f} with headers)")
        check(0.98 < wire.payload / ledger < 1.02, f"host {host}'s cable carried {wire}, {wire.payload} bytes without headers, the ledger says {ledger}", "")
    return f"cable / ledger {', '.join(said)}"


QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
PACKED = {"zero_packed_exponents": True}
SUITES = {
    "bytes": [(f"{count} x {ranks} {sharding or ''}: a cable carries what the ledger says, within 2 %",
               functools.partial(cables_carry_what_the_ledger_says, count, ranks, sharding))
              for count, ranks, sharding in ((2, 1, None), (2, 2, None), (3, 1, None), (2, 2, {"stage": 3, "mics_shard_size": 2}),
                                             (2, 1, {"stage": 2, **PACKED}), (2, 2, {"stage": 3, **PACKED}),
                                             (2, 2, {"stage": 3, "zero_hpz_partition_size": 2}),
                                             (2, 2, {"stage": 3, "zero_hpz_partition_size": 2, **QUANTISED}))],
    "bits": [(f"{count} x {ranks} {dtype} has the bits of one host at every stage and sharding",
              functools.partial(has_the_bits_over_loopback, count, ranks, dtype))
             for count, ranks in ((2, 1), (2, 2), (3, 1)) for dtype in ("fp32", "bf16")],
    "transports": [(f"{count} x {ranks} over {transport} has the bits of one host",
                    functools.partial(has_the_bits_over, launcher, transport, count, ranks))
                   for launcher, transport in (("launch", "gloo"), ("mpirun", "openmpi"), ("mpiexec", "mpich"))
                   for count, ranks in ((2, 2), (3, 1))],
    # Two ranks add in one order however they are spread; four on two hosts add by host first.
    "training": [(f"{launcher} trains on {count} x {ranks} ranks as all others do",
                  functools.partial(trains, launcher, count, ranks, same))
                 for launcher in hosts.LAUNCHERS
                 for count, ranks, same in ((2, 1, functools.partial(losses_on_one_host, 2)),
                                            (2, 2, functools.partial(losses_of_the_first_launcher, 2, 2)))],
    "loopback": [(f"{launcher} starts {count} x {ranks} ranks over loopback",
                  functools.partial(meets_over_loopback, launcher, count, ranks))
                 for launcher in ("launch", "torchrun") for count, ranks in ((2, 1), (2, 2), (3, 1))] +
                [("zero bench collectives tells what leaves a host", collectives_tell_what_leaves_a_host),
                 ("a run on several hosts is planned", plans_a_run_on_its_hosts),
                 ("hosts that were not started alike are refused", refuses_hosts_that_were_not_started_alike)] +
                [(f"the ranks meet after torchrun on zh{victim} has started its own again",
                  functools.partial(meets_after_a_restart, victim)) for victim in (1, 2)] +
                [(f"the ranks of a dead launcher, node {victim}'s, are named", functools.partial(names_the_ranks_of_a_dead_launcher, victim))
                 for victim in (0, 1)],
    "network": [(f"{launcher} starts {count} x {ranks} ranks in network namespaces",
                 functools.partial(meets, launcher, count, ranks))
                for launcher in ("launch", "torchrun", "mpirun", "mpiexec") for count, ranks in ((2, 1), (2, 2))] +
               [(f"what a rank sent before it left arrives on {count} x {ranks}",
                 functools.partial(delivers_what_a_rank_sent_before_it_left, count, ranks))
                for count, ranks in ((2, 1), (3, 2))] +
               [("a plan measures the network", plan_measures_the_network),
                ("uneven hosts are refused by name", refuses_uneven_hosts),
                ("MPICH is asked for an address", asks_mpich_for_an_address),
                ("a killed rank is named on 2 x 2", functools.partial(names_a_killed_rank, 2, 2)),
                ("a killed rank is named on 3 x 1", functools.partial(names_a_killed_rank, 3, 1)),
                ("a node that is missing is named", names_a_node_that_is_missing),
                ("a host name that means loopback is not listened at", loopback_name_is_not_listened_at),
                ("torchrun's ranks meet at a host name that means loopback", meets_at_a_loopback_name)],
    "slurm": [(f"{launcher} starts {count} x {ranks} ranks under a real Slurm",
               functools.partial(meets, launcher, count, ranks))
              for launcher in ("srun-none", "srun-pmix", "srun-pmi2") for count, ranks in ((2, 1), (2, 2))],
}


def main():
    if sys.argv[1] not in ("loopback", "bits"):
        try:
            hosts.own_namespace()
        except CannotRun as reason:
            print(f"left out: all of '{sys.argv[1]}': {reason}")
            return 0
    failed = 0
    for name, body in SUITES[sys.argv[1]]:
        try:
            said = body()
            print(f"passed: {name}{': ' + said if said else ''}", flush=True)
        except CannotRun as reason:
            print(f"left out: {name}: {reason}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"FAILED: {name}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
