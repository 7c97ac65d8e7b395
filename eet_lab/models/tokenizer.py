"""Text to token ids and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from pathlib import Path
from typing import Any

from eet_lab.errors import ModelError, PromptError
from eet_lab.models.checkpoint import AGAIN, check_file, read_json
from eet_lab.models.token_types import tells_types
from eet_lab.models.transcript import BROKEN
from eet_lab.words import counted, told

UNKNOWN = re.compile(r"⟨\d+⟩")
"""What `decode` makes of a token that the vocabulary does not have."""


PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
UNPRINTED = tuple(byte for byte in range(256) if byte not in PRINTED)
BYTE_OF = {chr(byte): byte for byte in PRINTED} | {chr(256 + i): byte for i, byte in enumerate(UNPRINTED)}
"""The byte for which each character of a word stands, in vocabularies of bytes (GPT-2's table)."""
ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""How other vocabularies write a byte that is no character alone."""
SPACE = "\u2581"
"""What stands for a space in SentencePiece's words."""

MAX_BYTES = 128 << 20
"""A tokenizer of 250,000 words and their merges has some 30 MB."""


@dataclass(frozen=True)
class Written:
    """A tokenizer for another process: its JSON, as `tokenizers` writes it, and the tokens with which texts begin."""

    json: str
    first: tuple[int, ...]

    def read(self) -> Tokenizer:
        """The tokenizer."""
        from tokenizers import Tokenizer as Fast

        return Tokenizer.of(Fast.from_str(self.json))._beginning_with([*self.first])


class Tokenizer:
    """A thin cover over a Hugging Face tokenizer. Special tokens are shown; unknown ids decode to ⟨id⟩."""

    def __init__(
        self,
        encode: Any,
        decode: Any,
        num_words: int,
        read: Any = None,
        id_of: Any = None,
        word_of: Any = None,
        to_json: Any = None,
    ) -> None:
        """`decode` takes `skip_special_tokens`; `read` makes ids and token types of one text or of a pair, `id_of` the
        id of a word or None, `word_of` the word of an id as the vocabulary writes it, `to_json` what `tokenizers`
        reads.
        """
        self._encode, self._decode, self.num_words = encode, decode, num_words
        self._read, self._id_of, self._word_of, self._to_json = read, id_of, word_of, to_json
        self._first: list[int] = []

    @classmethod
    def from_folder(cls, folder: Path, family: str = "gpt2") -> Tokenizer | None:
        """The tokenizer of a checkpoint, or None: tokenizer.json, BERT's vocab.txt, or GPT-2's and RoBERTa's vocab.json
        with merges.txt.
        """
        from tokenizers import Tokenizer as Fast

        choices = (["tokenizer.json"], ["vocab.txt"], ["vocab.json", "merges.txt"])
        found = ([folder / name for name in names] for names in choices)
        files = next((paths for paths in found if all(path.exists() for path in paths)), None)
        if files is None:
            return None
        for path in files:
            check_file(path, MAX_BYTES)
        try:
            if files[0].name == "tokenizer.json":
                whole = Fast.from_file(str(files[0]))
                whole.no_padding()
                whole.no_truncation()
                return cls.of(whole, tells_types=tells_types(folder, family))
            if files[0].name == "vocab.txt":
                return cls.of(_word_pieces(folder, files[0]), tells_types=tells_types(folder, family))
            read = _byte_pairs(files, is_roberta=family in ("roberta", "bart"))
            return cls.of(read)._beginning_with(_added(folder, read))
        except ModelError:
            raise
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"The tokenizer in {folder} cannot be read: {error}. {AGAIN}") from error

    @classmethod
    def of(cls, tokenizer: Any, *, tells_types: bool = True) -> Tokenizer:
        """Cover a tokenizer of `tokenizers`, whose token types are told if it `tells_types`, or one of transformers.

        As in transformers, what it has set of padding and truncation is not used. Errors: ModelError for anything else.
        """
        if isinstance(tokenizer, cls):
            return tokenizer
        needed = ("encode", "decode", "get_vocab")
        if isinstance(tokenizer, type) or not all(callable(getattr(tokenizer, name, None)) for name in needed):
            raise ModelError(
                f"tokenizer is {tokenizer!r:.60}, but it must be a tokenizer of `tokenizers` or of transformers, such "
                "as AutoTokenizer.from_pretrained(folder)."
            )
        if getattr(tokenizer, "padding", None) or getattr(tokenizer, "truncation", None):
            tokenizer = _reading_whole_texts(tokenizer)
        decode = tokenizer.decode
        if hasattr(tokenizer, "get_vocab_size"):

            @lru_cache(maxsize=1)
            def cutting(most: int) -> Any:
                from tokenizers import Tokenizer as Fast

                copy = Fast.from_str(tokenizer.to_str())  # other threads read by the tokenizer itself
                copy.enable_truncation(most, strategy="longest_first")
                return copy

            def read(text: str, second: str | None, most: int | None) -> tuple[list[int], list[int] | None]:
                told = tokenizer.encode(text, second)
                if most is not None and len(told.ids) > most:
                    told = cutting(most).encode(text, second)
                return told.ids, told.type_ids if tells_types else None

            num_words, id_of, word_of = tokenizer.get_vocab_size(), tokenizer.token_to_id, tokenizer.id_to_token
            to_json = getattr(tokenizer, "to_str", None)
            return cls(lambda text: tokenizer.encode(text).ids, decode, num_words, read, id_of, word_of, to_json)

        def read_by_transformers(text: str, second: str | None, most: int | None) -> tuple[list[int], list[int] | None]:
            told = tokenizer(text, second, truncation="longest_first" if most else False, max_length=most)
            return told["input_ids"], told.get("token_type_ids")

        return cls(
            tokenizer.encode,
            decode,
            len(tokenizer),
            read_by_transformers,
            lambda word: tokenizer.get_vocab().get(word),
            tokenizer.convert_ids_to_tokens,
        )

    def _beginning_with(self, first: list[int]) -> Tokenizer:
        """The same, but texts begin with these tokens."""
        if not first:
            return self
        found = Tokenizer(
            lambda text: [*first, *self._encode(text)],
            self._decode,
            self.num_words,
            word_of=self._word_of,
            to_json=self._to_json,
        )
        found._first = first
        return found

    def written(self) -> Written | None:
        """The same for another process; None for one of transformers, which only pickle could carry."""
        return Written(self._to_json(), tuple(self._first)) if self._to_json else None

    def check_fits(self, vocab_size: int) -> None:
        """ModelError where it has more tokens than a model's vocabulary, which may have more: many are padded."""
        if self.num_words > vocab_size:
            raise ModelError(
                f"The tokenizer has {self.num_words:,} tokens, but the model's vocabulary has {vocab_size:,} "
                "(vocab_size), so it is another model's. Give the model's own with tokenizer=, or put its files into "
                "the model's folder."
            )

    @property
    def marks(self) -> list[int]:
        """The tokens that mark the beginning and the end of every text."""
        return list(self._encode(""))

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text)) if text else []

    def read(self, text: str, second: str | None = None, most: int | None = None) -> tuple[list[int], list[int] | None]:
        """A text, or a pair of them, as an encoder reads it: ids with the special tokens around, and the types of these
        tokens, if the tokenizer tells them. A pair of more than `most` tokens loses those at the end of its longer one.
        """
        ids, types = (
            self._read(text, second, None if second is None else most) if self._read else (self.encode(text), None)
        )
        return list(ids), None if types is None else list(types)

    def id_of(self, word: str) -> int | None:
        """The id of a word of the vocabulary; None where it has no such word."""
        return self._id_of(word) if self._id_of else None

    def bytes_of(self, token: int) -> bytes:
        """The bytes of UTF-8 for which a token stands, with the space in front of a word; half a character has its own.

        What it stands for is read from the word where the text alone does not tell.
        """
        text = self.decode([token])
        word = self._word_of(token) if self._word_of and token < self.num_words else None
        if not isinstance(word, str):
            return text.encode()
        if BROKEN not in text:
            return (" " * (word.startswith(SPACE) and not text.startswith(" ")) + text).encode()
        if found := ONE_BYTE.fullmatch(word):
            return bytes.fromhex(found[1])
        return bytes(BYTE_OF[letter] for letter in word) if BYTE_OF.keys() >= {*word} else text.encode()

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """The text of token ids, with special tokens or without. Errors: PromptError for what are none."""
        ids = _checked_ids(ids)
        if all(token < self.num_words for token in ids):
            return self._decode(ids, skip_special_tokens=not special) if ids else ""
        text: list[str] = []
        run: list[int] = []
        for token in [*ids, None]:
            if token is not None and token < self.num_words:
                run.append(token)
                continue
            text.append(self._decode(run, skip_special_tokens=not special) if run else "")
            text.append("" if token is None else f"⟨{token}⟩")
            run = []
        return "".join(text)


