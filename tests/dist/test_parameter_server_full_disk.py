"""A disk that takes nothing more: training goes on, and what was written stays whole."""

import contextlib
import json
import re

import pytest
import torch
from parameter_cluster import Cluster, flat, gradient_of, model, sgd, started

from spawned import free_port
from thinwire.systems.cli.ps_machines import PsNodeVerb
from thinwire.systems.parameter_server import Journal, Layout, Service, replay
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server.presets import bsp, inhad
from thinwire.tools.cli.console import Output
from thinwire.tools.cli.main import app
from verbs import CliRunner

resource = pytest.importorskip("resource")

pytestmark = pytest.mark.dist

MOST = 64_000  # bytes of a file


@contextlib.contextmanager
def no_longer_files():
    """Files of this process cannot grow beyond MOST: writing fails as on a full disk, after a part has been written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def versions(folder):
    return list(checkpoints.kept_in(folder).found())


def obstruct(folder, prefix, numbers):
    """These checkpoints cannot be written: a directory is where their file is to be made."""
    for number in numbers:
        (folder / f".partial-{prefix}version-{number:09d}.pt").mkdir(parents=True)


def test_training_goes_on_without_checkpoint_and_journal_and_the_model_gets_its_weights(tmp_path, caplog):
    folder, journal = tmp_path / "c", tmp_path / "j"
    with no_longer_files():
        cluster = Cluster(
            bsp(deterministic=True), 1, width=8000, updates=40, checkpoint_every=10, checkpoint_dir=folder,
            journal=journal, facts={"long": "x" * (MOST - 2000)},
        )  # fmt: skip
        status = cluster.join()
    assert status.version == 40
    assert torch.equal(flat(cluster.model), flat(cluster.models[0, 0]))
    assert list(folder.iterdir()) == []  # what was written of them is gone, and the disk has room again
    assert "version-000000010.pt could not be written ([Errno 27] File too large)" in caplog.text
    assert "version-000000040.pt could not be written" in caplog.text
    assert f"the weights of version 40 are in no checkpoint in {folder}" in cluster.service.saves.unsaved
    assert caplog.text.count(f"the journal {journal} could not be written") == 1
    kept = Journal.read(journal)
    assert 0 < len(kept.updates) < 40
    assert journal.read_bytes().endswith(b"]}\n")
    layout, network = Layout.of(model(width=8000)), model(width=8000)
    again = replay(kept, layout.flat(network), gradient_of(network, layout), sgd())
    assert again.isfinite().all()


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one_and_the_next_is_tried(tmp_path, caplog):
    folder = tmp_path / "c"
    obstruct(folder, "", [10, 15])
    cluster = Cluster(bsp(), 1, updates=22, checkpoint_every=5, checkpoint_dir=folder)
    cluster.join()
    assert versions(folder) == [20, 22]
    assert cluster.service.saves.unsaved is None
    assert caplog.text.count("could not be written") == 2
    assert "continues from version 5" in caplog.text


def test_the_verb_ends_with_a_sentence_and_exit_code_1(tmp_path):
    folder, port = tmp_path / "c", free_port()
    obstruct(folder, "", range(1, 5))
    node = started(PsNodeVerb(server=f"127.0.0.1:{port}", model="mlp:width=16:layers=1", node=1).run, Output())
    words = ["--model", "mlp:width=16:layers=1", "--updates", 4, "--checkpoint-every", 2, "--checkpoint-dir", folder]
    result = CliRunner().invoke(app, ["ps", "server", "--port", str(port), "--json", *map(str, words)])
    node.join(60)
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["version"] == 4
    assert f"error: the weights of version 4 are in no checkpoint in {folder}" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_shard_that_cannot_write_ends_nothing_and_the_others_keep_what_fits(tmp_path, caplog):
    folder, parts = tmp_path / "server", tmp_path / "shards"
    obstruct(parts, "shard-0-", range(1, 31))
    settings = inhad(2, start_nodes=1)
    cluster = Cluster(
        settings, 1, shards=2, delays=[0.02], updates=30, checkpoint_every=5, checkpoint_dir=folder, shard_folder=parts
    )
    status = cluster.join()
    assert status.version == 30
    assert torch.equal(flat(cluster.model), flat(cluster.models[0, 0]))
    assert versions(folder) == [0]
    assert "continues from version 0" in cluster.service.saves.unsaved
    assert re.search(r"shard 0 could not write its checkpoint of version \d+", caplog.text)
    run = checkpoints.load(folder).run
    for index in range(2):
        assert checkpoints.load_slice(parts, 0, index, 2, run).version == 0


def test_a_checkpoint_or_journal_that_can_never_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=re.escape(f"{place} cannot hold checkpoints")):
            Service(model(), inhad(), updates=1, checkpoint_dir=place)
    for place in (tmp_path / "no" / "such", tmp_path):
        with pytest.raises(ValueError, match=re.escape(f"the journal {place} cannot be written")):
            Service(model(), inhad(), updates=1, journal=place)


def test_a_second_server_on_a_taken_port_leaves_the_journal_alone(tmp_path):
    first = Service(model(), inhad(), updates=1, journal=tmp_path / "j", facts={"of": "the first"})
    with pytest.raises(RuntimeError, match="cannot be used"):
        Service(model(), inhad(), updates=1, journal=tmp_path / "j", port=first.port)
    assert Journal.read(tmp_path / "j").facts == {"of": "the first"}
    first.close()
