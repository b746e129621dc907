"""A port in front of another one, which carries connections, counts and keeps their bytes, and holds or cuts them."""

import contextlib
import socket
import threading


class Between:
    """Carries connections to a port.

    Attributes:
        port: to connect to.
        pairs: both ends of each connection, in the order in which they came.
        alive: places of those that neither side nor ``cut`` has ended.
        going: while it is not set, nothing but the first connection's bytes goes on.
        crossed: bytes of all connections, up and down.
        cut_at: end all connections when so many bytes would have crossed in all, once; None: never.
        flip: (connection, way, place in what it has carried) of a byte that is changed on its way, once.
    """

    def __init__(self, port, cut_at=None):
        self._port, self.pairs, self.alive, self.going = port, [], set(), threading.Event()
        self.going.set()
        self.crossed, self.cut_at, self.cuts, self.flip = [bytearray(), bytearray()], cut_at, 0, None
        self.carried = {}  # bytes by (connection, way)
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._start(self._accept)

    def _start(self, do, *args):
        threading.Thread(target=do, args=args, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                place = len(self.pairs)
                self.pairs.append((near, far))
                self.alive.add(place)
                for way, ends in enumerate(((near, far), (far, near))):
                    self._start(self._carry, place, way, *ends)

    def _carry(self, place, way, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if place:
                    self.going.wait()
                if (data := self._passing(place, way, data)) is None:
                    break
                target.sendall(data)
        self.alive.discard(place)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)  # also after a reset

    def _passing(self, place, way, data):
        """What goes on of it; None: what came is lost with the connection."""
        with self._lock:
            if self.cut_at is not None and sum(map(len, self.crossed)) + len(data) >= self.cut_at:
                self.cut_at, self.cuts = None, self.cuts + 1
                for one in range(len(self.pairs)):
                    self.cut(one)
                return None
            before = self.carried.get((place, way), 0)
            if self.flip and self.flip[:2] == (place, way) and before <= self.flip[2] < before + len(data):
                at, self.flip = self.flip[2] - before, None
                data = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
            self.carried[place, way] = before + len(data)
            self.crossed[way] += data
        return data

    def cut(self, place):
        """End one connection; what it has not carried yet is lost."""
        self.alive.discard(place)
        for end in self.pairs[place]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def refuse(self):
        """Take no further connection."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def close(self):
        self.going.set()
        self.refuse()
        for place, ends in enumerate(self.pairs):
            self.cut(place)
            for end in ends:
                end.close()