def encoded(tokenizer: Tokenizer | None, prompt: str | list[int], name: str) -> list[int]:
    """Token ids of a text; a list of ids as it is. `name` is the model's. Errors: PromptError, ModelError."""
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
        alone = "; a single prompt of ids is [[1, 2, 3]]" if isinstance(prompt, int) else ""
        raise PromptError(f"A prompt is {prompt!r:.60}, but it must be a text or a list of token ids{alone}.")
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise ModelError(f"{name} came without a tokenizer; give prompts as lists of token ids, or load one with it.")
    check_characters(prompt)
    return tokenizer.encode(prompt)


def decoded(tokenizer: Tokenizer | None, ids: Any, special: bool = True) -> str:
    """The text of token ids, with special tokens or without; the ids themselves where there is no tokenizer."""
    return " ".join(map(str, _checked_ids(ids))) if tokenizer is None else tokenizer.decode(ids, special)


def _checked_ids(ids: Any) -> list[int]:
    """Token ids as a list. Errors: PromptError."""
    try:
        given = None if isinstance(ids, str | bytes) else [*ids]
        found = None if given is None or bool in map(type, given) else [*map(index, given)]
    except (TypeError, ValueError):  # the latter of arrays in several rows
        found = None
    if found is None:
        raise PromptError(f"ids is {told(ids)}, but it must be a list of token ids, which are whole numbers: [1, 2].")
    if (least := min(found, default=0)) < 0:
        raise PromptError(f"ids holds {least:,}, but token ids begin at 0. Leave out what is no token, such as -100.")
    return found


