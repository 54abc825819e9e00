#!/usr/bin/env python3
"""Lists the comments that begin with a word with which fragments begin ("Of what a pass reduces."), as FILE:LINE: comment.

    scripts/plain_english.py [--count] [--more] [FOLDER ...]     all folders of sources if none is named

A comment is a block of lines that begin with // or ///, or the text after // behind code. The exit status is 1 if there is one.
--more also lists comments that are probably fragments: they begin with a conjunction ("And where nothing does."), or with a
preposition or an "As" and have no verb in their first sentence. It finds some whole sentences too, so it changes no exit status.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["zero", "apps", "plugins", "python", "tests", "examples"]
FRAGMENT = re.compile(r"(Of|What|Where|Whether|Those|Whose|Which)\b")
# Words that rarely begin a whole sentence.
CONJUNCTION = re.compile(r"(And|Also|Anew|Else|Nor|Not|No longer|Or|Than|That|Until|Whatever|Who|Whoever|Why)\b(?! is\b)")
# Words that begin a whole sentence or a fragment.
OPENING = re.compile(r"(After|All|As|At|Before|Behind|Beside|Between|By|For|From|In|On|Only|Since|So|To|With|Without)\b")
VERB = re.compile(
    r"\b(am|are|be|been|can|cannot|could|did|do|does|had|has|have|is|may|might|must|need|needs|was|were|will|would|should|"
    r"(?:add|allocate|begin|call|change|come|compare|compute|copie|cost|count|end|fail|fill|find|follow|gather|get|give|goe|hold|"
    r"keep|know|leave|lie|make|mean|move|name|own|pas|read|reduce|return|run|say|see|send|set|show|stand|start|stay|take|tell|"
    r"throw|train|use|wait|want|work|write)s?|\w+(?:ches|shes|sses))\b", re.IGNORECASE)
WHOLE_LINE = re.compile(r"\s*//[/!]?<?\s?(.*)")
BEHIND_CODE = re.compile(r"[^\"]*\S\s+//[/!]?<?\s?(.*)")


def comments(file: Path) -> list[tuple[int, list[str]]]:
    """The comments of a file: the number of each one's first line, and its lines."""
    blocks, inside = [], False
    for number, line in enumerate(file.read_text().splitlines(), 1):
        whole = WHOLE_LINE.fullmatch(line)
        behind = None if whole else BEHIND_CODE.fullmatch(line)
        # An empty comment line ends a block, as blank lines and code do.
        words = (whole or behind).group(1) if whole or behind else ""
        if words and whole and inside:
            blocks[-1][1].append(words)
        elif words:
            blocks.append((number, [words]))
        inside = bool(words)
    return blocks


def may_be_fragment(lines: list[str]) -> bool:
    first = re.split(r"[.:;](?:\s|$)", " ".join(lines))[0]
    return bool(CONJUNCTION.match(first) or (OPENING.match(first) and not VERB.search(first)))


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--count", "--more")]
    total = more = 0
    for folder in arguments or FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix not in (".h", ".cpp", ".cu"):
                continue
            for number, lines in comments(file):
                surely = FRAGMENT.match(lines[0])
                if not surely and not ("--more" in sys.argv and may_be_fragment(lines)):
                    continue
                if surely:
                    total += 1
                else:
                    more += 1
                if "--count" not in sys.argv:
                    print(f"{file.relative_to(ROOT)}:{number}: {lines[0]}")
    print(f"{total} comments begin with a fragment's word" + (f", {more} may be fragments" if "--more" in sys.argv else ""))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
