# ruff: noqa: RUF001 - letters that look like others are what a tokenizer must keep apart
"""Tokenizers: compared with algorithms written out here, with Transformers, and with decoding all at once."""

from __future__ import annotations

import importlib
import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from octavo.core.errors import ModelError, RequestError
from octavo.core.hub import ModelFiles
from octavo.core.models.gguf_file import GGUFFile
from octavo.core.models.loader import open_model
from octavo.core.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnewlines\r\n\r\n  mixed \n\t ",
    "\n\n\n",
    "a  b   c    d",
    "It's we're I'll they'd YOU'VE don't",
    "1",
    "12",
    "2024-11-05T12:34:56Z costs $1,234.56",
    "007 is 7, 1e10 is 10000000000",
    "version 3.10.12rc1",
    "x1y2z3",
    "half ½ roman Ⅷ arabic ٣٤٥ superscript x²",
    "fullwidth １２３",
    "def f(x):\n    return x ** 2  # square\n",
    "for (int i = 0; i < 10; ++i) { a[i] += b[i]; }",
    "<html><body class='x'>&amp;</body></html>",
    '{"key": [1, 2, {"n": null}], "t": true}',
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';",
    "https://example.org/path?q=a%20b&x=1#frag",
    "C:\\Users\\name\\file.txt",
    "😀",
    "👩‍👩‍👧‍👦 family",
    "👍🏽🇩🇪🏳️‍🌈",
    "emoji in 😀 the 🎉 middle",
    "Straße, naïve café, ångström",
    "cafe\u0301 decomposed",
    "Zażółć gęślą jaźń",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "你好，世界！",
    "こんにちは世界。カタカナ",
    "안녕하세요 세계",
    "ሰላም ዓለም",
    "mixed 你好 and Привет and hello",
    "\u200bzero width\u200d joiner\ufeff",
    "non\u00a0breaking\u2003em\u3000ideographic",
    "control \x00\x01\x7f\x1b[0m",
    "math ∑∫√∞ ≤≥≠ αβγ 𝔸𝕓𝟙",
    "quotes “curly” ‘single’ «guillemets» —dash– …",
    "________ ======== -------- ########",
    "word" * 50,
    "a" * 500,
    "UPPER lower MiXeD camelCase snake_case kebab-case",
    "...!!!???;;;:::",
    "<|im_start|>user\nhi<|im_end|>\n",
    "text<|endoftext|>more",
    "<|im_start|><|im_start|> <|im_end|>",
    "<|im_start",
    "▁underline ▁ ▁▁",
    "Ġ is a letter too: ĠĠ Ċ",
    "\U0010ffff\ue000 private",
    "x\u0085y\u2028z",
]

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_chars() -> dict[int, str]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


class PlainBPE:
    """Byte-level BPE by the book: cut into words, then join the best-ranked pair until none is left."""

    def __init__(self, vocab: dict[str, int], merges: list[str], special: list[str], words: list[str], whole: bool):
        self.vocab, self.whole = vocab, whole
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self.special = "|".join(map(regex.escape, sorted(special, key=len, reverse=True)))
        self.words = [regex.compile(pattern) for pattern in words]
        self.chars = byte_chars()
        self.join = lru_cache(maxsize=None)(self._join)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in regex.split(f"({self.special})", text) if self.special else [text]:
            if part in self.vocab and self.special and regex.fullmatch(self.special, part):
                ids.append(self.vocab[part])
                continue
            pieces = [part]
            for pattern in self.words:
                pieces = [p for piece in pieces for p in self.cut(pattern, piece)]
            for piece in pieces:
                ids += self.join("".join(self.chars[b] for b in piece.encode()))
        return ids

    @staticmethod
    def cut(pattern: Any, text: str) -> list[str]:
        out, at = [], 0
        for match in pattern.finditer(text):
            out += [text[at : match.start()], match.group()]
            at = match.end()
        return [piece for piece in [*out, text[at:]] if piece]

    def _join(self, word: str) -> list[int]:
        if self.whole and word in self.vocab:
            return [self.vocab[word]]
        parts = list(word)
        while True:
            ranked = [(self.ranks.get(pair, 1 << 60), i) for i, pair in enumerate(pairwise(parts))]
            if not ranked or min(ranked)[0] == 1 << 60:
                return [self.vocab[p] for p in parts]
            i = min(ranked)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]


