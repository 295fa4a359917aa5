from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    D_TYPE_UNSPECIFIED: _ClassVar[DType]
    D_TYPE_FLOAT32: _ClassVar[DType]
    D_TYPE_FLOAT64: _ClassVar[DType]
    D_TYPE_FLOAT16: _ClassVar[DType]
    D_TYPE_BFLOAT16: _ClassVar[DType]
    D_TYPE_UINT8: _ClassVar[DType]
    D_TYPE_INT64: _ClassVar[DType]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_INVALID_ARGUMENT: _ClassVar[Reason]
    REASON_ROW_OUT_OF_RANGE: _ClassVar[Reason]
    REASON_TABLE_NOT_FOUND: _ClassVar[Reason]
    REASON_SCHEMA_MISMATCH: _ClassVar[Reason]
    REASON_TABLE_IN_USE: _ClassVar[Reason]
    REASON_CACHE_TOO_SMALL: _ClassVar[Reason]
    REASON_OUT_OF_MEMORY: _ClassVar[Reason]
    REASON_OUT_OF_SPACE: _ClassVar[Reason]
    REASON_STORAGE_FAILED: _ClassVar[Reason]
    REASON_CORRUPT: _ClassVar[Reason]
    REASON_STATE_ROLLED_BACK: _ClassVar[Reason]
    REASON_OUT_OF_SEQUENCE: _ClassVar[Reason]
    REASON_SESSION_NOT_FOUND: _ClassVar[Reason]
    REASON_INCOMPATIBLE: _ClassVar[Reason]
    REASON_UNAVAILABLE: _ClassVar[Reason]
    REASON_PERMISSION_DENIED: _ClassVar[Reason]
    REASON_LIMIT_EXCEEDED: _ClassVar[Reason]
    REASON_SNAPSHOT_NOT_FOUND: _ClassVar[Reason]
    REASON_REPLICA_MISMATCH: _ClassVar[Reason]
    REASON_NOT_IMPLEMENTED: _ClassVar[Reason]
    REASON_INTERNAL: _ClassVar[Reason]
    REASON_CANCELLED: _ClassVar[Reason]

class ResultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESULT_KIND_UNSPECIFIED: _ClassVar[ResultKind]
    RESULT_KIND_DELTA: _ClassVar[ResultKind]
    RESULT_KIND_VALUE: _ClassVar[ResultKind]
    RESULT_KIND_NONE: _ClassVar[ResultKind]
D_TYPE_UNSPECIFIED: DType
D_TYPE_FLOAT32: DType
D_TYPE_FLOAT64: DType
D_TYPE_FLOAT16: DType
D_TYPE_BFLOAT16: DType
D_TYPE_UINT8: DType
D_TYPE_INT64: DType
REASON_UNSPECIFIED: Reason
REASON_INVALID_ARGUMENT: Reason
REASON_ROW_OUT_OF_RANGE: Reason
REASON_TABLE_NOT_FOUND: Reason
REASON_SCHEMA_MISMATCH: Reason
REASON_TABLE_IN_USE: Reason
REASON_CACHE_TOO_SMALL: Reason
REASON_OUT_OF_MEMORY: Reason
REASON_OUT_OF_SPACE: Reason
REASON_STORAGE_FAILED: Reason
REASON_CORRUPT: Reason
REASON_STATE_ROLLED_BACK: Reason
REASON_OUT_OF_SEQUENCE: Reason
REASON_SESSION_NOT_FOUND: Reason
REASON_INCOMPATIBLE: Reason
REASON_UNAVAILABLE: Reason
REASON_PERMISSION_DENIED: Reason
REASON_LIMIT_EXCEEDED: Reason
REASON_SNAPSHOT_NOT_FOUND: Reason
REASON_REPLICA_MISMATCH: Reason
REASON_NOT_IMPLEMENTED: Reason
REASON_INTERNAL: Reason
REASON_CANCELLED: Reason
RESULT_KIND_UNSPECIFIED: ResultKind
RESULT_KIND_DELTA: ResultKind
RESULT_KIND_VALUE: ResultKind
RESULT_KIND_NONE: ResultKind

