"""The parts that the demonstration is made of; `make demo` runs the whole of it."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from demo.checks import Failure, check
from demo.encoder import EncoderConfig, SentenceEncoder
from demo.safetensors_file import read_safetensors
from demo.trainer import read_log
from demo.wordpiece import WordPiece

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##believ", "##able", "cafe", "!", "!!"]
CONFIG = EncoderConfig(
    vocab_size=len(TOKENS),
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=12,
    type_vocab_size=2,
    layer_norm_eps=1e-12,
    hidden_dropout_prob=0.1,
)


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(TOKENS) + "\n")
    return WordPiece(path)


def test_words_are_split_greedily_without_case_and_accents(words):
    tokens, mask = words.encode(["Unbelievable Café!!", "nonsense"])
    assert tokens.tolist() == [[2, 4, 5, 6, 7, 8, 8, 3], [2, 1, 3, 0, 0, 0, 0, 0]]
    assert mask.tolist() == [[1] * 8, [1] * 3 + [0] * 5]


def test_padding_does_not_change_an_embedding(words):
    torch.manual_seed(0)
    encoder = SentenceEncoder(CONFIG).eval()
    alone = encoder(*words.encode(["cafe"]))
    padded = encoder(*words.encode(["cafe", "unbelievable cafe!"]))[:1]
    torch.testing.assert_close(alone, padded)
    torch.testing.assert_close(alone.norm(dim=-1), torch.ones(1))


def test_only_layers_from_the_named_one_on_learn():
    encoder = SentenceEncoder(CONFIG)
    encoder.freeze_below(1)
    learning = {name for name, each in encoder.named_parameters() if each.requires_grad}
    assert learning
    assert all(name.startswith("encoder.layer.1.") for name in learning)


def test_a_safetensors_file_is_read_as_the_reference_wrote_it(tmp_path):
    arrays = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones((), dtype="i8")}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    found = read_safetensors(tmp_path / "x.safetensors")
    assert found.metadata == {"format": "np"}
    assert found.tensors == {
        "a": ("F32", (2, 3), arrays["a"].tobytes()),
        "b": ("I64", (), arrays["b"].tobytes()),
    }


def test_a_step_with_two_losses_is_noticed(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"step": 1, "loss": "0x1p0", "save_s": 1}\n' * 2)
    assert read_log(path).losses == {1: "0x1p0"}
    with path.open("a") as log:
        log.write('{"step": 1, "loss": "0x1p1", "save_s": 1}\n')
    with pytest.raises(Failure, match="computed twice"):
        read_log(path)


def test_a_check_that_fails_stops(capsys):
    check(True, "one is one")
    assert "ok  one is one" in capsys.readouterr().out
    with pytest.raises(Failure, match="not so"):
        check(False, "one is two")
