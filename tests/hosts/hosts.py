#!/usr/bin/env python3
"""Several hosts on one machine, and the launchers that clusters have on them.

  tests/hosts/hosts.py --hosts 2 --ranks 2 --rate 1gbit --launcher mpirun -- COMMAND...

A host is a set of namespaces: a network with one cable, a host name, processes, /tmp/.. and /dev/shm of its own.
The cables meet in a bridge in a namespace of this program's. Nothing of it is in the machine's own network, and
all of it ends with this program, however that ends. It needs root, or a kernel that lets users make namespaces.
With --loopback it needs neither: hosts are ranks that are told different host names (ZERO_HOST).

When the command has ended, the bytes that each host's cable carried are printed, by the interface's own counters.
"""
import argparse
import contextlib
import glob
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import typing

import agent

HERE = pathlib.Path(__file__).resolve().parent
PORT = 29500
LAUNCHERS = ("launch", "torchrun", "mpirun", "mpiexec", "srun-none", "srun-pmix", "srun-pmi2")
REEXECUTED = "ZERO_TEST_NAMESPACE"
HEADER = 14 + 20 + 32  # bytes: Ethernet, IPv4, TCP with time stamps
SEGMENT = 1500 - 20 - 32  # bytes of TCP's payload in a full packet


class CannotRun(Exception):
    """This machine lacks something; the message says what."""


class Carried(typing.NamedTuple):
    """What a host's cable has carried, by the counters of its interface and of its TCP."""
    sent: int  # bytes, headers included
    received: int
    packets: int  # sent
    repeated: int  # segments that TCP sent again

    @property
    def payload(self):
        """Bytes sent without what only carries them: headers, acknowledgements, and what was lost or late and sent again.
        How many of those there are depends on how busy the machine is."""
        return self.sent - HEADER * self.packets - SEGMENT * self.repeated

    def __sub__(self, before):
        return Carried(*(mine - other for mine, other in zip(self, before)))


