"""How the tests are shared out when pytest runs in several processes (``-n 4``): whole files, or chains of them."""

from xdist.scheduler import LoadScopeScheduling

WIRES, RANKS, OTHERS, FUZZ = "tests/net/", "tests/dist/", "tests/third_party/", "tests/fuzz/"


class ByFile(LoadScopeScheduling):
    """A process takes a file at a time; those that emulate a network are one chain, those with ranks two.

    More processes than cores, as many of these wait: for a rank that is late, a server that comes back. More chains of
    ranks at a time would only take turns on the cores.
    """

    def _split_scope(self, nodeid):
        file = nodeid.split("::", 1)[0]
        if file.startswith(WIRES):
            return WIRES
        if file.startswith(FUZZ):
            return nodeid  # each has ranks of its own, and some of the scripts
        if file.startswith(RANKS):
            return "ranks, a to f" if file < RANKS + "test_g" else "ranks, g to z"
        return "ranks, a to f" if file.startswith(OTHERS) else file