def trained(words: Any, size: int = 700) -> tuple[dict[str, int], list[str]]:
    """A small byte-level vocabulary and merges, trained on the texts above."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer.get_vocab(), [" ".join(merge) if isinstance(merge, list) else merge for merge in merges]


def gguf_tokenizer(path: Path, model: str, tokens: list[str], kinds: list[int], **keys: Any) -> Tokenizer:
    metadata = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    metadata |= {f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": value for key, value in keys.items()}
    return Tokenizer.from_gguf(GGUFFile(write_gguf(path, {}, metadata=metadata)))


@pytest.mark.demo
def test_demo_tokenizer_is_exact(demo_model: ModelFiles) -> None:
    """The "smollm" rule: digits one by one, then GPT-2's words."""
    meta = GGUFFile(demo_model.path).metadata
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    plain = PlainBPE(
        {token: i for i, token in enumerate(tokens)},
        meta["tokenizer.ggml.merges"],
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3],
        [r"\p{N}", GPT2_WORDS],
        whole=False,
    )
    ours = open_model(demo_model).tokenizer
    assert ours is not None
    assert len(TEXTS) >= 50
    for text in TEXTS:
        assert ours.encode(text) == plain.encode(text), repr(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert (ours.vocab_size, ours.eos_token_ids, ours.bos_token_id) == (49152, (2,), 1)
    assert ours.is_special(2)
    assert ours.id_to_token(2) == "<|im_end|>"
    assert ours.token_to_id("<|im_end|>") == 2


@pytest.mark.parametrize(
    ("pre", "rule"),
    [
        ("gpt-2", GPT2_WORDS),
        ("default", GPT2_WORDS),
        ("llama-bpe", TikTokenConverter.__init__.__defaults__[1]),
        ("qwen2", PRETOKENIZE_REGEX),
    ],
)
def test_byte_level_gguf_tokenizers(pre: str, rule: str, tmp_path: Path) -> None:
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    if pre == "llama-bpe":
        # A word that is a token but that no merge makes: Llama 3 must still take it whole.
        vocab["Ġzyxw"] = len(vocab)
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokens = [*sorted(vocab, key=vocab.__getitem__), *special]
    kinds = [1] * len(vocab) + [3] * 3
    ours = gguf_tokenizer(tmp_path / "t.gguf", "gpt2", tokens, kinds, pre=pre, merges=merges, bos_token_id=len(vocab))
    plain = PlainBPE({t: i for i, t in enumerate(tokens)}, merges, special, [rule], whole=pre == "llama-bpe")
    for text in [*TEXTS, "the zyxw"]:
        # Qwen2 normalizes to NFC first, as its Hugging Face tokenizer does; the plain one is given that text.
        normal = regex.sub("e\u0301", "é", text) if pre == "qwen2" else text
        bos = [len(vocab)] if pre == "llama-bpe" else []
        assert ours.encode(text, add_special_tokens=False) == plain.encode(normal), repr(text)
        assert ours.encode(text) == bos + plain.encode(normal)


def spm_encode(vocab: dict[str, tuple[int, float]], text: str) -> list[int]:
    """SentencePiece BPE by the book: join the neighbours whose token scores best, leftmost first; then bytes."""
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [(-vocab[a + b][1], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in vocab]
        if not joined:
            break
        i = min(joined)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        ids += [vocab[part][0]] if part in vocab else [vocab[f"<0x{b:02X}>"][0] for b in part.encode()]
    return ids


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, dict[str, tuple[int, float]]]:
    trainer = tokenizers.Tokenizer(models.BPE())
    trainer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    alphabet = [chr(c) for c in range(32, 127)]
    bpe = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, limit_alphabet=120, show_progress=False)
    trainer.train_from_iterator(TEXTS * 3, bpe)
    pieces = sorted(trainer.get_vocab(), key=trainer.get_vocab().__getitem__)
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    # Later pieces were merged later, and score lower; single characters come first and need no score.
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    path = tmp_path_factory.mktemp("spm") / "t.gguf"
    ours = gguf_tokenizer(path, "llama", tokens, kinds, scores=scores, bos_token_id=1, eos_token_id=2)
    return ours, {token: (i, scores[i]) for i, token in enumerate(tokens) if kinds[i] in (1, 6)}