def own_namespace():
    """Goes on in a network and mount namespace of its own, once; as root of it where this user is not root."""
    if REEXECUTED in os.environ:
        return
    options = ["--net", "--mount"] + ([] if os.geteuid() == 0 else ["--user", "--map-root-user"])
    probe = subprocess.run(["unshare", *options, "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        raise CannotRun(f"no namespaces can be made here ({probe.stderr.strip()})")
    os.environ[REEXECUTED] = "1"
    os.execvp("unshare", ["unshare", *options, sys.executable, *sys.argv])


def need(*programs):
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise CannotRun(f"there is no {' and no '.join(missing)}")


class Host:
    """One virtual host. Commands run there as if by ssh."""

    def __init__(self, number, folder, address):
        self.number = number
        self.name = f"zh{number}"
        self.address = address
        self.socket = str(folder / self.name)

    def run(self, words, environment=None, folder=None, output=None):
        """Blocks; the exit status."""
        streams = (os.open(os.devnull, os.O_RDONLY), output or 1, output or 2)
        try:
            return agent.run(self.socket, [str(word) for word in words], {**os.environ, "TMPDIR": agent.temporary_folder(self.socket), **(environment or {})},
                             str(folder or os.getcwd()), streams)
        finally:
            os.close(streams[0])

    def start(self, words, environment=None, output=None):
        """A thread that has its status in `.status` once it has been joined."""
        return Running(lambda: self.run(words, environment, output=output))

    def text(self, words):
        with tempfile.TemporaryFile() as out:
            self.run(words, output=out.fileno())
            out.seek(0)
            return out.read().decode()

    def counters(self):
        """What the cable has carried since the host's start."""
        files = [f"/sys/class/net/eth0/statistics/{which}" for which in ("tx_bytes", "rx_bytes", "tx_packets")]
        lines = self.text(["cat", *files, "/proc/net/snmp"]).splitlines()
        names, numbers = (line.split() for line in lines if line.startswith("Tcp:"))
        return Carried(*(int(line) for line in lines[:3]), int(numbers[names.index("RetransSegs")]))


class Running(threading.Thread):
    def __init__(self, body):
        super().__init__(daemon=True)
        self.body = body
        self.status = None
        self.start()

    def run(self):
        self.status = self.body()


class Network:
    """`count` hosts zh1, zh2, ... at 10.77.0.1, ..., each with a cable of `rate` both ways ("1gbit"; None: unlimited)."""

    def __init__(self, count, rate=None, burst="1mb"):
        need("ip", "unshare", "hostname", *(["tc"] if rate else []))
        self.remove_left_over()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"zero-hosts-{os.getpid()}-"))
        os.environ[agent.FOLDER] = str(self.folder)
        self.hosts = [Host(k, self.folder, f"10.77.0.{k}") for k in range(1, count + 1)]
        self.agents = []
        names = self.folder / "names"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{h.address} {h.name}\n" for h in self.hosts))
        os.environ["ZERO_TEST_NAMES"] = str(names)
        try:
            self.make_bridge()
            for host in self.hosts:
                self.make_host(host, names)
                self.connect(host, rate, burst)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def remove_left_over():
        """A few files of a run that was killed are all that can stay."""
        for folder in glob.glob(f"{tempfile.gettempdir()}/zero-hosts-[0-9]*-*"):
            if not os.path.exists(f"/proc/{folder.rsplit('-', 2)[1]}"):
                shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def command(*words):
        subprocess.run([str(word) for word in words], check=True)

    def make_bridge(self):
        self.command("ip", "link", "set", "lo", "up")
        self.command("ip", "link", "add", "bridge", "type", "bridge")
        self.command("ip", "link", "set", "bridge", "up")

    def make_host(self, host, names):
        # A mount of /sys shows the network of the namespace in which it is made.
        script = (f"mount --bind {names} /etc/hosts && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && "
                  f"exec {sys.executable} {HERE}/agent.py {host.name} {host.socket}")
        process = subprocess.Popen(["unshare", "--net", "--uts", "--pid", "--mount", "--ipc", "--fork", "--kill-child",
                                    "--mount-proc", "/bin/sh", "-c", script], preexec_fn=agent.die_with_parent)
        self.agents.append(process)
        end = time.monotonic() + 60
        while not os.path.exists(host.socket):
            if process.poll() is not None:
                raise CannotRun(f"host {host.name} cannot be made (status {process.returncode})")
            if time.monotonic() > end:
                raise CannotRun(f"host {host.name} is not there after 60 s")
            time.sleep(0.01)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        host.process = int(children[0])

    def connect(self, host, rate, burst):
        cable = f"cable{host.number}"
        self.command("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host.process)
        self.command("ip", "link", "set", cable, "master", "bridge", "up")
        inside = [["ip", "link", "set", "lo", "up"], ["ip", "addr", "add", f"{host.address}/24", "dev", "eth0"],
                  ["ip", "link", "set", "eth0", "up"]]
        if rate:
            shape = ["root", "tbf", "rate", rate, "burst", burst, "latency", "100ms"]
            self.command("tc", "qdisc", "replace", "dev", cable, *shape)
            inside.append(["tc", "qdisc", "replace", "dev", "eth0", *shape])
        for words in inside:
            if host.run(words) != 0:
                raise CannotRun(f"{' '.join(words)} failed on {host.name}")

    def cut(self, host):
        """Unplugs the cable."""
        self.command("ip", "link", "set", f"cable{host.number}", "down")

    def mend(self, host):
        self.command("ip", "link", "set", f"cable{host.number}", "up")

    def close(self):
        # The kernel takes a dead namespace's cable away some time later: here it goes at once, so that its name is free.
        for link in [f"cable{host.number}" for host in self.hosts] + ["bridge"]:
            subprocess.run(["ip", "link", "del", link], capture_output=True)
        for process in self.agents:  # the agent dies with it, and its namespaces with the agent
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def python_with_torch():
    """ZERO_TEST_TORCH, or that of the virtual environment in which docs/clusters.md installs it, or this Python."""
    for python in (os.environ.get("ZERO_TEST_TORCH"), os.path.expanduser("~/.cache/libzero/hosts/torch/bin/python"),
                   sys.executable):
        if python and shutil.which(python) and subprocess.run(
                [python, "-c", "import torch.distributed.run"], capture_output=True).returncode == 0:
            return python
    raise CannotRun("no Python here has torch, whose torchrun is wanted; name one in ZERO_TEST_TORCH")


class Slurm:
    """slurmctld, and a slurmd on each host, with all their files in a folder of their own."""

    def __init__(self, network, ranks):
        need("slurmctld", "slurmd", "srun", "munged")
        if os.geteuid() != 0 or REEXECUTED not in os.environ:
            raise CannotRun("Slurm's daemons want root")
        self.network = network
        self.folder = folder = network.folder / "slurm"
        first = network.hosts[0]
        for part in ("state", "log", *(f"{what}.{h.name}" for h in network.hosts for what in ("spool", "tmp"))):
            (folder / part).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        socket = folder / "munge.socket"
        # Version 1 of cgroups asks for none until it is used. Without a TmpFS of each node's own, two nodes on one
        # machine make the same folder for PMIx, and only "task launch failed" is seen of it.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        nodes = "".join(f"NodeName={h.name} NodeAddr={h.address} CPUs={max(ranks, 2)} State=UNKNOWN\n"
                        for h in network.hosts)
        (folder / "slurm.conf").write_text(f"""ClusterName=zero
SlurmctldHost={first.name}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldTimeout=30
SlurmdTimeout=30
{nodes}PartitionName=all Nodes={",".join(h.name for h in network.hosts)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
""")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        network.folder.chmod(0o755)  # munged insists

        def daemon(host, words):
            with open(folder / "log" / f"{words[0]}.{host.name}.out", "ab") as out:
                host.start(words, output=os.dup(out.fileno()))

        daemon(first, ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}",
                     f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed",
                     f"--log-file={folder}/log/munged.log"])
        self.wait_for(socket.exists, "munged")
        daemon(first, ["slurmctld", "-D"])
        for host in network.hosts:
            daemon(host, ["slurmd", "-D", "-N", host.name])
        self.wait_for(lambda: first.text(["sinfo", "-h", "-t", "idle", "-o", "%D"]).strip() == str(len(network.hosts)),
                      "the nodes")

    def wait_for(self, ready, what):
        for _ in range(150):
            if ready():
                return
            time.sleep(0.2)
        logs = "".join(f"--- {log}\n{pathlib.Path(log).read_text()[-2000:]}" for log in glob.glob(f"{self.folder}/log/*"))
        raise CannotRun(f"Slurm does not come up: {what} did not\n{logs}")


