"""Engine configuration: the one source for the command line's flags, for `LLM(...)` and for the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from .errors import ConfigError


def option(default: Any, text: str, **more: Any) -> Any:
    """A dataclass field that is also a command-line option.

    Args:
        default: its default.
        text: the option's help.
        more: `choices` (a tuple), `low` (least value), `unit` ("bytes": the flag takes 4GiB and the like), `backend`
            (True: it is handed to the device's plugin as an option of that name, and refused where that has none).
    """
    metadata = {"help": text, **more}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_of(f: Field[Any]) -> str:
    """The command-line flag of a configuration field."""
    return "--" + f.name.replace("_", "-")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is set up. None and "auto" mean: chosen, and the choice is reported in the log.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    model: str | None = option(None, "Model: a directory, a .gguf file or a Hugging Face id. Default: the demo model.")
    tokenizer: str | None = option(None, "Tokenizer directory, where it is not the model's own.")
    revision: str | None = option(None, "Revision of the Hugging Face repository.")
    device: str = option("auto", "Device: a name or an id from `octavo devices`, or auto.")
    dtype: str = option(
        "auto", "Weights and activations.", choices=("auto", "float32", "bfloat16", "float16", "float64")
    )
    kv_cache_dtype: str = option(
        "auto", "KV cache; auto is as --dtype.", choices=("auto", "float32", "bfloat16", "float16", "float64", "int8")
    )
    quantization: str | None = option(
        None,
        "Round weights to 8 or 4 bits when they are loaded, on devices that can. Default: as the checkpoint has them.",
        choices=("int8", "int4"),
        backend=True,
    )
    threads: int | None = option(
        None,
        "Threads to compute with, on devices that use the host's. Default: the device's choice.",
        low=1,
        backend=True,
    )
    max_model_len: int | None = option(
        None, "Longest sequence in tokens, prompt and output. Default: the model's.", low=1
    )
    max_num_seqs: int = option(256, "Sequences that run at once.", low=1)
    max_num_batched_tokens: int = option(2048, "Tokens per step: the budget that prefill chunks share.", low=1)
    block_size: int | None = option(None, "Tokens per KV block. Default: the device's.", low=1)
    memory_utilization: float | None = option(
        None, "Share of the device's memory to use for weights, activations and KV cache. Default: the device's."
    )
    kv_cache_memory: int | None = option(
        None, "Bytes for the KV cache, in place of --memory-utilization.", low=1, unit="bytes"
    )
    swap_space: int = option(
        0, "Bytes of host memory for the blocks of preempted requests; 0 preempts by recompute.", low=0, unit="bytes"
    )
    prefix_caching: bool = option(True, "Reuse the KV blocks of equal prefixes.")
    chunked_prefill: bool = option(True, "Split long prompts over several steps.")
    num_hosts: int = option(1, "Hosts that run the model together; the same command is run on each.", low=1)
    host_rank: int = option(0, "Which of the hosts this is; rank 0 serves, the others follow it.", low=0)
    coordinator: str | None = option(
        None, "HOST:PORT on rank 0, for several hosts; that port and the next one must be free there."
    )
    seed: int | None = option(None, "Seed for requests that bring none. Default: fresh ones.")
    max_waiting: int = option(100_000, "Requests that may wait; further ones are refused.", low=1)
    served_model_name: str | None = option(None, "Name in the API. Default: the model's.")
    backend_option: Mapping[str, str] = option(dict, "key=value for the device's plugin; may be repeated.")

    def __post_init__(self) -> None:
        for f in fields(self):
            value, low, choices = getattr(self, f.name), f.metadata.get("low"), f.metadata.get("choices")
            flag = flag_of(f)
            if low is not None and value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"{flag} must be a whole number, not {value!r}.")
            if low is not None and value is not None and value < low:
                raise ConfigError(f"{flag} must be at least {low}, not {value}.")
            if choices and value is not None and value not in choices:
                raise ConfigError(f"{flag} must be one of {', '.join(choices)}, not {value!r}.")
        share = self.memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(f"--memory-utilization must be greater than 0 and at most 1, not {share}.")
        if share is not None and self.kv_cache_memory is not None:
            raise ConfigError("Give --memory-utilization or --kv-cache-memory, not both.")
        self._check_hosts()

    def backend_options(self) -> dict[str, str]:
        """Options for the device's plugin: those of `backend_option`, and the flags that stand for one.

        Raises:
            ConfigError: one is given both ways, with different values.
        """
        options = dict(self.backend_option)
        for f in fields(self):
            value = getattr(self, f.name)
            if not f.metadata.get("backend") or value is None:
                continue
            if options.get(f.name, str(value)) != str(value):
                raise ConfigError(
                    f"{flag_of(f)} {value} and --backend-option {f.name}={options[f.name]} differ: give one of them."
                )
            options[f.name] = str(value)
        return options

    def _check_hosts(self) -> None:
        if self.host_rank >= self.num_hosts:
            raise ConfigError(
                f"--host-rank {self.host_rank} must be below --num-hosts ({self.num_hosts}): ranks count from 0."
            )
        if self.num_hosts == 1:
            if self.coordinator is not None:
                raise ConfigError("--coordinator is for several hosts: give --num-hosts as well, or leave it out.")
            return
        if self.coordinator is None:
            raise ConfigError(
                f"--num-hosts {self.num_hosts} needs --coordinator HOST:PORT: an address of rank 0 that all hosts "
                "can reach."
            )
        host, colon, port = self.coordinator.rpartition(":")
        if not (host and colon and port.isascii() and port.isdecimal() and 1 <= int(port) <= 65534):
            raise ConfigError(
                f"--coordinator must be HOST:PORT with a port from 1 to 65534 (the next one is used too), not "
                f"{self.coordinator!r}."
            )
