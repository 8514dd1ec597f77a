"""Runs Octavo and its peers interleaved on the same work, and makes tables and a plot of what they did.

    python compare.py run --out results.jsonl --set offline [--rounds 3] [--only Octavo,vLLM]
    python compare.py table results.jsonl
    python compare.py plot results.jsonl --out figure.svg

peers.json is a list of {"label", "set", "command"}. In a command $NAMES come from the environment, $BENCH is this
folder, $REPEAT the round's number and $REPEATS all of their numbers, for peers that start so slowly that they do all
repeats at once ("once": true). A round runs each peer once, so that drift of the machine falls on all of them. Before
each command it waits, at most ten minutes, for a quiet machine. "others" in a line is the share of the machine's CPU
time that other processes took, or that was stolen, while the command ran; `table` leaves out lines above
--max-others. `plot` needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import string
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Line = dict[str, Any]
Column = tuple[str, str, Callable[[Line], float | None]]

OFFLINE: list[Column] = [
    ("W1 s", "W1", lambda line: line["wall_s"]),
    ("W1 total tok/s", "W1", lambda line: line["total_tok_s"]),
    ("W2 decode tok/s", "W2", lambda line: line.get("decode_tok_s")),
    ("W2 TTFT ms", "W2", lambda line: 1e3 * line["ttft_s"] if "ttft_s" in line else None),
    ("W3 s", "W3", lambda line: line["wall_s"]),
    ("W5 s", "W5", lambda line: line["wall_s"]),
    ("peak RSS MB", "W5", lambda line: line.get("peak_rss_mb")),
]
CEILINGS: list[Column] = [
    *(
        (f"read {mib} MiB, GB/s", "ceiling", lambda line, mib=mib: line["gb_s"] if line.get("mib") == mib else None)
        for mib in (128, 256, 512)
    ),
    ("multiply-adds, GFLOP/s", "ceiling", lambda line: line.get("gflop_s")),
]
START: list[Column] = [("start to first token, s", "start", lambda line: line["first_token_s"])]


def quantiles(key: str) -> list[Column]:
    """Columns of a latency in ms."""
    return [
        (f"{key.upper()} {q} ms", "W4", lambda line, q=q: 1e3 * line[key][q] if line[key] else None)
        for q in ("p50", "p95", "p99")
    ]


ONLINE: list[Column] = [
    ("requests", "W4", lambda line: line["requests"]),
    ("wall s", "W4", lambda line: line["wall_s"]),
    *quantiles("ttft"),
    *quantiles("itl"),
]


def cpu_ticks() -> tuple[int, int]:
    """Ticks that processes or the hypervisor took, and ticks in all, over all CPUs since boot."""
    with open("/proc/stat") as file:
        values = list(map(int, file.readline().split()[1:9]))
    return sum(values) - values[3] - values[4], sum(values)


def busy_share(seconds: float) -> float:
    """The busy share of the machine over some seconds."""
    busy, total = cpu_ticks()
    time.sleep(seconds)
    busy_after, total_after = cpu_ticks()
    return (busy_after - busy) / max(1, total_after - total)


def child_ticks() -> float:
    """Ticks that this process's ended children took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (usage.ru_utime + usage.ru_stime) * os.sysconf("SC_CLK_TCK")