def start_launcher(network, launcher, ranks, command, zero=None):
    """The commands that start `command` as `ranks` ranks on each host: (host, words, environment)."""
    hosts = network.hosts
    first = hosts[0]
    all_ranks = ranks * len(hosts)
    slots = ",".join(f"{host.name}:{ranks}" for host in hosts)
    if launcher == "launch":
        return [(host, [zero, "launch", "-n", ranks, "--nnodes", len(hosts), "--node-rank", k, "--master-addr",
                        first.name, "--master-port", PORT, "--", *command], {}) for k, host in enumerate(hosts)]
    if launcher == "torchrun":
        python = python_with_torch()
        return [(host, [python, "-m", "torch.distributed.run", "--nnodes", len(hosts), "--nproc-per-node", ranks,
                        "--node-rank", k, "--master-addr", first.name, "--master-port", PORT, "--no-python",
                        *command], {}) for k, host in enumerate(hosts)]
    if launcher == "mpirun":
        need("mpirun.openmpi")
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [(first, ["mpirun.openmpi", *as_root, "-n", all_ranks, "--host", slots, "--map-by",
                         f"ppr:{ranks}:node", "--bind-to", "none", "--mca", "plm_rsh_agent", HERE / "rsh",
                         *command], {})]
    if launcher == "mpiexec":
        need("mpiexec.mpich")
        return [(first, ["mpiexec.mpich", "-launcher", "ssh", "-launcher-exec", HERE / "rsh", "-iface", "eth0",
                         "-hosts", slots, "-n", all_ranks, "-ppn", ranks, "-genv", "MASTER_ADDR", first.name,
                         "-genv", "MASTER_PORT", PORT, *command], {})]
    if launcher.startswith("srun-"):
        return [(first, ["srun", f"--mpi={launcher[5:]}", "-N", len(hosts), f"--ntasks-per-node={ranks}",
                         "--kill-on-bad-exit=1", *command], {})]
    raise CannotRun(f"there is no launcher {launcher}; these are: {', '.join(LAUNCHERS)}")


