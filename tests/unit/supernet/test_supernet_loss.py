import pytest
import torch

from thinwire.systems.supernet.stereo import measure, pyramid_loss
from thinwire.systems.supernet.stereo.evaluation import Metrics


def test_loss_by_hand():
    truth = torch.tensor([[[10.0, 0.0], [torch.inf, 300.0]]])  # one valid pixel
    found = [torch.tensor([[[1.0]]]), torch.tensor([[[4.0, 9.0], [9.0, 9.0]]])]
    assert float(pyramid_loss(found, truth, 192)) == pytest.approx((10 - 2 - 0.5) / 3 + (10 - 4 - 0.5) * 2 / 3)


def test_maps_that_are_right_at_their_own_size_lose_nothing():
    truth = torch.full((2, 12, 24), 6.0)
    assert float(pyramid_loss([torch.full((2, 4, 8), 2.0), torch.full((2, 6, 12), 3.0), truth], truth, 192)) == 0


@pytest.mark.parametrize("nothing", [0.0, torch.inf, torch.nan, -1.0, 192.0])
def test_without_a_valid_pixel_the_loss_is_zero_with_a_graph(nothing):
    found = torch.randn(1, 4, 8, requires_grad=True)
    loss = pyramid_loss([found], torch.full((1, 4, 8), nothing), 192)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(found.grad, torch.zeros(1, 4, 8))


def test_shares_of_a_batch_average_to_the_loss_of_the_whole():
    torch.manual_seed(0)
    found, truth = torch.rand(4, 6, 8) * 20, torch.rand(4, 6, 8) * 20
    truth[0, :3] = torch.inf
    whole = pyramid_loss([found], truth, 192)
    total = int(truth.isfinite().sum()) / 2
    parts = [pyramid_loss([found[s]], truth[s], 192, total) for s in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(parts) / 2, whole)
    plain = [pyramid_loss([found[s]], truth[s], 192) for s in (slice(0, 2), slice(2, 4))]
    assert abs(float(sum(plain) / 2 - whole)) > 1e-4  # each rank's own mean is another thing


def test_metrics_by_hand_and_their_sum():
    truth = torch.tensor([[[10.0, 100.0, 50.0, torch.inf, 0.0]]])
    found = torch.tensor([[[11.5, 104.0, 54.0, 3.0, 9.0]]])
    m = measure(found, truth, 192)
    assert (m.pixels, m.error, m.over1, m.over2, m.over3) == (3, 9.5, 3, 2, 2)
    assert m.outliers == 1  # 4 of 100 px is less than 5 %
    both = Metrics(*(m.vector() + m.vector()).tolist())
    assert both.epe == m.epe == pytest.approx(9.5 / 3)
    assert (both.pixels, both.d1, both.bad3) == (6, 1 / 3, 2 / 3)
    assert Metrics().epe != Metrics().epe
