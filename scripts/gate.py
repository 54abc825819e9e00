#!/usr/bin/env python3
"""Runs the parts of the gate in this checkout. `.ci/run` starts this script in the place where gates build.

Every gate checks the format and runs each short test, in the build or builds that its BUILD in tests/**/CMakeLists.txt names. It runs one of
the four shards of the long suite, which the count of commits selects, and the long tests whose folder has changed. It runs the fuzzers, and
clang-tidy over files that have changed. Shard 3 brings ThreadSanitizer. Four gates whose counts of commits follow each other run everything.

A file has changed if it is unlike that of the last commit that passed a gate here (refs/gate/passed). On a machine where none has passed, the
newest first parent that is a day older than HEAD is compared instead. The end of the output names the parts that did not fit into the time;
long tests among them are due in the next gate here.

Environment: ALL=1 runs everything, whatever the time; PLAN=1 only says what would run; GATE_MINUTES is the time [30];
GATE_STUB=1 replaces what takes long by its name, to try this script.
"""
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARDS = 4
TSAN_SHARD = 3
TSAN_MINUTES = 20  # a build of the library from nothing and three tests
TSAN_LIMIT = 60  # minutes of a gate at most, where ThreadSanitizer is due
LINT_FILES = 16  # of 10 s of one core each
FUZZERS = {"config": ["zero/config/"], "safetensors": ["zero/checkpoint/"], "text": ["zero/data/tokenizers/", "zero/data/jinja/", "zero/data/example"],
           "tokenizer": ["zero/data/tokenizers/piece", "zero/data/utf8", "zero/data/token_pipe"],
           "tokens": ["zero/data/token_"]}
ENVIRONMENTS = {"python": "scripts/python_environment.sh", "monitors": "scripts/monitors_environment.sh",
                "trace": "scripts/trace_environment.sh"}

ALL = os.environ.get("ALL", "") == "1"
PLAN = os.environ.get("PLAN", "") == "1"
IN_PLACE = os.environ.get("ZERO_GATE_PLACE", "") == str(ROOT)  # and not in a checkout where somebody works
STUB = os.environ.get("GATE_STUB", "") == "1"
MINUTES = float("inf") if ALL else float(os.environ.get("GATE_MINUTES", 30))
START = time.monotonic()


def elapsed():
    return (time.monotonic() - START) / 60


