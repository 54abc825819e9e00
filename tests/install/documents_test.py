#!/usr/bin/env python3
"""What documents and comments point to exists: links, notes, a page for each subcommand of the program, and the options
that pages name. And folders include only those above them.

    documents_test.py SOURCE_FOLDER ZERO_PROGRAM
"""

import re
import subprocess
import sys
from pathlib import Path

# Options of other programs: torchrun, mpirun, srun, sbatch, docker, cmake, zero_bench, the benchmarks' own scripts.
OTHERS = {"--elements", "--parameters", "--nproc-per-node", "--no-python", "--ntasks", "--allow-run-as-root", "--oversubscribe", "--install", "--prefix", "--build", "--preset", "--kills", "--signal", "--version", "--in-memory", "--shm-size"}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(line.lstrip("#")) for line in FENCE.sub("", page.read_text()).splitlines() if line.startswith("#")}


def broken_links(page: Path) -> list[str]:
    problems = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, place = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            problems.append(f"{page.name} links to {target}, which does not exist")
        elif place and place not in anchors(file):
            problems.append(f"{page.name} links to {target}, which has no such heading")
    return problems


def wrong_notes(source: Path) -> list[str]:
    """Each Note [Title] that a file refers to is in some file, as a line of its own."""
    suffixes = {".h", ".cpp", ".cu", ".cuh", ".py", ".md", ".sh", ".txt"}
    folders = ("zero", "apps", "plugins", "python", "tests", "docs", "examples", "benchmarks", "scripts", "cmake")
    files = [file for folder in folders for file in (source / folder).rglob("*") if file.suffix in suffixes]
    written, referred = set(), {}
    for file in [*files, *source.glob("*.md")]:
        if not file.is_file() or file.samefile(__file__):
            continue
        text = file.read_text(errors="replace")
        written.update(re.findall(r"^\W*Note \[([^\]]+)\]\W*$", text, re.MULTILINE))
        for note in re.findall(r"Note \[([^\]]+)\]", re.sub(r"\s*\n\s*(?://+|#)?\s*", " ", text)):
            referred.setdefault(note, file.relative_to(source))
    return [f"{file} refers to Note [{note}], which no file has" for note, file in sorted(referred.items())
            if note not in written]


def upward_includes(source: Path) -> list[str]:
    """Each folder of zero/ includes only those above it, in the order of zero/CMakeLists.txt."""
    folders = re.findall(r"add_subdirectory\((\w+)\)", (source / "zero/CMakeLists.txt").read_text())
    place = {folder: index for index, folder in enumerate(folders)}
    problems = []
    for file in sorted((source / "zero").glob("*/**/*")):
        if file.suffix not in {".h", ".cpp"}:
            continue
        own = file.relative_to(source / "zero").parts[0]
        for other in re.findall(r'#include "zero/(\w+)/', file.read_text()):
            if place[other] > place[own]:
                problems.append(f"{file.relative_to(source)} includes zero/{other}, which is below zero/{own}")
    return problems


def help_of(program: str, *words: str, option: str = "--help") -> str:
    return subprocess.run([program, *words, option], check=True, capture_output=True, text=True).stdout


def listed(text: str) -> list[str]:
    """The names that a help lists, each indented by two blanks."""
    return re.findall(r"^  ([a-z]+)  ", text, re.MULTILINE)


def main() -> int:
    source, program = Path(sys.argv[1]), sys.argv[2]
    pages = [*source.glob("*.md"), *(source / "docs").glob("*.md"), source / "benchmarks" / "README.md"]
    problems = [problem for page in pages for problem in broken_links(page)]

    problems += wrong_notes(source) + upward_includes(source)

    subcommands = listed(help_of(program))
    if "train" not in subcommands:
        problems.append("`zero --help` lists no subcommand `train`")
    known = set(OTHERS)
    for subcommand in subcommands:
        if not (source / "docs" / f"zero-{subcommand}.md").exists():
            problems.append(f"`zero {subcommand}` has no page docs/zero-{subcommand}.md")
        texts = [help_of(program, subcommand)]
        if subcommand == "bench":
            texts += [help_of(program, subcommand, subject) for subject in listed(texts[0])]
        if subcommand == "ckpt":
            texts += [help_of(program, subcommand, action) for action in listed(texts[0])]
        if "--help-all" in texts[0]:
            texts.append(help_of(program, subcommand, option="--help-all"))
        if subcommand == "data":
            texts += [help_of(program, subcommand, action) for action in listed(texts[0])]
        known.update(option for text in texts for option in re.findall(r"--[a-z][a-z0-9-]*", text))
    for page in [source / "README.md", *(source / "docs").glob("zero-*.md")]:
        for option in sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page.read_text())) - known):
            problems.append(f"{page.name} names {option}, which no subcommand has")

    print("\n".join(problems) or f"{len(pages)} pages, {len(subcommands)} subcommands, {len(known)} options")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