def run_all(network, commands, output=None):
    """Runs (host, words, environment) together; the first status that is not 0."""
    threads = [host.start(words, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **environment}, output)
               for host, words, environment in commands]
    for thread in threads:
        thread.join()
    return next((thread.status for thread in threads if thread.status), 0)


def run(launcher, hosts, ranks, command, rate=None, burst="1mb", zero=None, output=None):
    """(exit status, [what the cable of each host carried])"""
    with Network(hosts, rate, burst) as network:
        if launcher.startswith("srun"):
            Slurm(network, ranks)
        before = [host.counters() for host in network.hosts]
        status = run_all(network, start_launcher(network, launcher, ranks, command, zero), output)
        after = [host.counters() for host in network.hosts]
        return status, [late - early for early, late in zip(before, after)]


def loopback_commands(launcher, hosts, ranks, command, zero, port):
    """As start_launcher's, without namespaces: words and environment of each host's launcher."""
    place = ["--master-addr", "127.0.0.1", "--master-port", port]
    for k in range(hosts):
        environment = {"ZERO_HOST": f"zh{k + 1}"}
        if launcher == "launch":
            yield [zero, "launch", "-n", ranks, "--nnodes", hosts, "--node-rank", k, *place, "--", *command], environment
        elif launcher == "torchrun":
            yield [python_with_torch(), "-m", "torch.distributed.run", "--nnodes", hosts, "--nproc-per-node", ranks,
                   "--node-rank", k, *place, "--no-python", *command], environment
        else:
            raise CannotRun(f"{launcher} is not run over loopback; launch and torchrun are")


def free_port():
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_over_loopback(launcher, hosts, ranks, command, zero=None, output=None):
    processes = [subprocess.Popen([str(word) for word in words], env={**os.environ, **environment}, stdout=output,
                                  stderr=output, preexec_fn=agent.die_with_parent)
                 for words, environment in loopback_commands(launcher, hosts, ranks, command, zero, free_port())]
    statuses = [process.wait() for process in processes]
    return next((status for status in statuses if status), 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="launch")
    parser.add_argument("--rate", help="of each host's cable, as tc writes it: 1gbit")
    parser.add_argument("--burst", default="1mb", help="that the cable lets through at once")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--zero", default="zero", help="the program zero, for the launcher `launch` [zero]")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if options.loopback:
            return run_over_loopback(options.launcher, options.hosts, options.ranks, options.command, options.zero)
        own_namespace()
        status, carried = run(options.launcher, options.hosts, options.ranks, options.command, options.rate,
                              options.burst, options.zero)
    except CannotRun as reason:
        print(f"hosts.py: {reason}", file=sys.stderr)
        return 77
    for k, cable in enumerate(carried, 1):
        print(f"zh{k}: the cable carried {cable.sent} bytes out and {cable.received} bytes in")
    return status


if __name__ == "__main__":
    sys.exit(main())
