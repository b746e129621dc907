"""How the tests are shared out when pytest runs in several processes (``-n 3``): whole files, wires one at a time."""

from xdist.scheduler import LoadScopeScheduling

WIRES = "tests/net/"


class ByFile(LoadScopeScheduling):
    """A process takes a file at a time, but all of those that emulate a network: they share the cores' time.

    More processes than cores: many tests wait, for a rank that is late or a server that comes back. In the order of the
    folders: files with ranks and wires take longest, so they come first.
    """

    def __init__(self, config, log):
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid):
        file = nodeid.split("::", 1)[0]
        return WIRES if file.startswith(WIRES) else file
