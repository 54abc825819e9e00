#!/usr/bin/env python3
"""Draws the charts of the documents (docs/images/*.svg) from the figures in benchmarks/history.

    benchmarks/draw.py                              draw them all
    benchmarks/draw.py --check                      fail where a committed chart is not what the figures give
    benchmarks/draw.py --list                       the measurements: benchmark, setting, commit, date
    benchmarks/draw.py --history peers 'bf16*' 'libzero, stage 3' 'tokens a second' --out speed.svg
                                                    one figure over all its measurements; the four are patterns, as 'bf16*'
    benchmarks/draw.py --demo DIR DIR DIR DIR       take the bytes of benchmarks/history/bytes_a_rank.json from runs of the demo at
                                                    stages 0 to 3:  for s in 0 1 2 3; do STAGE=$s STEPS=4 OUT=run/stage$s scripts/demo.sh; done
    benchmarks/draw.py --trace FILE CAPTION         take the spans of benchmarks/history/step_trace.json from a file of `zero train --profile`
    benchmarks/draw.py --check --demo DIR ...       fail where those runs hold other bytes than the committed picture says

Any python3 runs this file; it needs nothing else.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from xml.sax.saxutils import escape

from diagrams import DIAGRAMS

ROOT = Path(__file__).resolve().parent.parent
HISTORY = ROOT / "benchmarks" / "history"
IMAGES = ROOT / "docs" / "images"
PAGE_COMMIT = "0eee05b"  # whose figures docs/benchmarks.md shows

MIB = 1 << 20
STATES = {"parameters": "#4477aa", "gradients": "#ccbb44", "optimizer": "#ee6677"}
OURS, THEIRS, GREY = "#4477aa", "#bbbbbb", "#777777"
FONT = "font-family='Helvetica, Arial, sans-serif'"
ROW, LABEL = 24, 175  # pixels of a row, of the names beside it


# --- Drawing ---


@dataclass
class Row:
    """A line of a panel: a value with its spread, drawn as a bar or as a dot; a bar may be of several parts."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    colour: str = OURS
    note: str = ""
    parts: list[tuple[float, str]] = field(default_factory=list)


@dataclass
class Panel:
    title: str
    rows: list[Row]
    bars: bool = True
    mark: float | None = None  # where a line is drawn to compare with
    limits: tuple[float, float] | None = None  # where the values begin and end; else as far as they go
    digits: int = 1
    width: int = 250  # of the area in which values are drawn


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", colour: str = "#222222", weight: str = "normal") -> str:
    return (f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{colour}' font-weight='{weight}' {FONT}>"
            f"{escape(words)}</text>")


def line(x1: float, y1: float, x2: float, y2: float, colour: str = GREY, width: float = 1.0) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' stroke-width='{width:.1f}'/>"


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{colour}'/>"


def draw_panel(panel: Panel, left: float, top: float) -> list[str]:
    numbers = [number for row in panel.rows for number in (row.value, row.low, row.high) if number is not None]
    numbers += [] if panel.mark is None else [panel.mark]
    first = min(0.0, *numbers) if panel.bars else min(numbers)
    last = max(numbers)
    if panel.limits is not None:
        first, last = panel.limits
    start = left + LABEL

    def at(number: float) -> float:
        return start + (number - first) / ((last - first) or 1) * panel.width

    svg = [text(left, top + 14, panel.title, 13, weight="bold")]
    bottom = top + 26 + ROW * len(panel.rows)
    if panel.mark is not None:
        svg.append(line(at(panel.mark), top + 24, at(panel.mark), bottom, "#cccccc"))
    for number, row in enumerate(panel.rows):
        middle = top + 26 + ROW * number + ROW / 2
        svg.append(text(start - 8, middle + 4, row.label, anchor="end"))
        if panel.bars and row.value is not None:
            x = at(0.0)
            for part, colour in row.parts or [(row.value, row.colour)]:
                width = at(part) - at(0.0)
                svg.append(box(x, middle - 8, width, 16, colour))
                x += width
        if row.low is not None and row.high is not None:
            colour = "#222222" if panel.bars else row.colour
            svg.append(line(at(row.low), middle, at(row.high), middle, colour, 1.5))
            svg += [line(at(end), middle - 4, at(end), middle + 4, colour, 1.5) for end in (row.low, row.high)]
        if not panel.bars and row.value is not None:
            svg.append(f"<circle cx='{at(row.value):.1f}' cy='{middle:.1f}' r='4.5' fill='{row.colour}'/>")
        words = row.note or (f"{row.value:.{panel.digits}f}" if row.value is not None else f"{row.low:g} to {row.high:g}")
        end = max(at(number) for number in (row.value, row.high, first) if number is not None) if panel.bars else start + panel.width
        svg.append(text(end + 10, middle + 4, words, colour="#444444"))
    return svg


