"""LLM: an engine in this process, for scripts and batches."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from difflib import get_close_matches
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from .batch_run import BatchRun
from .config import EngineConfig
from .engine.frontend import Frontend, open_frontend
from .engine.input import InputProcessor
from .engine.output import OutputProcessor, RequestOutput
from .engine.types import EngineInfo, EngineStats
from .errors import ConfigError, EngineDeadError, RequestError
from .progress import StartProgress
from .sampling.params import SamplingParams
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .engine.engine import EngineCore

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None

logger = logging.getLogger("octavo")


class LLM:
    """An engine in this process.

        with LLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
            for output in llm.generate(["Once upon a time", "The moon is"], SamplingParams(max_tokens=50)):
                print(output.outputs[0].text)

    One thread may use it at a time.

    Args:
        model: a directory, a .gguf file or a Hugging Face id; None is the demo model.
        options: fields of EngineConfig, such as max_model_len=4096.

    Attributes:
        info: what the engine is.
        tokenizer: the model's, None where it has none.
        generation_defaults: sampling fields that the model's makers recommend; used where no params are given.

    Raises:
        OctavoError: the configuration, the model or the device cannot be used; the message says why.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        from .engine.build import build_engine  # loads the device's libraries, so not before they are needed

        config = _config(model, options)
        frontend = open_frontend(config)
        with closing(StartProgress()) as progress:
            engine = build_engine(config, progress=progress, log=logger.info)
        self._set_up(engine, frontend, config.max_waiting)

    @classmethod
    def from_engine(cls, engine: EngineCore, frontend: Frontend, max_waiting: int = EngineConfig.max_waiting) -> LLM:
        """An LLM over an engine that is built already; it closes the engine.

        Args:
            engine: with no request under way.
            frontend: its model's tokenizer and defaults.
            max_waiting: requests that may wait in it.
        """
        self = cls.__new__(cls)
        self._set_up(engine, frontend, max_waiting)
        return self

    def _set_up(self, engine: EngineCore, frontend: Frontend, max_waiting: int) -> None:
        self.info: EngineInfo = engine.info
        self.tokenizer: Tokenizer | None = frontend.tokenizer
        self.generation_defaults: dict[str, Any] = frontend.generation_defaults
        self._engine: EngineCore | None = engine
        self._inputs = InputProcessor(engine.info, frontend.tokenizer)
        self._numbers = itertools.count()
        # Requests are added when there is room, so that a queue of millions takes no memory in the engine.
        self._queue = min(engine.info.max_num_seqs, max_waiting)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the device. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def stats(self) -> EngineStats:
        """The engine's counters and gauges as they are now.

        Raises:
            EngineDeadError: the engine was closed, or has broken.
        """
        if self._engine is None:
            raise EngineDeadError("The engine was closed; make a new LLM.")
        return self._engine.stats()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Completes prompts; the outputs are in their order. Ctrl-C ends them all and leaves the engine usable.

        Args:
            prompts: one prompt or a list. A prompt is a text, a list of token ids, {"prompt": text} or
                {"prompt_token_ids": ids}.
            params: one for all prompts or one for each; None is what the model's makers recommend.
            use_tqdm: whether to show progress on stderr.

        Returns:
            For each prompt its whole output. Where the engine could not run one, its `error` says why and its
            completions have finish_reason "error"; the others are not affected.

        Raises:
            RequestError: a prompt or its params are invalid; it names which. Nothing has run then.
            EngineDeadError: the engine was closed, or has broken.
        """
        sources = []
        for i, prompt in enumerate(_as_list(prompts)):
            with _naming("Prompt", i):
                sources.append(_source(prompt))
        return self._run("Prompt", sources, params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, by way of the model's chat template.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists.
            params: as in `generate`.
            use_tqdm: as in `generate`.
            add_generation_prompt: whether to end with the start of the assistant's turn.
            continue_final_message: whether to leave the last message open, for the model to go on with it.
            tools: tools that the template tells the model of.
            template_kwargs: variables for the template.

        Raises:
            RequestError: as `generate`; or the model has no chat template, or it refuses the messages.
        """
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Messages], [messages] if one else messages)
        if self.tokenizer is None:
            raise RequestError("The model has no tokenizer, so it cannot take messages.", "messages")
        sources = []
        for i, conversation in enumerate(conversations):
            with _naming("Conversation", i):
                text = self.tokenizer.apply_chat_template(
                    conversation, add_generation_prompt, tools, continue_final_message, **template_kwargs
                )
            sources.append(_Source(text, None, add_special_tokens=False))
        return self._run("Conversation", sources, params, use_tqdm)

    def _run(self, noun: str, sources: Sequence[_Source], params: Params, use_tqdm: bool) -> list[RequestOutput]:
        if self._engine is None:
            raise EngineDeadError("The engine was closed; make a new LLM.")
        each = self._params_for(len(sources), params, noun)
        requests = []
        for i, (source, sampling) in enumerate(zip(sources, each, strict=True)):
            with _naming(noun, i):
                ids = source.ids
                if source.text is not None:
                    ids = self._inputs.encode(source.text, source.add_special_tokens)
                # What is neither text nor ids is refused by `build`.
                requests.append(self._inputs.build(str(next(self._numbers)), ids, sampling))  # type: ignore[arg-type]
        texts = [source.text for source in sources]
        try:
            return BatchRun(self._engine, OutputProcessor(self.tokenizer), self._queue).outputs(
                requests, texts, use_tqdm
            )
        except Exception:  # a fault inside: nothing is known about the engine's state
            self.close()
            raise

    def _params_for(self, count: int, params: Params, noun: str) -> Sequence[SamplingParams]:
        if params is None:
            params = SamplingParams(**self.generation_defaults)
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(
                f"There are {count} {noun.lower()}s and {len(params)} params; give one for each, or one."
            )
        return params


class _Source(NamedTuple):
    """A prompt as it was given: text, or token ids."""

    text: str | None
    ids: Sequence[int] | None
    add_special_tokens: bool = True


@contextmanager
def _naming(noun: str, number: int) -> Iterator[None]:
    """Puts into an error which of the inputs is meant."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{noun} {number}: {error}", error.param) from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast(Sequence[Prompt], [prompts] if one else prompts)


def _source(prompt: Prompt) -> _Source:
    if isinstance(prompt, str):
        return _Source(prompt, None)
    if not isinstance(prompt, Mapping):
        return _Source(None, prompt)
    keys = set(prompt)
    if keys not in ({"prompt"}, {"prompt_token_ids"}):
        named = ", ".join(sorted(map(str, keys))) or "nothing"
        raise RequestError(
            f'A prompt that is a dict must have "prompt" or "prompt_token_ids"; one has {named}.', "prompt"
        )
    return _Source(prompt.get("prompt"), prompt.get("prompt_token_ids"))


def _config(model: str | None, options: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig; ConfigError for an option that there is not."""
    names = [f.name for f in fields(EngineConfig)]
    for name in options:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
            raise ConfigError(f"There is no option {name}; {hint}")
    return EngineConfig(model=model, **options)