def test_sentencepiece_gguf_tokenizer(spm: Any) -> None:
    ours, vocab = spm
    for text in TEXTS:
        expected = spm_encode(vocab, text)
        assert ours.encode(text, add_special_tokens=False) == expected, repr(text)
        assert ours.encode(text) == [1, *expected]
        assert ours.decode(expected) == text.replace("▁", " ")
    assert (ours.eos_token_ids, ours.bos_token_id) == ((2,), 1)


def byte_level(tmp_path: Path) -> Tokenizer:
    vocab, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|end|>", "<|ü|>"]
    kinds = [1] * len(vocab) + [3, 4]
    return gguf_tokenizer(
        tmp_path / "t.gguf", "gpt2", tokens, kinds, pre="gpt-2", merges=merges, eos_token_id=len(vocab)
    )


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def other_tokenizer() -> Tokenizer:
    """A decoder of neither common shape: Metaspace."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    return [*(stream.step(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("kind", ["bytes", "spm", "other"])
def test_streamed_pieces_equal_a_full_decode(kind: str, request: pytest.FixtureRequest) -> None:
    fixture = {"bytes": "bytes_tokenizer", "spm": "spm", "other": "other_tokenizer"}[kind]
    tokenizer = request.getfixturevalue(fixture)
    tokenizer = tokenizer[0] if kind == "spm" else tokenizer
    # Single bytes often, so that characters come apart and together; some ids beyond the vocabulary.
    ids = st.integers(0, tokenizer.vocab_size + 3) | st.integers(0, 270)

    @settings(max_examples=400, deadline=None)
    @given(ids=st.lists(ids, max_size=30), skip=st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert "".join(pieces_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()
    for text in TEXTS:
        ids_of_text = tokenizer.encode(text)
        assert "".join(pieces_of(tokenizer, ids_of_text, True)) == tokenizer.decode(ids_of_text)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=40))
def test_bytes_that_are_not_utf8(bytes_tokenizer: Tokenizer, data: bytes) -> None:
    chars = byte_chars()
    ids = [bytes_tokenizer.token_to_id(chars[b]) for b in data]
    assert "".join(pieces_of(bytes_tokenizer, ids, True)) == data.decode(errors="replace")
    assert b"".join(bytes_tokenizer.token_bytes(i) for i in ids) == data


def test_a_piece_is_empty_until_its_character_is_whole(bytes_tokenizer: Tokenizer) -> None:
    chars = byte_chars()
    ids = [bytes_tokenizer.token_to_id(chars[b]) for b in "𝔸b".encode()]
    assert pieces_of(bytes_tokenizer, ids, True) == ["", "", "", "𝔸", "b", ""]
    assert pieces_of(bytes_tokenizer, ids[:3], True) == ["", "", "", "\ufffd"]


def test_token_bytes(spm: Any, bytes_tokenizer: Tokenizer, other_tokenizer: Tokenizer) -> None:
    assert spm[0].token_bytes(3 + 0xE2) == b"\xe2"
    assert spm[0].token_bytes(spm[0].token_to_id("▁")) == b" "
    assert bytes_tokenizer.token_bytes(bytes_tokenizer.eos_token_ids[0]) == b"<|end|>"
    odd = bytes_tokenizer.token_to_id("<|ü|>")
    assert bytes_tokenizer.token_bytes(odd).decode(errors="replace") == bytes_tokenizer.decode([odd])
    assert bytes_tokenizer.token_bytes(10**6) == b""
    assert bytes_tokenizer.token_bytes(-1) == b""
    assert bytes_tokenizer.id_to_token(1 << 40) is None
    text = "Hello, world!"
    for tokenizer in (spm[0], other_tokenizer):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == " " + text


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00 no", "\ud83d\ud83d"])
def test_half_a_surrogate_pair_is_a_request_error(bytes_tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        bytes_tokenizer.encode(text)
    assert caught.value.param == "prompt"


def test_text_that_is_no_text(bytes_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="of type int"):
        bytes_tokenizer.encode(3)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives(bytes_tokenizer: Tokenizer, text: str) -> None:
    assert bytes_tokenizer.decode(bytes_tokenizer.encode(text), skip_special_tokens=False) == text


def test_long_text_is_not_cut(bytes_tokenizer: Tokenizer) -> None:
    text = "word and 😀 " * 100_000
    assert bytes_tokenizer.decode(bytes_tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("model", "keys", "what"),
    [
        ("gpt2", {"pre": "gemma4", "merges": ["a b"]}, "pre-tokenizer 'gemma4'.*--tokenizer"),
        ("gpt2", {"pre": "gpt-2"}, "tokenizer.ggml.merges is missing"),
        ("gpt2", {"pre": "gpt-2", "merges": ["a z"]}, "do not fit together"),
        ("gpt2", {"pre": "gpt-2", "merges": ["nospace"]}, "do not fit together"),
        ("llama", {}, "tokenizer.ggml.scores"),
        ("bert", {}, "'bert' is not supported"),
    ],
)
def test_gguf_tokenizer_that_cannot_be_built(model: str, keys: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=what):
        gguf_tokenizer(tmp_path / "t.gguf", model, ["a", "b"], [1, 1], **keys)


# Directories ----------------------------------------------------------------------------------------------------


def saved(tmp_path: Path, tokenizer: Tokenizer, **fields: Any) -> Any:
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, eos_token="<|end|>", **fields)
    theirs.save_pretrained(tmp_path)
    return theirs


def test_directory_equals_transformers(bytes_tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = saved(tmp_path, bytes_tokenizer)
    ours = Tokenizer.from_directory(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert (ours.vocab_size, ours.eos_token_ids) == (len(theirs), (theirs.eos_token_id,))
    assert ours.bos_token_id is None
    assert not ours.has_chat_template


def test_padding_and_truncation_of_the_file_are_not_for_prompts(bytes_tokenizer: Tokenizer, tmp_path: Path) -> None:
    saved(tmp_path, bytes_tokenizer)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "Hello, world! " * 10
    assert Tokenizer.from_directory(tmp_path).encode(text) == bytes_tokenizer.encode(text)


@pytest.mark.parametrize("value", [True, False])
def test_add_bos_and_eos_of_the_config_win(value: bool, bytes_tokenizer: Tokenizer, tmp_path: Path) -> None:
    saved(tmp_path, bytes_tokenizer, bos_token="<|end|>")
    edit(tmp_path / "tokenizer_config.json", add_bos_token=value, add_eos_token=value)
    ends = [bytes_tokenizer.token_to_id("<|end|>")] if value else []
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.encode("hi") == ends + bytes_tokenizer.encode("hi") + ends
    assert ours.encode("hi", add_special_tokens=False) == bytes_tokenizer.encode("hi")


def edit(path: Path, **fields: Any) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**data, **fields}))


def test_tokens_only_in_the_config_are_added(bytes_tokenizer: Tokenizer, tmp_path: Path) -> None:
    saved(tmp_path, bytes_tokenizer)
    new = bytes_tokenizer.vocab_size
    token = {"content": "<|extra|>", "special": True, "normalized": False}
    edit(tmp_path / "tokenizer_config.json", added_tokens_decoder={str(new): token}, eos_token=token)
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.encode("a<|extra|>b")[1] == new
    assert ours.eos_token_ids == (new,)
    assert ours.is_special(new)
    edit(tmp_path / "tokenizer_config.json", added_tokens_decoder={str(new + 5): token})
    with pytest.raises(ModelError, match=r"'<\|extra\|>' the id"):
        Tokenizer.from_directory(tmp_path)


def test_where_chat_templates_may_stand(bytes_tokenizer: Tokenizer, tmp_path: Path) -> None:
    saved(tmp_path, bytes_tokenizer)
    config, messages = tmp_path / "tokenizer_config.json", [{"role": "user", "content": "x"}]

    def rendered(**kwargs: Any) -> str:
        return Tokenizer.from_directory(tmp_path).apply_chat_template(messages, **kwargs)

    edit(config, chat_template="inline")
    assert rendered() == "inline"
    edit(config, chat_template=[{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    assert rendered() == "plain"
    assert rendered(tools=[{"type": "function"}]) == "tools"
    edit(tmp_path / "chat_template.json", chat_template="legacy")
    assert rendered() == "legacy"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tool file")
    assert rendered() == "file"
    assert rendered(tools=[{"type": "function"}]) == "tool file"
    assert Tokenizer.from_directory(tmp_path).chat_template == "file"


def test_damaged_tokenizer_files(bytes_tokenizer: Tokenizer, tmp_path: Path) -> None:
    saved(tmp_path, bytes_tokenizer)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config.json is not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_old_formats_need_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer.json.*--tokenizer"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"junk")
    with pytest.raises(ModelError, match=r"Transformers cannot convert tokenizer.model"):
        Tokenizer.from_directory(tmp_path)

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModelError, match=r"only tokenizer.model. Install Transformers"):
        Tokenizer.from_directory(tmp_path)


def test_old_format_through_transformers(bytes_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = json.loads(bytes_tokenizer._backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    ours = Tokenizer.from_directory(tmp_path)
    for text in ("Hello, world!", "emoji in 😀 the middle"):
        assert ours.encode(text) == bytes_tokenizer.encode(text)


# Chats ----------------------------------------------------------------------------------------------------------

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUSY = """
{%- if tools is not none %}
Tools: {{ tools | tojson(indent=2) }}
{% endif %}
    {% for message in messages %}
        {% if message.role == 'skip' %}{% continue %}{% endif %}
        {%- if message.content is string %}
{{ bos_token }}{{ message.role | upper }}: {{ message.content | trim }}{{ eos_token }}
        {%- else %}
            {%- for part in message.content %}[{{ part.text }}]{% endfor %}
        {%- endif %}
        {% for call in message.tool_calls or [] %}
