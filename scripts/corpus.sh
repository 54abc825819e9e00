#!/bin/sh
# Writes the demo's text: the King James Bible from the packages bible-kjv and bible-kjv-text (Debian, Ubuntu: universe), some 4 MB in the
# public domain. One verse a line without its number; each chapter begins with its name on a line between blank lines.
#   scripts/corpus.sh FILE
set -eu

fail() { echo "corpus.sh: $*" >&2; exit 1; }

[ $# -eq 1 ] || fail "usage: scripts/corpus.sh FILE"
destination=$1
command -v bible >/dev/null || fail "the program 'bible' is missing. Install it: apt-get install bible-kjv bible-kjv-text"
[ -r /usr/lib/bible.data ] || fail "the text /usr/lib/bible.data is missing. Install it: apt-get install bible-kjv-text"

mkdir -p "$(dirname "$destination")"
temporary=$destination.$$.tmp
trap 'rm -f "$temporary"' EXIT
trap 'exit 1' HUP INT TERM

# -l: no line is wrapped. -p: never a file of the current folder. A verse starts with two or fewer blanks and its number; anything else is a heading.
bible -p /usr/lib -l100000 'Genesis1:1-Revelation22:21' </dev/null |
  awk '/^ *[0-9]+ +[^0-9 ]/ && !/^[0-9]+ [A-Z][a-z]+ [0-9]+$/ { sub(/^ *[0-9]+ +/, ""); print; verses++; next }
       /^$/ { next }
       { if (chapters++) print ""; print; print "" }
       END { if (verses != 31102 || chapters != 1189) {
               printf "corpus.sh: found %d verses in %d chapters, not 31102 in 1189\n", verses, chapters > "/dev/stderr"; exit 1 } }' \
    >"$temporary" || fail "the output of 'bible' is not the text that was expected"
mv "$temporary" "$destination"
