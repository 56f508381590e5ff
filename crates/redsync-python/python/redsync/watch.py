"""Who is missing. A collective that fails tells that somebody does not answer, but not who.

Comes in: a sign of life of every rank, every few seconds, through the store of the process group, with how far it has got.
Goes out, after a failure: the ranks that are silent, have left or lag behind. What must hold: all survivors name the same.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
import time
from typing import Any

import torch.distributed as dist

from .errors import PeerError


class Watch:
    """The sign of life of this rank, and the view on those of the others."""

    def __init__(self, name: str, rank: int, ranks: int, grace: float) -> None:
        self._rank, self._ranks = rank, ranks
        self._interval = grace / 5
        self._place: tuple[int, int] = (-1, 0)
        self._beats = 0
        self._stop = threading.Event()
        # The default store is shared with whoever waits in it, for minutes perhaps; a clone has a connection of its own.
        store = dist.distributed_c10d._get_default_store().clone()
        store.set_timeout(datetime.timedelta(seconds=grace))
        self._store = dist.distributed_c10d.PrefixStore(f"redsync/{name}", store)
        self._lock = threading.Lock()
        self._say("alive")
        self._thread = threading.Thread(target=self._beat, name="redsync-watch", daemon=True)
        self._thread.start()

    def note(self, step: int, place: int) -> None:
        """This rank has got as far as this exchange of this step."""
        self._place = (step, place)

    def close(self) -> None:
        """This rank leaves."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        try:
            self._say("left")
        except Exception:  # the store has gone first, and nobody is left to read it
            pass

    def blame(self, cause: str) -> PeerError:
        """What a failed collective means, in terms of ranks."""
        begin, first = time.monotonic(), None
        try:
            first = self._look()
            while time.monotonic() - begin < 3 * self._interval:
                verdict = self._verdict()
                if verdict is not None:
                    return PeerError(*verdict)
                time.sleep(self._interval / 4)
            found = self._judge(first, self._look())
            self._store.set("verdict", json.dumps(found))
        except Exception as error:
            held = "" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else ", which rank 0 holds"
            ranks = () if not held or self._rank == 0 else (0,)
            who = "rank 0 does not answer" if ranks else "a rank does not answer"
            return PeerError(f"{who}: neither the exchange ({cause}) nor the store{held} ({_line(error)})", ranks)
        why, missing = found
        return PeerError(f"{why} ({cause})", tuple(missing))

    def _beat(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._say("alive")
            except Exception:  # noticed where it matters, in `blame`
                continue

    def _say(self, what: str) -> None:
        with self._lock:
            self._beats += 1
            self._store.set(f"rank/{self._rank}", json.dumps([what, self._beats, *self._place]))

    def _look(self) -> list[Any]:
        keys = [f"rank/{rank}" for rank in range(self._ranks)]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else ["absent", 0, -1, 0] for key in keys]

    def _verdict(self) -> tuple[str, tuple[int, ...]] | None:
        """What another survivor has found out; it may be gone itself by now, and must not be named."""
        if not self._store.check(["verdict"]):
            return None
        why, ranks = json.loads(self._store.get("verdict"))
        return (why, tuple(ranks))

    def _judge(self, before: list[Any], after: list[Any]) -> tuple[str, list[int]]:
        step, place = self._place
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        left = [rank for rank in others if after[rank][0] == "left"]
        silent = [rank for rank in others if after[rank][0] != "left" and after[rank][1] == before[rank][1]]
        behind = [rank for rank in others if tuple(after[rank][2:]) < (step, place)]
        for ranks, what in ((silent, "gave no sign of life"), (left, "left"), (behind, "did not come")):
            if ranks:
                at = f"; its last sign is of step {after[ranks[0]][2]}" if after[ranks[0]][2] >= 0 else ""
                names = ", ".join(map(str, ranks))
                return (f"rank {names} {what} at step {step}{at}", ranks)
        return (f"an exchange failed at step {step}, though all ranks are alive", [])


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