CALL {{ call.function.name }} {{ call.function.arguments | tojson }}
        {% endfor %}
    {% endfor %}
{% generation %}GEN{% endgeneration %}
{{ strftime_now('%Y') }} {{ custom | default('none') }} {{ namespace(a=1).a }}
{%- if add_generation_prompt %} ASSISTANT:{% endif %}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>\"there\"</b> & 'you' é 😀"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "2+2?"}],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "w", "arguments": {"city": "Köln"}}}],
        },
        {"role": "tool", "content": "sunny"},
        {"role": "skip", "content": "never"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "w", "description": "<Weather> é", "parameters": {}}}]


def pair(tokenizer: Tokenizer, template: str) -> tuple[Tokenizer, Any]:
    """Ours and Transformers' with the same template and special tokens."""
    named = {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, chat_template=template, **named)
    return Tokenizer(tokenizer._backend, named, {"default": template}), theirs


@pytest.mark.parametrize("template", [CHATML, BUSY])
@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_equal_transformers(bytes_tokenizer: Tokenizer, template: str, chat: int, prompt: bool) -> None:
    ours, theirs = pair(bytes_tokenizer, template)
    for tools in (None, TOOLS):
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, "custom": "x"}
        expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, **options)
        assert ours.apply_chat_template(CHATS[chat], **options) == expected
        ids = theirs.apply_chat_template(CHATS[chat], tokenize=True, return_dict=False, **options)
        assert ours.encode_chat(CHATS[chat], **options) == ids


