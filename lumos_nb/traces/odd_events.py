"""Events that the scanner leaves alone: names of threads, unusual types, and what is not quite JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from lumos_nb.errors import UNDECODABLE
from lumos_nb.traces import _event_kernels as kernels
from lumos_nb.traces.exact import integer, nanoseconds
from lumos_nb.traces.json_text import mend
from lumos_nb.traces.scan import UNREADABLE, Row

Id = int | str | float | None


class Event(msgspec.Struct, gc=False):
    """One record of a list of events; numbers stay text where floats would lose digits."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: Id = None
    tid: Id = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    args: msgspec.Raw = msgspec.Raw()
    attr: msgspec.Raw = msgspec.Raw()  # how some writers call the arguments


class Args(
    msgspec.Struct,
    gc=False,
    rename={"external_id": "External id", "external_id_2021": "external id", "sequence": "Sequence number"},
):
    """The arguments that have columns of their own."""

    device: Id = None
    stream: Id = None
    correlation: Id = None
    external_id: Id = None
    external_id_2021: Id = None
    sequence: Id = None


_decode_event = msgspec.json.Decoder(Event).decode
_decode_args = msgspec.json.Decoder(Args).decode


@dataclass(slots=True)
class OddEvents:
    """Reads them one by one, and remembers what was odd and the names that it met."""

    counts: dict[str, tuple[int, str]] = field(default_factory=dict)
    _names: dict[tuple[Any, Any, Any], bytes] = field(default_factory=dict)

    def read(self, text: bytes, offset: int) -> Row | None:
        """Read one event, given its text and byte offset, whatever it takes; None if it is no JSON even when mended."""
        compact, reason = _compact(text)
        if compact is None:
            self.count("unreadable", f"the event at byte {offset:,}: {reason}: {text[:80]!r}")
            return None
        try:
            event = _decode_event(compact)
        except UNDECODABLE as error:
            self.count("unreadable", f"the event at byte {offset:,}: {reason or error}: {text[:80]!r}")
            return UNREADABLE
        if reason:
            self.count("mended", f"the event at byte {offset:,}: {reason}: {text[:80]!r}")
        if event.ph == "M" and event.name in kernels.NAMES:
            self._names.setdefault((event.name, event.pid, event.tid), bytes(event.args))
        if event.ph not in kernels.KEPT_PHASES or event.pid in kernels.PSEUDO_PROCESSES:
            return _row({kernels.PH: event.ph, kernels.CAT: event.cat, kernels.PID: _id(event.pid)}, b"")
        return self._kept(event)

    def _kept(self, event: Event) -> Row:
        given = bytes(event.args) or bytes(event.attr) or b"{}"
        try:
            args = _decode_args(given)
        except UNDECODABLE:
            args = Args()
            self.count("odd arguments", "args of a type that no event has: kept as text, ids in them are not read")
        ids = [event.pid, event.tid, args.device, args.stream, args.correlation]
        ids += [args.external_id, args.external_id_2021, args.sequence]
        fields: dict[int, int | str | None] = {kernels.PH: event.ph, kernels.CAT: event.cat, kernels.NAME: event.name}
        fields |= {kernels.PID + i: _id(value) for i, value in enumerate(ids)}
        fields |= {kernels.START: nanoseconds(event.ts), kernels.DUR: nanoseconds(event.dur)}
        return _row(fields, given)

    def count(self, what: str, reason: str) -> None:
        """Count something odd; the first reason stands for all."""
        before, first = self.counts.get(what, (0, reason))
        self.counts[what] = (before + 1, first)

    def names(self) -> dict[str, list[dict[str, Any]]]:
        """Names of processes and threads: `processes` (pid, name, labels) and `threads` (pid, tid, name)."""
        processes: dict[Any, dict[str, Any]] = {}
        threads: list[dict[str, Any]] = []
        for (key, pid, tid), raw in self._names.items():
            try:
                value = msgspec.json.decode(raw, type=dict[str, Any])
            except UNDECODABLE:
                continue
            if key == "thread_name":
                threads.append({"pid": pid, "tid": tid, "name": value.get("name")})
            else:
                processes.setdefault(pid, {"pid": pid}).update(value)
        return {"processes": list(processes.values()), "threads": threads}


def _compact(text: bytes) -> tuple[bytes | None, str]:
    """The text without the whitespace between its tokens, if need be mended, and why it needs to be."""
    try:
        return msgspec.json.format(text, indent=-1), ""
    except UNDECODABLE as error:
        reason = str(error)
    try:
        return msgspec.json.format(mend(text), indent=-1), reason
    except UNDECODABLE:
        return None, reason


def _row(fields: dict[int, int | str | None], args: bytes) -> Row:
    return Row({at: value for at, value in fields.items() if value is not None}, args)


def _id(value: Id) -> int | str | None:
    """`value` as the scanner has ids: an int64, or text."""
    return value if isinstance(value, str | None) else known if (known := integer(value)) is not None else str(value)
