"""`octavo serve` in a process of its own."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time

import httpx


class Server:
    """A running `octavo serve`."""

    def __init__(self, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "octavo.server", "serve", "--port", str(self.port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(1200):
            assert self.process.poll() is None, self.process.stdout.read()
            try:
                httpx.get(self.url + "/health").raise_for_status()
                return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise AssertionError("not ready in two minutes")

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics").text
        return sum(float(v) for v in re.findall(rf"^octavo:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))

    def wait_idle(self) -> None:
        """Until no request is inside and no block is held."""
        for _ in range(100):
            if not self.metric("num_requests_running") and not self.metric("kv_cache_usage_perc"):
                return
            time.sleep(0.1)
        raise AssertionError("requests or blocks are left behind")

    def stop(self) -> None:
        """Ends it as a supervisor does."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0
