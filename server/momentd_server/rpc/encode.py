"""Domain types to wire messages."""

from __future__ import annotations

from dataclasses import asdict

from momentd_server.engine.api import EngineTotals, TableStats, TableView, VerifyStep
from momentd_server.engine.snapshots import SnapshotView
from momentd_server.obs.latency import LatencySummary
from momentd_server.schema import FieldSpec, Schema
from momentd_wire import codec
from momentd_wire.v1 import momentd_pb2 as pb


def field(spec: FieldSpec) -> pb.FieldSpec:
    return pb.FieldSpec(
        name=spec.name, dtype=codec.to_wire(spec.dtype), width=spec.width, initial=spec.initial
    )


def schema(schema: Schema) -> pb.Schema:
    return pb.Schema(
        rows=schema.rows,
        width=schema.width,
        fields=[field(spec) for spec in schema.fields],
        rule=schema.rule,
    )


def table(view: TableView) -> pb.TableInfo:
    return pb.TableInfo(
        table=pb.TableRef(id=view.id, generation=view.generation),
        name=view.name or "",
        label=view.label,
        run=view.run,
        schema=schema(view.schema),
        record_bytes=view.record_bytes,
        step=view.step,
        update_number=view.update_number,
        request_rows=view.request_rows,
        created_s=view.created_s,
    )


def table_stats(stats: TableStats) -> pb.TableStats:
    return pb.TableStats(
        table=table(stats.table),
        owner=stats.table.owner.hex()[:8] if stats.table.owner else "",
        rows_touched=stats.rows_touched,
        frames=stats.frames,
        frames_dirty=stats.frames_dirty,
        segments=stats.segments,
        disk_bytes=stats.disk_bytes,
        bytes_read=stats.bytes_read,
        bytes_written=stats.bytes_written,
        hits=stats.hits,
        misses=stats.misses,
        first_touches=stats.first_touches,
        updates=stats.updates,
        rows_updated=stats.rows_updated,
        rows_per_s=stats.rows_per_s,
        update_latency=_latency(stats.update_latency),
        broken=stats.broken,
        needed_bytes=stats.needed_bytes,
        bytes_compacted=stats.bytes_compacted,
        segments_compacted=stats.segments_compacted,
        rows_prefetched=stats.rows_prefetched,
        reads_shared=stats.reads_shared,
    )


def engine_totals(totals: EngineTotals) -> pb.Totals:
    """The engine's share of the totals; the caller adds what concerns the process."""
    return pb.Totals(
        state=totals.state,
        failure=totals.failure,
        cache_bytes=totals.cache_bytes,
        cache_used_bytes=totals.cache_used_bytes,
        slabs=totals.slabs,
        slabs_free=totals.slabs_free,
        frames=totals.frames,
        frames_dirty=totals.frames_dirty,
        location_bytes=totals.location_bytes,
        space_bytes=totals.space_bytes,
        segments=totals.segments,
        disk_bytes=totals.disk_bytes,
        disk_free_bytes=totals.disk_free_bytes,
        bytes_read=totals.bytes_read,
        bytes_written=totals.bytes_written,
        page_cache_bytes=totals.page_cache_bytes,
        direct_io=totals.direct_io,
        drain_s=totals.drain_s,
        needed_bytes=totals.needed_bytes,
        bytes_compacted=totals.bytes_compacted,
        segments_compacted=totals.segments_compacted,
        rows_prefetched=totals.rows_prefetched,
        reads_shared=totals.reads_shared,
        rows_updated=totals.rows_updated,
        disk_bytes_written=totals.disk_bytes_written,
        disk_bytes_written_per_s=totals.disk_bytes_written_per_s,
    )


def _latency(summary: LatencySummary) -> pb.Latency:
    return pb.Latency(
        p50_s=summary.p50_s, p90_s=summary.p90_s, p99_s=summary.p99_s, max_s=summary.max_s
    )


def snapshot(view: SnapshotView) -> pb.Snapshot:
    """A snapshot as the wire describes it."""
    record = view.record
    return pb.Snapshot(
        name=record.name,
        run=record.run,
        created_s=record.created_s,
        pinned=record.pinned,
        tables=[
            pb.TableSnapshot(
                id=entry.id,
                label=entry.label,
                schema=schema(entry.schema),
                step=entry.manifest.step,
                update_number=entry.manifest.update_number,
                rows_touched=entry.rows_touched,
                table_id=entry.table,
            )
            for entry in record.tables
        ],
        bytes=view.nbytes,
        bytes_only=view.only_bytes,
    )


def verify_step(step: VerifyStep) -> pb.VerifyReply:
    reply = pb.VerifyReply(bytes_done=step.bytes_done, bytes_total=step.bytes_total)
    for damage in step.damages:
        reply.damages.add(
            what=damage.what, path=damage.path, offset=damage.offset, tables=damage.tables,
            rows=damage.rows, row_count=damage.row_count, snapshots=damage.snapshots,
        )  # fmt: skip
    if step.counts is not None:
        reply.counts.CopyFrom(pb.VerifyCounts(**asdict(step.counts)))
    return reply
