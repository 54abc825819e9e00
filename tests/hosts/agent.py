#!/usr/bin/env python3
"""The first process of a virtual host: starts what it is asked to start there, as an ssh server would.

agent.py NAME SOCKET    waits at the unix socket until its parent ends
rsh [-x ...] HOST COMMAND...   (the same file by that name) runs COMMAND, a shell's text, on HOST
"""
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys

PR_SET_PDEATHSIG = 1
FOLDER = "ZERO_TEST_HOSTS"  # the environment variable that names the folder of the hosts' sockets


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(name, path):
    """Each connection is one command: its words, environment and folder, with three descriptors.
    Its exit status goes back. Whoever hangs up before has the command killed."""
    subprocess.run(["hostname", name], check=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)  # whoever sees it may connect
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector.register(wake, selectors.EVENT_READ)
    running = {}  # pid -> connection

    def start(connection):
        message, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        request = json.loads(message)
        stdin, stdout, stderr = fds
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                for target, fd in enumerate((stdin, stdout, stderr)):
                    os.dup2(fd, target)
                os.closerange(3, 256)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.chdir(request["folder"])
                os.execvpe(request["words"][0], request["words"], request["environment"])
            except OSError as error:
                print(f"{name}: cannot run {request['words'][0]}: {error}", file=sys.stderr, flush=True)
            os._exit(127)
        for fd in fds:
            os.close(fd)
        running[pid] = connection
        selector.register(connection, selectors.EVENT_READ, pid)

    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                start(listener.accept()[0])
            elif key.fileobj is wake:
                wake.recv(4096)
            elif key.data in running:
                running.pop(key.data)
                selector.unregister(key.fileobj)
                key.fileobj.close()
                os.killpg(key.data, signal.SIGKILL)
        while True:  # orphans too: this is the first process of its namespace
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            connection = running.pop(pid, None)
            if connection is None:
                continue
            selector.unregister(connection)
            code = os.waitstatus_to_exitcode(status)
            try:
                connection.sendall(str(code if code >= 0 else 128 - code).encode())
            except OSError:
                pass
            connection.close()


def run(path, words, environment, folder, streams=(0, 1, 2)):
    """Runs a command at a host's agent and returns its exit status."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        message = json.dumps({"words": words, "environment": environment, "folder": folder}).encode()
        socket.send_fds(connection, [message], list(streams))
        status = connection.recv(64)
    return int(status) if status else 255


def temporary_folder(path):
    """Of the host whose agent listens at `path`: hosts do not share /tmp."""
    folder = path + ".tmp"
    os.makedirs(folder, exist_ok=True)
    return folder


def remote_shell(words):
    """What mpirun and mpiexec take for ssh."""
    while words and words[0].startswith("-"):
        words = words[1:]
    host, command = words[0], " ".join(words[1:])
    kept = ("PATH", "HOME", "USER", "LANG", "SHELL", FOLDER)
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    path = os.path.join(os.environ[FOLDER], host)
    return run(path, ["/bin/sh", "-c", command], {**environment, "TMPDIR": temporary_folder(path)}, "/")


if __name__ == "__main__":
    if os.path.basename(sys.argv[0]) == "rsh":
        sys.exit(remote_shell(sys.argv[1:]))
    die_with_parent()
    serve(sys.argv[1], sys.argv[2])
