#!/usr/bin/env python3
"""libzero's collectives beside Gloo's and MPI's: the time of one all-gather and one reduce-scatter.

    benchmarks/peers/collectives.py                        64 MiB of fp32, 2 ranks of one host; Gloo, and the MPIs that PyPI has
    benchmarks/peers/collectives.py --ranks 4 --size 16777216
    benchmarks/peers/collectives.py --hosts 2 --ranks 1 --rate 1gbit       between hosts of this machine, beside iperf3

With --hosts, hosts are network namespaces (tests/hosts/hosts.py) with links of a given speed, the MPIs are Debian's (openmpi-bin, mpich),
and what iperf3 reaches over the same link comes first: the all-gather's and the reduce-scatter's bytes over it are the least time.
libzero is then run three times: over LibTorch's Gloo, and over each of the MPIs (ZERO_TRANSPORT), each collective for itself, as the peers do.

Each round runs `zero bench collectives`, Gloo (through torch.distributed, over the loopback device) and each MPI (through mpi4py)
in turn. A run's time is the median over its repetitions of the slowest rank's; ours has a barrier at its end. SIZE is that of the full buffer: what each rank has
after the all-gather and before the reduce-scatter. Needs the release build and benchmarks/peers/setup.sh.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent.parent
HOSTS = ROOT / "tests/hosts/hosts.py"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "libzero"
COLLECTIVES = ("all_gather", "reduce_scatter")
LAUNCHERS = {"OpenMPI": "mpirun", "MPICH": "mpiexec"}  # of tests/hosts/hosts.py

# A peer's rank: `collective(name)` does one, `barrier` meets the others, `slowest(seconds)` is the largest of all ranks'.
RANK = """
import os, sys, time
from statistics import median
peer, size, repetitions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if peer == "gloo":
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    full, part = torch.zeros(size // 4), torch.zeros(size // 4 // ranks)
    barrier = dist.barrier
    # Gloo has no reduce-scatter of one array: PyTorch builds it from what there is.
    collectives = {"all_gather": lambda: dist.all_gather_into_tensor(full, part),
                   "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full)}
    def slowest(seconds):
        value = torch.tensor(seconds, dtype=torch.double)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()
else:
    import numpy
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    rank, ranks = world.rank, world.size
    # Not numpy.zeros, of which nothing is in memory but one page of zeros, read again and again.
    full, part = numpy.ones(size // 4, numpy.float32), numpy.ones(size // 4 // ranks, numpy.float32)
    barrier = world.Barrier
    collectives = {"all_gather": lambda: world.Allgather(part, full), "reduce_scatter": lambda: world.Reduce_scatter_block(full, part)}
    def slowest(seconds):
        return world.allreduce(seconds, MPI.MAX)
for name, collective in collectives.items():
    times = []
    for _ in range(repetitions + 3):
        barrier()
        start = time.perf_counter()
        collective()
        times.append(slowest(time.perf_counter() - start))
    if rank == 0:
        print("RESULT", name, median(times[3:]), flush=True)
barrier()
if peer == "gloo":
    os._exit(0)  # Gloo's own end aborts where the other rank is gone already
"""


def over_hosts(options: argparse.Namespace, launcher: str, command: list) -> str:
    """What `command` prints as ranks of virtual hosts."""
    words = [sys.executable, str(HOSTS), "--hosts", str(options.hosts), "--ranks", str(options.ranks), "--rate", options.rate]
    words += ["--launcher", launcher, "--zero", options.zero, "--", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "ZERO_TEST_TORCH": options.python}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{Path(command[0]).name} failed under {launcher}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def iperf3(options: argparse.Namespace) -> float:
    """Bytes a second from one host to another."""
    script = "case $(hostname) in *1) exec iperf3 -s -1 >/dev/null;; esac; sleep 1; iperf3 -c $MASTER_ADDR -t 5 -f k"
    one = argparse.Namespace(**{**vars(options), "hosts": 2, "ranks": 1})
    output = over_hosts(one, "launch", ["sh", "-c", script])
    found = re.search(r"([0-9.]+) Kbits/sec.*receiver", output)
    if found is None:
        sys.exit(f"iperf3 says no speed:\n{output[-2000:]}")
    return float(found[1]) * 1000 / 8


def parse(output: str) -> dict[str, float]:
    words = [line.split() for line in output.splitlines() if line.startswith("RESULT")]
    return {name: float(seconds) for _, name, seconds in words}


def libzero(options: argparse.Namespace, launcher: str = "launch", transport: str = "gloo") -> dict[str, float]:
    times = {}
    for collective in COLLECTIVES:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [options.zero, "bench", "collectives", "--collectives", collective, "--sizes", str(options.size)]
            command += ["--memory", "arena", "--repetitions", str(options.repetitions), "--json", file.name]
            if options.hosts > 1:
                over_hosts(options, launcher, ["env", f"ZERO_TRANSPORT={transport}", *command])
            else:
                subprocess.run([*command, "--nproc", str(options.ranks)], check=True, stdout=subprocess.DEVNULL)
            rows = json.loads(Path(file.name).read_text())["results"]
        times |= {row["operation"]: row["microseconds"]["median"] * 1e-6 for row in rows if row["operation"] == collective}
    return times


def gloo(options: argparse.Namespace) -> dict[str, float]:
    if options.hosts > 1:
        return parse(over_hosts(options, "torchrun", [options.python, "-c", RANK, "gloo", str(options.size), str(options.repetitions)]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(options.ranks):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [options.python, "-c", RANK, "gloo", str(options.size), str(options.repetitions)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    outputs = [rank.communicate()[0] for rank in ranks]
    return parse(outputs[0])


def mpi(options: argparse.Namespace, name: str) -> dict[str, float]:
    if options.hosts > 1:
        ours, debians = {"OpenMPI": ("libmpi.so.40", "libmpi.so.40"), "MPICH": ("libmpi.so.12", "libmpich.so.12")}[name]
        with tempfile.TemporaryDirectory() as folder:  # Debian has another name for MPICH's library
            library = Path(folder) / ours
            library.symlink_to(f"/usr/lib/{os.uname().machine}-linux-gnu/{debians}")
            command = ["env", f"MPI4PY_LIBMPI={library}", f"LD_LIBRARY_PATH={folder}", options.python, "-c", RANK, name]
            return parse(over_hosts(options, LAUNCHERS[name], [*command, str(options.size), str(options.repetitions)]))
    folder = Path(options.python).parent.parent / name.lower()
    library = folder / "lib" / {"OpenMPI": "libmpi.so.40", "MPICH": "libmpi.so.12"}[name]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPI4PY_LIBMPI": str(library), "LD_LIBRARY_PATH": str(folder / "lib")}
    if name == "OpenMPI":
        environment |= {"OPAL_PREFIX": str(folder), "PRTE_PREFIX": str(folder), "PMIX_PREFIX": str(folder)}
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environment |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    command = [str(folder / "bin" / "mpiexec"), "-n", str(options.ranks), options.python, "-c", RANK, name]
    command += [str(options.size), str(options.repetitions)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True)
    times = parse(output.stdout)
    if not times:
        sys.exit(f"{name} gave no result (status {output.returncode}):\n{output.stderr[-2000:]}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1, help="[1]")
    parser.add_argument("--rate", default="1gbit", help="of each link between hosts, as tc writes it [1gbit]")
    parser.add_argument("--ranks", type=int, default=2, help="of a host [2]")
    parser.add_argument("--size", type=int, default=64 << 20, help="bytes of the full buffer [67108864]")
    parser.add_argument("--repetitions", type=int, default=21, help="of each run [21]")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of each [5]")
    parser.add_argument("--peers", default="Gloo,OpenMPI,MPICH", help="with commas between [Gloo,OpenMPI,MPICH]")
    parser.add_argument("--zero", default=str(ROOT / "build/release/zero"), help="the program [build/release/zero]")
    parser.add_argument("--python", default=str(CACHE / "peers/bin/python"), help="that of setup.sh")
    parser.add_argument("--json", help="where to write everything that was measured")
    options = parser.parse_args()
    peers = options.peers.split(",")
    rounds = []
    if options.hosts > 1:
        if shutil.which("iperf3") is None:
            parser.error("iperf3 is missing; as root, run: apt-get install iperf3")
        link = iperf3(options)
        # A host's share of the whole buffer leaves it once to each of the others.
        least = options.size * (options.hosts - 1) / options.hosts / link
        print(f"{options.hosts} hosts, {options.rate}: iperf3 {link * 8e-9:.3f} Gbit/s, at which a host's bytes take {least * 1e3:.1f} ms")
    for _ in range(options.rounds):
        times = {"libzero": libzero(options)}
        for peer in peers:
            if options.hosts > 1 and peer in LAUNCHERS:
                times[f"libzero, {peer}"] = libzero(options, LAUNCHERS[peer], peer.lower())
            times[peer] = gloo(options) if peer == "Gloo" else mpi(options, peer)
        rounds.append(times)
    print(f"{options.size / (1 << 20):.4g} MiB fp32, {options.ranks} ranks{' a host' if options.hosts > 1 else ''}: median ms, and the time over libzero's by round")
    for collective in COLLECTIVES:
        for who in rounds[0]:
            ratios = [one[who][collective] / one["libzero"][collective] for one in rounds]
            spread = f"{median(ratios):6.2f}x  ({min(ratios):.2f} to {max(ratios):.2f})" if who != "libzero" else ""
            print(f"{collective:<16} {who:<16} {median(one[who][collective] for one in rounds) * 1e3:8.2f} {spread}")
    if options.json:
        Path(options.json).write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    main()
