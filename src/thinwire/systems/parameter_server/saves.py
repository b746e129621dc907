"""The checkpoints of one server: what it continues from, when it saves, and what it says if it could not."""

from __future__ import annotations

import logging
from pathlib import Path

from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server.layout import Layout

logger = logging.getLogger("thinwire")


class Saves:
    """Checkpoints of a server in a directory.

    Attributes:
        directory: None: nothing is saved, and the server starts over.
        resumed: version that the server continues from, 0 if it starts over.
        fresh: whether it starts over, for lack of a checkpoint.
        unsaved: the reason why the final weights are in no checkpoint although they should be.

    Raises:
        ValueError: the directory cannot be created, or ``every`` is below 1.
    """

    def __init__(self, directory: str | Path | None, every: int) -> None:
        if every < 1:
            raise ValueError(f"checkpoint_every={every!r} must be at least 1")
        if directory is not None:
            checkpoints.prepare(directory)
        self.directory, self._every = directory, every
        self.resumed, self.fresh = 0, True
        self.unsaved: str | None = None

    def load(self, layout: Layout, shards: int) -> checkpoints.Saved | None:
        """Return what the server continues from; None if it starts over.

        Raises:
            ValueError: it is not a checkpoint of a server, or is one of another model or another number of shards.
        """
        saved = checkpoints.load(self.directory) if self.directory is not None else None
        if saved is None:
            return None
        if saved.layout != layout.to_json():
            layout.check(Layout.from_json(saved.layout))
        if saved.shards != shards:
            raise ValueError(
                f"the checkpoint in {self.directory} holds a model in {saved.shards} shards, not {shards}: start the "
                f"server with the same number (shards=, or --shards)"
            )
        self.resumed, self.fresh = saved.version, False
        return saved

    def due(self, version: int) -> bool:
        """Return whether this version is to be saved."""
        return self.directory is not None and version % self._every == 0

    def failed(self, why: str) -> None:
        """Warn that a checkpoint could not be written; training goes on."""
        logger.warning("%s; %s", why, self._next_start())

    def look_back(self, version: int) -> None:
        """Set ``unsaved``, and warn, if the final weights, those of ``version``, were not saved."""
        assert self.directory is not None
        if max(checkpoints.kept_in(self.directory).found(), default=-1) < version:
            missing = f"the weights of version {version} are in no checkpoint in {self.directory}"
            self.unsaved = f"{missing}; {self._next_start()}"
            logger.warning("%s; the model holds the last weights: save them elsewhere", self.unsaved)

    def _next_start(self) -> str:
        """Return what would happen if the server were started again."""
        assert self.directory is not None
        there = checkpoints.kept_in(self.directory).found()
        start = f"continues from version {max(there)}" if there else "starts over"
        return f"a server that is started again {start}"
