"""The sentence encoder all-MiniLM-L6-v2 in plain torch.

A BERT encoder (Devlin et al., arXiv 1810.04805) with mean pooling (Reimers and Gurevych,
arXiv 1908.10084). Modules carry the names that the published tensors have, so that a checkpoint
of the model is its state dict and nothing is renamed on the way.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The sizes that the model's own configuration file gives."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    hidden_dropout_prob: float

    @classmethod
    def read(cls, path: Path) -> "EncoderConfig":
        """Take the known fields of a configuration file."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


class Embeddings(nn.Module):
    """Sum of word, position and type embeddings, normalised."""

    position_ids: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        positions, width = config.max_position_embeddings, config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.register_buffer("position_ids", torch.arange(positions).unsqueeze(0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token numbers [texts, tokens] to vectors [texts, tokens, width]."""
        positions = self.position_embeddings(self.position_ids[:, : tokens.shape[1]])
        types = self.token_type_embeddings(torch.zeros_like(tokens))
        summed = self.word_embeddings(tokens) + positions + types
        hidden: Tensor = self.dropout(self.LayerNorm(summed))
        return hidden


class SelfAttention(nn.Module):
    """Scaled dot-product attention over the tokens that the mask admits."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.heads = config.num_attention_heads

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Mix the vectors of each text; ``mask`` is boolean [texts, 1, 1, tokens]."""
        query, key, value = (
            part(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(2)


class Residual(nn.Module):
    """Linear map, dropout, sum with the residual, norm."""

    def __init__(self, config: EncoderConfig, *, width_in: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width_in, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Return the norm of the residual plus the mapped vectors."""
        summed: Tensor = self.LayerNorm(residual + self.dropout(self.dense(hidden)))
        return summed


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(config), "output": Residual(config, width_in=width)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = Residual(config, width_in=inner)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Apply attention, then the two dense maps."""
        attended = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        widened = functional.gelu(self.intermediate["dense"](attended))
        output: Tensor = self.output(widened, attended)
        return output


class SentenceEncoder(nn.Module):
    """Token numbers to one unit vector a text."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.embeddings = Embeddings(config)
        self.encoder = nn.ModuleDict({"layer": layers})
        # Published with the model, unused by mean pooling; kept so that the names agree.
        self.pooler = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.hidden_size)})

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings [texts, width]; ``mask`` is 1 where ``tokens`` is no padding."""
        hidden = self.embeddings(tokens)
        admitted = mask[:, None, None, :].bool()
        for layer in self.layers:
            hidden = layer(hidden, admitted)
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer layers, the one nearest to the input first."""
        layers = self.encoder["layer"]
        assert isinstance(layers, nn.ModuleList)
        return layers

    def freeze_below(self, layer_index: int) -> None:
        """Let only layers from ``layer_index`` on learn."""
        self.requires_grad_(False)
        for layer in list(self.layers)[layer_index:]:
            layer.requires_grad_(True)