def draw(title: str, caption: str, columns: list[list[Panel]], notes_width: int = 90, legend: dict[str, str] | None = None) -> str:
    """Columns of panels beside each other under one title."""
    svg: list[str] = []
    left, height = 16.0, 0.0
    for column in columns:
        top = 52.0
        for panel in column:
            svg += draw_panel(panel, left, top)
            top += 26 + ROW * len(panel.rows) + 18
        height = max(height, top)
        left += LABEL + max(panel.width for panel in column) + notes_width + 16
    x = 16.0
    for name, colour in (legend or {}).items():
        svg += [box(x, height - 4, 12, 12, colour), text(x + 18, height + 6, name)]
        x += 40 + 7 * len(name)
    height += 26 if legend else 6
    head = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {left:.0f} {height:.0f}' width='{left:.0f}' height='{height:.0f}' role='img'>",
            f"<title>{escape(title)}</title>", box(0, 0, left, height, "#ffffff"), text(16, 24, title, 16, weight="bold"),
            text(16, 42, caption, 12, colour="#555555")]
    return "\n".join([*head, *svg, "</svg>"]) + "\n"


# --- Figures ---


def measurements() -> list[dict]:
    """In the order of their commits' dates."""
    return sorted(json.loads((HISTORY / "figures.json").read_text())["measurements"], key=lambda one: one["date"])


def measured(benchmark: str, setting: str, commit: str = PAGE_COMMIT, note: str = "") -> dict[tuple[str, str], dict]:
    """The figures of one measurement by run and metric."""
    found = [one for one in measurements()
             if (one["benchmark"], one["setting"], one["commit"]) == (benchmark, setting, commit) and note in one.get("note", "")]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} measurements of {benchmark}, {setting}, on {commit}; the chart needs one")
    return {(figure["run"], figure["metric"]): figure for figure in found[0]["figures"]}


def row(figures: dict[tuple[str, str], dict], run: str, metric: str, **more: str) -> Row:
    figure = figures[(run, metric)]
    label = more.pop("label", run)
    return Row(label, figure["value"], figure.get("low"), figure.get("high"), **more)


def bytes_a_rank() -> str:
    data = json.loads((HISTORY / "bytes_a_rank.json").read_text())
    rows = []
    for stage in data["stages"]:
        parts = [(stage[state] / MIB, colour) for state, colour in STATES.items()]
        total = sum(stage[state] for state in STATES)
        rows.append(Row(f"stage {stage['stage']}", total / MIB, parts=parts,
                        note=f"{total / MIB:.1f} MiB, {total / data['parameters']:.0f} bytes a parameter"))
    return draw("What one rank holds, by ZeRO stage",
                f"The demo's model ({data['parameters']:,} parameters, fp32, Adam) on {data['ranks']} ranks; counted while it trains, the most in a step",
                [[Panel("MiB a rank", rows, width=330)]], 190, {state + (" states" if state == "optimizer" else ""): colour for state, colour in STATES.items()})


PEER_RUNS = ("libzero, independent", "independent", "libzero, stage 0", "DDP", "libzero, stage 1", "DeepSpeed 1", "libzero, stage 2",
             "FSDP2, not resharding", "DeepSpeed 2", "libzero, stage 3", "FSDP2", "DeepSpeed 3")


def peers() -> str:
    figures = measured("peers", "bf16, micro-batch 1, 2 ranks")
    names = {"independent": "PyTorch, independent", "FSDP2, not resharding": "FSDP2, no resharding"}

    def rows(metric: str) -> list[Row]:
        return [row(figures, run, metric, label=names.get(run, run), colour=OURS if run.startswith("libzero") else THEIRS) for run in PEER_RUNS]

    return draw("GPT-2 124 M in bf16 on 2 ranks: libzero, PyTorch 2.11, DeepSpeed 0.19.8", "Each group is one stage: the same work, the same losses to rounding",
                [[Panel("tokens a second, both ranks: more is better", rows("tokens a second"), digits=0)],
                 [Panel("MiB a rank at its peak: less is better", rows("memory of a rank, MiB"), digits=0)]], 50)


def tax() -> str:
    def panel(dtype: str, ranks: int) -> Panel:
        figures = measured("tax", f"{dtype}, micro-batch 1, {ranks} ranks")
        rows = [row(figures, run, "tax, %", colour=GREY if run == "lockstep" else OURS,
                    note="{value:+.1f} % ({low:+.1f} to {high:+.1f})".format(**figures[(run, "tax, %")]))
                for run in ("lockstep", "stage 0", "stage 1", "stage 2", "stage 3")]
        return Panel(f"{dtype}, {ranks} ranks", rows, bars=False, mark=0.0, limits=(-13, 13))

    return draw("Time of a step beside that of independent trainers: % more", "GPT-2 124 M, micro-batch 1, 2 cores; median of the rounds, least and most",
                [[panel("fp32", 2), panel("fp32", 4)], [panel("bf16", 2), panel("bf16", 4)]], 150)


