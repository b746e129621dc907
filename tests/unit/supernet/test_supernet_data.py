"""Made-up pairs have the truth they claim; files are read as their formats say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems.supernet.stereo import RandomDots, StereoFiles, batches, pad, random_dot_pair
from thinwire.systems.supernet.stereo.data import normalise, read_disparity, read_list, read_pfm, shuffled
from thinwire.systems.supernet.stereo.layers import warp

Image = pytest.importorskip("PIL.Image")


def write_pfm(path, image):
    rows = image.flip(0).numpy().astype("<f4")
    path.write_bytes(f"Pf\n{image.shape[1]} {image.shape[0]}\n-1.0\n".encode() + rows.tobytes())


@given(st.integers(0, 2**20), st.sampled_from(["pieces", "plane", "zero"]))
@settings(max_examples=25, deadline=None)
def test_the_right_view_moved_by_the_truth_is_the_left_view(seed, kind):
    left, right, d = random_dot_pair(2, 24, 48, 9, torch.Generator().manual_seed(seed), kind)
    known = d.isfinite()
    moved = warp(right, torch.where(known, d, 0.0))
    assert torch.allclose(moved.movedim(1, 3)[known], left.movedim(1, 3)[known], atol=1e-5)
    assert (torch.arange(48) - torch.where(known, d, 0.0))[known].min() >= 0
    assert known.float().mean() > 0.6
    if kind == "pieces":
        assert torch.equal(d[known], d[known].round())
    if kind != "zero":
        assert d[known].min() >= 2
        assert d[known].max() <= 9
        wrong = warp(right, torch.where(known, d + 2, 0.0))
        assert (wrong - left).abs().mean() > 0.1


def test_scenes_are_photographed_twice_but_match():
    left, right, d = random_dot_pair(4, 48, 96, 15, torch.Generator().manual_seed(0), "scene")
    known = d.isfinite()
    moved = warp(right, torch.where(known, d, 0.0))
    right_error = (moved - left).abs().mean(1)[known].mean()
    wrong_error = (warp(right, torch.where(known, d + 5, 0.0)) - left).abs().mean(1)[known].mean()
    assert 0.005 < right_error < 0.5 * wrong_error
    assert left.min() >= 0
    assert left.max() <= 1


def test_a_sample_is_always_the_same():
    one, two, other = (RandomDots(10, 24, 48, 9, seed=s) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one[3], two[3]))
    assert not torch.equal(one[3][0], other[3][0])
    assert not torch.equal(one[3][0], one[4][0])
    with pytest.raises(IndexError):
        one[10]


@given(st.integers(1, 50), st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
def test_ranks_share_the_batch_that_one_would_take(length, batch, world, seed):
    for step in range(3):
        together = [i for r in range(world) for i in shuffled(length, seed, step, batch, r, world)]
        assert together == shuffled(length, seed, step, batch * world)
    epoch = [i for step in range(length) for i in shuffled(length, seed, step, 1)]
    assert sorted(epoch) == list(range(length))


def test_batches_are_dealt_out_in_turn():
    pairs = RandomDots(10, 24, 48, 9)
    whole = [b.left for b in batches(pairs, 3)]
    assert [len(x) for x in whole] == [3, 3, 3, 1]
    parts = [[b.left for b in batches(pairs, 3, rank, 2)] for rank in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(whole, [parts[0][0], parts[1][0], parts[0][1], parts[1][1]]))


def test_padding_is_at_the_top_and_right():
    x = torch.ones(3, 500, 741)
    padded = pad(x, 24)
    assert padded.shape == (3, 504, 744)
    assert torch.equal(padded[..., -500:, :741], x)
    assert padded.sum() == x.sum()


def test_pfm_by_hand(tmp_path):
    big = b"Pf\n2 2\n1.0\n" + np.array([3, 4, 1, 2], ">f4").tobytes()  # the bottom row comes first
    (tmp_path / "big.pfm").write_bytes(big)
    assert read_pfm(tmp_path / "big.pfm").tolist() == [[1, 2], [3, 4]]
    colours = b"PF 1 2 -1\n" + np.array([4, 5, 6, 1, 2, 3], "<f4").tobytes()
    (tmp_path / "c.pfm").write_bytes(colours)
    assert read_pfm(tmp_path / "c.pfm")[:, 0, 0].tolist() == [1, 2, 3]
    write_pfm(tmp_path / "n.pfm", torch.tensor([[-3.0, 0.0]]))
    assert read_disparity(tmp_path / "n.pfm", "pfm-negated").tolist() == [[3.0, np.inf]]


def test_disparities_as_pictures(tmp_path):
    kitti = np.array([[0, 256, 257], [512, 65535, 128]], np.uint16)
    Image.fromarray(kitti).save(tmp_path / "kitti.png")
    wanted = [[np.inf, 1.0, 257 / 256], [2.0, 65535 / 256, 0.5]]
    assert read_disparity(tmp_path / "kitti.png").tolist() == wanted
    sintel = np.array([[[10, 32, 128]]], np.uint8)
    Image.fromarray(sintel).save(tmp_path / "sintel.png")
    assert float(read_disparity(tmp_path / "sintel.png", "sintel")[0, 0]) == 40 + 0.5 + 128 / 16384
    np.savez(tmp_path / "d.npz", np.array([[1.5, np.inf]], np.float32))
    assert read_disparity(tmp_path / "d.npz").tolist() == [[1.5, np.inf]]
    with pytest.raises(ValueError, match="is not a disparity of kitti"):
        read_disparity(tmp_path / "sintel.png")


def files(tmp_path, lines=3, height=30, width=60):
    rows = []
    for i in range(lines):
        left, right, d = random_dot_pair(1, height, width, 9, torch.Generator().manual_seed(i))
        for name, image in (("l", left), ("r", right)):
            array = (image[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
            Image.fromarray(array).save(tmp_path / f"{name}{i}.png")
        write_pfm(tmp_path / f"d{i}.pfm", d[0])
        rows.append(f"l{i}.png r{i}.png d{i}.pfm  # pair {i}")
    (tmp_path / "list.txt").write_text("\n".join(["# three pairs", "", *rows]))
    return tmp_path / "list.txt"


def test_lists_of_files(tmp_path):
    path = files(tmp_path)
    assert [len(row) for row in read_list(path)] == [3, 3, 3]
    whole = StereoFiles(path)
    assert [tuple(x.shape) for x in whole[0]] == [(3, 48, 72), (3, 48, 72), (48, 72)]
    assert not whole[0][2][:18].isfinite().any()
    left, _, d = random_dot_pair(1, 30, 60, 9, torch.Generator().manual_seed(0))
    assert torch.allclose(whole[0][0][..., -30:, :60], normalise(left[0]), atol=0.02)
    assert torch.equal(whole[0][2][-30:, :60], d[0])
    cropped = StereoFiles(path, crop=(24, 48), seed=3)
    assert [tuple(x.shape) for x in cropped[1]] == [(3, 24, 48), (3, 24, 48), (24, 48)]
    assert all(torch.equal(a, b) for a, b in zip(cropped[1], StereoFiles(path, (24, 48), seed=3)[1]))
    known = cropped[1][2].isfinite()
    assert known.any()
    with pytest.raises(ValueError, match="smaller than the crop"):
        StereoFiles(path, crop=(36, 48))[0]