def run_one(peer: dict[str, Any], repeat: int, repeats: str, out: Path) -> None:
    """Runs one command and keeps its lines."""
    names = {**os.environ, "BENCH": str(HERE), "REPEAT": str(repeat), "REPEATS": repeats}
    command = string.Template(peer["command"]).substitute(names)
    start, (busy, total), own = time.time(), cpu_ticks(), child_ticks()
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    busy_after, total_after = cpu_ticks()
    others = max(0.0, (busy_after - busy - (child_ticks() - own)) / max(1, total_after - total))
    found = [json.loads(text) for text in done.stdout.splitlines() if text.startswith('{"peer"')]
    with out.open("a") as file:
        for line in found:
            file.write(json.dumps({**line, "label": peer["label"], "others": round(others, 3)}) + "\n")
    took = time.time() - start
    print(
        f"round {repeat} {peer['label']}: {len(found)} lines, code {done.returncode}, {took:.0f} s, others {others:.2f}"
    )
    sys.stdout.flush()
    if done.returncode or not found:
        print(done.stderr[-2000:], file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> None:
    """Runs the chosen peers, round by round."""
    chosen = [peer for peer in json.loads(args.peers.read_text()) if peer["set"] == args.set]
    if args.only:
        chosen = [peer for peer in chosen if any(part in peer["label"] for part in args.only.split(","))]
    rounds = range(args.first, args.first + args.rounds)
    for repeat in rounds:
        for peer in chosen:
            if peer.get("once") and repeat != args.first:
                continue
            end = time.time() + 600
            while busy_share(3) > args.quiet_load and time.time() < end:
                time.sleep(5)
            run_one(peer, repeat, ",".join(map(str, rounds)), args.out)


def read(paths: list[Path], max_others: float) -> dict[tuple[str, float | None], dict[str, list[Line]]]:
    """(label, rate) -> workload -> its lines."""
    found: dict[tuple[str, float | None], dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for line in map(json.loads, path.read_text().splitlines()):
            if line["others"] <= max_others and "workload" in line:
                found[line["label"], line.get("rate")][line["workload"]].append(line)
    return found


def values(lines: dict[str, list[Line]], column: Column) -> list[float]:
    """What a column reads from a peer's lines."""
    _, workload, get = column
    return [value for value in map(get, lines.get(workload, [])) if value is not None]


def show(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def cell(found: list[float]) -> str:
    """The median, with the spread where there are several."""
    if len(found) < 2:
        return "".join(map(show, found))
    return f"{show(statistics.median(found))} ({show(min(found))} to {show(max(found))})"


def print_table(found: dict[tuple[str, float | None], dict[str, list[Line]]], columns: list[Column]) -> None:
    """A Markdown table of the peers that have any of these columns."""
    rows = []
    for (label, rate), lines in found.items():
        cells = [cell(values(lines, column)) for column in columns]
        if any(cells):
            rows.append([f"{label}, {rate:g}/s" if rate else label, *cells])
    if rows:
        print("\n| | " + " | ".join(name for name, *_ in columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))


def table(args: argparse.Namespace) -> None:
    """Prints the tables."""
    found = read(args.results, args.max_others)
    for columns in (CEILINGS, OFFLINE, ONLINE, START):
        print_table(found, columns)


def plot(args: argparse.Namespace) -> None:
    """Draws medians as bars, Octavo's in another colour."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "octavo"  # the same file from the same figures
    from matplotlib import pyplot

    found = read(args.results, args.max_others)
    chosen = [OFFLINE[0], OFFLINE[2], OFFLINE[4], OFFLINE[5]]
    titles = [
        "W1: 64 mixed requests, s",
        "W2: one stream, tokens/s",
        "W3: 32 with one prefix, s",
        "W5: 4,096-token prompt, s",
    ]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axis, column, title in zip(axes.flat, chosen, titles, strict=True):
        bars = [(label, statistics.median(v)) for (label, _), lines in found.items() if (v := values(lines, column))]
        better = max if "tok/s" in column[0] else min
        bars.sort(key=lambda bar: bar[1], reverse=better is min)  # the best on top
        colours = ["tab:orange" if label.startswith("Octavo") else "tab:gray" for label, _ in bars]
        drawn = axis.barh([label for label, _ in bars], [value for _, value in bars], color=colours)
        axis.bar_label(drawn, [show(value) for _, value in bars], padding=3, fontsize=8)
        axis.set_title(f"{title} ({'more' if better is max else 'less'} is better)", fontsize=10)
        axis.tick_params(axis="y", labelsize=8)
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.out, metadata={"Date": None})


def main() -> None:
    """The three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("run", help="run peers")
    made.add_argument("--peers", type=Path, default=HERE / "peers.json")
    made.add_argument("--set", required=True, help="which of them: offline, online or start")
    made.add_argument("--only", help="comma-separated parts of labels")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--first", type=int, default=0, help="number of the first round")
    made.add_argument("--quiet-load", type=float, default=0.3)
    made.set_defaults(do=run)
    for name, do in (("table", table), ("plot", plot)):
        made = commands.add_parser(name, help=do.__doc__)
        made.add_argument("results", nargs="+", type=Path)
        made.add_argument("--max-others", type=float, default=0.06)
        if do is plot:
            made.add_argument("--out", required=True)
        made.set_defaults(do=do)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