def git(*arguments):
    """The output of git, or None where it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


class Test:
    """One line of build/PRESET/tests.tsv, which tests/CMakeLists.txt writes."""

    def __init__(self, line):
        name, folder, builds, shard, needs, targets, watches = line.rstrip("\n").split("\t")
        self.name, self.folder = name, folder
        self.builds = builds.split(",")
        self.shard = int(shard) if shard else None
        self.needs, self.targets = (text.split(",") if text else [] for text in (needs, targets))
        self.watches = [f"tests/{folder}/", f"zero/{folder}/", *(watches.split(",") if watches else [])]


def tests_of(preset):
    file = ROOT / "build" / preset / "tests.tsv"
    return [Test(line) for line in file.read_text().splitlines()] if file.exists() else []


class Part:
    def __init__(self, name, what):
        self.name, self.what = name, what
        self.passed, self.failed, self.skipped, self.status = 0, 0, 0, 0
        self.minutes, self.times = 0.0, []


RESULT = re.compile(r"^ *\d+/\d+ +Test +#\d+: (\S+) \.+ *(.*?) +([0-9.]+) sec")


class Gate:
    def __init__(self):
        self.parts, self.left_out = [], []

    def run(self, name, command, what="", slow=True):
        """Runs a command as one part, prints what it prints, and counts its tests. `what` is said in the table at the end."""
        part = Part(name, what)
        self.parts.append(part)
        command = [str(word) for word in command]
        print(f"\n== {name}: {shlex.join(command)[:400]}", flush=True)
        if STUB and slow:
            command = [*command, "-N"] if any(word.endswith("test.sh") for word in command) else ["true"]
        begin = time.monotonic()
        try:
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       text=True, errors="replace")
        except OSError as error:
            print(error, flush=True)
            part.status = 1
            return
        for line in process.stdout:
            print(line, end="", flush=True)
            if result := RESULT.match(line):
                test, outcome, seconds = result.groups()
                outcome = outcome.strip("* ")
                part.passed += outcome == "Passed"
                part.skipped += outcome == "Skipped"
                part.failed += outcome not in ("Passed", "Skipped")
                part.times.append((float(seconds), test, outcome))
        part.status = process.wait()
        part.minutes = (time.monotonic() - begin) / 60
        if part.status == 0 and not part.times and not STUB and any(word.endswith("test.sh") for word in command):
            print("no test ran", flush=True)
            part.status = 1
        print(f"== {name}: {'passed' if part.status == 0 else 'FAILED'} in {part.minutes:.1f} minutes", flush=True)

    def leave_out(self, what, why):
        self.left_out.append(f"{what} ({why})")

    def build(self, preset, tests, also=()):
        targets = sorted({target for test in tests for target in test.targets} | set(also))
        if targets:  # without any the script would build all
            self.run(f"build {preset}", ["scripts/build.sh", preset, "--keep-going", *targets], f"{len(targets)} targets")

    def fits(self, what, minutes, limit=MINUTES):
        """Returns whether there is time for a part of so many minutes. If not, the end of the output names it."""
        if elapsed() + minutes <= limit:
            return True
        self.leave_out(what, f"{minutes:.0f} minutes more, and {elapsed():.0f} of {limit:.0f} have gone")
        return False


def forget_what_no_longer_fits():
    """Removes the caches of CMake if a CMake file has changed, since a cache keeps the defaults of the old file, and removes all that was built
    if a compiler or LibTorch has changed. Object files stay valid without the cache: ninja knows their commands and all their headers."""
    def output(command):
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return hashlib.sha256(done.stdout.encode()).hexdigest()

    keys = {"tools": output("c++ --version; clang++-16 --version; cmake --version; source scripts/env.sh; stat -c '%n %i %Y' $LIBTORCH_ROOT"),
            "cmake": output("git ls-files -s 'CMakePresets.json' '*.cmake' '*CMakeLists.txt'; source scripts/env.sh; echo ${python_options[*]}")}
    kept = ROOT / "build" / "gate.json"
    old = json.loads(kept.read_text()) if kept.exists() else {}
    if old.get("tools") != keys["tools"]:
        shutil.rmtree(ROOT / "build", ignore_errors=True)
    elif old.get("cmake") != keys["cmake"]:
        for preset in ("release", "asan", "tsan", "lint"):
            (ROOT / "build" / preset / "CMakeCache.txt").unlink(missing_ok=True)
            for folder in (ROOT / "build" / preset / "CMakeFiles").glob("[0-9]*.[0-9]*.[0-9]*"):
                shutil.rmtree(folder)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(keys))


def names_pattern(tests):
    return "^(" + "|".join(sorted(re.escape(test.name).replace("\\-", "-") for test in tests)) + ")$"


def seconds_of_tests(preset):
    """Returns how long each test took in earlier runs in this folder, as ctest recorded it: {name: seconds}."""
    file = ROOT / "build" / preset / "Testing" / "Temporary" / "CTestCostData.txt"
    words = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return {line[0]: float(line[2]) for line in words if len(line) == 3 and line[1] != "0"}


def base_of_changes():
    """Returns the commit that the tree is compared with, and why it is that one."""
    passed = git("rev-parse", "--verify", "--quiet", "refs/gate/passed^{commit}")
    if passed:
        return passed, "the last commit that passed a gate here"
    date = int(git("log", "-1", "--format=%ct") or 0)
    older = git("rev-list", "-1", "--first-parent", f"--before={date - 24 * 3600}", "HEAD")
    if older:
        return older, "no gate has passed here; this first parent is a day older"
    roots = (git("rev-list", "--max-parents=0", "HEAD") or "").split()
    return (roots[-1], "no gate has passed here, and no commit is a day older; this is the first") if roots else (None, "git says nothing")


def in_any(file, prefixes):
    return any(file.startswith(prefix) for prefix in prefixes)


def check_union(release, asan):
    """Checks that the four shards and both builds together run every test that ctest knows. Returns a line for each mistake."""
    wrong = []
    known = {}
    for preset, tests in (("release", release), ("asan", asan)):
        listed = subprocess.run(["ctest", "--preset", preset, "-N"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        known[preset] = set(re.findall(r"^ +Test +#\d+: (\S+)", listed.stdout, re.M))
        named = {test.name for test in tests}
        wrong += [f"{name}: ctest runs it in {preset}, and tests.tsv does not have it" for name in sorted(known[preset] ^ named)]
    runs = {test.name for test in release if test.shard is None and "release" in test.builds}
    runs |= {test.name for test in asan if test.shard is None and "asan" in test.builds}
    for shard in range(SHARDS):
        runs |= {test.name for test in release if test.shard == shard}
    wrong += [f"{name}: no gate runs it" for name in sorted((known["release"] | known["asan"]) - runs)]
    print(f"{len(known['release'] | known['asan'])} tests: {len(runs)} of them run in four gates")
    return wrong


def main():
    gate = Gate()
    os.chdir(ROOT)
    gate.run("set-up", ["scripts/setup.sh", "lint", "asan"])
    gate.run("format", ["scripts/format.sh", "check"], slow=False)
    if IN_PLACE:
        forget_what_no_longer_fits()
    gate.run("configure", ["scripts/build.sh", "release", "--configure"], slow=False)
    gate.run("configure asan", ["scripts/build.sh", "asan", "--configure"], slow=False)
    release, asan = tests_of("release"), tests_of("asan")
    gate.run("every test", [sys.executable, __file__, "--check"], slow=False)

    commit = git("rev-parse", "HEAD")
    base, why = base_of_changes()
    changed = (git("diff", "--name-only", base, "HEAD") or "").splitlines() if base else []
    changed += [line[3:] for line in (git("status", "--porcelain") or "").splitlines()]  # HERE=1
    shard = int(git("rev-list", "--count", "HEAD") or 0) % SHARDS
    pending = (git("config", "--get-all", "gate.pending") or "").split()
    due = [test for test in release if ALL or test.shard == shard]
    more = [test for test in release if test.shard is not None and test not in due and
            (test.name in pending or any(in_any(file, test.watches) for file in changed))]
    seconds = seconds_of_tests("release")
    gate_release = [test for test in release if ALL or (test.shard is None and "release" in test.builds)]
    gate_asan = [test for test in asan if test.shard is None and (ALL or "asan" in test.builds)]
    print(f"\n== {len(changed)} files have changed since {(base or 'none')[:12]} ({why})")
    print(f"== release: {len(gate_release)} short tests, and shard {shard} of the long ones: {' '.join(test.name for test in due) or 'none'}")
    print(f"== asan: {len(gate_asan)} tests")
    print(f"== long tests whose folder has changed: {' '.join(test.name for test in more) or 'none'}", flush=True)
    if PLAN:
        return 0

    # Environments of due tests; without one its tests are skipped, and say so.
    for need, script in ENVIRONMENTS.items():
        if any(need in test.needs for test in due + more):
            gate.run(need, [script])
            if need == "python":
                gate.run("configure again", ["scripts/build.sh", "release", "--configure"], slow=False)
                again = {test.name: test for test in tests_of("release")}  # whose Python tests have targets now
                gate_release, due, more = ([again.get(test.name, test) for test in tests] for tests in (gate_release, due, more))

    tests = list({test.name: test for test in gate_release + due}.values())
    if ALL:
        gate.run("build release", ["scripts/build.sh", "release", "--keep-going"])
        gate.run("test release", ["scripts/test.sh", "release"], "every test")
    else:
        gate.build("release", tests, ["zero_program"])
        gate.run("test release", ["scripts/test.sh", "release", "-L", f"^(gate|shard{shard})$"],
                 f"{len(gate_release)} short tests; shard {shard}: {' '.join(test.name for test in due)}")
    if ALL:
        gate.run("build asan", ["scripts/build.sh", "asan", "--keep-going"])
        gate.run("test asan", ["scripts/test.sh", "asan", "--short"], "every test that is not long")
    else:
        gate.build("asan", gate_asan)
        gate.run("test asan", ["scripts/test.sh", "asan", "-L", "^gate$"], f"{len(gate_asan)} short tests")

    slow = [name for name, readers in FUZZERS.items() if ALL or any(in_any(file, [*readers, f"tests/fuzz/{name}"]) for file in changed)]
    quick = [name for name in FUZZERS if name not in slow]
    if quick:
        gate.run("fuzz", ["scripts/fuzz.sh", 15, *quick], " ".join(quick))
    if slow and gate.fits(f"fuzzers of {' '.join(slow)}, a minute each", 3):
        gate.run("fuzz, a minute", ["scripts/fuzz.sh", 60, *slow], " ".join(slow))

    fit, minutes = [], 1
    for test in more:
        cost = seconds.get(test.name, 60) / 60
        if elapsed() + minutes + cost <= MINUTES:
            fit.append(test)
            minutes += cost
    late = [test for test in more if test not in fit]
    if late:
        gate.leave_out(" ".join(test.name for test in late), f"no time: {elapsed():.0f} of {MINUTES:.0f} minutes have gone; due in the next gate here")
    if fit:
        gate.build("release", fit)
        gate.run("test changed", ["scripts/test.sh", "release", "-R", names_pattern(fit)], " ".join(test.name for test in fit))

    if shard == TSAN_SHARD or ALL:
        if gate.fits("ThreadSanitizer", TSAN_MINUTES, max(MINUTES, TSAN_LIMIT)):
            gate.run("configure tsan", ["scripts/build.sh", "tsan", "--configure"], slow=False)
            threads = [test for test in tests_of("tsan") if "tsan" in test.builds]
            gate.build("tsan", threads)
            gate.run("test tsan", ["scripts/test.sh", "tsan", "-L", "^gate$"], " ".join(test.name for test in threads))

    sources = [file for file in changed if file.endswith(".cpp") and not file.startswith(("examples/", "cmake/", "python/", "plugins/cuda/")) and
               (ROOT / file).exists()]
    if sources:
        first = int(commit[:8], 16) % len(sources)  # not always the same
        turned = sources[first:] + sources[:first]
        now, rest = turned[:LINT_FILES], turned[LINT_FILES:]
        if ALL:
            now, rest = sources, []
        if gate.fits(f"clang-tidy of {len(now)} files", len(now) / 6):
            gate.run("clang-tidy", ["scripts/lint.sh", *now], f"{len(now)} files")
        if rest:
            gate.leave_out(f"clang-tidy of {' '.join(rest)}", f"{LINT_FILES} files a gate; scripts/lint.sh takes others")

    return finish(gate, commit, late)


def finish(gate, commit, late):
    failed = sum(part.failed for part in gate.parts)
    failed += sum(part.status != 0 and part.failed == 0 for part in gate.parts)
    passed = sum(part.passed for part in gate.parts)
    print(f"\n{'part':<18} {'':<7} {'passed':>6} {'failed':>6} {'skipped':>7} {'minutes':>8}  what")
    for part in gate.parts:
        counts = [str(count) if part.times else "" for count in (part.passed, part.failed, part.skipped)]
        print(f"{part.name:<18} {'passed' if part.status == 0 else 'FAILED':<7} {counts[0]:>6} {counts[1]:>6} {counts[2]:>7} {part.minutes:8.1f}  {part.what}")
    print(f"{'whole':<50} {elapsed():5.1f}")
    times = sorted(((seconds, test, part.name) for part in gate.parts for seconds, test, _ in part.times), reverse=True)
    print("longest: " + ", ".join(f"{test} {seconds:.0f} s ({part})" for seconds, test, part in times[:12]))
    for part in gate.parts:
        wrong = [f"{test} ({outcome})" for _, test, outcome in part.times if outcome not in ("Passed", "Skipped")]
        if wrong:
            print(f"failed in {part.name}: {', '.join(wrong)}")
        skipped = [test for _, test, outcome in part.times if outcome == "Skipped"]
        if skipped:
            print(f"skipped in {part.name}: {', '.join(skipped)}")
    for text in gate.left_out:
        print(f"left out: {text}")
    if os.environ.get("ZERO_GATE_LEFT_OUT"):
        print(f"NOT part of this gate, since it is not committed (HERE=1 tests it):\n{os.environ['ZERO_GATE_LEFT_OUT']}")
    if not failed and not STUB and IN_PLACE:
        git("update-ref", "refs/gate/passed", commit)
        git("config", "--unset-all", "gate.pending")
        for test in late:
            git("config", "--add", "gate.pending", test.name)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        mistakes = check_union(tests_of("release"), tests_of("asan"))
        print("\n".join(mistakes))
        sys.exit(1 if mistakes else 0)
    sys.exit(main())
