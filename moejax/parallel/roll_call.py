"""A roll call before JAX connects: every process tells process 0 who it is and hears whether all may go on.

Why not leave it to jax.distributed.initialize: when a process is missing, has a number twice or counts the others differently,
its C++ client ends every process with SIGABRT after the timeout and names nobody (jax 0.10.2 and 0.12.0). Here each of these is
an exception, on all processes, that says which process and which host. One line of JSON goes each way, over the coordinator's
own port, which is free again before JAX takes it.
"""

from __future__ import annotations

import dataclasses
import json
import selectors
import socket
import time

LONGEST = 1 << 16  # bytes of a call; an honest one has about 150
SLACK_S = 5.0  # process 0 answers at its timeout; the others wait this much longer for that answer
RETRY_S = 0.25


@dataclasses.dataclass(frozen=True)
class Member:
    """What a process says of itself."""

    process_id: int
    processes: int
    host: str
    pid: int
    version: str

    def __str__(self) -> str:
        return f"process {self.process_id} (host {self.host}, pid {self.pid})"


def roll_call(me: Member, host: str, port: int, timeout_s: float) -> list[Member]:
    """Wait until all have come; -> the members in order of their numbers, the same on every process.

    Raises, on every process that can be told:
      ValueError: two counts, a number twice or out of range, two versions of jax, the port taken.
      TimeoutError: somebody did not come; the message says who.
    """
    answer = _host(me, host, port, timeout_s) if me.process_id == 0 else _guest(me, host, port, timeout_s)
    if "wrong" in answer:
        raise ValueError(answer["wrong"])
    if "late" in answer:
        raise TimeoutError(answer["late"])
    return [Member(**member) for member in answer["members"]]


class _Roll:
    """Process 0's list: a connection, and who is at its other end. Who hangs up is struck off and may come again."""

    def __init__(self, me: Member, listener: socket.socket) -> None:
        self.me, self.members = me, {0: me}
        self.buffers: dict[socket.socket, bytes] = {}
        self.callers: dict[socket.socket, Member] = {}
        self.listener, self.selector = listener, selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)

    def wait(self, seconds: float) -> None:
        """Handle what arrives. Raises ValueError for a caller who cannot belong to this run."""
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.listener:
                connection, _ = self.listener.accept()
                connection.settimeout(SLACK_S)
                self.buffers[connection] = b""
                self.selector.register(connection, selectors.EVENT_READ)
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._hear(key.fileobj)

    def _hear(self, connection: socket.socket) -> None:
        try:
            more = connection.recv(LONGEST)
        except OSError:
            more = b""
        text = self.buffers[connection] + more
        if not more or len(text) > LONGEST:
            self._hang_up(connection)
        elif not text.endswith(b"\n"):
            self.buffers[connection] = text
        elif connection not in self.callers:
            try:
                member = Member(**json.loads(text)["moejax"])
            except (ValueError, KeyError, TypeError):
                self._hang_up(connection)  # a port scanner, a health probe, the gRPC client of an earlier run
                return
            self.callers[connection] = member
            self._admit(member)

    def _hang_up(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        self.buffers.pop(connection)
        gone = self.callers.pop(connection, None)
        if gone is not None:
            self.members.pop(gone.process_id, None)

    def _admit(self, member: Member) -> None:
        me = self.me
        if member.processes != me.processes:
            raise ValueError(
                f"{member} counts {member.processes} processes, {me} counts {me.processes}; all must be started with the same "
                "number: look at processes=, MOEJAX_PROCESSES or the scheduler's number of tasks on both hosts."
            )
        if not 0 < member.process_id < me.processes or member.process_id in self.members:
            there = self.members.get(member.process_id)
            also = f", and so says {there}" if there else ""
            raise ValueError(
                f"{member} says that it is number {member.process_id} of {me.processes}{also}; the numbers are 0 to "
                f"{me.processes - 1}, each once: look at process_id= or MOEJAX_PROCESS_ID."
            )
        if member.version != me.version:
            raise ValueError(
                f"{member} runs jax {member.version}, {me} runs jax {me.version}; they would compile different programs and "
                "wait for each other without end. Install the same version on every host."
            )
        self.members[member.process_id] = member

    def answer(self, answer: dict) -> None:
        """To all who called. Each hangs up first, so that the port has no connection in TIME_WAIT on this side."""
        self.selector.close()
        self.listener.close()  # before the answer: JAX's client may be quicker than JAX's service
        for connection in self.callers:
            try:
                connection.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                pass  # it went away; JAX's own timeout reports it
        for connection in self.buffers:
            try:
                connection.recv(1) if connection in self.callers else None
            except OSError:
                pass
            connection.close()


def _host(me: Member, host: str, port: int, timeout_s: float) -> dict:
    """Process 0: listen until all have called."""
    try:
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port), backlog=4096)
    except OSError as error:
        raise ValueError(
            f"Port {port} of this host ({me.host}) cannot be opened: {error.strerror or error}. It must be free on process 0: "
            "end what holds it (an earlier run?), or give all processes another one by coordinator=, MOEJAX_COORDINATOR or MOEJAX_PORT."
        ) from None
    roll, end = _Roll(me, listener), time.monotonic() + timeout_s
    try:
        while len(roll.members) < me.processes and (left := end - time.monotonic()) > 0:
            roll.wait(left)
        answer = _full(roll.members) if len(roll.members) == me.processes else {"late": _missing(me, roll.members, host, port, timeout_s)}
    except ValueError as error:
        answer = {"wrong": str(error)}
    except BaseException:
        listener.close()
        raise
    roll.answer(answer)
    return answer