class Region(_message.Message):
    __slots__ = ("arena", "offset", "length")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    arena: int
    offset: int
    length: int
    def __init__(self, arena: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Bulk(_message.Message):
    __slots__ = ("arena", "streamed", "inline")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    STREAMED_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    arena: Region
    streamed: int
    inline: bytes
    def __init__(self, arena: _Optional[_Union[Region, _Mapping]] = ..., streamed: _Optional[int] = ..., inline: _Optional[bytes] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class RowRange(_message.Message):
    __slots__ = ("start", "count")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class TableRef(_message.Message):
    __slots__ = ("id", "generation")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    id: int
    generation: int
    def __init__(self, id: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("stream", "number")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    stream: int
    number: int
    def __init__(self, stream: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("reason", "message", "details")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    message: str
    details: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., details: _Optional[_Mapping[str, str]] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "client_version", "features", "required_features", "pid", "run", "program", "resume_session", "token", "no_session")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    RESUME_SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NO_SESSION_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    client_version: str
    features: _containers.RepeatedScalarFieldContainer[str]
    required_features: _containers.RepeatedScalarFieldContainer[str]
    pid: int
    run: str
    program: str
    resume_session: bytes
    token: str
    no_session: bool
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., client_version: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., required_features: _Optional[_Iterable[str]] = ..., pid: _Optional[int] = ..., run: _Optional[str] = ..., program: _Optional[str] = ..., resume_session: _Optional[bytes] = ..., token: _Optional[str] = ..., no_session: bool = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "server_version", "features", "limits", "session", "resumed", "done", "store_id", "engine_epoch", "pid", "data_dir", "cache_bytes", "auto_started")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DATA_DIR_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    AUTO_STARTED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    server_version: str
    features: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    session: bytes
    resumed: bool
    done: _containers.RepeatedCompositeFieldContainer[Sequence]
    store_id: bytes
    engine_epoch: int
    pid: int
    data_dir: str
    cache_bytes: int
    auto_started: bool
    def __init__(self, protocol: _Optional[int] = ..., server_version: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., session: _Optional[bytes] = ..., resumed: bool = ..., done: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ..., store_id: _Optional[bytes] = ..., engine_epoch: _Optional[int] = ..., pid: _Optional[int] = ..., data_dir: _Optional[str] = ..., cache_bytes: _Optional[int] = ..., auto_started: bool = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("packet_bytes", "piece_bytes", "arena_bytes", "request_record_bytes", "request_tables")
    PACKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TABLES_FIELD_NUMBER: _ClassVar[int]
    packet_bytes: int
    piece_bytes: int
    arena_bytes: int
    request_record_bytes: int
    request_tables: int
    def __init__(self, packet_bytes: _Optional[int] = ..., piece_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., request_record_bytes: _Optional[int] = ..., request_tables: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GrowArenaRequest(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class GrowArenaReply(_message.Message):
    __slots__ = ("arena", "bytes")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    arena: int
    bytes: int
    def __init__(self, arena: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class DropArenaRequest(_message.Message):
    __slots__ = ("arena",)
    ARENA_FIELD_NUMBER: _ClassVar[int]
    arena: int
    def __init__(self, arena: _Optional[int] = ...) -> None: ...

class DropArenaReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FieldSpec(_message.Message):
    __slots__ = ("name", "dtype", "width", "initial")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    width: int
    initial: float
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., width: _Optional[int] = ..., initial: _Optional[float] = ...) -> None: ...

class Schema(_message.Message):
    __slots__ = ("rows", "width", "fields", "rule")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    rows: int
    width: int
    fields: _containers.RepeatedCompositeFieldContainer[FieldSpec]
    rule: str
    def __init__(self, rows: _Optional[int] = ..., width: _Optional[int] = ..., fields: _Optional[_Iterable[_Union[FieldSpec, _Mapping]]] = ..., rule: _Optional[str] = ...) -> None: ...

class OpenTableRequest(_message.Message):
    __slots__ = ("sequence", "name", "label", "schema", "run", "mode")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[OpenTableRequest.Mode]
        MODE_OPEN_OR_CREATE: _ClassVar[OpenTableRequest.Mode]
        MODE_CREATE: _ClassVar[OpenTableRequest.Mode]
        MODE_OPEN: _ClassVar[OpenTableRequest.Mode]
    MODE_UNSPECIFIED: OpenTableRequest.Mode
    MODE_OPEN_OR_CREATE: OpenTableRequest.Mode
    MODE_CREATE: OpenTableRequest.Mode
    MODE_OPEN: OpenTableRequest.Mode
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    name: str
    label: str
    schema: Schema
    run: str
    mode: OpenTableRequest.Mode
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., name: _Optional[str] = ..., label: _Optional[str] = ..., schema: _Optional[_Union[Schema, _Mapping]] = ..., run: _Optional[str] = ..., mode: _Optional[_Union[OpenTableRequest.Mode, str]] = ...) -> None: ...

class OpenTableReply(_message.Message):
    __slots__ = ("table", "created")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    table: TableInfo
    created: bool
    def __init__(self, table: _Optional[_Union[TableInfo, _Mapping]] = ..., created: bool = ...) -> None: ...

class TableInfo(_message.Message):
    __slots__ = ("table", "name", "label", "run", "schema", "record_bytes", "step", "update_number", "request_rows", "created_s")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ROWS_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    table: TableRef
    name: str
    label: str
    run: str
    schema: Schema
    record_bytes: int
    step: int
    update_number: int
    request_rows: int
    created_s: float
    def __init__(self, table: _Optional[_Union[TableRef, _Mapping]] = ..., name: _Optional[str] = ..., label: _Optional[str] = ..., run: _Optional[str] = ..., schema: _Optional[_Union[Schema, _Mapping]] = ..., record_bytes: _Optional[int] = ..., step: _Optional[int] = ..., update_number: _Optional[int] = ..., request_rows: _Optional[int] = ..., created_s: _Optional[float] = ...) -> None: ...

class GetTableRequest(_message.Message):
    __slots__ = ("id", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class GetTableReply(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: TableInfo
    def __init__(self, table: _Optional[_Union[TableInfo, _Mapping]] = ...) -> None: ...

class ListTablesRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListTablesReply(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableInfo]
    def __init__(self, tables: _Optional[_Iterable[_Union[TableInfo, _Mapping]]] = ...) -> None: ...

class DropTableRequest(_message.Message):
    __slots__ = ("sequence", "ids", "run", "force")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    ids: _containers.RepeatedScalarFieldContainer[int]
    run: str
    force: bool
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., ids: _Optional[_Iterable[int]] = ..., run: _Optional[str] = ..., force: bool = ...) -> None: ...

class DropTableReply(_message.Message):
    __slots__ = ("dropped",)
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    def __init__(self, dropped: _Optional[int] = ...) -> None: ...

class CloneTableRequest(_message.Message):
    __slots__ = ("sequence", "source", "name", "label", "run")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    source: TableRef
    name: str
    label: str
    run: str
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., source: _Optional[_Union[TableRef, _Mapping]] = ..., name: _Optional[str] = ..., label: _Optional[str] = ..., run: _Optional[str] = ...) -> None: ...

class CloneTableReply(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: TableInfo
    def __init__(self, table: _Optional[_Union[TableInfo, _Mapping]] = ...) -> None: ...

class SparseAdamHyper(_message.Message):
    __slots__ = ("lr", "beta1", "beta2", "eps", "maximize")
    LR_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    MAXIMIZE_FIELD_NUMBER: _ClassVar[int]
    lr: float
    beta1: float
    beta2: float
    eps: float
    maximize: bool
    def __init__(self, lr: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., maximize: bool = ...) -> None: ...

class TableUpdate(_message.Message):
    __slots__ = ("table", "step", "expected_update_number", "sparse_adam", "result", "count", "dtype", "result_rows", "result_values", "result_factors", "row_ids", "grads", "mask", "weights")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_UPDATE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SPARSE_ADAM_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RESULT_ROWS_FIELD_NUMBER: _ClassVar[int]
    RESULT_VALUES_FIELD_NUMBER: _ClassVar[int]
    RESULT_FACTORS_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    GRADS_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    table: TableRef
    step: int
    expected_update_number: int
    sparse_adam: SparseAdamHyper
    result: ResultKind
    count: int
    dtype: DType
    result_rows: Region
    result_values: Region
    result_factors: Region
    row_ids: Bulk
    grads: Bulk
    mask: Bulk
    weights: Bulk
    def __init__(self, table: _Optional[_Union[TableRef, _Mapping]] = ..., step: _Optional[int] = ..., expected_update_number: _Optional[int] = ..., sparse_adam: _Optional[_Union[SparseAdamHyper, _Mapping]] = ..., result: _Optional[_Union[ResultKind, str]] = ..., count: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., result_rows: _Optional[_Union[Region, _Mapping]] = ..., result_values: _Optional[_Union[Region, _Mapping]] = ..., result_factors: _Optional[_Union[Region, _Mapping]] = ..., row_ids: _Optional[_Union[Bulk, _Mapping]] = ..., grads: _Optional[_Union[Bulk, _Mapping]] = ..., mask: _Optional[_Union[Bulk, _Mapping]] = ..., weights: _Optional[_Union[Bulk, _Mapping]] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("sequence", "tables", "report_progress")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    REPORT_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    tables: _containers.RepeatedCompositeFieldContainer[TableUpdate]
    report_progress: bool
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[TableUpdate, _Mapping]]] = ..., report_progress: bool = ...) -> None: ...

class UpdateProgress(_message.Message):
    __slots__ = ("table", "rows_done", "rows")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_DONE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    table: int
    rows_done: int
    rows: int
    def __init__(self, table: _Optional[int] = ..., rows_done: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class TableResult(_message.Message):
    __slots__ = ("step", "update_number", "rows", "dtype", "result", "row_ids", "values", "factors")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    FACTORS_FIELD_NUMBER: _ClassVar[int]
    step: int
    update_number: int
    rows: int
    dtype: DType
    result: ResultKind
    row_ids: Bulk
    values: Bulk
    factors: Bulk
    def __init__(self, step: _Optional[int] = ..., update_number: _Optional[int] = ..., rows: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., result: _Optional[_Union[ResultKind, str]] = ..., row_ids: _Optional[_Union[Bulk, _Mapping]] = ..., values: _Optional[_Union[Bulk, _Mapping]] = ..., factors: _Optional[_Union[Bulk, _Mapping]] = ...) -> None: ...

class UpdateReply(_message.Message):
    __slots__ = ("tables", "repeated_request")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    REPEATED_REQUEST_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableResult]
    repeated_request: bool
    def __init__(self, tables: _Optional[_Iterable[_Union[TableResult, _Mapping]]] = ..., repeated_request: bool = ...) -> None: ...

class UpdatePart(_message.Message):
    __slots__ = ("head", "piece")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    head: UpdateRequest
    piece: Piece
    def __init__(self, head: _Optional[_Union[UpdateRequest, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ...) -> None: ...

class UpdateReplyPart(_message.Message):
    __slots__ = ("head", "piece")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    head: UpdateReply
    piece: Piece
    def __init__(self, head: _Optional[_Union[UpdateReply, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ...) -> None: ...

class GatherRequest(_message.Message):
    __slots__ = ("table", "fields", "count", "range", "result_values", "row_ids")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    RESULT_VALUES_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    table: TableRef
    fields: _containers.RepeatedScalarFieldContainer[str]
    count: int
    range: RowRange
    result_values: _containers.RepeatedCompositeFieldContainer[Region]
    row_ids: Bulk
    def __init__(self, table: _Optional[_Union[TableRef, _Mapping]] = ..., fields: _Optional[_Iterable[str]] = ..., count: _Optional[int] = ..., range: _Optional[_Union[RowRange, _Mapping]] = ..., result_values: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., row_ids: _Optional[_Union[Bulk, _Mapping]] = ...) -> None: ...

class GatherReply(_message.Message):
    __slots__ = ("step", "update_number", "rows", "fields", "values")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    step: int
    update_number: int
    rows: int
    fields: _containers.RepeatedCompositeFieldContainer[FieldSpec]
    values: _containers.RepeatedCompositeFieldContainer[Bulk]
    def __init__(self, step: _Optional[int] = ..., update_number: _Optional[int] = ..., rows: _Optional[int] = ..., fields: _Optional[_Iterable[_Union[FieldSpec, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[Bulk, _Mapping]]] = ...) -> None: ...

class GatherPart(_message.Message):
    __slots__ = ("head", "piece")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    head: GatherRequest
    piece: Piece
    def __init__(self, head: _Optional[_Union[GatherRequest, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ...) -> None: ...

class GatherReplyPart(_message.Message):
    __slots__ = ("head", "piece")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    head: GatherReply
    piece: Piece
    def __init__(self, head: _Optional[_Union[GatherReply, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ...) -> None: ...

class ScatterRequest(_message.Message):
    __slots__ = ("sequence", "table", "fields", "count", "range", "step", "row_ids", "values")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    table: TableRef
    fields: _containers.RepeatedScalarFieldContainer[str]
    count: int
    range: RowRange
    step: int
    row_ids: Bulk
    values: _containers.RepeatedCompositeFieldContainer[Bulk]
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., table: _Optional[_Union[TableRef, _Mapping]] = ..., fields: _Optional[_Iterable[str]] = ..., count: _Optional[int] = ..., range: _Optional[_Union[RowRange, _Mapping]] = ..., step: _Optional[int] = ..., row_ids: _Optional[_Union[Bulk, _Mapping]] = ..., values: _Optional[_Iterable[_Union[Bulk, _Mapping]]] = ...) -> None: ...

class ScatterReply(_message.Message):
    __slots__ = ("step", "update_number", "repeated_request")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPEATED_REQUEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    update_number: int
    repeated_request: bool
    def __init__(self, step: _Optional[int] = ..., update_number: _Optional[int] = ..., repeated_request: bool = ...) -> None: ...

class ScatterPart(_message.Message):
    __slots__ = ("head", "piece")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    head: ScatterRequest
    piece: Piece
    def __init__(self, head: _Optional[_Union[ScatterRequest, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("table", "count", "row_ids")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    table: TableRef
    count: int
    row_ids: Bulk
    def __init__(self, table: _Optional[_Union[TableRef, _Mapping]] = ..., count: _Optional[int] = ..., row_ids: _Optional[_Union[Bulk, _Mapping]] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("reading",)
    READING_FIELD_NUMBER: _ClassVar[int]
    reading: int
    def __init__(self, reading: _Optional[int] = ...) -> None: ...

class PrefetchPart(_message.Message):
    __slots__ = ("head", "piece")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    head: PrefetchRequest
    piece: Piece
    def __init__(self, head: _Optional[_Union[PrefetchRequest, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("bytes_written",)
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    bytes_written: int
    def __init__(self, bytes_written: _Optional[int] = ...) -> None: ...

class TableSnapshot(_message.Message):
    __slots__ = ("id", "label", "schema", "step", "update_number", "rows_touched", "table_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROWS_TOUCHED_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    label: str
    schema: Schema
    step: int
    update_number: int
    rows_touched: int
    table_id: int
    def __init__(self, id: _Optional[bytes] = ..., label: _Optional[str] = ..., schema: _Optional[_Union[Schema, _Mapping]] = ..., step: _Optional[int] = ..., update_number: _Optional[int] = ..., rows_touched: _Optional[int] = ..., table_id: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("name", "run", "created_s", "pinned", "tables", "bytes", "bytes_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    run: str
    created_s: float
    pinned: bool
    tables: _containers.RepeatedCompositeFieldContainer[TableSnapshot]
    bytes: int
    bytes_only: int
    def __init__(self, name: _Optional[str] = ..., run: _Optional[str] = ..., created_s: _Optional[float] = ..., pinned: bool = ..., tables: _Optional[_Iterable[_Union[TableSnapshot, _Mapping]]] = ..., bytes: _Optional[int] = ..., bytes_only: _Optional[int] = ...) -> None: ...

class CreateSnapshotRequest(_message.Message):
    __slots__ = ("sequence", "tables", "run", "name", "pinned")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    tables: _containers.RepeatedCompositeFieldContainer[TableRef]
    run: str
    name: str
    pinned: bool
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[TableRef, _Mapping]]] = ..., run: _Optional[str] = ..., name: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class CreateSnapshotReply(_message.Message):
    __slots__ = ("snapshot", "created", "bytes_written")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    created: bool
    bytes_written: int
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., created: bool = ..., bytes_written: _Optional[int] = ...) -> None: ...

class ListSnapshotsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListSnapshotsReply(_message.Message):
    __slots__ = ("snapshots",)
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[Snapshot]
    def __init__(self, snapshots: _Optional[_Iterable[_Union[Snapshot, _Mapping]]] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ("id", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    name: str
    def __init__(self, id: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class GetSnapshotReply(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ...) -> None: ...

class DeleteSnapshotRequest(_message.Message):
    __slots__ = ("sequence", "names")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteSnapshotReply(_message.Message):
    __slots__ = ("bytes_freed",)
    BYTES_FREED_FIELD_NUMBER: _ClassVar[int]
    bytes_freed: int
    def __init__(self, bytes_freed: _Optional[int] = ...) -> None: ...

class RestoreTableRequest(_message.Message):
    __slots__ = ("sequence", "id", "name", "replace", "label", "run")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    id: bytes
    name: str
    replace: bool
    label: str
    run: str
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., id: _Optional[bytes] = ..., name: _Optional[str] = ..., replace: bool = ..., label: _Optional[str] = ..., run: _Optional[str] = ...) -> None: ...

class RestoreTableReply(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: TableInfo
    def __init__(self, table: _Optional[_Union[TableInfo, _Mapping]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("totals", "tables", "sessions")
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    totals: Totals
    tables: _containers.RepeatedCompositeFieldContainer[TableStats]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    def __init__(self, totals: _Optional[_Union[Totals, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[TableStats, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ...) -> None: ...

class WatchStatsRequest(_message.Message):
    __slots__ = ("interval_s", "run")
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    run: str
    def __init__(self, interval_s: _Optional[float] = ..., run: _Optional[str] = ...) -> None: ...

class WatchStatsReply(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: StatsReply
    def __init__(self, stats: _Optional[_Union[StatsReply, _Mapping]] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("pid", "server_version", "uptime_s", "state", "data_dir", "store_id", "engine_epoch", "addresses", "cache_bytes", "cache_used_bytes", "slabs", "slabs_free", "frames", "frames_dirty", "location_bytes", "arena_bytes", "space_bytes", "rss_anonymous_bytes", "rss_shared_bytes", "rss_file_bytes", "segments", "disk_bytes", "disk_free_bytes", "bytes_read", "bytes_written", "page_cache_bytes", "direct_io", "drain_s", "needed_bytes", "bytes_compacted", "segments_compacted", "disk_bytes_written", "disk_bytes_written_per_s", "process_bytes_written", "rows_prefetched", "reads_shared", "rows_updated", "failure", "engine_pid", "engine_restarts", "requests", "errors")
    PID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATA_DIR_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    SLABS_FREE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_DIRTY_FIELD_NUMBER: _ClassVar[int]
    LOCATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RSS_ANONYMOUS_BYTES_FIELD_NUMBER: _ClassVar[int]
    RSS_SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RSS_FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRECT_IO_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_COMPACTED_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_COMPACTED_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_WRITTEN_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROCESS_BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    ROWS_PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    READS_SHARED_FIELD_NUMBER: _ClassVar[int]
    ROWS_UPDATED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    server_version: str
    uptime_s: float
    state: str
    data_dir: str
    store_id: bytes
    engine_epoch: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    cache_bytes: int
    cache_used_bytes: int
    slabs: int
    slabs_free: int
    frames: int
    frames_dirty: int
    location_bytes: int
    arena_bytes: int
    space_bytes: int
    rss_anonymous_bytes: int
    rss_shared_bytes: int
    rss_file_bytes: int
    segments: int
    disk_bytes: int
    disk_free_bytes: int
    bytes_read: int
    bytes_written: int
    page_cache_bytes: int
    direct_io: bool
    drain_s: float
    needed_bytes: int
    bytes_compacted: int
    segments_compacted: int
    disk_bytes_written: int
    disk_bytes_written_per_s: float
    process_bytes_written: int
    rows_prefetched: int
    reads_shared: int
    rows_updated: int
    failure: str
    engine_pid: int
    engine_restarts: int
    requests: int
    errors: int
    def __init__(self, pid: _Optional[int] = ..., server_version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., state: _Optional[str] = ..., data_dir: _Optional[str] = ..., store_id: _Optional[bytes] = ..., engine_epoch: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., cache_bytes: _Optional[int] = ..., cache_used_bytes: _Optional[int] = ..., slabs: _Optional[int] = ..., slabs_free: _Optional[int] = ..., frames: _Optional[int] = ..., frames_dirty: _Optional[int] = ..., location_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., space_bytes: _Optional[int] = ..., rss_anonymous_bytes: _Optional[int] = ..., rss_shared_bytes: _Optional[int] = ..., rss_file_bytes: _Optional[int] = ..., segments: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ..., bytes_read: _Optional[int] = ..., bytes_written: _Optional[int] = ..., page_cache_bytes: _Optional[int] = ..., direct_io: bool = ..., drain_s: _Optional[float] = ..., needed_bytes: _Optional[int] = ..., bytes_compacted: _Optional[int] = ..., segments_compacted: _Optional[int] = ..., disk_bytes_written: _Optional[int] = ..., disk_bytes_written_per_s: _Optional[float] = ..., process_bytes_written: _Optional[int] = ..., rows_prefetched: _Optional[int] = ..., reads_shared: _Optional[int] = ..., rows_updated: _Optional[int] = ..., failure: _Optional[str] = ..., engine_pid: _Optional[int] = ..., engine_restarts: _Optional[int] = ..., requests: _Optional[int] = ..., errors: _Optional[int] = ...) -> None: ...

class TableStats(_message.Message):
    __slots__ = ("table", "owner", "rows_touched", "frames", "frames_dirty", "segments", "disk_bytes", "bytes_read", "bytes_written", "hits", "misses", "first_touches", "updates", "rows_updated", "rows_per_s", "update_latency", "broken", "needed_bytes", "bytes_compacted", "segments_compacted", "rows_prefetched", "reads_shared")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ROWS_TOUCHED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_DIRTY_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOUCHES_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    ROWS_UPDATED_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_S_FIELD_NUMBER: _ClassVar[int]
    UPDATE_LATENCY_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_COMPACTED_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_COMPACTED_FIELD_NUMBER: _ClassVar[int]
    ROWS_PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    READS_SHARED_FIELD_NUMBER: _ClassVar[int]
    table: TableInfo
    owner: str
    rows_touched: int
    frames: int
    frames_dirty: int
    segments: int
    disk_bytes: int
    bytes_read: int
    bytes_written: int
    hits: int
    misses: int
    first_touches: int
    updates: int
    rows_updated: int
    rows_per_s: float
    update_latency: Latency
    broken: bool
    needed_bytes: int
    bytes_compacted: int
    segments_compacted: int
    rows_prefetched: int
    reads_shared: int
    def __init__(self, table: _Optional[_Union[TableInfo, _Mapping]] = ..., owner: _Optional[str] = ..., rows_touched: _Optional[int] = ..., frames: _Optional[int] = ..., frames_dirty: _Optional[int] = ..., segments: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., bytes_read: _Optional[int] = ..., bytes_written: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., first_touches: _Optional[int] = ..., updates: _Optional[int] = ..., rows_updated: _Optional[int] = ..., rows_per_s: _Optional[float] = ..., update_latency: _Optional[_Union[Latency, _Mapping]] = ..., broken: bool = ..., needed_bytes: _Optional[int] = ..., bytes_compacted: _Optional[int] = ..., segments_compacted: _Optional[int] = ..., rows_prefetched: _Optional[int] = ..., reads_shared: _Optional[int] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("p50_s", "p90_s", "p99_s", "max_s")
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P90_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    MAX_S_FIELD_NUMBER: _ClassVar[int]
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float
    def __init__(self, p50_s: _Optional[float] = ..., p90_s: _Optional[float] = ..., p99_s: _Optional[float] = ..., max_s: _Optional[float] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("session", "pid", "uid", "run", "program", "plane", "tables", "arena_bytes", "idle_s", "requests", "attached")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    session: str
    pid: int
    uid: int
    run: str
    program: str
    plane: str
    tables: _containers.RepeatedScalarFieldContainer[int]
    arena_bytes: int
    idle_s: float
    requests: int
    attached: bool
    def __init__(self, session: _Optional[str] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., run: _Optional[str] = ..., program: _Optional[str] = ..., plane: _Optional[str] = ..., tables: _Optional[_Iterable[int]] = ..., arena_bytes: _Optional[int] = ..., idle_s: _Optional[float] = ..., requests: _Optional[int] = ..., attached: bool = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("bytes_per_s",)
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    bytes_per_s: int
    def __init__(self, bytes_per_s: _Optional[int] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("bytes_done", "bytes_total", "damages", "counts")
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DAMAGES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    bytes_done: int
    bytes_total: int
    damages: _containers.RepeatedCompositeFieldContainer[Damage]
    counts: VerifyCounts
    def __init__(self, bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., damages: _Optional[_Iterable[_Union[Damage, _Mapping]]] = ..., counts: _Optional[_Union[VerifyCounts, _Mapping]] = ...) -> None: ...

class VerifyCounts(_message.Message):
    __slots__ = ("tables", "segments", "batches", "records", "locations", "bytes", "snapshots")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    tables: int
    segments: int
    batches: int
    records: int
    locations: int
    bytes: int
    snapshots: int
    def __init__(self, tables: _Optional[int] = ..., segments: _Optional[int] = ..., batches: _Optional[int] = ..., records: _Optional[int] = ..., locations: _Optional[int] = ..., bytes: _Optional[int] = ..., snapshots: _Optional[int] = ...) -> None: ...

class Damage(_message.Message):
    __slots__ = ("what", "path", "offset", "tables", "rows", "row_count", "snapshots")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    what: str
    path: str
    offset: int
    tables: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    row_count: int
    snapshots: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, what: _Optional[str] = ..., path: _Optional[str] = ..., offset: _Optional[int] = ..., tables: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., row_count: _Optional[int] = ..., snapshots: _Optional[_Iterable[str]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("discard",)
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    discard: bool
    def __init__(self, discard: bool = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ("drain_s",)
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    drain_s: float
    def __init__(self, drain_s: _Optional[float] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "hello", "grow_arena", "drop_arena", "open_table", "get_table", "list_tables", "drop_table", "clone_table", "update", "gather", "scatter", "prefetch", "flush", "stats", "stop", "create_snapshot", "list_snapshots", "get_snapshot", "delete_snapshot", "restore_table", "oversize")
    ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GROW_ARENA_FIELD_NUMBER: _ClassVar[int]
    DROP_ARENA_FIELD_NUMBER: _ClassVar[int]
    OPEN_TABLE_FIELD_NUMBER: _ClassVar[int]
    GET_TABLE_FIELD_NUMBER: _ClassVar[int]
    LIST_TABLES_FIELD_NUMBER: _ClassVar[int]
    DROP_TABLE_FIELD_NUMBER: _ClassVar[int]
    CLONE_TABLE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    SCATTER_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CREATE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LIST_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    GET_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DELETE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_TABLE_FIELD_NUMBER: _ClassVar[int]
    OVERSIZE_FIELD_NUMBER: _ClassVar[int]
    id: int
    hello: HelloRequest
    grow_arena: GrowArenaRequest
    drop_arena: DropArenaRequest
    open_table: OpenTableRequest
    get_table: GetTableRequest
    list_tables: ListTablesRequest
    drop_table: DropTableRequest
    clone_table: CloneTableRequest
    update: UpdateRequest
    gather: GatherRequest
    scatter: ScatterRequest
    prefetch: PrefetchRequest
    flush: FlushRequest
    stats: StatsRequest
    stop: StopRequest
    create_snapshot: CreateSnapshotRequest
    list_snapshots: ListSnapshotsRequest
    get_snapshot: GetSnapshotRequest
    delete_snapshot: DeleteSnapshotRequest
    restore_table: RestoreTableRequest
    oversize: Region
    def __init__(self, id: _Optional[int] = ..., hello: _Optional[_Union[HelloRequest, _Mapping]] = ..., grow_arena: _Optional[_Union[GrowArenaRequest, _Mapping]] = ..., drop_arena: _Optional[_Union[DropArenaRequest, _Mapping]] = ..., open_table: _Optional[_Union[OpenTableRequest, _Mapping]] = ..., get_table: _Optional[_Union[GetTableRequest, _Mapping]] = ..., list_tables: _Optional[_Union[ListTablesRequest, _Mapping]] = ..., drop_table: _Optional[_Union[DropTableRequest, _Mapping]] = ..., clone_table: _Optional[_Union[CloneTableRequest, _Mapping]] = ..., update: _Optional[_Union[UpdateRequest, _Mapping]] = ..., gather: _Optional[_Union[GatherRequest, _Mapping]] = ..., scatter: _Optional[_Union[ScatterRequest, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchRequest, _Mapping]] = ..., flush: _Optional[_Union[FlushRequest, _Mapping]] = ..., stats: _Optional[_Union[StatsRequest, _Mapping]] = ..., stop: _Optional[_Union[StopRequest, _Mapping]] = ..., create_snapshot: _Optional[_Union[CreateSnapshotRequest, _Mapping]] = ..., list_snapshots: _Optional[_Union[ListSnapshotsRequest, _Mapping]] = ..., get_snapshot: _Optional[_Union[GetSnapshotRequest, _Mapping]] = ..., delete_snapshot: _Optional[_Union[DeleteSnapshotRequest, _Mapping]] = ..., restore_table: _Optional[_Union[RestoreTableRequest, _Mapping]] = ..., oversize: _Optional[_Union[Region, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "error", "hello", "grow_arena", "drop_arena", "open_table", "get_table", "list_tables", "drop_table", "clone_table", "update", "gather", "scatter", "prefetch", "flush", "stats", "stop", "progress", "fragment", "resumed", "create_snapshot", "list_snapshots", "get_snapshot", "delete_snapshot", "restore_table")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GROW_ARENA_FIELD_NUMBER: _ClassVar[int]
    DROP_ARENA_FIELD_NUMBER: _ClassVar[int]
    OPEN_TABLE_FIELD_NUMBER: _ClassVar[int]
    GET_TABLE_FIELD_NUMBER: _ClassVar[int]
    LIST_TABLES_FIELD_NUMBER: _ClassVar[int]
    DROP_TABLE_FIELD_NUMBER: _ClassVar[int]
    CLONE_TABLE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    SCATTER_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    CREATE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LIST_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    GET_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DELETE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_TABLE_FIELD_NUMBER: _ClassVar[int]
    id: int
    error: Error
    hello: HelloReply
    grow_arena: GrowArenaReply
    drop_arena: DropArenaReply
    open_table: OpenTableReply
    get_table: GetTableReply
    list_tables: ListTablesReply
    drop_table: DropTableReply
    clone_table: CloneTableReply
    update: UpdateReply
    gather: GatherReply
    scatter: ScatterReply
    prefetch: PrefetchReply
    flush: FlushReply
    stats: StatsReply
    stop: StopReply
    progress: UpdateProgress
    fragment: ReplyFragment
    resumed: Resumed
    create_snapshot: CreateSnapshotReply
    list_snapshots: ListSnapshotsReply
    get_snapshot: GetSnapshotReply
    delete_snapshot: DeleteSnapshotReply
    restore_table: RestoreTableReply
    def __init__(self, id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., hello: _Optional[_Union[HelloReply, _Mapping]] = ..., grow_arena: _Optional[_Union[GrowArenaReply, _Mapping]] = ..., drop_arena: _Optional[_Union[DropArenaReply, _Mapping]] = ..., open_table: _Optional[_Union[OpenTableReply, _Mapping]] = ..., get_table: _Optional[_Union[GetTableReply, _Mapping]] = ..., list_tables: _Optional[_Union[ListTablesReply, _Mapping]] = ..., drop_table: _Optional[_Union[DropTableReply, _Mapping]] = ..., clone_table: _Optional[_Union[CloneTableReply, _Mapping]] = ..., update: _Optional[_Union[UpdateReply, _Mapping]] = ..., gather: _Optional[_Union[GatherReply, _Mapping]] = ..., scatter: _Optional[_Union[ScatterReply, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchReply, _Mapping]] = ..., flush: _Optional[_Union[FlushReply, _Mapping]] = ..., stats: _Optional[_Union[StatsReply, _Mapping]] = ..., stop: _Optional[_Union[StopReply, _Mapping]] = ..., progress: _Optional[_Union[UpdateProgress, _Mapping]] = ..., fragment: _Optional[_Union[ReplyFragment, _Mapping]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ..., create_snapshot: _Optional[_Union[CreateSnapshotReply, _Mapping]] = ..., list_snapshots: _Optional[_Union[ListSnapshotsReply, _Mapping]] = ..., get_snapshot: _Optional[_Union[GetSnapshotReply, _Mapping]] = ..., delete_snapshot: _Optional[_Union[DeleteSnapshotReply, _Mapping]] = ..., restore_table: _Optional[_Union[RestoreTableReply, _Mapping]] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("engine_epoch", "done")
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    engine_epoch: int
    done: _containers.RepeatedCompositeFieldContainer[Sequence]
    def __init__(self, engine_epoch: _Optional[int] = ..., done: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ...) -> None: ...

class ReplyFragment(_message.Message):
    __slots__ = ("data", "last")
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    last: bool
    def __init__(self, data: _Optional[bytes] = ..., last: bool = ...) -> None: ...