@pytest.mark.parametrize("template", [CHATML, BUSY])
@pytest.mark.parametrize("last", ["The answer is", "The answer is ", "CONTINUE"])
def test_continuing_the_last_message_equals_transformers(bytes_tokenizer: Tokenizer, template: str, last: str) -> None:
    ours, theirs = pair(bytes_tokenizer, template)
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": last}]
    expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert ours.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True) == expected


@pytest.mark.demo
def test_demo_chat_equals_transformers(demo_model: ModelFiles) -> None:
    ours = open_model(demo_model).tokenizer
    assert ours is not None
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours._backend, chat_template=ours.chat_template)
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert ours.apply_chat_template(chat) == expected
        assert ours.encode_chat(chat)[:2] == ours.encode("<|im_start|>system\n" if "system" in expected else "")[:2]


def test_parts_are_joined_unless_the_template_takes_them(bytes_tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = [{"role": "user", "content": parts}]
    plain, _ = pair(bytes_tokenizer, CHATML)
    assert plain.apply_chat_template(chat, add_generation_prompt=False) == "<|im_start|>user\none\ntwo<|im_end|>\n"
    busy, theirs = pair(bytes_tokenizer, BUSY)
    assert "[one][two]" in busy.apply_chat_template(chat)
    assert busy.apply_chat_template(chat, add_generation_prompt=False) == theirs.apply_chat_template(
        chat, tokenize=False
    )
    prints, _ = pair(bytes_tokenizer, "{{ messages[0].content }}")
    assert prints.apply_chat_template(chat) == "one\ntwo"
    dumps, _ = pair(bytes_tokenizer, "{{ messages[0].content | tojson }}")
    assert dumps.apply_chat_template(chat) == '"one\\ntwo"'


def test_tool_arguments_become_objects(bytes_tokenizer: Tokenizer) -> None:
    """The protocol sends JSON text; a template that dumps it again must not escape it twice."""
    busy, _ = pair(bytes_tokenizer, BUSY)
    call = {"function": {"name": "w", "arguments": '{"city": "Köln"}'}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert 'CALL w {"city": "Köln"}' in busy.apply_chat_template(chat)
    call["function"]["arguments"] = "{"
    with pytest.raises(RequestError, match="not valid JSON"):
        busy.apply_chat_template(chat)


@pytest.mark.parametrize(
    ("chat", "what"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] is not an object"),
        ([{"content": "x"}], "with a role"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is of type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is of type 'str'"),
        ([{"role": "user", "content": "x", "tool_calls": ["x"]}], "without a function"),
        ([{"role": "user"}], "chat template refuses"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_messages_that_are_wrong(bytes_tokenizer: Tokenizer, chat: Any, what: str) -> None:
    ours, _ = pair(bytes_tokenizer, CHATML)
    with pytest.raises(RequestError, match=what) as caught:
        ours.encode_chat(chat)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_templates_that_fail_are_request_errors(bytes_tokenizer: Tokenizer, template: str, what: str) -> None:
    ours, _ = pair(bytes_tokenizer, template)
    with pytest.raises(RequestError, match=what) as caught:
        ours.apply_chat_template(CHATS[0])
    assert caught.value.param == "messages"


def test_template_that_is_no_jinja(bytes_tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelError, match=r"not valid Jinja2 \(line 1"):
        bytes_tokenizer.with_chat_template("{% if %}")
    assert bytes_tokenizer.with_chat_template("ok").apply_chat_template(CHATS[0]) == "ok"


def test_no_template_and_bad_combinations(bytes_tokenizer: Tokenizer) -> None:
    assert bytes_tokenizer.chat_template is None
    with pytest.raises(RequestError, match="no chat template"):
        bytes_tokenizer.apply_chat_template(CHATS[0])
    ours, _ = pair(bytes_tokenizer, CHATML)
    with pytest.raises(RequestError, match="exclude each other"):
        ours.apply_chat_template(CHATS[0], continue_final_message=True)
    with pytest.raises(RequestError, match="no text to continue"):
        ours.apply_chat_template([{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True)
    drops, _ = pair(bytes_tokenizer, "{{ messages[0].content }}")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RequestError, match="drops the last message"):
        drops.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
