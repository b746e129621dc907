"""How the tests are shared out when pytest runs in several processes (``-n 2``): whole files, ranks one at a time."""

from xdist.scheduler import LoadScopeScheduling

RANKS = ("tests/dist/", "tests/third_party/")
CHAINS = (*RANKS, "tests/net/")


class ByFile(LoadScopeScheduling):
    """A process takes a file at a time; of those that start ranks or emulate a network, it takes the whole folder.

    The folders with ranks are one: ranks are kept for the next file.
    """

    def _split_scope(self, nodeid):
        file = nodeid.split("::", 1)[0]
        scope = next((folder for folder in CHAINS if file.startswith(folder)), file)
        return RANKS[0] if scope in RANKS else scope
