"""Text to token numbers: the lower-casing WordPiece splitting of BERT, from a vocabulary file."""

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor


class WordPiece:
    """A vocabulary and the rules that split text into its entries."""

    def __init__(self, vocabulary: Path) -> None:
        lines = vocabulary.read_text(encoding="utf-8").splitlines()
        self._number = {token: number for number, token in enumerate(lines)}

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return token numbers and a mask, both int64 of shape [texts, longest text]."""
        rows = [self._row(text) for text in texts]
        width = max(len(row) for row in rows)
        padding = self._number["[PAD]"]
        tokens = [row + [padding] * (width - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        return torch.tensor(tokens), torch.tensor(mask)

    def _row(self, text: str) -> list[int]:
        pieces = [piece for word in _words(text) for piece in self._pieces(word)]
        return [self._number[token] for token in ("[CLS]", *pieces, "[SEP]")]

    def _pieces(self, word: str) -> list[str]:
        """Split one word greedily, the longest known piece first."""
        pieces: list[str] = []
        start = 0
        while start < len(word):
            piece = self._longest(word, start=start)
            if piece is None:
                return ["[UNK]"]
            pieces.append(piece)
            start += len(piece.removeprefix("##") if start else piece)
        return pieces

    def _longest(self, word: str, *, start: int) -> str | None:
        prefix = "##" if start else ""
        candidates = (prefix + word[start:stop] for stop in range(len(word), start, -1))
        return next((piece for piece in candidates if piece in self._number), None)


def _words(text: str) -> Iterator[str]:
    """Yield lower-case words without accents; every punctuation mark is a word of its own."""
    letters = unicodedata.normalize("NFD", text.lower())
    word = ""
    for letter in letters:
        if unicodedata.category(letter) == "Mn":
            continue
        if letter.isalnum():
            word += letter
            continue
        if word:
            yield word
        word = ""
        if not letter.isspace():
            yield letter
    if word:
        yield word
