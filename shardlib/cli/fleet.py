"""The agents of several hosts, started over ssh from one place and ended together.

An agent's standard input is the line on which it is told of signals. Where that ends, because the launcher or the
connection has, the agent ends too: no rank outlives the run.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType

from shardlib.cli.agent import LOST, PATIENCE, say
from shardlib.cli.hosts import there

_PAUSE = 3.0  # seconds before an agent that was lost is started again
_SSH = 255  # ssh's own exit code: no connection
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = _SIGNALS[:3]


class Fleet:
    """`commands`: by host, an agent's command line. `ssh`: the program that runs `ssh HOST 'COMMAND'`."""

    def __init__(self, commands: Mapping[str, Sequence[str]], ssh: Sequence[str], restarts: int, grace: float) -> None:
        self.commands, self.ssh, self.restarts, self.grace = commands, ssh, restarts, grace
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.again: dict[str, float] = {}  # when to start an agent again
        self.codes: dict[str, int] = {}
        self.signal, self.deadline = 0, float("inf")

    def run(self) -> int:
        """Start all, and wait for the end; the exit code: 0, or that of the first that failed, or 128 + the signal."""
        for number in _SIGNALS:
            signal.signal(number, self._forward)
        for host in self.commands:
            self._start(host)
        while self.agents:
            time.sleep(0.1)
            for host, agent in [*self.agents.items()]:
                if (code := agent.poll()) is not None:
                    del self.agents[host]
                    self._ended(host, code)
            for host, when in [*self.again.items()]:
                if self.agents and time.monotonic() > when:
                    del self.again[host]
                    self._start(host)
            if time.monotonic() > self.deadline:
                self._end()
        if self.signal:
            return 128 + self.signal
        done = 0 in self.codes.values()  # where some host came to the end, one that was lost is no failure
        failed = [c for c in self.codes.values() if c and not (done and c == LOST)]
        return next((c for c in failed if c not in (1, LOST)), failed[0] if failed else 0)

    def _start(self, host: str) -> None:
        self.codes.pop(host, None)
        command = [*self.ssh, host, there(self.commands[host])]
        self.agents[host] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def _ended(self, host: str, code: int) -> None:
        if code < 0:
            code = 128 - code
        if code in (LOST, _SSH) and self.restarts and self.agents and not self.signal:
            self.again[host] = time.monotonic() + _PAUSE
            return
        self.codes[host] = code
        if code and self.agents and self.deadline == float("inf"):
            say(f"{host} ended with exit code {code}; the others end")
            self.deadline = time.monotonic() + PATIENCE

    def _end(self) -> None:
        """What has to end does so now: first asked, then by force."""
        self._tell(signal.SIGTERM)
        end = time.monotonic() + self.grace + 5
        for agent in self.agents.values():
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, end - time.monotonic()))
            agent.kill()
        self.deadline = float("inf")

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._tell(number)
        if number in _ENDING:
            self.signal = number
            self.deadline = min(self.deadline, time.monotonic() + self.grace + 5)

    def _tell(self, number: int) -> None:
        for agent in self.agents.values():
            with suppress(OSError):  # it has just ended
                assert agent.stdin is not None
                os.write(agent.stdin.fileno(), b"%d\n" % number)


def obey() -> None:
    """In an agent: signals from the fleet's line are this process's own; its end is SIGTERM."""

    def listen() -> None:
        for line in sys.stdin:
            os.kill(os.getpid(), int(line))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()
