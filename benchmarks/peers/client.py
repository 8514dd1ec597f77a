"""A streaming client for any OpenAI-compatible /v1/completions server; it can start and stop the server.

    python client.py --peer NAME --url http://127.0.0.1:8000 --workloads DIR --names W4 --rate 2 [--start COMMAND]
    python client.py --peer NAME --url http://127.0.0.1:8000 --cold --start COMMAND

W4 is sent by its Poisson arrivals at --rate requests a second; every other workload at once. Latencies count from
when a request was due, so that a late client hides no waiting. --cold only measures the time from the start of the
server's process to the first token of its first answer. Times are in seconds; a line per workload, repeat and rate:

    ttft          first piece of text - due
    itl           between two pieces (a server may put more than one token in a piece)
    tpot          per request: (last - first piece) / (tokens - 1)
    client_cpu_s  CPU time that this client took from the machine
    peak_rss_mb   of the server's processes together, which counts shared pages more than once

Needs: aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import common


@dataclass
class Seen:
    """One request: when it was due, when its pieces came, how many tokens they had."""

    due: float
    stamps: list[float] = field(default_factory=list)
    tokens: int = 0


async def send(session: aiohttp.ClientSession, args: argparse.Namespace, row: dict[str, Any], due: float) -> Seen:
    """One request, streamed."""
    body = {
        "model": args.model,
        "prompt": row["prompt_ids"],
        "max_tokens": row["max_tokens"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    seen = Seen(due)
    async with session.post(args.url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now, piece = time.perf_counter(), json.loads(line[6:])
            if piece.get("error"):
                raise SystemExit(f"server error: {piece['error']}")
            if piece.get("choices") and piece["choices"][0].get("text"):
                seen.stamps.append(now)
            if piece.get("usage"):
                seen.tokens = piece["usage"]["completion_tokens"]
    return seen


async def send_all(args: argparse.Namespace, rows: common.Rows, scale: float) -> tuple[float, list[Seen], float]:
    """All rows, each at `scale` times its arrival: (start, what was seen, the client's CPU seconds)."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
    ) as session:
        start, cpu = time.perf_counter() + 0.05, time.process_time()
        seen = await asyncio.gather(*(send(session, args, row, start + row["arrival"] * scale) for row in rows))
        return start, seen, time.process_time() - cpu


def spread(values: list[float]) -> dict[str, float] | None:
    """Three quantiles."""
    return {f"p{q:g}": round(common.quantile(values, q / 100), 4) for q in (50, 95, 99)} if values else None


def metrics(rows: common.Rows, start: float, seen: list[Seen]) -> dict[str, Any]:
    """Rates and latencies of a workload."""
    wall = max(s.stamps[-1] for s in seen) - start
    return {
        **common.totals(rows, wall, sum(s.tokens for s in seen)),
        **(common.single(seen[0].due, seen[0].stamps, seen[0].tokens) if len(rows) == 1 else {}),
        "ttft": spread([s.stamps[0] - s.due for s in seen]),
        "itl": spread([b - a for s in seen for a, b in itertools.pairwise(s.stamps)]),
        "tpot": spread([(s.stamps[-1] - s.stamps[0]) / (s.tokens - 1) for s in seen if s.tokens > 1]),
    }


def wait_ready(url: str, server: subprocess.Popen[bytes] | None, limit: float = 600) -> None:
    """Until the server answers; ends the program when it does not."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if server is not None and server.poll() is not None:
            raise SystemExit(f"the server ended with code {server.returncode}")
        try:
            if urllib.request.urlopen(url, timeout=2).status == 200:
                return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.02)
    raise SystemExit(f"{url} did not answer in {limit} s")


def peak_rss_mb(group: int) -> int:
    """Peak resident memory of a process group's live processes, added up."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(name)) != group:
                continue
            with open(f"/proc/{name}/status") as file:
                total += next((int(line.split()[1]) for line in file if line.startswith("VmHWM")), 0)
        except OSError:
            continue  # it has ended
    return round(total / 1024)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ends a server that `--start` launched; it leads a session of its own."""
    if server.poll() is not None:
        return
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)


def measure(args: argparse.Namespace, server: subprocess.Popen[bytes] | None, begin: float) -> None:
    """Prints a line per workload, repeat and rate."""
    wait_ready(args.url + args.ready, server)
    line: dict[str, Any] = {"peer": args.peer, "online": True, "load_s": round(time.perf_counter() - begin, 2)}
    _, (first, *_), _ = asyncio.run(send_all(args, common.WARM_UP[:1], 0.0))
    line["first_token_s"] = round(first.stamps[0] - begin, 3)
    if args.cold:
        print(json.dumps({**line, "workload": "start"}), flush=True)
        return
    asyncio.run(send_all(args, common.WARM_UP, 0.0))
    for repeat in args.repeats.split(","):
        for name in args.names.split(","):
            rows = common.load(args.workloads, name, repeat)
            for rate in args.rate if name == "W4" else [None]:
                start, seen, cpu = asyncio.run(send_all(args, rows, 1 / rate if rate else 0.0))
                more = {
                    "workload": name,
                    "repeat": int(repeat),
                    **({"rate": rate} if rate else {}),
                    "client_cpu_s": round(cpu, 2),
                    **({"peak_rss_mb": peak_rss_mb(server.pid)} if server else {}),
                }
                print(json.dumps({**line, **more, **metrics(rows, start, seen)}), flush=True)


def main() -> None:
    """Starts the server where asked to, measures, stops it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="model", help='what to send as "model"')
    parser.add_argument("--workloads")
    parser.add_argument("--names", default="W1,W2,W3,W4,W5")
    parser.add_argument("--repeats", default="0")
    parser.add_argument("--rate", type=lambda text: [float(r) for r in text.split(",")], default=[1.0])
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--start", help="command that starts the server")
    parser.add_argument("--log", default=os.devnull, help="where the started server's output goes")
    parser.add_argument("--ready", default="/health")
    args = parser.parse_args()
    server, begin = None, time.perf_counter()
    if args.start:
        with open(args.log, "ab") as log:
            server = subprocess.Popen(shlex.split(args.start), stdout=log, stderr=log, start_new_session=True)
    try:
        measure(args, server, begin)
    finally:
        if server is not None:
            stop(server)


if __name__ == "__main__":
    main()
