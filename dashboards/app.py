"""The web app: the routes of its pages, and the server."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, unquote_to_bytes

import panel as pn
from bokeh.io import curdoc
from bokeh.server.server import Server
from bokeh.server.views.auth_request_handler import AuthRequestHandler
from bokeh.server.views.ws import WSHandler
from tornado.ioloop import PeriodicCallback
from tornado.web import HTTPError, RequestHandler, authenticated

from dashboards.access import Access, is_loopback
from dashboards.experiment_figures import draw_picture
from dashboards.following import follow
from dashboards.gate import SERVER_OPTIONS, install_access_rules, login_options
from dashboards.health import health_routes
from dashboards.limits import REQUEST_LIMITS, limit_server
from dashboards.pages import (
    buckets,
    compare,
    compare_several,
    documents,
    experiments,
    order,
    overview,
    shell,
    stragglers,
    timeline,
)
from dashboards.pages import runs as runs_page
from dashboards.pages.experiments import FoundExperiment, find_experiments
from dashboards.pages.shell import PageBuilder, parse_step_range
from dashboards.recording import LiveStatus, RecordingCache, RecordingStatus
from dashboards.runs import RunIndex
from dashboards.saving import table_routes
from dashboards.urls import RUN_ROUTE, RunUrl, file_stem
from overlapscope.console import Progress
from overlapscope.errors import OverlapScopeError
from overlapscope.interop.open_metrics import Sample, format_open_metrics
from overlapscope.interop.table_files import encode_table

# Release of the memory of pages that are closed, or left for another one.

SESSION_LIFETIME_OPTIONS: Final[dict[str, Any]] = {
    # Long enough for a page on a slow connection to open its websocket, or to open it again after an interruption.
    "check_unused_sessions_milliseconds": 5_000,
    "unused_session_lifetime_milliseconds": 60_000,
}
"""Options of Bokeh's server for the lifetime of sessions."""

_GOING_AWAY: Final = 1001
"""Websocket close code of a page that is closed or left (RFC 6455, 7.4.1); a broken connection sends none."""
_TRIM_INTERVAL_MS: Final = 20_000


def release_closed_pages(server: Server) -> None:
    """Release the memory of closed pages soon.

    Otherwise it grows: a page that follows a live recording is reloaded again and again, each time with a later state.
    """
    for rule in server._tornado.wildcard_router.rules:
        if isinstance(rule.target, type) and issubclass(rule.target, WSHandler):
            # The class is Panel's, a subclass of Bokeh's.
            rule.target = type("WebSocket", (_ExpiringWSHandler, rule.target), {})
    if sys.platform == "linux":
        PeriodicCallback(_trim_heap, _TRIM_INTERVAL_MS).start()


class _ExpiringWSHandler(WSHandler):
    def on_close(self) -> None:
        if self.connection is not None and self.close_code == _GOING_AWAY:
            self.connection.session.request_expiration()
        super().on_close()


def _trim_heap() -> None:
    """Return freed memory to the system: glibc keeps most of what tables used. Other C libraries lack this call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# HTTP handler of ``/metrics``, at which Prometheus scrapes the metrics of all runs.

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def metrics_routes(runs: RunIndex) -> list[tuple[str, type[RequestHandler], dict[str, Any]]]:
    """Return the route of ``/metrics`` for Bokeh's server."""
    return [("/metrics", _MetricsHandler, {"runs": runs})]


class _MetricsHandler(AuthRequestHandler):
    def initialize(self, runs: RunIndex) -> None:
        self._runs = runs

    @authenticated
    def get(self) -> None:
        """Answer with the metrics known so far: runs are analyzed in the background, as for the table of runs."""
        self.set_header("Content-Type", CONTENT_TYPE)
        self.set_header("Cache-Control", "no-store")
        self.write(
            format_open_metrics(
                {
                    row.run.name or row.run.path.name: [
                        Sample("overlapscope_live", int(row.is_live)),
                        *(() if row.judged is None else row.judged.samples),
                    ]
                    for row in self._runs.latest()
                }
            )
        )


