"""Every wait has a limit: what waits by itself stands here with the reason why that is good, and nothing else does.

Looked for is what waits for another thread, task, process or lock without saying how long. What asks over HTTP gets its
limits where its client is made, and what they are is in docs/reliability.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]

WITHOUT_LIMIT = {
    "awaited within asyncio.timeout(PROXY_RELOAD_TIMEOUT_S), by `Reloading._looking`": [
        ("proxy/controlplane/checkpoints.py", "in_daemon_thread(directory.parent.is_dir)"),
        ("proxy/controlplane/checkpoints.py", "in_daemon_thread(partial(are_here, directory, files))"),
        ("proxy/controlplane/checkpoints.py", "in_daemon_thread(partial(_read, request, models, landed))"),
        ("proxy/controlplane/reloading.py", "in_daemon_thread(partial(refuse_path, path, roots=roots, param='path'))"),
    ],
    "a lookup: `Discovery.run` gives it LOOKUP_S": [
        ("proxy/discovery/dns.py", "in_daemon_thread(self._resolve)"),
        ("proxy/discovery/file.py", "in_daemon_thread(self._read)"),
        ("proxy/discovery/jobs.py", "in_daemon_thread(self._look)"),
    ],
    "part of a rollout: `Relay` gives it PROXY_ROLLOUT_TIMEOUT_S, and the monitor PROXY_STALL_S": [
        ("proxy/dataplane/exchange.py", "self._waiter"),
        ("proxy/dataplane/pool.py", "self.acquire(fresh=fresh)"),
        ("proxy/dataplane/pool.py", "waiter"),
        ("proxy/dataplane/relay.py", "self._changed.wait()"),
        ("proxy/dataplane/upstream.py", "pool.acquire(fresh=fresh)"),
    ],
    "a client: `ServerProtocol.close_if_late` gives it PROXY_REQUEST_TIMEOUT_S to send, and UNREAD_S to read": [
        ("proxy/dataplane/client_request.py", "self._wakes.wait()"),
        ("proxy/dataplane/server_protocol.py", "self._has_room.wait()"),
    ],
    "a collective, which ends when a member fails, leaves or restarts, or its caller is gone": [
        (
            "proxy/controlplane/collective.py",
            "changes.wait_until(lambda: not all((member.is_there for member in tasks)), deadline=math.inf)",
        ),
        (
            "proxy/controlplane/collective.py",
            "asyncio.wait({*pending, leaving}, return_when=asyncio.FIRST_COMPLETED)",
        ),
    ],
    "what is awaited has limits of its own, each step of it": [
        ("proxy/controlplane/connected.py", "work"),
        ("proxy/controlplane/keeper.py", "self._asking"),
        ("proxy/controlplane/members_api.py", "asyncio.shield(removal)"),
        ("proxy/controlplane/reloading.py", "asyncio.shield(task)"),
        ("proxy/controlplane/reloading.py", "task"),
        ("proxy/demo/run.py", "asyncio.to_thread(client.publish, adapter, step=step)"),
        ("trainer_client/client.py", "futures.wait([future])"),
        ("trainer_client/client.py", "collected.result()"),
        ("trainer_client/client.py", "merged.result()"),
        ("trainer_client/integrations/trl/syncs.py", "futures.wait([self._travelling])"),
        ("trainer_client/lane.py", "wait([self._open[0]])"),
    ],
    "whoever has the lock ends within its own limits": [
        ("proxy/controlplane/federation.py", "self._asking"),
        ("proxy/controlplane/pausing.py", "self._resuming"),
        ("trainer_client/client.py", "self._handing_over"),
        ("trainer_client/metrics.py", "self._lock"),
    ],
    "it only computes, for milliseconds": [
        (
            "proxy/controlplane/federation.py",
            "asyncio.to_thread(merged, {index: answers[api.url] for index, api in up.items()})",
        ),
        ("proxy/controlplane/federation.py", "asyncio.to_thread(only, page, names)"),
    ],
    "a loop that waits for work": [
        (
            "proxy/controlplane/reloading.py",
            "self._changes.wait_until(lambda: self._lacking() is not None, deadline=math.inf)",
        ),
        ("trainer_client/lane.py", "self._queue.get()"),
    ],
    "it ends with the process that it waits for, which has deadlines (nccl.sweep)": [
        ("trainer_client/nccl/rank.py", "go.acquire()"),
    ],
    "a call to the Hub or to a replica's /health, each with its own limit": [
        ("trainer_client/jobs/ending.py", "threads.map(partial(_cancel, hub), jobs)"),
        ("trainer_client/jobs/health.py", "self._threads.map(self._health, asked)"),
        ("trainer_client/jobs/watch.py", "threads.map(self._start, starts)"),
    ],
    "`join` is given its limit": [("proxy/tracing/provider.py", "asyncio.to_thread(sending.join, LAST_SPANS_S)")],
    "whoever calls it sets the limit, and is listed here unless it stands beside the call": [
        ("proxy/threads.py", "asyncio.get_running_loop().run_in_executor(_DAEMONS, call)"),
    ],
    "it does not wait: it is done, or no lock, or closes what is open": [
        ("proxy/app.py", "client"),
        ("proxy/demo/rollouts.py", "client"),
        ("proxy/tracing/rollouts.py", "_current.get()"),
        ("trainer_client/client.py", "future.result()"),
        ("trainer_client/outcomes.py", "future.result()"),
    ],
}
"""Reason -> where, and what waits as the source has it."""


def found() -> dict[tuple[str, str], int]:
    """Return every wait of the two packages that names no limit, with its line."""
    files = [path for package in ("proxy", "trainer_client") for path in sorted((REPO / package).rglob("*.py"))]
    return {
        (str(path.relative_to(REPO)), ast.unparse(wait)): wait.lineno
        for path in files
        if "simulator" not in path.parts  # a server for tests and demos
        for wait in waits(ast.parse(path.read_text()), asynchronous=False, limited=False)
    }


def waits(node: ast.AST, *, asynchronous: bool, limited: bool) -> Iterator[ast.expr]:
    """Yield what waits without a limit below `node`, which stands in an async function, or below asyncio.timeout."""
    if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef | ast.Lambda):
        asynchronous, limited = isinstance(node, ast.AsyncFunctionDef), False
    if isinstance(node, ast.AsyncWith):
        yield from (item.context_expr for item in node.items if _is_name(item.context_expr) and not limited)
        limited = limited or any("asyncio.timeout" in ast.unparse(item.context_expr) for item in node.items)
    if isinstance(node, ast.With):
        yield from (item.context_expr for item in node.items if _is_name(item.context_expr))
    if isinstance(node, ast.Await) and _is_name(node.value) and not limited:
        yield node.value
    if isinstance(node, ast.Call) and not limited and _waits(node, asynchronous):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from waits(child, asynchronous=asynchronous, limited=limited)


def _is_name(node: ast.expr) -> bool:
    """Whether it is a thing rather than a call: a lock, a task, a future."""
    return isinstance(node, ast.Name | ast.Attribute)


def _waits(call: ast.Call, asynchronous: bool) -> bool:
    said = ast.unparse(call)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    named = {keyword.arg for keyword in call.keywords}
    if name in ("to_thread", "run_in_executor", "in_daemon_thread", "shield", "flock"):
        return "LOCK_NB" not in said and "LOCK_UN" not in said
    if name in ("wait", "as_completed") and said.startswith(("asyncio.", "futures.", "wait([")):
        return "timeout" not in named
    if name in ("join", "wait", "acquire", "communicate") or (name == "get" and not call.args):
        return not call.args and not named & {"timeout", "blocking"}
    if name == "result":
        return not call.args and not asynchronous  # of a task it raises where it would wait
    if name in ("run", "check_call", "check_output") and said.startswith("subprocess."):
        return "timeout" not in named
    if name == "map" and "threads" in said:
        return "timeout" not in named
    limits = [keyword.value for keyword in call.keywords if keyword.arg in ("deadline", "timeout_s", "within_s")]
    return any(ast.unparse(limit) == "math.inf" for limit in limits)


def test_what_waits_without_a_limit_has_a_reason() -> None:
    known = {entry for entries in WITHOUT_LIMIT.values() for entry in entries}
    new = {f"{file}:{line}: {said}" for (file, said), line in found().items() if (file, said) not in known}
    assert not new, "give it a limit, or the reason why it needs none, in WITHOUT_LIMIT"


def test_every_reason_is_of_something_that_waits() -> None:
    known = {entry for entries in WITHOUT_LIMIT.values() for entry in entries}
    assert not known - found().keys()