def check_characters(text: str) -> None:
    """PromptError for what no tokenizer takes."""
    if half := re.search("[\ud800-\udfff]", text):
        raise PromptError(
            f"A prompt holds {half[0]!r} after {counted(half.start(), 'character')}, half of a surrogate pair, and "
            "no character. Take it out, or decode the prompt's bytes with errors='replace'."
        )


def _reading_whole_texts(tokenizer: Any) -> Any:
    """A copy, as the tokenizer itself is its owner's, without padding and truncation."""
    from tokenizers import Tokenizer as Fast

    try:
        copy = Fast.from_str(tokenizer.to_str())
    except Exception as error:  # parts written in Python have no JSON
        raise ModelError(
            f"The tokenizer pads or truncates texts, and no copy can be made that does not: {error}. Call its "
            "no_padding() and no_truncation() first."
        ) from error
    copy.no_padding()
    copy.no_truncation()
    return copy


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def _added(folder: Path, tokenizer: Any) -> list[int]:
    """What an older tokenizer puts before each text, as tokenizer_config.json has it: OPT's </s>."""
    told = _settings(folder)
    word = told.get("bos_token") if told.get("add_bos_token") else None
    word = word.get("content") if isinstance(word, dict) else word
    token = tokenizer.token_to_id(word) if isinstance(word, str) else None
    return [] if token is None else [token]


def _word_pieces(folder: Path, vocab: Path) -> Any:
    """BERT's older tokenizer, as tokenizer_config.json has it."""
    from tokenizers import BertWordPieceTokenizer

    told = _settings(folder)
    return BertWordPieceTokenizer(
        str(vocab),
        lowercase=bool(told.get("do_lower_case", True)),
        strip_accents=told.get("strip_accents"),
        handle_chinese_chars=bool(told.get("tokenize_chinese_chars", True)),
    )


def _byte_pairs(files: Sequence[Path], is_roberta: bool) -> Any:
    """GPT-2's older tokenizer; RoBERTa's has special tokens around a text."""
    from tokenizers import AddedToken, ByteLevelBPETokenizer
    from tokenizers.processors import RobertaProcessing

    read = ByteLevelBPETokenizer.from_file(*map(str, files))
    if is_roberta:
        read.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)])
        first, last = (read.token_to_id(word) for word in ("<s>", "</s>"))
        read.post_processor = RobertaProcessing(("</s>", last), ("<s>", first), add_prefix_space=False)
    return read
