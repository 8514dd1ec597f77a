"""Many streaming HTTP connections at once on the null backend: none dropped, tokens in order, time to first token.

    python benchmarks/connections.py [--connections 1000] [--tokens 64]

Starts `octavo serve --device null` by itself. Each connection streams a completion of its own prompt; the tokens
must be those that the same prompt gives in one piece, without streaming, when nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
import urllib.request

DISTINCT = 16  # prompts to compare with


def body(args: argparse.Namespace, number: int, stream: bool) -> bytes:
    prompt = [100 + number % DISTINCT, *range(1000, 1030)]
    fields = {"model": "null", "prompt": prompt, "max_tokens": args.tokens, "ignore_eos": True, "temperature": 0}
    return json.dumps(fields | {"stream": stream, "return_token_ids": True}).encode()


async def one(args: argparse.Namespace, number: int) -> tuple[float, float, list[int], bool]:
    """→ (time to first token, total time, token ids, whether the stream ended as it should)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", args.port)
    data = body(args, number, stream=True)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    begin = time.perf_counter()
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + data)
    first, tokens, done = None, [], False
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            done = True
        elif line.startswith(b"data: "):
            if first is None:
                first = time.perf_counter() - begin
            for choice in json.loads(line[6:]).get("choices", ()):
                tokens += choice.get("token_ids") or ()
    writer.close()
    return first or float("inf"), time.perf_counter() - begin, tokens, done


def expected(args: argparse.Namespace, number: int) -> list[int]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{args.port}/v1/completions", body(args, number, False), {"content-type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["token_ids"]


async def run(args: argparse.Namespace) -> list[tuple[float, float, list[int], bool] | BaseException]:
    return await asyncio.gather(*(one(args, n) for n in range(args.connections)), return_exceptions=True)


def main() -> int:
    """Prints one JSON line; the exit code is 1 when a connection was dropped or a token is out of place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * args.connections)), hard))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        args.port = free.getsockname()[1]
    serve = [sys.executable, "-m", "octavo.server", "serve", "--device", "null", "--served-model-name", "null"]
    server = subprocess.Popen([*serve, "--port", str(args.port)], stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{args.port}/health")
                break
            except OSError:
                time.sleep(0.1)
        want = [expected(args, n) for n in range(DISTINCT)]
        begin = time.perf_counter()
        results = asyncio.run(run(args))
        wall = time.perf_counter() - begin
    finally:
        server.terminate()
        server.wait()
    whole = [r for r in results if not isinstance(r, BaseException) and r[3]]
    right = sum(r[2] == want[n % DISTINCT] for n, r in enumerate(results) if not isinstance(r, BaseException))
    firsts = sorted(r[0] for r in whole)
    print(
        json.dumps(
            {
                "connections": args.connections,
                "ended_well": len(whole),
                "tokens_in_order": right,
                "tokens_per_s": round(args.connections * args.tokens / wall),
                "ttft_s_p50": round(firsts[len(firsts) // 2], 3),
                "ttft_s_p99": round(firsts[int(len(firsts) * 0.99)], 3),
                "wall_s": round(wall, 2),
            }
        )
    )
    return 0 if len(whole) == right == args.connections else 1


if __name__ == "__main__":
    sys.exit(main())
