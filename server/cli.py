"""The command line. What a command needs is imported when it runs, so that `octavo --help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from ..core.config import EngineConfig
from ..core.errors import OctavoError
from .log import LogLevel
from .options import parse_bytes, with_engine_options

app = typer.Typer(
    name="octavo",
    help="Serve large language models on any accelerator. Where MODEL is left out, it is a small demo model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
bench = typer.Typer(help="Measure throughput, latency, or a running server.", no_args_is_help=True)
app.add_typer(bench, name="bench")

LOG_LEVEL = typer.Option(LogLevel.info, "--log-level", help="What is logged to stderr.")
JSON_FILE = typer.Option(None, "--json", help="File for the results as JSON.", metavar="FILE")


def _print_version(value: bool) -> None:
    if value:
        from .version import version

        print(f"octavo {version()}")
        raise typer.Exit


@app.callback()
def _octavo(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=_print_version
    ),
) -> None:
    pass


@app.command()
@with_engine_options
def serve(
    config: EngineConfig,
    host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0 is all."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    api_key: str | None = typer.Option(
        None, envvar="OCTAVO_API_KEY", show_envvar=True, help="Key that clients must send. Default: no check."
    ),
    cors_origin: list[str] = typer.Option([], help="Origin whose pages may call the server; may be repeated."),
    max_body_size: int = typer.Option(
        32 << 20, parser=parse_bytes, metavar="BYTES", show_default="32MiB", help="Largest request body."
    ),
    drain_timeout: float = typer.Option(30.0, min=0.0, help="Seconds for requests under way when told to stop."),
    metrics_prefix: str = typer.Option("octavo", help="Prefix of the metrics; vllm gives vLLM's names exactly."),
    log_level: LogLevel = LOG_LEVEL,
) -> None:
    """Serve a model over the OpenAI protocol."""
    from . import log
    from .serve import ServeOptions
    from .serve import serve as run
    from .settings import ServerOptions

    log.set_up(log_level)
    if config.host_rank:
        from .follow import follow

        raise typer.Exit(follow(config))
    http = ServerOptions(config.served_model_name, api_key, max_body_size, tuple(cors_origin), metrics_prefix)
    raise typer.Exit(run(config, ServeOptions(host, port, drain_timeout, http)))


@app.command()
@with_engine_options
def chat(
    config: EngineConfig,
    url: str | None = typer.Option(None, help="Chat with a server at this address, not with a model in this process."),
    api_key: str | None = typer.Option(None, envvar="OCTAVO_API_KEY", show_envvar=True, help="The server's key."),
    system: str | None = typer.Option(None, help="System message."),
    max_tokens: int | None = typer.Option(None, min=1, help="Tokens per answer. Default: up to the context's end."),
    temperature: float | None = typer.Option(None, min=0.0, help="Default: the model's."),
) -> None:
    """Chat in the terminal. Ctrl-C stops an answer, Ctrl-D ends the chat."""
    from .terminal import ChatOptions
    from .terminal import chat as run

    run(config, ChatOptions(url, api_key, system, max_tokens, temperature))


@app.command()
@with_engine_options
def complete(
    config: EngineConfig,
    prompt: str = typer.Argument(help="The text to continue; - reads it from stdin.", metavar="PROMPT"),
    max_tokens: int = typer.Option(128, min=1, help="Tokens to generate at most."),
    temperature: float | None = typer.Option(None, min=0.0, help="Default: the model's."),
    sampling_seed: int | None = typer.Option(None, help="Seed of this completion."),
) -> None:
    """Continue a text; the continuation goes to stdout as it is made."""
    from .terminal import complete as run

    run(config, sys.stdin.read() if prompt == "-" else prompt, max_tokens, temperature, sampling_seed)


@app.command()
@with_engine_options
def plan(config: EngineConfig, as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Tell whether a model fits a device, with how many blocks and sequences, without loading it."""
    from .plan import show

    raise typer.Exit(show(config, as_json))


