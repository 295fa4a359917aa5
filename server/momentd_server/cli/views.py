"""What people see of a daemon: text from messages. Pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from momentd_server.cli.output import columns, pairs
from momentd_wire.units import format_bytes, format_count, format_duration
from momentd_wire.v1 import momentd_pb2 as pb

# Years have so many seconds, and a day.
_YEAR_S, _DAY_S = 365.25 * 86400, 86400
# What a drive of 1 TB is commonly warranted for.
DRIVE_TBW = 600.0


def _process(total: pb.Totals) -> str:
    text = f"pid {total.pid}, up {format_duration(total.uptime_s)}"
    if total.engine_restarts:
        text += f" since restart {total.engine_restarts} of its engine (pid {total.engine_pid})"
    return text


def status(stats: pb.StatsReply, address: str, drive_tbw: float = DRIVE_TBW) -> RenderableType:
    """The health of a daemon, one thing a line."""
    total = stats.totals
    headline = Text.assemble(
        (f"momentd {total.server_version} ", "bold"),
        (total.state, "green" if total.state == "serving" else "yellow"),
        f" at {address}",
    )
    runs = len({row.table.run for row in stats.tables})
    rows = [
        ("process", _process(total)),
        ("data", _data(total)),
        ("cache", _cache(total)),
        ("memory", _memory(total)),
        ("use", f"{_plural(len(stats.tables), 'table')} in {_plural(runs, 'run')}, "
                f"{_plural(len(stats.sessions), 'session')}"),
        ("traffic", f"read {format_bytes(total.bytes_read)}, "
                    f"written {format_bytes(total.bytes_written)}, "
                    f"{_plural(total.requests, 'request')}, {_plural(total.errors, 'error')}"),
        ("wear", _wear(total, drive_tbw)),
        ("stop", f"an orderly stop would need about {format_duration(total.drain_s)}"),
    ]  # fmt: skip
    if total.failure:
        rows.insert(0, ("failed", total.failure))
    broken = [row.table.table.id for row in stats.tables if row.broken]
    if broken:
        rows.append(("broken", f"tables {', '.join(map(str, broken))}: drop them"))
    return Group(headline, pairs(rows))


def _wear(total: pb.Totals, drive_tbw: float) -> str:
    """What goes to the disk, and how long a drive lasts that is warranted for so many TB."""
    written = total.disk_bytes_written
    parts = [f"{format_bytes(written)} to the disk"]
    if total.bytes_written:
        parts.append(f"{written / total.bytes_written:.2f} times the records spilled")
    if total.rows_updated:
        # Not of the tables that are shown: those may be of one run.
        parts.append(f"{written / total.rows_updated:,.0f} bytes for each updated row")
    a_day = total.disk_bytes_written_per_s * _DAY_S
    if a_day:
        years = drive_tbw * 1e12 / total.disk_bytes_written_per_s / _YEAR_S
        parts.append(
            f"now {format_bytes(round(a_day))} a day, at which a drive rated for {drive_tbw:g} TB "
            f"lasts {years:,.1f} years"
        )
    return ", ".join(parts)


def _data(total: pb.Totals) -> str:
    direct = "direct I/O" if total.direct_io else "buffered I/O"
    return (
        f"{total.data_dir}: {format_bytes(total.disk_bytes)} in "
        f"{_plural(total.segments, 'segment')} ({format_bytes(total.needed_bytes)} needed), "
        f"{format_bytes(total.disk_free_bytes)} free, "
        f"{direct}"
    )


def _cache(total: pb.Totals) -> str:
    return (
        f"{format_bytes(total.cache_used_bytes)} of {format_bytes(total.cache_bytes)} "
        f"({percent(total.cache_used_bytes, total.cache_bytes)}), "
        f"{total.frames_dirty:,} of {_plural(total.frames, 'frame')} dirty"
    )


def _memory(total: pb.Totals) -> str:
    return (
        f"resident: {format_bytes(total.rss_anonymous_bytes)} anonymous, "
        f"{format_bytes(total.rss_shared_bytes)} shared, "
        f"{format_bytes(total.rss_file_bytes)} file; "
        f"{format_bytes(total.location_bytes)} row locations, "
        f"{format_bytes(total.arena_bytes)} arenas"
    )


def tables(infos: Sequence[pb.TableInfo], *, width: int | None) -> RenderableType:
    """All tables, one a line."""
    if not infos:
        return Text("no tables")
    headers = ("id", "name", "run", "rows", "width", "dtype", "record", "rule", "step")
    rows = [
        (
            str(info.table.id),
            title(info),
            info.run or "-",
            f"{info.schema.rows:,}",
            str(info.schema.width),
            _dtype(info.schema),
            format_bytes(info.record_bytes),
            info.schema.rule or "-",
            f"{info.step:,}",
        )
        for info in infos
    ]
    return columns(
        headers, rows, left=("name", "run", "dtype", "rule"), spare=("rule", "record"), width=width
    )


def traffic(rows: Sequence[pb.TableStats], *, width: int | None) -> RenderableType:
    """What tables hold and do, one a line."""
    if not rows:
        return Text("no tables")
    headers = (
        "id", "name", "rows", "touched", "frames", "dirty", "disk", "needed", "read", "ahead",
        "written", "compacted", "hits", "updates", "rows/s", "p50", "p99",
    )  # fmt: skip
    lines = [
        (
            str(row.table.table.id),
            title(row.table),
            format_count(row.table.schema.rows),
            format_count(row.rows_touched),
            format_count(row.frames),
            format_count(row.frames_dirty),
            format_bytes(row.disk_bytes),
            format_bytes(row.needed_bytes),
            format_bytes(row.bytes_read),
            format_count(row.rows_prefetched),
            format_bytes(row.bytes_written),
            format_bytes(row.bytes_compacted),
            percent(row.hits, row.hits + row.misses),
            format_count(row.updates),
            format_count(row.rows_per_s),
            format_duration(row.update_latency.p50_s),
            format_duration(row.update_latency.p99_s),
        )
        for row in rows
    ]
    spare = ("needed", "compacted", "ahead", "dirty", "updates", "p50", "frames", "read")
    return columns(headers, lines, left=("name",), spare=spare, width=width)


def sessions(found: Sequence[pb.SessionStats], *, width: int | None) -> RenderableType:
    """The connected processes, one a line."""
    if not found:
        return Text("no sessions")
    headers = ("session", "pid", "uid", "run", "plane", "tables", "arena", "requests", "last seen")
    rows = [
        (
            session.session,
            str(session.pid),
            str(session.uid),
            session.run or "-",
            session.plane if session.attached else f"{session.plane}, gone",
            str(len(session.tables)),
            format_bytes(session.arena_bytes),
            f"{session.requests:,}",
            f"{format_duration(session.idle_s)} ago",
        )
        for session in found
    ]
    return columns(
        headers, rows, left=("session", "run", "plane"), spare=("uid", "arena"), width=width
    )


def everything(
    stats: pb.StatsReply, address: str, *, width: int | None, drive_tbw: float = DRIVE_TBW
) -> RenderableType:
    """`momentd stats`: totals, tables, sessions."""
    return Group(
        status(stats, address, drive_tbw),
        Text(),
        traffic(stats.tables, width=width),
        Text(),
        sessions(stats.sessions, width=width),
    )


@dataclass(slots=True)
class Run:
    """The tables and sessions that carry one label. Bytes and rows are sums over its tables."""

    run: str
    tables: int = 0
    rows: int = 0
    rows_touched: int = 0
    disk_bytes: int = 0
    # Unix time of its newest table; 0 without tables.
    newest_s: float = 0.0
    pids: list[int] = field(default_factory=list)

    @property
    def in_use(self) -> bool:
        return bool(self.pids)


def group_runs(stats: pb.StatsReply) -> list[Run]:
    """All runs that have tables or sessions, by name."""
    found: dict[str, Run] = {}
    for row in stats.tables:
        run = found.setdefault(row.table.run, Run(row.table.run))
        run.tables += 1
        run.rows += row.table.schema.rows
        run.rows_touched += row.rows_touched
        run.disk_bytes += row.disk_bytes
        run.newest_s = max(run.newest_s, row.table.created_s)
    for session in stats.sessions:
        # A session uses the tables it opened, whatever label they were made under.
        opened = set(session.tables)
        used = {row.table.run for row in stats.tables if row.table.table.id in opened}
        for label in sorted(used | {session.run}):
            found.setdefault(label, Run(label)).pids.append(session.pid)
    return [found[label] for label in sorted(found) if found[label].tables or label]


def runs(found: Iterable[Run], now_s: float, *, width: int | None) -> RenderableType:
    """All runs, one a line."""
    rows = [
        (
            run.run or "-",
            str(run.tables),
            f"{run.rows:,}",
            f"{run.rows_touched:,}",
            format_bytes(run.disk_bytes),
            f"{format_duration(now_s - run.newest_s)} ago" if run.tables else "-",
            ", ".join(map(str, run.pids)) or "-",
        )
        for run in found
    ]
    if not rows:
        return Text("no runs")
    headers = ("run", "tables", "rows", "touched", "disk", "newest table", "used by pid")
    return columns(headers, rows, left=("run", "used by pid"), spare=("rows",), width=width)


def title(info: pb.TableInfo) -> str:
    """A table's name, or in brackets the label of one that belongs to a session."""
    return info.name or f"[{info.label or 'unnamed'}]"


def percent(part: int, whole: int) -> str:
    """A share without decimals; "-" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _dtype(schema: pb.Schema) -> str:
    names = {pb.DType.Name(field.dtype).removeprefix("D_TYPE_").lower() for field in schema.fields}
    return "/".join(sorted(names)) or "-"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def snapshots(
    found: Sequence[pb.Snapshot], now_s: float, *, width: int | None = None
) -> RenderableType:
    """Snapshots, a line for each of their tables."""
    rows = [
        (
            each.name if first else "",
            each.run if first else "",
            f"{format_duration(max(now_s - each.created_s, 0))} ago" if first else "",
            ("yes" if each.pinned else "no") if first else "",
            format_bytes(each.bytes_only) if first else "",
            table.label or "-",
            str(table.step),
            table.id.hex(),
        )
        for each in found
        for first, table in zip((True, *[False] * len(each.tables)), each.tables, strict=False)
    ]
    headers = ("snapshot", "run", "made", "pinned", "frees", "table", "step", "id")
    left = ("snapshot", "run", "table", "id")
    return columns(headers, rows, left=left, spare=("run", "frees"), width=width)