def _full(members: dict[int, Member]) -> dict:
    return {"members": [dataclasses.asdict(members[number]) for number in sorted(members)]}


def _missing(me: Member, members: dict[int, Member], host: str, port: int, timeout_s: float) -> str:
    missing = ranges([number for number in range(me.processes) if number not in members])
    here = ", ".join(str(member) for _, member in sorted(members.items())[:16]) + (", ..." if len(members) > 16 else "")
    return (
        f"{len(members)} of {me.processes} processes came within {timeout_s:g} s. Missing: {missing}. Here: {here}. Look at the output of "
        f"the missing ones: did they start, and do they reach {host} at port {port} (a firewall?). A slow start needs a longer timeout: "
        "timeout_s= or MOEJAX_TIMEOUT_S."
    )


def _guest(me: Member, host: str, port: int, timeout_s: float) -> dict:
    """Another process: call process 0 until it answers."""
    end, reason = time.monotonic() + timeout_s, "no answer"
    while time.monotonic() < end:
        try:
            connection = socket.create_connection((host.strip("[]"), port), timeout=max(1.0, min(10.0, end - time.monotonic())))
        except OSError as error:  # not started yet, or the name of a new pod that is not known yet
            reason = str(error)
            time.sleep(RETRY_S)
            continue
        with connection:
            connection.settimeout(max(0.0, end - time.monotonic()) + SLACK_S)
            try:
                connection.sendall(json.dumps({"moejax": dataclasses.asdict(me)}).encode() + b"\n")
                text = connection.makefile("rb").readline()
            except OSError as error:
                reason = f"it took the call, then: {error}"
                continue
        if text.endswith(b"\n"):
            return json.loads(text)
        reason = "it hung up without an answer"  # it restarts, or something else listens there
        time.sleep(RETRY_S)
    raise TimeoutError(
        f"{me} got no word from process 0 at {host}, port {port}, within {timeout_s:g} s (last: {reason}). Is process 0 running, is that "
        "its address as seen from here (localhost is each host's own), and is the port open in the firewall? Another port: MOEJAX_PORT "
        "or coordinator=HOST:PORT; more time: timeout_s= or MOEJAX_TIMEOUT_S."
    )


def ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7": a thousand missing hosts in a line."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
