"""The pictures that docs/architecture.md begins with: what each rank holds, a step of stage 3, two hosts. benchmarks/draw.py writes them."""

from xml.sax.saxutils import escape

FONT = "font-family='Helvetica, Arial, sans-serif'"
DARK, GREY, PALE = "#222222", "#777777", "#eeeeee"
STATES = {"parameters": "#4477aa", "gradients": "#ccbb44", "optimizer": "#ee6677"}
GATHER, COMPUTE, REDUCE, UPDATE = "#4477aa", "#bbbbbb", "#ccbb44", "#ee6677"


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", colour: str = DARK, weight: str = "normal") -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{anchor}' fill='{colour}' font-weight='{weight}' {FONT}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' fill='{fill}' stroke='{stroke}'/>"


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = GREY) -> str:
    return f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{colour}' stroke-width='1.5' marker-end='url(#head)'/>"


def picture(width: int, height: int, title: str, caption: str, parts: list[str]) -> str:
    return "\n".join([
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img'>",
        f"<title>{escape(title)}</title>",
        "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto-start-reverse'>"
        f"<path d='M0,0 L8,4 L0,8 z' fill='{GREY}'/></marker></defs>",
        box(0, 0, width, height, "#ffffff"), text(16, 24, title, 16, weight="bold"), text(16, 42, caption, 12, colour="#555555"), *parts, "</svg>"]) + "\n"


def what_a_rank_holds() -> str:
    ranks, cell, gap, high = 4, 64, 4, 22
    parts = []
    for stage in range(4):
        left, top = 70 + stage * (3 * (cell + gap) + 26), 74
        parts.append(text(left, top - 12, f"stage {stage}", 13, weight="bold"))
        for column, (state, colour) in enumerate(STATES.items()):
            sharded = stage >= 3 - column  # the optimizer's states from stage 1 on, gradients from 2, parameters from 3
            x = left + column * (cell + gap)
            for rank in range(ranks):
                y = top + rank * (high + gap)
                parts.append(box(x, y, cell, high, PALE))
                parts.append(box(x + rank * cell / ranks, y, cell / ranks, high, colour) if sharded else box(x, y, cell, high, colour))
    for rank in range(ranks):
        parts.append(text(16, 74 + rank * (high + gap) + 15, f"rank {rank}"))
    x = 70
    for state, colour in STATES.items():
        parts += [box(x, 190, 12, 12, colour), text(x + 18, 200, state + (" (master weights, moments)" if state == "optimizer" else ""))]
        x += 120
    return picture(1000, 216, "One unit of the model on four ranks",
                   "Coloured: what the rank holds. A sharded state lies in equal slices, and rank r owns slice r of every unit.", parts)


def a_step() -> str:
    parts, slot, high = [], 58, 26
    lanes = {"gather": 74, "compute": 114, "reduce": 154, "update": 194}
    for name, y in lanes.items():
        parts += [text(16, y + 17, name), box(80, y, 15 * slot + 8, high, "#f7f7f7")]

    def task(lane: str, begin: float, words: str, colour: str, width: float = 1.0) -> None:
        x = 84 + begin * slot
        parts.extend([box(x, lanes[lane], width * slot - 3, high, colour), text(x + (width * slot - 3) / 2, lanes[lane] + 17, words, 11, "middle")])

    for unit in range(3):  # forward: each unit is gathered while the one before it computes
        task("gather", unit, f"unit {unit}", GATHER)
        task("compute", 1 + unit, f"forward {unit}", COMPUTE)
    for order, unit in enumerate((2, 1, 0)):
        begin = 4.2 + 1.8 * order
        if unit < 2:
            task("gather", begin - 1, f"unit {unit}", GATHER)
        task("compute", begin, f"backward {unit}", COMPUTE, 1.8)
        task("reduce", begin + 1.8, f"unit {unit}", REDUCE)
    task("update", 11.2, "norm", UPDATE, 0.8)
    for unit in range(3):
        task("update", 12 + unit, f"slice {unit}", UPDATE)
    parts += [text(84, 244, "The plan keeps unit 2 between forward and backward, and gathers the others again: Belady's rule within a budget.", 12, colour="#555555"),
              text(84, 262, "Between two steps a rank holds its slices alone.", 12, colour="#555555")]
    return picture(980, 276, "A step of stage 3 on one rank", "Time goes to the right. All-gathers run ahead of their use, reduce-scatters behind it.", parts)


def two_hosts() -> str:
    parts = []
    for host in range(2):
        x = 16 + host * 480
        parts += [box(x, 60, 380, 196, "#f7f7f7", GREY), text(x + 12, 80, f"host {host}", 13, weight="bold"),
                  box(x + 20, 190, 340, 48, "#dde7f0", GREY),
                  text(x + 190, 210, "shared memory: windows, arena, mailboxes", 12, "middle"),
                  text(x + 190, 227, "ranks read and add up each other's arrays in place", 11, "middle", "#555555")]
        for local in range(2):
            cx = x + 105 + local * 170
            parts += [box(cx - 60, 96, 120, 52, "#ffffff", GREY), text(cx, 118, f"rank {2 * host + local}", 13, "middle", weight="bold"),
                      text(cx, 136, "slice " + str(2 * host + local), 11, "middle", "#555555"), arrow(cx, 148, cx, 188), arrow(cx, 188, cx, 148)]
    parts += [text(446, 96, "rails", 12, "middle", weight="bold"), text(446, 284, "Rank r of a host talks to rank r of each other host. A host sends (H-1)/H of an array once, however many ranks it has.", 12, "middle", "#555555")]
    for local, y in enumerate((112, 132)):
        parts += [arrow(398, y, 494, y), arrow(494, y, 398, y), text(446, y - 3 if local == 0 else y + 14, f"{local} - {2 + local}", 11, "middle")]
    return picture(892, 300, "Two hosts with two ranks each", "Inside a host data are shared; between hosts they are sent over TCP, MPI or a backend of yours.", parts)


DIAGRAMS = {"what-a-rank-holds.svg": what_a_rank_holds, "a-step.svg": a_step, "two-hosts.svg": two_hosts}