# HTTP handler of ``/news``, which an open page polls every two seconds for the live status of its recording.

_MOST_RECORDINGS: Final = 64


def live_status_routes(runs: RunIndex) -> list[tuple[str, type[RequestHandler], dict[str, Any]]]:
    """Return the routes of the live status, beside the pages of each run, for Bokeh's server."""
    statuses = lru_cache(maxsize=_MOST_RECORDINGS)(LiveStatus)
    of_run = RUN_ROUTE.replace("{run:path}", "(?P<run>.+)")
    return [(f"{route}/news", _LiveStatusHandler, {"runs": runs, "statuses": statuses}) for route in ("", of_run)]


class _LiveStatusHandler(AuthRequestHandler):
    def initialize(self, runs: RunIndex, statuses: Any) -> None:
        self._runs = runs
        self._statuses = statuses

    @authenticated
    def get(self, run: str = "") -> None:
        try:
            path = (
                self._runs.path_of(unquote_to_bytes(run).decode(errors="surrogateescape"))
                if run
                else self._runs.only_run
            )
        except OverlapScopeError:
            path = None
        self.set_header("Cache-Control", "no-store")
        self.write(asdict(RecordingStatus() if path is None else self._statuses(path).latest()))


# HTTP handler of downloads of experiments: ``experiments/NAME.svg``, ``.png``, ``.csv`` and ``.parquet``.


def experiment_routes(folders: Sequence[Path]) -> list[tuple[str, type[RequestHandler], dict[str, Any]]]:
    """Return the routes of figures and results for Bokeh's server."""
    return [(r"/experiments/(?P<name>[^/]+)\.(?P<kind>svg|png|csv|parquet)", _FileHandler, {"folders": folders})]


_TYPES = {
    "svg": "image/svg+xml",
    "png": "image/png",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}


