"""Text for the examples: Shakespeare in small tokens, batches, validation windows, and a baseline to beat.

Everything is a function of its arguments, so that all ranks, and a run resumed at any step, see the same data.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

DATA = Path(__file__).parent / "data" / "shakespeare.txt"
Batch = dict[str, Tensor]  # tokens and targets, int64 (batch, seq); targets are the tokens that come next


class Text(NamedTuple):
    train: Tensor  # int64 (n,)
    val: Tensor  # int64 (m,)
    tokenizer: Tokenizer
    bytes_per_val_token: float  # nats per token / (bytes_per_val_token * ln 2) = bits per byte


def load(vocab_size: int = 512, cache: Path | None = None) -> Text:
    """The plays as tokens of a byte-level BPE trained on the training split; `cache` is a folder to keep it in."""
    train, val = split(DATA.read_text(encoding="utf-8"))
    file = cache / f"bpe-{vocab_size}-{crc32(train.encode()):08x}.json" if cache else None
    if file and file.exists():
        tokenizer = Tokenizer.from_file(str(file))
    else:
        tokenizer = train_tokenizer(train, vocab_size)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            whole = file.with_suffix(f".{os.getpid()}")  # renamed when complete: ranks may write at the same time
            tokenizer.save(str(whole))
            whole.replace(file)
    train_tokens, val_tokens = (torch.tensor(tokenizer.encode(text).ids) for text in (train, val))
    return Text(train_tokens, val_tokens, tokenizer, len(val.encode()) / len(val_tokens))


def split(text: str) -> tuple[str, str]:
    """The first nine tenths, to the end of a line, and the rest."""
    cut = text.rfind("\n", 0, len(text) * 9 // 10) + 1
    return text[:cut], text[cut:]


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: any text can be encoded
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: BPE made {tokenizer.get_vocab_size()} tokens of this text, from 256"
        )
    return tokenizer


def batch_at(tokens: Tensor, step: int, batch: int, seq: int, seed: int = 0) -> Batch:
    """The batch of one step: `batch` windows of `seq` tokens from anywhere in the text, drawn by (seed, step) alone."""
    start = np.random.default_rng((seed, step)).integers(len(tokens) - seq, size=(batch, 1))
    index = torch.from_numpy(start) + torch.arange(seq)
    return dict(tokens=tokens[index], targets=tokens[index + 1])


def batches(tokens: Tensor, batch: int, seq: int, seed: int = 0, step: int = 0) -> Iterator[Batch]:
    """The batches of `step`, step + 1 and so on, without end."""
    while True:
        yield batch_at(tokens, step, batch, seq, seed)
        step += 1


def windows(tokens: Tensor, batch: int, seq: int) -> Iterator[Batch]:
    """The whole text side by side, each target once; what the last batch has left over has target -1 and token 0."""
    count = len(tokens) - 1
    for first in range(0, count, batch * seq):
        index = (first + torch.arange(batch * seq)).view(batch, seq)
        inside = index < count
        index = index.clamp(max=count - 1)
        yield dict(tokens=tokens[index].where(inside, 0), targets=tokens[index + 1].where(inside, -1))


def bigram_loss(train: Tensor, val: Tensor, vocab: int) -> float:
    """Cross-entropy of the bigram model on `val`, in nats per token."""
    return -bigram(train, vocab)[val[:-1], val[1:]].log().mean().item()


def bigram(train: Tensor, vocab: int) -> Tensor:
    """P(next | token), float64 (vocab, vocab): the best mixture of bigram, unigram and uniform frequencies.

    The weights maximise the likelihood of the last tenth of `train` under frequencies of the rest, by EM (Jelinek and
    Mercer 1980); the mixture then uses the frequencies of all of it.
    """
    cut = len(train) * 9 // 10
    held_out = train[cut:]
    likelihood = frequencies(train[:cut], vocab)[:, held_out[:-1], held_out[1:]]
    weights = torch.full((3, 1), 1 / 3, dtype=torch.float64)
    for _ in range(100):
        share = weights * likelihood
        weights = (share / share.sum(0)).mean(1, keepdim=True)
    return (weights[..., None] * frequencies(train, vocab)).sum(0)


def frequencies(tokens: Tensor, vocab: int) -> Tensor:
    """Bigram, unigram and uniform P(next | token), (3, vocab, vocab). After a token not seen, bigram is unigram."""
    pairs = torch.bincount(tokens[:-1] * vocab + tokens[1:], minlength=vocab**2).view(vocab, vocab).double()
    single = torch.bincount(tokens, minlength=vocab).double() / len(tokens)
    seen = pairs.sum(1, keepdim=True)
    uniform = torch.full((vocab,), 1 / vocab, dtype=torch.float64)
    bigram = torch.where(seen > 0, pairs / seen.clamp(min=1), single)
    return torch.stack([bigram, single.expand_as(bigram), uniform.expand_as(bigram)])
