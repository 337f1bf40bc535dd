"""The data of the examples: nothing leaks from validation, nothing is left out, every rank sees the same."""

import math
from itertools import islice

import pytest
import torch

import text

VOCAB = 512


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def data(cache):
    return text.load(VOCAB, cache)


def test_split_is_disjoint_and_whole():
    whole = text.DATA.read_text(encoding="utf-8")
    train, val = text.split(whole)
    assert train + val == whole
    assert train.endswith("\n")
    assert len(train) == pytest.approx(0.9 * len(whole), rel=1e-3)


def test_tokenizer_knows_the_training_split_only_and_round_trips(data):
    train, val = text.split(text.DATA.read_text(encoding="utf-8"))
    assert data.tokenizer.to_str() == text.train_tokenizer(train, VOCAB).to_str()
    assert data.tokenizer.decode(data.train.tolist()) == train
    assert data.tokenizer.decode(data.val.tolist()) == val
    assert data.bytes_per_val_token == len(val.encode()) / len(data.val)
    assert data.train.dtype == data.val.dtype == torch.int64
    beyond = "Zoë said: 東京, 1 €\n"
    assert data.tokenizer.decode(data.tokenizer.encode(beyond).ids) == beyond


def test_cache_holds_the_tokenizer_and_nothing_else(data, cache):
    again = text.load(VOCAB, cache)
    assert [file.suffix for file in cache.iterdir()] == [".json"]
    assert torch.equal(again.train, data.train) and torch.equal(again.val, data.val)


def test_impossible_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size=255: BPE made 256 tokens of this text"):
        text.train_tokenizer("to be or not to be", 255)


def test_batches_depend_on_seed_and_step_alone(data):
    now = text.batch_at(data.train, 7, batch=4, seq=16, seed=3)
    assert now["tokens"].shape == now["targets"].shape == (4, 16)
    assert torch.equal(now["tokens"][:, 1:], now["targets"][:, :-1])
    same = next(text.batches(data.train, 4, 16, seed=3, step=7))
    later = list(islice(text.batches(data.train, 4, 16, seed=3), 8))[-1]
    for key in now:
        assert torch.equal(now[key], same[key]) and torch.equal(now[key], later[key])
    assert not torch.equal(now["tokens"], text.batch_at(data.train, 8, 4, 16, seed=3)["tokens"])
    assert not torch.equal(now["tokens"], text.batch_at(data.train, 7, 4, 16, seed=4)["tokens"])


def test_batches_reach_both_ends():
    drawn = text.batch_at(torch.arange(10), 0, batch=100, seq=8)
    assert drawn["tokens"].min() == 0 and drawn["targets"].max() == 9


@pytest.mark.parametrize("length", [2, 24, 25, 26, 61])
def test_windows_hold_every_target_once(length):
    tokens = torch.arange(100, 100 + length)
    found = list(text.windows(tokens, batch=2, seq=4))
    assert {tuple(part.shape) for window in found for part in window.values()} == {(2, 4)}
    targets = torch.cat([window["targets"].flatten() for window in found])
    given = torch.cat([window["tokens"].flatten() for window in found])
    valid = targets != -1
    assert torch.equal(targets[valid], tokens[1:])
    assert torch.equal(given[valid], tokens[:-1])
    assert (given[~valid] == 0).all()
    assert len(targets) - (length - 1) < 8


def test_bigram_rows_are_probabilities(data):
    bigram = text.bigram(data.train, VOCAB)
    assert bigram.min() > 0
    torch.testing.assert_close(bigram.sum(1), torch.ones(VOCAB, dtype=torch.float64), rtol=0, atol=1e-12)


def test_bigram_beats_unigram_and_loses_to_a_cheat(data):
    def loss(probabilities):
        return -probabilities[data.val[:-1], data.val[1:]].log().mean().item()

    unigram = torch.bincount(data.train, minlength=VOCAB).double() + 1
    cheat = text.frequencies(data.val, VOCAB)[0]
    bigram = text.bigram_loss(data.train, data.val, VOCAB)
    assert loss(cheat) < bigram < loss((unigram / unigram.sum()).expand(VOCAB, VOCAB)) < math.log(VOCAB)