class _FileHandler(AuthRequestHandler):
    def initialize(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    @authenticated
    async def get(self, name: str, kind: str) -> None:
        self.set_header("Cache-Control", "no-store")
        found = next((each for each in find_experiments(self._folders) if each.name == unquote(name)), None)
        if found is None:
            raise HTTPError(404, "no such experiment")
        try:
            content = await asyncio.to_thread(_content, found, kind)
        except OverlapScopeError as error:
            raise HTTPError(404, str(error)) from None
        self.set_header("Content-Type", _TYPES[kind])
        self.set_header("Content-Disposition", f'attachment; filename="{file_stem(found.name, None)}.{kind}"')
        self.finish(content)


def _content(found: FoundExperiment, kind: str) -> bytes:
    if kind in ("csv", "parquet"):
        return b"".join(encode_table(found.rows, "csv" if kind == "csv" else "parquet"))
    return draw_picture(found.experiment.title, found.figure, "svg" if kind == "svg" else "png")


ROUTES: Final[dict[str, PageBuilder]] = {
    "/": overview.build,
    "/overview": overview.build,  # what its label in the header suggests
    "/timeline": timeline.build,
    "/stragglers": stragglers.build,
    "/order": order.build,
    "/buckets": buckets.build,
    # Every plot without the rest of its page, for embedding.
    "/plots/timeline": partial(timeline.build, is_plain=True),
    "/plots/stragglers": stragglers.build_heatmap,
    "/plots/order": partial(order.build, is_plain=True),
    "/plots/buckets": partial(buckets.build, is_plain=True),
    **overview.TREND_ROUTES,
}

DEFAULT_PORT: Final = 5006

_PREPARATION_PHASES: Final = (
    ("dividing steps", ("summary", "breakdown_section")),
    ("looking for stragglers", ("stragglers", "heatmap")),
    ("comparing the order of collectives", ("diagnosis",)),
)
"""Phases of preparing a snapshot, as progress shows them, with the slow properties that all pages share."""


def open_page(build: PageBuilder, recording: RecordingCache) -> None:
    """Fill the current document with a page of the latest state of a recording, or with an error page."""
    document = curdoc()
    arguments = pn.state.session_args
    which = parse_step_range(arguments)
    try:
        build(document, recording.latest(which=which), arguments)
        follow(document, build, lambda asked: recording.latest(which=parse_step_range(asked)))
    except OverlapScopeError as error:
        (shell.build if which is None else shell.build_no_steps)(document, error)


def open_run_page(build: PageBuilder, runs: RunIndex, name: str) -> None:
    """Fill the current document with a page of a run.

    Args:
        name: name of the run, as in the URL; empty if the URL has none, for a run that is the only one served.
    """
    document = curdoc()
    run_url = RunUrl.from_route(name) if name else RunUrl(has_table=runs.only_run is None)
    try:
        path = runs.path_of(run_url.run) if name else runs.only_run
        if path is None:
            raise OverlapScopeError("this address names no run, and several are served")
    except OverlapScopeError as error:
        document.template_variables["place"] = replace(run_url, run="")
        shell.build_no_run(document, error)
        return
    document.template_variables["place"] = run_url
    open_page(build, runs.recording(path))


def open_first_page(runs: RunIndex) -> None:
    """Fill the current document with the table of runs, or with the overview of the only one served."""
    if runs.only_run is None:
        runs_page.build(curdoc(), runs)
    else:
        open_run_page(overview.build, runs, "")


def open_comparison(runs: RunIndex) -> None:
    """Fill the current document with a comparison of two runs, of more with one, or of two step ranges of one."""
    arguments = pn.state.session_args
    builder = compare_several if compare_several.is_asked(arguments) else compare
    builder.build(curdoc(), runs, arguments)


def open_experiments(runs: RunIndex) -> None:
    """Fill the current document with the experiments in the served folders."""
    experiments.build(curdoc(), runs)


def open_document(runs: RunIndex, name: str) -> None:
    """Fill the current document with one of the documents."""
    documents.build(curdoc(), runs, name)


def serve(
    folders: Sequence[Path],
    address: str = "127.0.0.1",
    port: int | None = None,
    *,
    access: Access | None = None,
    prefix: str = "",
    show: bool = True,
    metrics: bool = False,
) -> None:
    """Serve recordings until Ctrl-C.

    Args:
        folders: each a recording, or a folder of recordings; it may be empty, live, or not exist yet.
        address: address to listen on; the default can't be reached from other machines.
        port: port to listen on; ``DEFAULT_PORT`` or the next free one if not given, any free one if 0.
        access: access rules; if not given, open to everybody who can reach the address.
        prefix: prefix of the path of every URL.
        show: open a browser.
        metrics: also answer Prometheus at ``/metrics``.

    Raises:
        OverlapScopeError: the server can't listen on the address and port.
    """
    access = access or Access()
    runs = RunIndex(folders)
    chosen = _free_port(address, range(DEFAULT_PORT, DEFAULT_PORT + 100)) if port is None else port
    try:
        server = start_server(runs, address, chosen, access=access, prefix=prefix, metrics=metrics)
    except OSError as error:
        raise OverlapScopeError(f"can't listen on {address} port {chosen}: {error.strerror or error}") from None
    first_page = prepare(runs)
    url = f"http://{_reachable_host(address)}:{server.port}{_normalize_prefix(prefix)}/{first_page}"
    full_url = f"{url}?token={access.token}" if access.is_token_generated else url
    print(f"Serving {', '.join(map(str, folders))} at {full_url}  (Ctrl-C to stop)", flush=True)
    if not is_loopback(address):
        print("Other machines can reach it, and the connection is not encrypted.", flush=True)
    # Not with a token in the URL: other users of this machine could read it in the list of processes.
    if show and not access.needs_login:
        server.io_loop.add_callback(webbrowser.open, url)
    try:
        server.io_loop.start()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()
        runs.close()


def prepare(runs: RunIndex) -> str:
    """Prepare the only run served, or start the search for runs. Problems with a folder go to stderr.

    Returns:
        The path of the first page to open.
    """
    only_run = runs.only_run
    if only_run is not None:
        return _prepare_only_run(runs.recording(only_run))
    if not runs.latest() and runs.is_found:
        for reason in runs_page.explain_missing_runs(runs):
            print(f"overlapscope serve: {reason}", file=sys.stderr)
    return ""


def _prepare_only_run(recording: RecordingCache) -> str:
    """Read and analyze a recording with a progress display, so that its first page opens as fast as later ones.

    An unreadable recording is no error here, and only printed to stderr: the page shows the problem as well, and a run
    that starts later fills the folder, so that a reload works.

    Returns:
        The path of the first page to open: the order of collectives if there is an incident, else the overview.
    """
    try:
        with Progress() as progress:
            snapshot = recording.latest(progress.count)
            for phase, figures in _PREPARATION_PHASES:
                progress.begin(phase)
                for figure in figures:
                    getattr(snapshot, figure)
    except OverlapScopeError as error:
        print(f"overlapscope serve: {error}", file=sys.stderr)
        return ""
    return "order" if snapshot.diagnosis is not None and snapshot.diagnosis.is_incident else ""


def start_server(
    runs: RunIndex, address: str, port: int, *, access: Access | None = None, prefix: str = "", metrics: bool = False
) -> pn.io.server.Server:
    """Start a server that listens; it answers once its ``io_loop`` runs."""
    access = access or Access()
    port = port or _free_port(address, [0])
    # Don't log that a browser tab was closed during a request.
    logging.getLogger("bokeh.server.views.ws").setLevel(logging.ERROR)
    page = partial(_page, runs)
    pages = {route: page(partial(open_run_page, build, runs, "")) for route, build in ROUTES.items()}
    pages["/"] = page(partial(open_first_page, runs))
    pages["/compare"] = page(partial(open_comparison, runs))
    pages["/experiments"] = page(partial(open_experiments, runs))
    pages |= {f"/docs/{name}": page(partial(open_document, runs, name)) for name in documents.DOCUMENTS}
    for route, build in ROUTES.items():
        pages[RUN_ROUTE + route.rstrip("/")] = page(partial(_open_of_route, build, runs))
    server = pn.serve(
        pages,
        address=address,
        port=port,
        prefix=_normalize_prefix(prefix),
        show=False,
        start=False,
        verbose=False,
        extra_patterns=[
            *live_status_routes(runs),
            *table_routes(runs),
            *experiment_routes(runs.folders),
            *health_routes(runs.folders),
            *(metrics_routes(runs) if metrics else ()),
        ],
        **SESSION_LIFETIME_OPTIONS,
        **REQUEST_LIMITS,
        **SERVER_OPTIONS,
        **login_options(access),
    )
    install_access_rules(server, access)
    limit_server(server)
    release_closed_pages(server)
    server.start()  # starts its periodic tasks: drop the sessions of closed pages, ping those of open ones
    return server


def _open_of_route(build: PageBuilder, runs: RunIndex) -> None:
    open_run_page(build, runs, pn.state.route_params.get("run", ""))


_page_lock: Final = threading.Lock()


def _page(runs: RunIndex, fill: Callable[[], None]) -> Callable[[], None]:
    # Panel recognizes pages by their type: it has to be a plain function.
    def page() -> None:
        # Bokeh 3.10 calls this on threads. Two pages that are built at once would compute the same results twice.
        with _page_lock:
            curdoc().template_variables["has_experiments"] = bool(find_experiments(runs.folders))
            fill()

    return page


def _reachable_host(address: str) -> str:
    """Return the host for a URL that reaches a server listening on an address."""
    if address in ("0.0.0.0", "::"):  # noqa: S104 - compared, not listened on
        return socket.gethostname()
    if address == "127.0.0.1":
        return "localhost"
    return f"[{address}]" if ":" in address else address


def _normalize_prefix(prefix: str) -> str:
    return f"/{prefix.strip('/')}" if prefix.strip("/") else ""


def _free_port(address: str, candidates: Iterable[int]) -> int:
    """Return the first free port, or 0 if none of them is; the system picks a free one for candidate 0."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in candidates:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return 0
