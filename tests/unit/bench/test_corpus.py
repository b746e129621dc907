import torch

from thinwire.tools.bench.models.text import standard_library


def test_same_step_and_rank_give_the_same_batch_and_others_another():
    corpus = standard_library()
    first, target = corpus.batch(4, 32, step=3, rank=1)
    again, _ = corpus.batch(4, 32, step=3, rank=1)
    assert torch.equal(first, again)
    assert torch.equal(first[:, 1:], target[:, :-1])
    for step, rank in ((4, 1), (3, 0)):
        assert not torch.equal(first, corpus.batch(4, 32, step=step, rank=rank)[0])


def test_it_is_python_and_the_validation_text_is_apart():
    corpus = standard_library()
    text = bytes(corpus.train.tolist())
    assert b"import " in text
    assert b"def " in text
    assert len(text) > 1_000_000
    assert corpus.validation.numel() > 100_000
    assert not torch.equal(*(corpus.batch(2, 16, step=0, rank=0, validation=v)[0] for v in (False, True)))


def test_shares_are_apart():
    corpus = standard_library()
    pieces = [bytes(piece.tolist()) for piece in corpus.train.tensor_split(3)]
    for rank in range(3):
        text, _ = corpus.batch(8, 64, step=0, rank=rank, shares=3)
        assert [[bytes(row.tolist()) in piece for piece in pieces].count(True) for row in text] == [1] * 8
        assert all(bytes(row.tolist()) in pieces[rank] for row in text)