@app.command()
def devices(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the plugins and the devices they found; where there are none, why."""
    from .devices import show

    show(as_json)


@app.command()
def pull(
    model: str | None = typer.Argument(None, help="As for serve.", metavar="MODEL", show_default=False),
    revision: str | None = typer.Option(None, help="Revision of the Hugging Face repository."),
) -> None:
    """Download a model and print where it is."""
    from ..core.hub import resolve

    print(resolve(model, revision).path)


@bench.command("throughput")
@with_engine_options
def bench_throughput(
    config: EngineConfig,
    workload: Path | None = typer.Option(
        None, exists=True, dir_okay=False, help="JSONL with prompt_ids and max_tokens in each row. Default: made up."
    ),
    requests: int = typer.Option(64, min=1, help="Made-up requests."),
    input_len: int = typer.Option(210, min=1, help="Their mean prompt length."),
    output_len: int = typer.Option(105, min=1, help="Their mean output length."),
    workload_seed: int = typer.Option(0, help="Seed of their lengths and tokens."),
    baseline: str | None = typer.Option(
        None, metavar="transformers", help="Run the same rows through Transformers (static batches) and compare."
    ),
    baseline_batch: int = typer.Option(16, min=1, help="Batch size of the baseline."),
    json_file: Path | None = JSON_FILE,
) -> None:
    """Run a workload offline, all requests at once: tokens per second."""
    from .bench.throughput import run
    from .bench.workload import load, synthetic

    made_up = None if workload else lambda vocab: synthetic(requests, input_len, output_len, workload_seed, vocab)
    run(config, load(workload) if workload else None, made_up, baseline, baseline_batch, json_file)


@bench.command("latency")
@with_engine_options
def bench_latency(
    config: EngineConfig,
    input_len: int = typer.Option(128, min=1, help="Prompt length."),
    output_len: int = typer.Option(128, min=2, help="Output length."),
    repeats: int = typer.Option(5, min=1, help="Measured runs; one more goes before them to warm up."),
    json_file: Path | None = JSON_FILE,
) -> None:
    """Run one request at a time: time to first token, and decode rate."""
    from .bench.latency import run

    run(config, input_len, output_len, repeats, json_file)


@bench.command("serve")
def bench_serve(
    url: str = typer.Option("http://127.0.0.1:8000", help="The server's address."),
    model: str | None = typer.Option(None, help="Default: the first that the server names."),
    api_key: str | None = typer.Option(None, envvar="OCTAVO_API_KEY", show_envvar=True, help="The server's key."),
    workload: Path | None = typer.Option(
        None, exists=True, dir_okay=False, help="JSONL with prompt_ids and max_tokens in each row. Default: made up."
    ),
    requests: int = typer.Option(64, min=1, help="Made-up requests."),
    input_len: int = typer.Option(210, min=1, help="Their mean prompt length."),
    output_len: int = typer.Option(105, min=1, help="Their mean output length."),
    workload_seed: int = typer.Option(0, help="Seed of their lengths, tokens and arrivals."),
    vocab_size: int = typer.Option(32_000, min=1, help="Made-up prompts use token ids below this."),
    rate: float | None = typer.Option(None, min=0.001, help="Requests per second (Poisson). Default: all at once."),
    concurrency: int | None = typer.Option(None, min=1, help="Most requests at once. Default: no limit."),
    json_file: Path | None = JSON_FILE,
) -> None:
    """Load a running server over HTTP, streaming: latency percentiles and throughput."""
    from .bench.online import Load, run
    from .bench.workload import load, synthetic

    rows = load(workload) if workload else synthetic(requests, input_len, output_len, workload_seed, vocab_size)
    run(Load(url, model, api_key, rate, concurrency, workload_seed), rows, json_file)


def main() -> None:
    """The entry point of `octavo`."""
    try:
        app()
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        sys.exit(1)
