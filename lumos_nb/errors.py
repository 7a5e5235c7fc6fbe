"""The package's errors.

LumosError
├── TraceError          a file cannot be read as the trace it should be
│   └── UnsupportedFormat   a known format that another reader takes
├── RunError            the files of a folder do not make one run
├── SchemaError         a table lacks a column, or has one of the wrong type
├── InputError          an argument is of another kind than the function takes
├── GraphError          ops and edges that no execution could follow
├── SheetError          a data sheet lacks a number, or has one that cannot be
├── LayoutError         a model, a layout, a batch or a cluster that cannot be, or not together
├── CalibrationError    a calibration that cannot be read, or that has nothing to price an op by
├── ScenarioError       a what-if that names unknown classes or impossible scales
├── CaptureError        a training loop could not be recorded
├── ExecutorError       what should have run the work elsewhere cannot, or was lost
├── BenchmarkError      a benchmark that cannot be run here: too large, or nothing of it chosen
└── ChakraError         bytes that are no Chakra file, or nodes that cannot be written as one
"""

import operator


class LumosError(Exception):
    """Base of every error that the package raises on purpose."""


class TraceError(LumosError):
    """A file cannot be read as a trace; the message names file, byte offset and event."""


class UnsupportedFormat(TraceError):
    """The file is a known format that this reader does not take; the message names the one that does."""


class RunError(LumosError):
    """The files given do not make one run of distinct ranks."""


class SchemaError(LumosError):
    """A table lacks a column, has one of the wrong type, or repeats a key."""


class InputError(LumosError, TypeError):
    """An argument is of another kind than the function takes; the message says what gives one."""


class GraphError(LumosError):
    """Ops and edges that no execution could follow: a cycle, an unknown op, a negative duration."""


class SheetError(LumosError):
    """A data sheet lacks a field or has a number that cannot be; the message names the sheet and the field."""


class LayoutError(LumosError, ValueError):
    """A model, layout, batch or cluster that cannot be, alone or together; names field, value and what to do."""


class CalibrationError(LumosError):
    """A calibration cannot be read, or has nothing to price an op by; the message says what to measure."""


class ScenarioError(LumosError):
    """A scenario names a class that the graph lacks, or a scale that is not a finite number >= 0."""


class CaptureError(LumosError):
    """A training loop could not be recorded."""


class ChakraError(LumosError):
    """Bytes that are no Chakra file, or nodes that cannot be written as one; names the byte or the node."""


class ExecutorError(LumosError):
    """What should have run the work elsewhere is no executor, cannot be reached, or was lost with its work."""


class BenchmarkError(LumosError):
    """A benchmark cannot be run here; the message says why and what to do."""


def require_kinds(**given: tuple[object, type]) -> None:
    """Raise InputError for the first argument that is of another kind than it should be."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise InputError(f"{name} is {value!r:.60}; give a {kind.__name__}.")


def require_whole(least: int, most: int = 2**62, **given: object) -> None:
    """Raise InputError for the first argument that is no whole number from `least` to `most`."""
    for name, value in given.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= operator.index(value) <= most:
            bounds = f"of at least {least}" if most == 2**62 else f"from {least} to {most:,}"
            raise InputError(f"{name}={value!r:.60}: give a whole number {bounds}.")
