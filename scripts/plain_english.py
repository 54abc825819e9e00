#!/usr/bin/env python3
"""Lists the comments that begin with a word with which fragments begin ("Of what a pass reduces."), as FILE:LINE: comment.

    scripts/plain_english.py [--count] [FOLDER ...]     zero, apps, plugins, python and tests where no folder is named

A comment is a block of lines that begin with // or ///, or what follows // behind code. Exit status 1 where there is one.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["zero", "apps", "plugins", "python", "tests", "examples"]
FRAGMENT = re.compile(r"(Of|What|Where|Whether|Those|Whose|Which)\b")
WHOLE_LINE = re.compile(r"\s*//[/!]?<?\s?(.*)")
BEHIND_CODE = re.compile(r"[^\"]*\S\s+//[/!]?<?\s?(.*)")


def fragments(file: Path) -> list[tuple[int, str]]:
    found, inside = [], False
    for number, line in enumerate(file.read_text().splitlines(), 1):
        whole = WHOLE_LINE.fullmatch(line)
        behind = None if whole else BEHIND_CODE.fullmatch(line)
        # An empty comment line ends a block, as blank lines and code do.
        words = (whole or behind).group(1) if whole or behind else ""
        if words and not (whole and inside) and FRAGMENT.match(words):
            found.append((number, words))
        inside = bool(words)
    return found


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--count"]
    total = 0
    for folder in arguments or FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix not in (".h", ".cpp", ".cu"):
                continue
            for number, words in fragments(file):
                total += 1
                if "--count" not in sys.argv:
                    print(f"{file.relative_to(ROOT)}:{number}: {words}")
    print(f"{total} comments begin with a fragment's word")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