def collectives() -> str:
    def panel(ranks: int) -> Panel:
        figures = measured("collectives", f"64 MiB, fp32, arena memory, {ranks} ranks")
        metric = "time over that of copies"
        rows = [row(figures, run, metric, colour=GREY if run == "read by N" else OURS,
                    label="reading alone" if run == "read by N" else run, note="{value:.2f} ({low:.2f} to {high:.2f})".format(**figures[(run, metric)]))
                for run in ("read by N", "all-gather", "reduce-scatter", "all-reduce", "broadcast", "all-to-all")]
        return Panel(f"{ranks} ranks", rows, bars=False, mark=1.0, limits=(0.7, 1.6))

    return draw("Time of a collective over that of copying as many bytes", "64 MiB of fp32 in shared memory, 2 cores; 1 is the speed of a copy",
                [[panel(2)], [panel(4)]], 150)


def over_time(benchmark: str, setting: str, run: str, metric: str) -> list[Row]:
    rows = []
    for one in measurements():
        if not fnmatchcase(one["benchmark"], benchmark) or not fnmatchcase(one["setting"], setting):
            continue
        for figure in one["figures"]:
            if fnmatchcase(figure["run"], run) and fnmatchcase(figure["metric"], metric):
                commit = one["commit"] or f"before {one['recorded']}"
                rows.append(Row(f"{one['date'][5:10]}, {commit}", figure["value"], figure.get("low"), figure.get("high"),
                                OURS if one["machine"] != "busy" else GREY))
    if not rows:
        raise SystemExit(f"no figure of benchmark '{benchmark}', setting '{setting}', run '{run}', metric '{metric}'; see --list")
    return rows


def history() -> str:
    xl = "GPT-2 XL in 6 GiB"
    columns = [[("tax of stage 3, bf16, micro-batch 1, %", ("tax", "bf16, micro-batch 1, 2 ranks", "stage 3", "tax, %")),
                ("MiB a rank, stage 3, bf16, split master weights", ("memory of stage 3", "bf16, split master weights", "libzero, stage 3", "memory*"))],
               [("GPT-2 XL in 6 GiB, 2 ranks: s a step", (xl, "2 ranks of 1 thread, updates in backward*", "run *", "step, s"))]]
    return draw("Figures that were measured on more than one commit", "month and day, commit; grey: while the machine was busy",
                [[Panel(title, over_time(*which), bars="tax" not in which[0], mark=0.0) for title, which in column] for column in columns], 60)


TRACE_COLOURS = {"forward": "#4477aa", "backward": "#66ccee", "step": "#bbbbbb", "wait": "#ee6677", "gather": "#228833", "reduce": "#ccbb44",
                 "update": "#aa3377", "disk": "#ee8866", "control": "#777777"}
TRACE_ROWS = ("compute", "gathers", "reductions", "updates", "disk reads", "disk writes")


def trace_colour(kind: str) -> str:
    return TRACE_COLOURS["update" if kind == "wait for update" else kind if kind in TRACE_COLOURS else kind.split()[0]]


def step_trace() -> str:
    """A step's spans: a band for each rank, in it a line for each row; waits lie on the phases that they are in."""
    data = json.loads((HISTORY / "step_trace.json").read_text())
    width, left, top, height = 860.0, 110.0, 62.0, 20
    svg: list[str] = []
    for rank in data["ranks"]:
        svg.append(text(16, top + 12, rank["name"], 13, weight="bold"))
        top += 18
        for row in rank["rows"]:
            svg += [text(left - 8, top + 13, row["name"], anchor="end"), box(left, top, width, height - 4, "#f6f6f6")]
            for kind, begin, end in row["spans"]:
                wait = kind.startswith("wait")
                x, right = (left + at / data["ms"] * width for at in (begin, end))
                svg.append(box(x, top + (7 if wait else 0), max(right - x, 0.3), height - 4 - (7 if wait else 0), trace_colour(kind)))
            top += height
        top += 10
    step = next(one for one in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000) if data["ms"] / one <= 12)
    for at in range(0, int(data["ms"]) + 1, step):
        svg += [line(left + at / data["ms"] * width, 60, left + at / data["ms"] * width, top - 6, "#dddddd", 0.5),
                text(left + at / data["ms"] * width, top + 6, f"{at} ms", 11, "middle", "#555555")]
    x = left
    for kind in [one for one in TRACE_COLOURS if any(one == span[0].split()[0] for rank in data["ranks"] for row in rank["rows"] for span in row["spans"])]:
        svg += [box(x, top + 18, 12, 12, TRACE_COLOURS[kind]), text(x + 18, top + 28, kind)]
        x += 44 + 7 * len(kind)
    total = left + width + 24
    head = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {total:.0f} {top + 40:.0f}' width='{total:.0f}' height='{top + 40:.0f}' role='img'>",
            "<title>One step of training</title>", box(0, 0, total, top + 40, "#ffffff"), text(16, 24, "One step of training, as --profile writes it", 16, weight="bold"),
            text(16, 42, data["caption"], 12, colour="#555555")]
    return "\n".join([*head, *svg, "</svg>"]) + "\n"


CHARTS = {"bytes-a-rank.svg": bytes_a_rank, "peers.svg": peers, "tax.svg": tax, "collectives.svg": collectives, "history.svg": history, "step-trace.svg": step_trace}


# --- Commands ---


def demo_figures(folders: list[Path]) -> dict:
    """What runs of the demo counted: the most that a rank had of each state."""
    stages = []
    config: dict = {}
    for folder in folders:
        lines = [json.loads(one) for one in (folder / "log.jsonl").read_text().splitlines()]
        config = next(one for one in lines if one.get("event") == "config")
        ranks = next(one for one in lines if one.get("event") == "memory")["per_rank"]
        stages.append({"stage": config["engine"]["zero_optimization"]["stage"], **{state: max(rank[state]["peak"] for rank in ranks) for state in STATES}})
    return {"parameters": config["parameters"], "ranks": config["world_size"], "stages": sorted(stages, key=lambda one: one["stage"])}


def trace_figures(file: Path, caption: str) -> dict:
    """The spans of a profile that can be seen in a picture: without operators, lines of a row laid over each other, milliseconds."""
    events = json.loads(file.read_text())["traceEvents"]
    named = {(event["name"], event["pid"], event["tid"]): event["args"].get("name") for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X" and event["cat"] not in ("operator", "control")]
    total = max(event["ts"] + event["dur"] for event in spans)
    ranks = []
    for pid in sorted({event["pid"] for event in spans}):
        rows: dict[str, list] = {row: [] for row in TRACE_ROWS}
        for event in spans:
            if event["pid"] == pid and event["dur"] >= total / 3000:
                row = named[("thread_name", pid, event["tid"])].split(" (")[0]
                rows[row].append([event["cat"], round(event["ts"] / 1000, 3), round((event["ts"] + event["dur"]) / 1000, 3)])
        ranks.append({"name": named[("process_name", pid, 0)],
                      "rows": [{"name": name, "spans": sorted(row, key=lambda one: (one[0].startswith("wait"), one[1]))} for name, row in rows.items() if row]})
    return {"caption": caption, "ms": round(total / 1000, 3), "ranks": ranks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--history", nargs=4, metavar=("BENCHMARK", "SETTING", "RUN", "METRIC"))
    parser.add_argument("--out", type=Path, default=Path("history.svg"))
    parser.add_argument("--demo", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--trace", nargs=2, metavar=("FILE", "CAPTION"))
    options = parser.parse_args()

    if options.list:
        for one in measurements():
            print(f"{one['date']}  {one['commit'] or 'before ' + one['recorded']:<15}  {one['benchmark']}: {one['setting']}")
        return 0
    if options.history:
        rows = over_time(*options.history)
        options.out.write_text(draw(", ".join(options.history[:3]), "month and day, commit; grey: while the machine was busy", [[Panel(options.history[3], rows, bars=False)]], 60))
        return 0
    if options.demo:
        counted = json.dumps(demo_figures(options.demo), indent=1) + "\n"
        file = HISTORY / "bytes_a_rank.json"
        if options.check and counted != file.read_text():
            print(f"{file.relative_to(ROOT)} is not what these runs counted:\n{counted}", file=sys.stderr)
            return 1
        if not options.check:
            file.write_text(counted)
    if options.trace:
        (HISTORY / "step_trace.json").write_text(json.dumps(trace_figures(Path(options.trace[0]), options.trace[1])).replace(', {"name"', ',\n{"name"') + "\n")
    stale = []
    for name, chart in {**CHARTS, **DIAGRAMS}.items():
        if not options.check:
            (IMAGES / name).write_text(chart())
        elif not (IMAGES / name).exists() or (IMAGES / name).read_text() != chart():
            stale.append(name)
    if stale:
        print(f"not what the figures give: {', '.join(stale)}; run benchmarks/draw.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
